"""The mark of what was compiled counts only for the same loops, in the same cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.kernels import compiled
from holdfast.kernels.compiled import is_compiled, note_compiled


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    return [tmp_path / "numba", tmp_path / "own" / "holdfast"]


def test_it_goes_with_the_cache(places: list[Path]) -> None:
    assert not is_compiled()
    note_compiled()
    assert is_compiled()
    (mark,) = places[0].iterdir()
    assert not places[1].exists()
    mark.unlink()
    assert not is_compiled()


def test_if_the_cache_cannot_be_written(places: list[Path]) -> None:
    places[0].write_text("not a folder")
    note_compiled()
    assert is_compiled()
    assert len(list(places[1].iterdir())) == 1


@pytest.mark.parametrize("what", ["_processor", "version"])
def test_another_machine_or_numba_compiles_anew(
    places: list[Path], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_compiled()
    monkeypatch.setattr(compiled, what, lambda *_: "another")
    assert not is_compiled()


def test_other_loops_are_compiled_anew(
    places: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_compiled()
    here = tmp_path / "kernels"
    here.mkdir()
    for path in Path(compiled.__file__).parent.glob("*.py"):
        (here / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(compiled, "__file__", str(here / "compiled.py"))
    note_compiled()
    assert is_compiled()
    with (here / "rows.py").open("a") as loops:
        loops.write("# changed\n")
    assert not is_compiled()


def test_processors_differ() -> None:
    assert any(line.startswith(("flags", "Features")) for line in compiled._processor())


def test_an_agent_needs_no_numba() -> None:
    """It would take longer to start, and more memory."""
    code = (
        "import sys, holdfast.cluster.runtime.engines.agent\n"
        "from holdfast.kernels.compiled import is_compiled\n"
        "is_compiled()\n"
        "assert not {'numba', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
