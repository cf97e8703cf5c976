"""Rows of versions: copied at once, or read while the version is written."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint.format.records import Field, make_groups
from holdfast.checkpoint.layout import bundles
from holdfast.checkpoint.memory import copy_on_write
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.checkpoint.saving import row_copies
from holdfast.checkpoint.saving.row_copies import RowCopies, file_bytes
from holdfast.errors import SaveFailed, SaveVoid, StoreFull
from holdfast.kernels import digests, ids, side_log
from holdfast.options import Policy
from tests.checkpoint.plain_source import PlainSource
from tests.checkpoint.saving.test_writer_alone import ROWS, Gate, Run, running


def copies(**policy: Any) -> RowCopies:
    return RowCopies(Policy(**policy), make_groups([("t", ROWS, (Field("weight", "F32", 2),))]))


def test_copies_reuse_memory_that_fits() -> None:
    some = copies()
    first = some._space(0, 10)[0]
    again = some._space(0, 12)[0]
    assert again.base is first.base
    grown = some._space(0, 100_000)[0]
    assert grown.shape == (100_000, 8)
    assert grown.base is not first.base
    assert some._space(0, 100_000)[0].base is grown.base
    small = some._space(0, 10)[0]
    assert small.base is not grown.base, "much too large"
    assert some._arena[0][0].shape[0] == 12, "a quarter more than is needed"


def test_memory_of_large_copies_is_given_back() -> None:
    some = copies(max_memory=4 * 8 * 125)
    some._space(0, 100)
    some.give_back()
    assert len(some._arena[0][0]) == 125
    some._space(0, 101)  # does not fit any more: all of it, and a quarter more
    some._space(0, 200)
    some.give_back()
    assert some._arena == [[]]


def test_a_quarter_of_the_limit_is_large() -> None:
    some = copies(max_memory=4 * 8 * 125)
    some._space(0, 101)
    assert len(some._arena[0][0]) == 126
    some.give_back()
    assert some._arena == [[]]


def test_what_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.zeros((ROWS, 8), np.uint8)
    groups = make_groups([("t", ROWS, (Field("weight", "F32", 2),))])
    live = LiveTables(groups, lambda name: (weights,))
    some, wanted = copies(max_memory=8 * 10), np.arange(11)
    assert some.copy(live, None, lambda *_: None).frozen is None  # small tables
    assert some.copy(live, [wanted], lambda *_: None).frozen is None
    monkeypatch.setattr(copy_on_write, "COPIED_BYTES", 0)
    assert some.copy(live, None, lambda *_: None).frozen is not None
    assert some.copy(live, [wanted], lambda *_: None).frozen is not None
    assert some.copy(live, [wanted[:10]], lambda *_: None).frozen is None
    assert copies().max_memory == (256 << 20) + ROWS * 8 // 20


def test_tables_up_to_a_size_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_on_write, "COPIED_BYTES", ROWS * 8)
    assert copies().copies_baselines
    monkeypatch.setattr(copy_on_write, "COPIED_BYTES", ROWS * 8 - 1)
    assert not copies().copies_baselines


def test_two_files_and_the_side_log_are_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file is being written while the next is put together."""
    limits: list[int] = []

    class Noted(copy_on_write.CopyOnWrite):
        def __init__(self, live: LiveTables, max_bytes: int, **options: Any) -> None:
            limits.append(max_bytes)
            super().__init__(live, max_bytes, **options)

    monkeypatch.setattr(row_copies, "CopyOnWrite", Noted)
    monkeypatch.setattr(copy_on_write, "COPIED_BYTES", 0)
    weights = np.zeros((ROWS, 8), np.uint8)
    live = LiveTables(make_groups([("t", ROWS, (Field("weight", "F32", 2),))]), lambda name: (weights,))
    for max_memory in (1000, 10 * bundles.FILE_BYTES):
        copies(max_memory=max_memory).copy(live, None, lambda *_: None)
    assert limits == [500, 8 * bundles.FILE_BYTES]


