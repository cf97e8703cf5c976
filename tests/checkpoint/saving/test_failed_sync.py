"""A sync that fails once: what it was to make durable is gone for good, though the next sync succeeds.

Linux reports the error to whoever syncs first, and takes what could not be written for written from then on.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import SaveFailed
from holdfast.options import Policy
from holdfast.testing.crash import CrashState, FailedSyncFiles, Journal, crash_states, materialise
from tests.checkpoint.lineage import STRATEGIES, Lineage, QuickFiles, check_store

SAVES = 2


class Quick(FailedSyncFiles, QuickFiles):
    """Only what is recorded counts."""


def work(root: Path, strategy: Any, operation: str, at: int) -> tuple[Journal, bool]:
    """Two processes, one after the other, save to a new store; what they were told is there is marked."""
    journal = Journal()
    left = at
    fired = False
    for _ in range(2):
        files = Quick(journal, operation, left)
        with LocalStore(root, create=True, files=files) as store, store.lock_writer():
            line = Lineage(store, Policy(strategy=strategy))
            for _ in range(SAVES):
                line.train()
                number = line.save()
                try:
                    line.writer.wait()
                except SaveFailed as error:
                    if "still marked" in str(error):
                        continue
                journal.mark(f"saved {number}")
            line.writer._thread.close()
        fired |= files.fired
        left = 0 if files.fired else files._left
    return journal, fired


def after_promises(journal: Journal, seed: int, mixed: int) -> Iterator[CrashState]:
    """The states of crashes right after something was promised, in which what was not synced may be lost."""
    marks = {n + 1 for n, operation in enumerate(journal.operations) if operation.kind == "mark"}
    for state in crash_states(journal, mixed=mixed, seed=seed):
        if state.prefix in marks and state.kind in ("lost", "mixed"):
            yield state


def check(tmp_path: Path, strategy: Any, operation: str, step: int, mixed: int) -> int:
    at = 1
    while True:
        journal, fired = work(tmp_path / f"store{at}", strategy, operation, at)
        if not fired:
            return at
        for number, state in enumerate(after_promises(journal, at, mixed)):
            folder = tmp_path / f"{at}-{number}"
            materialise(state, folder, tmp_path / f"cache{at}")
            promised = {int(mark.split()[1]) for mark in state.marks}
            with LocalStore(folder, create=True, files=QuickFiles()) as store:
                listed = {v.version for v in check_store(store).versions}
            assert promised <= listed, f"call {at} of {operation}, {state.kind}"
            shutil.rmtree(folder)
        at += step


@pytest.mark.parametrize("operation", ["fsync", "fsync_dir"])
def test_nothing_rests_on_a_sync_that_failed(tmp_path: Path, operation: str) -> None:
    assert check(tmp_path, STRATEGIES[3], operation, 1 if operation == "fsync_dir" else 4, 0) > 10


@pytest.mark.soak
@pytest.mark.parametrize("operation", ["fsync", "fsync_dir"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_nothing_rests_on_any_sync_that_failed(tmp_path: Path, strategy: Any, operation: str) -> None:
    assert check(tmp_path, strategy, operation, 1, 3) > 10
