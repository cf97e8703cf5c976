"""Which rows of a shard an increment holds, and how writing them is cancelled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint.format.encoding import Encoder
from holdfast.checkpoint.format.records import Field, Group, Rows, Table
from holdfast.checkpoint.layout import bundles
from holdfast.checkpoint.layout.shard import Shard
from holdfast.checkpoint.saving.shard_rows import Cancellation, IncrementRows, SaveCancelled, write_rows
from holdfast.checkpoint.store.local import LocalStore
from holdfast.options import Full, Policy
from tests.checkpoint.lineage import QuickFiles

GROUP = Group((Field("weight", "F32", 2),), (Table("t", 100, 0),))


def ids(*rows: int) -> Any:
    return np.array(rows, np.int64)


def test_an_increment_holds_what_changed_since_the_last_version() -> None:
    increment = IncrementRows(Policy(strategy="incremental"), [100])
    assert increment.add(0, ids(3, 5)).tolist() == [3, 5]
    assert increment.add(0, ids(4)).tolist() == [4]
    increment.note_baseline()
    increment.resume([(0, ids(7))])
    assert increment.add(0, ids(1)).tolist() == [1]


def test_a_differential_version_holds_what_changed_since_the_baseline() -> None:
    increment = IncrementRows(Policy(strategy="differential"), [100, 10])
    assert increment.add(0, ids(5, 3)).tolist() == [3, 5]
    assert increment.add(0, ids(4)).tolist() == [3, 4, 5]
    assert increment.add(1, ids(9)).tolist() == [9]
    increment.note_baseline()
    assert increment.add(0, ids(8)).tolist() == [8]
    assert increment.add(1, ids()).tolist() == []
    assert increment.add(1, ids(9)).tolist() == [9], "each group has as many rows as before"


def test_a_differential_run_resumes_with_the_rows_of_its_last_version() -> None:
    increment = IncrementRows(Policy(strategy="differential"), [100])
    increment.resume([(0, ids(7, 9)), (1, ids(1, 2))])  # group 1: rows that are stored raw
    assert increment.add(0, ids(3)).tolist() == [3, 7, 9]


def test_a_save_is_wanted_until_it_is_cancelled() -> None:
    wanted = Cancellation()
    wanted.check()
    wanted.cancelled = True
    with pytest.raises(SaveCancelled):
        wanted.check()


def test_writing_stops_between_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "FILE_BYTES", 80)
    monkeypatch.setattr(bundles, "STRETCH_BYTES", 80)
    store, wanted = LocalStore(tmp_path, create=True, files=QuickFiles()), Cancellation()
    put = store.put
    written: list[str] = []

    def cancelling(name: str, parts: Any) -> int:
        written.append(name)
        wanted.cancelled = len(written) == 2
        return put(name, parts)

    monkeypatch.setattr(store, "put", cancelling)
    rows = Rows(np.arange(100, dtype=np.int64), (np.zeros((100, 8), np.uint8),))
    encoder = Encoder.plan(Policy(), 0, [rows], (GROUP,))
    shard = Shard(0, encoder.stored, Full())
    with pytest.raises(SaveCancelled):
        write_rows(shard, store, encoder, 1, [rows], baseline=True, policy=Policy(), wanted=wanted)
    assert len(written) == 2
    change = write_rows(
        shard, store, encoder, 2, [rows], baseline=True, policy=Policy(), wanted=Cancellation()
    )
    files = change.for_manifest()
    assert (change.version, change.kind, files.rows) == (2, "baseline", 100)
    assert len(files.added) > 2


@pytest.mark.parametrize(
    ("share", "baseline", "pauses"),
    [(None, True, True), (1.0, True, True), (0.5, False, True), (None, False, False), (1.0, False, False)],
)
def test_a_store_pauses_for_all_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float | None, baseline: bool, pauses: bool
) -> None:
    """Even where there is no need to rest: so a store knows that it writes much."""
    store, put, paused = LocalStore(tmp_path, create=True, files=QuickFiles()), LocalStore.put, []

    def noting(name: str, parts: Any) -> int:
        paused.append(store.pause is not None)
        return put(store, name, parts)

    monkeypatch.setattr(store, "put", noting)
    rows = Rows(np.arange(100, dtype=np.int64), (np.zeros((100, 8), np.uint8),))
    encoder = Encoder.plan(Policy(), 0, [rows], (GROUP,))
    policy = Policy(background_share=share)
    shard = Shard(0, encoder.stored, Full())
    write_rows(shard, store, encoder, 1, [rows], baseline=baseline, policy=policy, wanted=Cancellation())
    assert paused == [pauses]
    assert store.pause is None
