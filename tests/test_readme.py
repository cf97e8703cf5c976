"""The README's own examples, run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The same code on less data: examples show sizes that take a while.
    code = EXAMPLES[number].replace("samples=100_000", "samples=6_000")
    exec(compile(code, f"README example {number}", "exec"), {"__name__": "readme"})  # noqa: S102


def test_there_are_examples() -> None:
    assert EXAMPLES


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_its_make_targets_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake (\w+)", README))
    assert {"demo", "test"} <= named <= targets
