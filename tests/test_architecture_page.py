"""The page of the architecture names what there is."""

from __future__ import annotations

import re

import pytest

from tests.pages import ROOT, names_in

SOURCE = ROOT / "src" / "holdfast"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
WALKS = {
    title: re.findall(r"^\d+\. `([\w/]+\.py)`: (.*(?:\n   .*)*)", text, re.MULTILINE)
    for title, text in re.findall(r"^## Walk \((\w)\)(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
STEPS = [(path, text) for steps in WALKS.values() for path, text in steps]


def test_three_short_walks() -> None:
    assert list(WALKS) == ["a", "b", "c"]
    for title, steps in WALKS.items():
        files = [path for path, _ in steps]
        assert 5 < len(files) <= 12, title
        assert len(set(files)) == len(files), f"walk {title} comes back to a file"


@pytest.mark.parametrize(("path", "text"), STEPS, ids=[path for path, _ in STEPS])
def test_every_name_of_a_walk_is_in_its_file(path: str, text: str) -> None:
    assert (SOURCE / path).is_file()
    called = set(re.findall(r"`([A-Z_]\w*\.\w+)`", text))
    first = re.findall(r"`(\w+(?:\.\w+)?)`", text)[0]
    assert {first, *called} <= names_in(SOURCE / path, ".")


def test_the_tree_names_every_folder() -> None:
    tree = PAGE.split("```")[1].splitlines()
    named: set[str] = set()
    above: list[str] = []
    for line in tree:
        found = re.match(r"((?:  )+)(\w+)/ ", line)
        if found is not None:
            above[len(found[1]) // 2 - 1 :] = [found[2]]
            named.add("/".join(above))
    there = {path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("__init__.py")} - {"."}
    assert named == there
