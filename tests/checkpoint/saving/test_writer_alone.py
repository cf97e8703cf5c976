"""The writer without a trainer: tables in memory, rows that are marked by hand, a store in a folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint.format.manifest import Version, read_newest
from holdfast.checkpoint.format.records import Field, make_groups
from holdfast.checkpoint.layout.shard import Shard
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.checkpoint.reading.loader import RowLoader
from holdfast.checkpoint.reading.version import open_version
from holdfast.checkpoint.saving.writer import Writer
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import CorruptCheckpoint, SaveFailed, StoreError, StoreFull, StoreLocked
from holdfast.events import EventLog
from holdfast.options import AutoBits, Chunked, Policy
from tests.checkpoint.lineage import QuickFiles
from tests.checkpoint.plain_source import PlainSource

ROWS = 200
SECONDS = 30.0


class Events(EventLog):
    def __init__(self) -> None:
        super().__init__(None)
        self.told: list[tuple[str, dict[str, Any]]] = []

    def emit(self, event: str, /, **figures: Any) -> None:
        self.told.append((event, figures))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [values for name, values in self.told if name == event]


class Run:
    """A table of float32 weights, its writer, and what each version must hold."""

    def __init__(self, folder: Path, events: Events | None = None, **policy: Any) -> None:
        self.store = LocalStore(folder, create=True, files=QuickFiles())
        self.events = events or Events()
        self.writer = Writer(self.store, Policy(**policy), self.events)
        self.weights = np.zeros((ROWS, 2), np.float32)
        self.groups = make_groups([("t", ROWS, (Field("weight", "F32", 2),))])
        self.source = PlainSource(self._live())
        self.writer.bind(self.source.tables)
        self.saved: dict[int, Any] = {}
        self.changes = 0

    def _live(self) -> LiveTables:
        return LiveTables(self.groups, lambda table: (self.weights.view(np.uint8),))

    def change(self, *rows: int, mark: bool = True) -> None:
        self.changes += 1
        self.weights[list(rows)] = self.changes
        if mark:
            self.writer.tracker.mark("t", np.array(rows, np.int64))

    def save(self, step: int = 0, *, wait: bool = True, **how: Any) -> int:
        version = self.writer.save(step, self.source, {}, **how)
        self.saved[version] = self.weights.copy()
        if wait:
            self.writer.wait()
        return version

    def restored(self, version: int | None = None) -> Any:
        found = np.full((ROWS, 2), -1, np.float32)
        with open_version(self.store, version) as reader:
            reader.read_rows(RowLoader(self.groups, lambda table: (found.view(np.uint8),)))
        return found

    def restore(self) -> bool:
        """Restore the newest version; whether the writer goes on with it."""
        with open_version(self.store) as reader:
            digests = self.writer.begin_restore(reader.groups)
            reader.read_rows(RowLoader(self.groups, lambda table: (self.weights.view(np.uint8),), digests))
            return self.writer.resume(reader.version, digests)

    @property
    def versions(self) -> list[int]:
        return [v.version for v in read_newest(self.store).versions]

    def check(self) -> None:
        """Every version of the store is as it was saved."""
        for version in self.versions:
            assert np.array_equal(self.restored(version), self.saved[version]), version


@contextmanager
def running(folder: Path, events: Events | None = None, **policy: Any) -> Iterator[Run]:
    run = Run(folder, events, **policy)
    with run.store, run.store.lock_writer():
        yield run
        run.writer.finish(SECONDS)


class Gate:
    """Holds the background up in an operation of the store."""

    def __init__(self, store: LocalStore, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        real = getattr(store, operation)

        def wait(*arguments: Any) -> Any:
            self.reached.set()
            assert self._open.wait(SECONDS)
            return real(*arguments)

        monkeypatch.setattr(store, operation, wait)

    def open(self) -> None:
        self._open.set()


class TestReports:
    def test_what_a_save_did(self, tmp_path: Path) -> None:
        with running(tmp_path, strategy="incremental") as run:
            run.save(7)
            run.change(3, 5)
            run.save(9)
            first, second = run.writer.reports
            assert (first.version, first.step, first.baseline, first.rows) == (1, 7, True, ROWS)
            assert (second.version, second.step, second.baseline, second.rows) == (2, 9, False, 2)
            assert first.bytes > second.bytes > 5
            for report in (first, second):
                assert 0 < report.snapshot_seconds <= report.stall_seconds
                assert report.write_seconds > 0
                assert report.cpu_seconds > 0
                assert (report.tidied_bytes, report.tidy_seconds) == (0, 0.0)
            told = run.events.of("checkpoint_saved")
            assert [(e["version"], e["rows"], e["bytes"]) for e in told] == [
                (1, ROWS, first.bytes),
                (2, 2, second.bytes),
            ]

    def test_tidying_is_told(self, tmp_path: Path) -> None:
        strategy = Chunked(round_versions=2, dead_fraction=0.0, reset="never")
        with running(tmp_path, strategy=strategy) as run:
            for step in range(9):
                run.change(*range(step, step + 50))
                run.save(step)
            tidied = [r for r in run.writer.reports if r.tidied_bytes]
            assert tidied
            assert all(r.tidy_seconds > 0 for r in tidied)
            assert all(r.tidied_bytes < 100_000 for r in tidied)
            run.check()

    def test_a_save_waits_for_the_one_before(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with running(tmp_path) as run:
            gate = Gate(run.store, "publish", monkeypatch)
            run.save(1, wait=False)
            assert run.writer.busy()
            threading.Timer(0.1, gate.open).start()
            run.change(1)
            run.save(2)
            assert not run.writer.busy()
            second = run.writer.reports[1]
            assert second.stall_seconds > second.snapshot_seconds, "waiting is no part of the snapshot"
            run.check()


class TestNumbers:
    def test_of_the_last_version_that_was_begun(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            assert run.writer.last_version == 0
            assert run.save() == 1
            assert run.writer.last_version == 1
        with running(tmp_path) as run:
            assert run.writer.last_version == 1
            assert run.save() == 2

    def test_a_snapshot_that_failed_uses_no_number_and_loses_no_row(self, tmp_path: Path) -> None:
        class Broken(PlainSource):
            def capture(self) -> PlainSource:
                raise ZeroDivisionError

        with running(tmp_path, strategy="incremental") as run:
            run.save()
            run.change(3)
            with pytest.raises(ZeroDivisionError):
                run.writer.save(1, Broken(run.source.tables), {})
            assert not run.writer.busy()
            assert run.writer.last_version == 1
            assert run.save() == 2
            assert run.writer.reports[-1].rows == 1
            run.check()


class TestFailures:
    def test_rows_are_in_the_next_save_and_the_error_is_raised_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running(tmp_path, strategy="incremental") as run:
            run.save()
            run.change(4)
            with monkeypatch.context() as broken:
                broken.setattr(run.store, "publish", lambda *_: (_ for _ in ()).throw(StoreError("no")))
                run.save(5, wait=False)
                with pytest.raises(SaveFailed, match="no; its rows are still marked") as caught:
                    run.writer.wait()
            assert caught.value.version == 2
            assert isinstance(caught.value.__cause__, StoreError)
            run.writer.wait()  # not again
            assert run.events.of("checkpoint_failed") == [{"version": 2, "step": 5, "error": "no"}]
            assert run.save() == 3, "a number is used once"
            assert run.versions == [1, 3]
            assert run.writer.reports[-1].rows == 1
            assert not [n for n in run.store.list("chunks/") if "00000002" in n.name], "nothing is left of it"
            run.saved.pop(2)
            run.check()

    def test_an_error_in_dealing_with_an_error_blocks_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise MemoryError

        with running(tmp_path, strategy="incremental") as run:
            run.save()
            with monkeypatch.context() as broken:
                broken.setattr(run.store, "publish", fail)
                broken.setattr(run.writer.catalog, "with_advice", fail)
                run.change(4)
                run.save(wait=False)
                with pytest.raises(SaveFailed):
                    run.writer.wait()
            with pytest.raises(MemoryError):
                run.writer.wait()
            run.save()
            assert run.writer.reports[-1].rows == 1
            run.saved.pop(2)
            run.check()

    def test_another_writer(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            run.save()
            number = read_newest(run.store).number
            run.store.publish(f"manifests/{number + 1:010}.json", b"another's")
            run.change(1)
            run.save(wait=False)
            with pytest.raises(StoreLocked, match="another writer has taken over"):
                run.writer.wait()
            with pytest.raises(StoreLocked):
                run.save()

    def test_a_full_disk_makes_room_and_tries_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running(tmp_path, strategy="full", keep=3) as run:
            for step in range(3):
                run.save(step)
            run.writer.catalog.policy = Policy(strategy="full", keep=1)
            real = run.store.put
            failed: list[str] = []

            def full_once(name: str, parts: Any) -> int:
                if not failed:
                    failed.append(name)
                    raise StoreFull("no space")
                return real(name, parts)

            monkeypatch.setattr(run.store, "put", full_once)
            run.save(3)
            assert failed
            assert run.versions == [4]
            run.check()

    def test_a_full_disk_with_nothing_to_delete(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running(tmp_path, strategy="incremental") as run:
            run.save()
            run.save()
            with monkeypatch.context() as broken:
                broken.setattr(run.store, "put", lambda *_: (_ for _ in ()).throw(StoreFull("no space")))
                run.save(wait=False)
                with pytest.raises(SaveFailed, match=r"no space, or keep fewer versions .*Policy\(keep=N\)"):
                    run.writer.wait()
            assert run.versions == [1, 2]

    @pytest.mark.parametrize(
        ("error", "damaged"), [(CorruptCheckpoint("damaged"), True), (StoreError("no"), False)]
    )
    def test_files_that_cannot_be_rearranged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, damaged: bool
    ) -> None:
        """A damaged file ends the era; any other error is tried again after the next version."""

        def fail(*_: Any) -> None:
            raise error

        with running(tmp_path, strategy="chunked") as run:
            run.save()
            with monkeypatch.context() as broken:
                broken.setattr(Shard, "tidy", fail)
                run.change(1)
                run.save(wait=False)
                with pytest.raises(SaveFailed, match="are intact, but their files could not be rearranged"):
                    run.writer.wait()
            run.writer.wait()  # raised once
            assert run.versions == [1, 2]
            assert [e["version"] for e in run.events.of("checkpoint_tidy_failed")] == [2]
            newest = run.writer.catalog.newest
            assert newest is not None
            assert run.writer.resume(newest, None) is not damaged
            run.change(2)
            run.save()
            assert run.writer.reports[-1].baseline is damaged
            run.change(3)
            run.save()
            assert not run.writer.reports[-1].baseline
            run.check()

    def test_an_applied_change_that_failed_ends_the_era(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise MemoryError

        with running(tmp_path, strategy="incremental") as run:
            run.save()
            with monkeypatch.context() as broken:
                broken.setattr(Shard, "apply", fail)
                run.change(1)
                run.save()
            run.change(2)
            run.save()
            assert [r.baseline for r in run.writer.reports] == [True, False, True]
            run.check()


class TestBusy:
    def test_a_save_is_skipped_only_if_the_policy_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for when, skips in (("skip", True), ("wait", False), ("cancel", False)):
            with running(tmp_path / when, when_busy=when) as run, monkeypatch.context() as held:
                assert not run.writer.skips(1), "none is in progress"
                gate = Gate(run.store, "publish", held)
                run.save(wait=False)
                assert run.writer.skips(2) is skips
                assert run.events.of("checkpoint_skipped") == ([{"step": 2}] if skips else [])
                gate.open()
                run.writer.wait()
                assert not run.writer.skips(3)

    def test_of_two_in_a_row_one_is_cancelled(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with running(tmp_path, when_busy="cancel", strategy="incremental") as run:
            run.save()
            with monkeypatch.context() as held:
                gate = Gate(run.store, "put", held)
                run.change(1)
                run.save(1, wait=False)
                assert gate.reached.wait(SECONDS)
                threading.Timer(0.05, gate.open).start()
                run.change(2)
                run.save(2, wait=False)  # cancels version 2
                run.writer.wait()
            assert run.versions == [1, 3]
            cancelled = run.events.of("checkpoint_cancelled")
            assert [(e["version"], e["step"]) for e in cancelled] == [(2, 1)]
            assert run.events.of("checkpoint_failed") == []
            assert run.writer.reports[-1].rows == 2, "its rows are in the next one"
            run.saved.pop(2)
            run.check()


class TestUnseen:
    """Rows that change without a mark."""

    def test_are_found_and_saved_and_older_versions_flagged(self, tmp_path: Path) -> None:
        with running(tmp_path, strategy="incremental") as run:
            assert run.writer.check(["t"]) == [], "nothing is saved yet"
            run.save()
            run.change(1)
            run.save()
            run.change(7, mark=False)
            run.change(9)
            (found,) = run.writer.check(["t"])
            assert (found.table, found.rows, found.verified) == ("t", 1, 1)
            assert run.writer.check(["t"]) == [], "they are marked by now"
            told = run.events.of("checkpoint_unseen_change")
            assert [(e["table"], e["rows"], e["versions"]) for e in told] == [("t", 1, [2])]
            run.save()
            assert run.writer.reports[-1].rows == 2
            assert np.array_equal(run.restored(), run.weights)
            flags = [v.unverified for v in read_newest(run.store).versions]
            assert flags == ["", "t: 1 rows had changed unseen", ""]

    def test_are_flagged_when_the_run_ends_too(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            run.save()
            run.save()
            run.change(7, mark=False)
            run.writer.check(["t"])
            run.writer.close()
            assert [bool(v.unverified) for v in read_newest(run.store).versions] == [False, True]

    def test_a_slice_at_a_time(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            assert run.writer.check_some(1.0, lambda table: True) == []
            run.save()
            run.change(7, mark=False)
            assert run.writer.check_some(1.0, lambda table: False) == [], "that table is not to be checked"
            (found,) = run.writer.check_some(1.0, lambda table: True)
            assert found.rows == 1

    def test_with_verify_all_no_version_lacks_a_change(self, tmp_path: Path) -> None:
        with running(tmp_path, verify="all", strategy="incremental") as run:
            run.save()
            run.change(7, mark=False)
            run.save()
            assert run.writer.reports[-1].rows == 1
            run.check()
            assert all(not v.unverified for v in read_newest(run.store).versions[1:])

    @pytest.mark.parametrize("policy", [{"verify": 0}, {"strategy": "full"}])
    def test_no_digests_are_kept(self, tmp_path: Path, policy: dict[str, Any]) -> None:
        with running(tmp_path, **policy) as run:
            run.save()
            run.change(7, mark=False)
            assert run.writer.check(["t"]) == []
            assert run.writer.check_some(1.0, lambda table: True) == []

    def test_missed_changes_without_digests(self, tmp_path: Path) -> None:
        with running(tmp_path, verify=0, strategy="incremental") as run:
            run.writer.note_missed("t", "a hook was missing", 0)
            assert run.events.of("checkpoint_unseen_change") == [], "there is no version yet"
            run.save()
            run.change(1)
            run.save()
            run.change(7, mark=False)
            run.writer.note_missed("t", "a hook was missing", 1)
            told = run.events.of("checkpoint_unseen_change")
            assert [(e["rows"], e["versions"]) for e in told] == [(None, [2])]
            run.save()
            assert run.writer.reports[-1].rows == ROWS, "the whole table"
            flags = [v.unverified for v in read_newest(run.store).versions]
            assert flags == ["", "t: a hook was missing", ""]

    def test_missed_changes_with_digests(self, tmp_path: Path) -> None:
        with running(tmp_path, strategy="incremental") as run:
            run.save()
            run.change(7, mark=False)
            run.writer.note_missed("t", "a hook was missing", 1)
            run.save()
            assert run.writer.reports[-1].rows == 1

    def test_a_table_that_may_have_changed_anywhere(self, tmp_path: Path) -> None:
        class Suspected(PlainSource):
            def look(self) -> Any:
                return self.tables, ["t"]

        for verify, rows in ((0, ROWS), (0.0025, 1)):
            with running(tmp_path / str(verify), verify=verify, strategy="incremental") as run:
                run.save()
                run.change(7, mark=False)
                run.writer.save(1, Suspected(run.source.tables), {})
                run.writer.wait()
                assert run.writer.reports[-1].rows == rows
                assert np.array_equal(run.restored(), run.weights)
                run.writer.save(2, Suspected(run.source.tables), {})
                run.writer.wait()


class TestResume:
    def resumed(self, folder: Path, **policy: Any) -> tuple[bool, bool]:
        """Whether a new process goes on with the newest version, and whether its first one is full."""
        with running(folder, **policy) as run:
            goes_on = run.restore()
            run.change(3)
            run.save()
            assert np.array_equal(run.restored(), run.weights)
            return goes_on, run.writer.reports[-1].baseline

    def begin(self, folder: Path, **policy: Any) -> None:
        with running(folder, **policy) as run:
            run.save()
            run.change(1, 2)
            run.save()

    @pytest.mark.parametrize("strategy", ["incremental", "chunked", "differential"])
    def test_an_era_goes_on(self, tmp_path: Path, strategy: str) -> None:
        self.begin(tmp_path, strategy=strategy)
        assert self.resumed(tmp_path, strategy=strategy) == (True, False)

    def test_a_differential_run_repeats_what_it_had_saved(self, tmp_path: Path) -> None:
        self.begin(tmp_path, strategy="differential")
        with running(tmp_path, strategy="differential") as run:
            assert run.restore()
            run.change(9)
            run.save()
            assert run.writer.reports[-1].rows == 3

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ({"strategy": "full"}, {"strategy": "full"}),
            ({"strategy": "incremental"}, {"strategy": "chunked"}),
            ({"strategy": "incremental"}, {"strategy": "incremental", "quantize": 8}),
        ],
    )
    def test_what_begins_anew(self, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
        self.begin(tmp_path, **before)
        with running(tmp_path, **after) as run:
            newest = run.writer.catalog.newest
            assert newest is not None
            assert not run.writer.resume(newest, None)
            run.save()
            assert run.writer.reports[-1].baseline

    def test_from_an_older_version(self, tmp_path: Path) -> None:
        self.begin(tmp_path, strategy="incremental")
        with running(tmp_path, strategy="incremental") as run:
            assert not run.writer.resume(run.writer.catalog.manifest.versions[0], None)

    def test_after_later_versions_were_deleted(self, tmp_path: Path) -> None:
        self.begin(tmp_path, strategy="incremental")
        with running(tmp_path, strategy="incremental") as run:
            run.writer.catalog.take_over(without=[2])
            newest = run.writer.catalog.newest
            assert newest is not None
            assert newest.version == 1
            assert not run.writer.resume(newest, None)

    def test_with_a_file_that_is_lost(self, tmp_path: Path) -> None:
        self.begin(tmp_path, strategy="differential")
        with running(tmp_path, strategy="differential") as run:
            newest = self.lose_increments(run, tmp_path)
            assert not run.writer.resume(newest, None)
            assert [e["version"] for e in run.events.of("checkpoint_damaged")] == [2]
            run.save()
            assert run.writer.reports[-1].baseline

    def test_with_a_file_that_is_lost_and_found_missing_later(self, tmp_path: Path) -> None:
        """Where resuming reads nothing, the first round finds it out."""
        self.begin(tmp_path, strategy="chunked")
        with running(tmp_path, strategy="chunked") as run:
            newest = self.lose_increments(run, tmp_path)
            assert run.writer.resume(newest, None)
            with pytest.raises(SaveFailed, match="could not be rearranged"):
                run.save()
            assert not run.writer.catalog.manifest.versions[-1].baseline
            run.save()
            assert run.writer.reports[-1].baseline

    def lose_increments(self, run: Any, folder: Path) -> Version:
        for info in run.store.list("chunks/"):
            if "increment" in info.name:
                (folder / info.name).unlink()
        newest = run.writer.catalog.newest
        assert isinstance(newest, Version)
        return newest

    def test_what_was_restored_is_known(self, tmp_path: Path) -> None:
        """Digests are learned: a change that nobody marks is seen from the first step on."""
        self.begin(tmp_path, strategy="incremental")
        with running(tmp_path, strategy="incremental") as run:
            assert run.restore()
            run.change(5, mark=False)
            (found,) = run.writer.check(["t"])
            assert (found.rows, found.verified) == (1, 2)


class TestBinding:
    def test_other_tables_begin_a_new_era(self, tmp_path: Path) -> None:
        with running(tmp_path, strategy="incremental") as run:
            run.save()
            tracker = run.writer.tracker
            run.weights = run.weights.copy()  # the same groups, elsewhere
            run.source = PlainSource(run._live())
            run.change(3)
            run.save()
            assert run.writer.tracker is tracker
            assert [r.baseline for r in run.writer.reports] == [True, False]
            run.groups = make_groups(
                [("t", ROWS, (Field("weight", "F32", 2),)), ("u", 9, (Field("w", "F32", 1),))]
            )
            other = np.zeros((9, 1), np.float32)
            fields = {"t": run.weights, "u": other}
            run.source = PlainSource(LiveTables(run.groups, lambda t: (fields[t].view(np.uint8),)))
            run.save()
            assert run.writer.reports[-1].baseline
            assert run.writer.reports[-1].rows == ROWS + 9

    def test_a_save_in_progress_ends_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with running(tmp_path, strategy="incremental") as run:
            gate = Gate(run.store, "publish", monkeypatch)
            run.save(wait=False)
            threading.Timer(0.05, gate.open).start()
            groups = make_groups([("u", 9, (Field("w", "F32", 1),))])
            other = np.zeros((9, 1), np.float32)
            run.writer.bind(LiveTables(groups, lambda t: (other.view(np.uint8),)))
            assert not run.writer.busy()
            assert run.versions == [1]


class TestPriorities:
    def test_rows_that_rank_low_wait_unless_the_save_is_whole(self, tmp_path: Path) -> None:
        with running(tmp_path, strategy="incremental", prioritize="scar", fraction=0.1) as run:
            run.save(whole=False)
            assert run.writer.reports[-1].rows == ROWS, "a baseline holds all rows"
            run.change(*range(100))
            run.save(whole=False)
            assert run.writer.reports[-1].rows == 20
            run.save(whole=True)
            assert run.writer.reports[-1].rows == 80, "all that are left"


def test_bits_are_said_once(tmp_path: Path) -> None:
    with running(tmp_path, strategy="full", quantize=AutoBits(expected_restores=3)) as run:
        for _ in range(3):
            run.save()
        run.writer.restores = 50
        run.save()
        run.save()
        assert [(e["bits"], e["restores"]) for e in run.events.of("checkpoint_bits")] == [(3, 0), (8, 50)]


def test_what_a_damaged_manifest_says(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.save()
        run.save()
        number = run.writer.catalog.manifest.number
    (tmp_path / f"manifests/{number:010}.json").write_bytes(b"broken")
    with running(tmp_path) as run:
        (told,) = run.events.of("checkpoint_damaged")
        assert told["version"] is None


def test_closing_finishes_and_raises_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as run:
        run.save()
        gate = Gate(run.store, "publish", monkeypatch)
        run.change(1)
        run.save(wait=False)
        assert not run.writer.finish(0.01), "it takes longer"
        gate.open()
        run.writer.close()
        assert run.versions == [1, 2]
