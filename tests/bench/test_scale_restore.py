"""The bench of restores by number of versions, on a tiny table; and its floor reads what a restore reads."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import holdfast as hf
from holdfast.bench import scale_restore
from holdfast.bench.harness import Report
from holdfast.checkpoint.format.manifest import read_newest
from holdfast.checkpoint.store.local import LocalStore


@pytest.mark.parametrize("cold", [False, True])
def test_the_figures_are_there(tmp_path: Path, cold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_restore, "_in_new_process", scale_restore.time_side)  # torch is here already
    report = Report("scale", True, Console(file=io.StringIO()))
    scale_restore.measure_restore(
        report, versions=(3, 9), rows=2000, touched=50, rounds=2, cold=cold, folder=tmp_path
    )
    figures = report.figures
    for count in (3, 9):
        assert figures[f"scale.restore.newest_over_read.versions{count}"] > 0
        assert figures[f"scale.restore.open_seconds.versions{count}"] > 0
        assert figures[f"scale.restore.first_save_seconds.versions{count}"] > 0
        assert figures[f"scale.restore.first_save_over_later.versions{count}"] > 0
    each = [figures[f"scale.restore.newest_over_read.versions{count}"] for count in (3, 9)]
    assert figures["scale.restore.newest_over_read"] == max(each)
    assert figures["scale.restore.growth"] == each[1] / each[0]
    assert not list(tmp_path.iterdir())


def test_a_new_process_says_what_it_has_measured(tmp_path: Path) -> None:
    stores = scale_restore._save_versions(tmp_path, (4,), 2000, 50, hf.Chunked())
    timed = scale_restore._in_new_process("restore", stores[4], 2000, hf.Chunked())
    assert timed.seconds > 0
    assert len(timed.saves) == 5


def test_both_sides_read_the_same_into_the_same_tables(tmp_path: Path) -> None:
    stores = scale_restore._save_versions(tmp_path, (5, 30), 3000, 200, hf.Chunked())
    for count, path in stores.items():
        with LocalStore(path, create=False) as store:
            read = scale_restore._objects(3000)
            timed = scale_restore.read_once(store, read_newest(store), read)
        restored = scale_restore._objects(3000)
        with hf.Checkpointer(path, restored, hf.Policy(save_last=False)) as ckpt:
            assert ckpt.restore() == count + 1
            assert len(ckpt.versions()) == count
        for one, other in zip(scale_restore._tensors(read), scale_restore._tensors(restored), strict=True):
            assert np.array_equal(one.numpy(), other.numpy())
        assert len(np.unique(one.numpy())) > count / 2
        assert timed.bytes >= 3000 * 256
