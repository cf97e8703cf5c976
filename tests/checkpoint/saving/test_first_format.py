"""A store that was written before there were segments: it is read, written to, and converted by that.

``first_format.tar.xz`` was made by the release before: a table of eight rows of zeros, of which each of eight
saves set two to the save's number, with rounds in between.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.checkpoint.format.manifest import read_newest
from holdfast.checkpoint.saving import history
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.tools.verify import verify_versions
from tests.checkpoint.by_hand import Rows

POLICY = hf.Policy(strategy=hf.Chunked(round_versions=2, dead_fraction=0.0, reset="never"), verify=0)


def value_of(version: int) -> list[list[float]]:
    rows = [0.0] * 8
    for step in range(version):
        rows[step % 8] = rows[step * 3 % 8] = step + 1.0
    return [[row] * 3 for row in rows]


def restored(path: Path, version: int) -> list[list[float]]:
    fresh = Rows(8)
    with hf.Checkpointer(path, fresh.objects, POLICY) as ckpt:
        assert ckpt.restore(version) == version
    return fresh.value()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("first_format.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def format_of(path: Path) -> int:
    with open_store(path, create=False) as store:
        assert verify_versions(store).good
        return read_newest(store).format


def test_it_is_read(path: Path) -> None:
    assert format_of(path) == 1
    assert [restored(path, version) for version in range(1, 9)] == [value_of(v) for v in range(1, 9)]


@pytest.mark.parametrize(("recent_bytes", "format_"), [(history.RECENT_BYTES, 1), (1000, 2)])
def test_it_is_written_to(
    path: Path, recent_bytes: int, format_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "RECENT_BYTES", recent_bytes)
    run = Rows(8)
    with hf.Checkpointer(path, run.objects, POLICY) as ckpt:
        assert ckpt.restore() == 8
        run.changes = 8
        for step in range(8, 14):
            run.change(ckpt, step % 8, step * 3 % 8)
            assert ckpt.save(step) == step + 1
            ckpt.wait()
            assert format_of(path) == format_, "the first save converts it, if it is too long for a manifest"
    assert [v.baseline for v in ckpt.versions()] == [True] + 13 * [False], "it continues its era"
    assert [restored(path, version) for version in range(1, 15)] == [value_of(v) for v in range(1, 15)]
