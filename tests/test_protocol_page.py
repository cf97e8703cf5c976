"""The page of the protocol names what there is: messages, holes, and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.cluster.protocol.wire import ROUTES
from tests.pages import ROOT, names_in

TESTS = ROOT / "tests"
PAGE = (ROOT / "docs" / "protocol.md").read_text()
HOLES = {int(number): tests for number, tests in re.findall(r"^\| (\d+) \|.*\|(.*)\|$", PAGE, re.MULTILINE)}
"""The last column of each hole's row."""
NAMED = sorted(set(re.findall(r"`([\w/]+\.py::[\w:]+)`", PAGE)))

# "hole 5", "holes 7, 8 and 11", "holes 21 to 24 and 26"
CITATION = re.compile(r"\bholes? (\d+(?:(?:, | and |, and | to )\d+)*)", re.IGNORECASE)


def numbers_in(text: str) -> set[int]:
    """The holes that a citation names."""
    numbers: set[int] = set()
    for first, _, last in re.findall(r"(\d+)( to (\d+))?", text):
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def cited_in(path: Path) -> set[int]:
    text = " ".join(path.read_text().split())
    return {number for found in CITATION.findall(text) for number in numbers_in(found)}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("Hole 5", {5}),
        ("holes 7, 8 and 11", {7, 8, 11}),
        ("(holes 21 to 24 and 26)", {21, 22, 23, 24, 26}),
        ("the whole 5", set()),
    ],
)
def test_how_holes_are_cited(text: str, numbers: set[int]) -> None:
    assert {n for found in CITATION.findall(text) for n in numbers_in(found)} == numbers


def test_every_hole_is_there_once() -> None:
    assert list(HOLES) == list(range(1, 37))
    assert len(re.findall(r"^\| \d+ \|", PAGE, re.MULTILINE)) == len(HOLES)
    for number, tests in HOLES.items():
        assert "::" in tests, f"hole {number} has no test"


@pytest.mark.parametrize("named", NAMED)
def test_every_test_that_is_named_exists(named: str) -> None:
    path, name = named.split("::", 1)
    assert (TESTS / path).is_file(), path
    assert name in names_in(TESTS / path, "::"), named


def test_every_hole_that_is_cited_is_listed_with_who_cites_it() -> None:
    cited = {path: cited_in(path) for path in TESTS.rglob("test_*.py") if path.name != Path(__file__).name}
    assert sum(map(len, cited.values())) > 50
    for path, numbers in cited.items():
        for number in numbers:
            assert path.relative_to(TESTS).as_posix() in HOLES[number], f"{path} cites hole {number}"
    for path in (ROOT / "src").rglob("*.py"):
        assert cited_in(path) <= set(HOLES), path


def test_every_message_is_listed_with_who_sends_it() -> None:
    section = PAGE.split("## Messages")[1].split("\n## ")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))
    assert set(listed) == {message.__name__ for message in ROUTES}
    for message, routes in ROUTES.items():
        sources, *_, targets = listed[message.__name__].split(" → ")
        for source, target in routes:
            assert source in sources, message
            assert target in targets, message
