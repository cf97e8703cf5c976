"""The README's own examples, run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CHECKPOINTER, JOB = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})  # noqa: S102


def test_the_checkpointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # the second start finds that all is done
        run(CHECKPOINTER, tmp_path, monkeypatch)
        assert len(list((tmp_path / "run1" / "dense").iterdir())) == 10


def test_the_job_survives_the_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smaller = JOB.replace("samples=500_000, batch_size=1024", "samples=60_000, batch_size=200")
    assert smaller != JOB
    run(smaller, tmp_path, monkeypatch)
    assert capsys.readouterr().out.endswith(" 300 1\n")  # batches, servers replaced


def test_it_is_short_and_shows_a_picture() -> None:
    assert len(README.splitlines()) <= 150
    picture = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert [(ROOT / path).stat().st_size <= 150_000 for path in picture] == [True]


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_its_make_targets_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake (\w+)", README))
    assert {"demo", "test"} <= named <= targets
