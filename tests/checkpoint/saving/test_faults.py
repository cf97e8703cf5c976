"""A disk that fails at any operation: the trainer is told, nothing is forgotten, nothing is left behind."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.layout import rounds
from holdfast.checkpoint.store.base import PARTIAL_PREFIX, RESERVE_PREFIX
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import CheckpointError, SaveFailed, StoreError
from holdfast.options import Chunked, Policy
from holdfast.testing.faults import READING_OPERATIONS, WRITING_OPERATIONS, FaultyFiles
from tests.checkpoint.lineage import (
    QUANTIZED,
    STRATEGIES,
    Lineage,
    QuickFiles,
    check_no_leftovers,
    check_store,
)

CODES = (errno.ENOSPC, errno.EACCES, errno.EIO)
OPERATIONS = WRITING_OPERATIONS + READING_OPERATIONS
NEVER = 10**9
ROUNDS = Chunked(round_versions=2, dead_fraction=0.0, reset="never")
SAVES = 6


class Faulty(FaultyFiles):
    """A disk that fails and is quick otherwise."""

    def fsync(self, handle: int) -> None:
        """Fail or do nothing."""
        self._arrive("fsync")

    def fsync_dir(self, path: str) -> None:
        """Fail or do nothing."""
        self._arrive("fsync_dir")


def begin(root: Path, policy: Policy) -> None:
    """A healthy process before: three versions, and a file that a dead writer left."""
    with LocalStore(root, create=True, files=QuickFiles()) as store, store.lock_writer():
        line = Lineage(store, policy)
        for _ in range(3):
            line.train()
            line.save()
            line.writer.wait()
        store.put("chunks/00000099-0000-live-000000000000.safetensors", [b"orphan"])


def go_on(root: Path, policy: Policy, files: Faulty) -> tuple[set[int], int]:
    """A process on the faulty disk; the versions that it was told are there, and how often it was told no."""
    promised: set[int] = set()
    failures = 0
    with LocalStore(root, create=True, files=files) as store, ExitStack() as held:
        try:
            held.enter_context(store.lock_writer())
            line = Lineage(store, policy)
        except (StoreError, CheckpointError):
            return promised, 1
        held.callback(line.writer._thread.close)
        for _ in range(SAVES):
            line.train()
            try:
                number = line.save()
                line.writer.wait()
            except SaveFailed as error:
                failures += error.__cause__ is not None
                if "still marked" in str(error):
                    continue
            promised.add(number)
        if files.calls[files._operation] > (files._last or NEVER):
            line.train()
            number = line.save()
            line.writer.close()  # the disk is well again: this one must work
            newest = check_store(store, on_grids=line.on_grids).versions[-1]
            assert (newest.version, newest.step) == (number, line.step)
            promised.add(number)
    return promised, failures


def check_after(root: Path, policy: Policy, promised: set[int]) -> None:
    with LocalStore(root, create=False, files=QuickFiles()) as store, store.lock_writer():
        on_grids = policy.quantize is not None
        listed = {v.version for v in check_store(store, on_grids=on_grids).versions}
        # One whose name could not be synced may be there, though it was said to have failed.
        newest = max(promised | listed, default=0)
        assert {v for v in promised if v > newest - (policy.keep or NEVER)} <= listed
        assert promised or {1, 2, 3} <= listed
        line = Lineage(store, policy)
        line.writer.catalog.take_over()
        check_no_leftovers(line)
        assert not list(root.rglob(f"{PARTIAL_PREFIX}*"))
        for _ in range(2):
            line.train()
            line.save()
        line.writer.close()
        assert check_store(store, on_grids=on_grids).versions[-1].step == line.step


def calls(root: Path, strategy: Any, **options: Any) -> dict[str, int]:
    """How often each operation is called when nothing fails."""
    policy = Policy(strategy=strategy, keep=4, **options)
    files = Faulty("mkdir", NEVER, 0)
    begin(root, policy)
    assert go_on(root, policy, files) == (set(range(4, 4 + SAVES)), 0)
    return dict(files.calls)


def try_all(
    tmp_path: Path, strategy: Any, places: Iterator[tuple[str, int, int, int]], **options: Any
) -> int:
    failures = 0
    for number, (operation, at, code, times) in enumerate(places):
        root = tmp_path / str(number)
        policy = Policy(strategy=strategy, keep=4, **options)
        begin(root, policy)
        files = Faulty(operation, at, code, times)
        promised, failed = go_on(root, policy, files)
        assert files.fired, f"{operation} was never called {at} times"
        check_after(root, policy, promised)
        failures += failed
    return failures


def some(counts: dict[str, int], per_operation: int) -> Iterator[tuple[str, int, int, int]]:
    for o, operation in enumerate(OPERATIONS):
        last = counts.get(operation, 0)
        step = max(1, last // per_operation)
        for i, at in enumerate(range(1 + o % step, last + 1, step)):
            yield operation, at, CODES[(i + o) % 3], 1 + i % 2


def every(counts: dict[str, int]) -> Iterator[tuple[str, int, int, int]]:
    for operation in OPERATIONS:
        for at in range(1, counts.get(operation, 0) + 1):
            for code in CODES:
                yield from ((operation, at, code, times) for times in (1, 2, 7))


def test_faults_at_some_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    counts = calls(tmp_path / "count", ROUNDS)
    assert counts["unlink"] > 20
    assert counts["preadv"] > 20
    failures = try_all(tmp_path, ROUNDS, some(counts, 4))
    assert failures > 20, "most faults are noticed"


@pytest.mark.parametrize("strategy", STRATEGIES[:4], ids=str)
def test_faults_with_other_strategies(tmp_path: Path, strategy: Any) -> None:
    assert try_all(tmp_path, strategy, some(calls(tmp_path / "count", strategy), 2))


def test_faults_with_quantized_rows(tmp_path: Path) -> None:
    counts = calls(tmp_path / "count", ROUNDS, **QUANTIZED)
    assert try_all(tmp_path, ROUNDS, some(counts, 1), **QUANTIZED)


@pytest.mark.soak
@pytest.mark.parametrize("quantized", [{}, QUANTIZED], ids=["raw", "quantized"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_faults_at_every_call(
    tmp_path: Path, strategy: Any, quantized: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    counts = calls(tmp_path / "count", strategy, **quantized)
    assert try_all(tmp_path, strategy, every(counts), **quantized)


def files_in(root: Path) -> set[Path]:
    return {p for p in root.rglob("*") if p.is_file() and not p.name.startswith(RESERVE_PREFIX)}


def test_a_disk_that_stays_full(tmp_path: Path) -> None:
    """Every save fails, every failure is told, and the first one that works holds everything."""
    begin(tmp_path, Policy(strategy=ROUNDS))
    files = Faulty("writev", NEVER, errno.ENOSPC)
    with LocalStore(tmp_path, create=True, files=files) as store, store.lock_writer():
        line = Lineage(store, Policy(strategy=ROUNDS))
        before = files_in(tmp_path)
        files._first, files._last = files.calls["writev"] + 1, None
        for _ in range(5):
            line.train()
            line.save()
            with pytest.raises(SaveFailed, match="no space left"):
                line.writer.wait()
            assert files_in(tmp_path) == before
        files._first = NEVER
        line.train()
        line.save()
        line.writer.close()
        assert files.fired >= 5
        manifest = check_store(store)
        assert manifest.versions[-1].step == line.step == 9


def test_rounds_that_fail_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second file of every round fails: the first goes at once, not with the next writer."""
    real = LocalStore.put
    written: list[str] = []

    def put(store: LocalStore, name: str, parts: Sequence[Any]) -> int:
        if "-live-" in name or "-history-" in name:
            written.append(name)
            if len(written) % 2 == 0:
                raise StoreError("no space left")
        return real(store, name, parts)

    with LocalStore(tmp_path, create=True, files=QuickFiles()) as store, store.lock_writer():
        line = Lineage(store, Policy(strategy=ROUNDS, keep=3))
        monkeypatch.setattr(LocalStore, "put", put)
        failures = 0
        for _ in range(12):
            line.train()
            line.save()
            try:
                line.writer.wait()
            except SaveFailed as error:
                failures += "could not be rearranged" in str(error)
                check_no_leftovers(line)
        assert failures >= 3
        monkeypatch.undo()
        line.writer.close()
        check_store(store)