def test_memory_that_is_eight_times_too_large_is_used_again() -> None:
    some = copies()
    first = some._space(0, 8192 * 4 // 5 + 1)[0]
    assert len(some._arena[0][0]) == 8192
    assert some._space(0, 1)[0].base is first.base
    above = copies()
    fresh = above._space(0, 6555)[0]
    assert len(above._arena[0][0]) == 8193
    assert above._space(0, 1)[0].base is not fresh.base
    larger = some._space(0, 8193)[0]
    assert some._space(0, 1281)[0].base is larger.base, "8,193 and a quarter"
    assert some._space(0, 1280)[0].base is not larger.base


def test_loops_are_compiled_before_the_first_save_of_large_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    monkeypatch.setattr(row_copies, "compile_loops", lambda: compiled.append(1))
    copies()
    RowCopies(Policy(), ())
    assert not compiled
    monkeypatch.setattr(copy_on_write, "COPIED_BYTES", 0)
    copies()
    assert compiled


def test_the_loops_that_a_snapshot_needs_are_compiled() -> None:
    row_copies.compile_loops()
    for loop in (side_log.log_rows, side_log.lay_over, ids.unmark_rows, digests.digest_rows):
        assert loop.signatures


def test_files_fit_into_the_memory() -> None:
    assert file_bytes(1 << 40) == bundles.FILE_BYTES
    assert file_bytes(1000) == 250


class TestWhileItIsWritten:
    """A version whose rows change while it is written."""

    @pytest.fixture(autouse=True)
    def _frozen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(copy_on_write, "COPIED_BYTES", 0)
        monkeypatch.setattr(copy_on_write, "BLOCK_BYTES", 80)

    def train(self, run: Run, *rows: int) -> None:
        run.writer.tracker.mark("t", np.array(rows, np.int64))
        run.change(*rows, mark=False)

    @pytest.mark.parametrize("policy", [{}, {"quantize": 8}, {"strategy": "full"}], ids=str)
    def test_it_is_as_it_was_at_the_save(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any]
    ) -> None:
        with running(tmp_path, max_memory=6000, **policy) as run:
            run.change(*range(0, ROWS, 7))
            gate = Gate(run.store, "put", monkeypatch)
            assert run.save(wait=False) == 1
            assert gate.reached.wait(30)
            self.train(run, *range(0, ROWS, 3))
            self.train(run, *range(0, ROWS, 3))
            gate.open()
            run.writer.wait()
            assert np.allclose(run.restored(1), run.saved[1], atol=0.1)
            assert "quantize" in policy or np.array_equal(run.restored(1), run.saved[1])
            report = run.writer.reports[0]
            assert report.rows == ROWS
            # Blocks are encoded ahead of the file that the gate holds up: all of these.
            assert ("quantize" not in policy) <= report.copied_bytes <= (ROWS // 3 + 1) * 24
            assert run.writer.tracker.snapshot is None or run.writer.tracker.snapshot.is_over()
            run.save()
            assert np.allclose(run.restored(2), run.weights, atol=0.1)

    def test_training_waits_if_copies_exceed_the_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running(tmp_path, max_memory=400) as run:
            gate = Gate(run.store, "put", monkeypatch)
            run.save(wait=False)
            assert gate.reached.wait(30)
            snapshot = run.writer.tracker.snapshot
            assert snapshot is not None
            rows, at = list(range(ROWS - 1, 0, -1)), 0
            while not snapshot.is_waited_for and at < 20:  # in this thread nobody waits: as much as fits
                room = snapshot._logs[0].has_room
                if not room:
                    break
                self.train(run, rows[at])
                at += 1
            assert 0 < at < 20
            training = threading.Thread(target=self.train, args=(run, *rows[at:]))
            training.start()
            while not snapshot.is_waited_for:
                assert training.is_alive(), "it should wait for blocks"
                time.sleep(0.001)
            gate.open()
            training.join()
            run.writer.wait()
            run.check()
            assert run.writer.reports[0].waited_seconds > 0
            assert run.writer.reports[0].copied_bytes <= 400

    def test_a_large_increment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with running(tmp_path, strategy="incremental", max_memory=200) as run:
            run.save()
            run.change(*range(0, ROWS, 2))
            gate = Gate(run.store, "put", monkeypatch)
            run.save(wait=False)
            assert gate.reached.wait(30)
            gate.open()
            self.train(run, *range(50, 150))
            run.writer.wait()
            run.check()
            assert [(r.baseline, r.rows) for r in run.writer.reports] == [(True, ROWS), (False, ROWS // 2)]
            run.save()
            run.check()
            assert run.writer.reports[-1].rows == 100

    def test_rows_that_changed_unannounced_make_it_void(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running(tmp_path) as run:
            gate = Gate(run.store, "put", monkeypatch)
            run.save(wait=False)
            assert gate.reached.wait(30)
            run.change(ROWS - 1, mark=False)
            run.writer.tracker.mark("t", np.array([ROWS - 1]), late="by hand")
            gate.open()
            with pytest.raises(SaveVoid, match="rows of t changed unannounced while it was written: by hand"):
                run.writer.wait()
            assert run.versions == []
            # From now on such a table is copied before save() returns.
            run.save(wait=False)
            run.change(ROWS - 1, mark=False)
            run.writer.tracker.mark("t", np.array([ROWS - 1]), late="by hand")
            run.writer.wait()
            assert run.versions == [2]
            run.check()

    def test_a_void_version_is_replaced_by_the_next_save(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running(tmp_path) as run:
            gate = Gate(run.store, "put", monkeypatch)
            run.save(wait=False)
            assert gate.reached.wait(30)
            run.writer.tracker.suspect("t", late="by hand")
            gate.open()
            assert run.save() == 2  # and nothing is raised
            assert run.versions == [2]
            run.check()

    def test_what_is_found_out_when_it_exists_flags_it(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            run.save()
            run.writer.tracker.suspect("t", late="by hand")
            run.writer.wait()
            (version,) = read_versions(run)
            assert version.unverified == "t: by hand"

    def test_what_is_known_to_be_right_is_not_flagged(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            run.save()
            snapshot = run.writer.tracker.snapshot
            assert snapshot is not None
            snapshot.has_not_changed_unannounced(["t"])
            run.writer.collect()
            assert run.writer.tracker.snapshot is None
            run.writer.tracker.suspect("t", late="by hand")
            run.writer.wait()
            (version,) = read_versions(run)
            assert not version.unverified

    def test_tables_that_change_unannounced_are_copied_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Unannounced(PlainSource):
            def unannounced(self) -> Any:
                return ["t"]

        with running(tmp_path) as run:
            gate = Gate(run.store, "put", monkeypatch)
            run.writer.save(0, Unannounced(run.source.tables), {})
            run.saved[1] = run.weights.copy()
            assert gate.reached.wait(30)
            run.change(*range(ROWS), mark=False)
            gate.open()
            run.writer.wait()
            run.check()

    def test_a_row_that_changed_unseen_is_found_when_the_next_baseline_reads_it(self, tmp_path: Path) -> None:
        with running(tmp_path, strategy="incremental") as run:
            run.save()
            run.change(3)
            run.save()
            run.change(5, mark=False)
            run.change(7)
            run.writer._publisher.leave_era()
            with pytest.raises(SaveVoid, match="1 rows of t changed unseen"):
                run.save()
            assert [bool(v.unverified) for v in read_versions(run)] == [False, True]
            run.save()
            assert run.writer.reports[-1].baseline
            assert np.array_equal(run.restored(), run.weights)

    def test_a_full_store_makes_room_while_it_is_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running(tmp_path, strategy="full", keep=1, max_memory=2000) as run:
            run.save()
            run.change(*range(ROWS))
            put, calls = run.store.put, 0

            def full(*arguments: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == 2:
                    raise StoreFull("no space")
                return put(*arguments)

            made: list[Any] = []

            def make_room(needed: Any) -> bool:
                made.append(needed)
                return True

            monkeypatch.setattr(run.store, "put", full)
            monkeypatch.setattr(run.writer.catalog, "make_room", make_room)
            run.save()
            assert made == [{0}]
            assert calls > 4
            assert np.array_equal(run.restored(), run.weights)

    def test_a_store_that_stays_full(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with running(tmp_path, strategy="full") as run:
            with monkeypatch.context() as broken:
                broken.setattr(run.store, "put", lambda *_: (_ for _ in ()).throw(StoreFull("no space")))
                with pytest.raises(SaveFailed, match="no space"):
                    run.save()
            assert run.writer.tracker.snapshot is None
            run.save()
            run.check()

    def test_who_waits_is_served_without_rests(self, tmp_path: Path) -> None:
        with running(tmp_path, background_share=0.001) as run:
            run.save()  # waits: resting after each block would take minutes
            run.check()


def read_versions(run: Run) -> Any:
    return run.writer.catalog.manifest.versions
