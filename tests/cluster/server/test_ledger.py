"""What a server remembers of pushes: each counts once (holes 7, 8, 11, 14, 15)."""

from __future__ import annotations

import pytest

from holdfast.cluster.protocol.messages import Peer, Position, Pushed, Refused, WorkerInView
from holdfast.cluster.server.ledger import PushLedger


class Ledger(PushLedger[str]):
    """A ledger of strings, with what was applied in order."""

    def __init__(self, workers: int = 2) -> None:
        self.counted: list[str] = []
        super().__init__(workers, lambda worker, sequence, text: self.counted.append(text))
        self.adopt([WorkerInView(slot, 1) for slot in range(workers)])


def worker(slot: int = 0, incarnation: int = 1) -> Peer:
    return Peer("worker", slot, incarnation)


def push(ledger: Ledger, sequence: int, *, stage: bool = False, source: Peer | None = None) -> object:
    who = source or worker()
    text = f"{who.slot}.{sequence}"
    return ledger.push(who, sequence, Position(0, sequence), text, samples=3, stage=stage)


def test_a_push_is_applied_once() -> None:
    ledger = Ledger()
    assert push(ledger, 1) == push(ledger, 1) == Pushed(1, applied=True)
    assert push(ledger, 2) == Pushed(2, applied=True)
    assert push(ledger, 1) == Pushed(1, applied=True)
    assert ledger.counted == ["0.1", "0.2"]
    mark = ledger.marks()[0]
    assert (mark.sequence, mark.batch, mark.samples) == (2, Position(0, 2), 6)


def test_a_push_behind_one_that_is_missing_is_refused() -> None:
    ledger = Ledger()
    assert push(ledger, 2) == Refused("gap", 2)
    assert ledger.counted == []


def test_two_phases() -> None:
    ledger = Ledger()
    assert push(ledger, 1, stage=True) == Pushed(1, applied=False)
    assert push(ledger, 1, stage=True) == Pushed(1, applied=False)
    assert ledger.counted == []
    assert ledger.marks()[0].staged == 1
    assert ledger.commit(worker(), 1) == ledger.commit(worker(), 1) == Pushed(1, applied=True)
    assert push(ledger, 1, stage=True) == Pushed(1, applied=True)  # late, and known
    assert ledger.counted == ["0.1"]
    assert ledger.marks()[0].staged == 0


def test_a_commit_of_what_is_not_here_is_refused() -> None:
    ledger = Ledger()
    assert ledger.commit(worker(), 1) == Refused("not staged", 1)
    push(ledger, 1, stage=True)
    assert ledger.commit(worker(), 2) == Refused("not staged", 2)
    assert ledger.counted == []


def test_two_workers_that_stage_the_same_rows_both_count() -> None:
    """Hole 7: what is kept is what to do, not what comes of it."""
    ledger = Ledger()
    for slot in (0, 1):
        push(ledger, 1, stage=True, source=worker(slot))
    for slot in (1, 0):
        ledger.commit(worker(slot), 1)
    assert ledger.counted == ["1.1", "0.1"]


def test_a_replaced_worker_is_refused() -> None:
    ledger = Ledger()
    push(ledger, 1)
    ledger.adopt([WorkerInView(0, 2, settle=1)])
    assert push(ledger, 2) == Refused("stale", 2)
    assert ledger.commit(worker(), 2) == Refused("stale", 2)
    assert push(ledger, 2, source=worker(0, 2)) == Pushed(2, applied=True)


def test_a_worker_that_no_view_has_named_waits() -> None:
    ledger = Ledger()
    assert push(ledger, 1, source=worker(0, 2)) is None
    for slot in (-1, 2, 7):
        assert push(ledger, 1, source=worker(slot)) is None
    assert push(ledger, 1, source=Peer("server", 0, 1)) is None
    ledger.adopt([WorkerInView(0, 2)])
    assert push(ledger, 1, source=worker(0, 2)) is None, "what the old one left is not settled yet"
    assert ledger.counted == []


@pytest.mark.parametrize(("settle", "applied"), [(0, []), (1, ["0.1"]), (5, ["0.1"])])
def test_what_a_dead_worker_staged_is_settled_once(settle: int, applied: list[str]) -> None:
    ledger = Ledger()
    push(ledger, 1, stage=True)
    ledger.adopt([WorkerInView(0, 2)])
    assert ledger.marks()[0].staged == 1
    ledger.adopt([WorkerInView(0, 2, settle=settle)])
    assert ledger.counted == applied
    successor = worker(0, 2)
    push(ledger, len(applied) + 1, stage=True, source=successor)
    ledger.adopt([WorkerInView(0, 2, settle=settle)])  # the same view again
    assert ledger.marks()[0].staged == len(applied) + 1
    assert ledger.commit(successor, len(applied) + 1) == Pushed(len(applied) + 1, applied=True)


def test_an_older_view_changes_nothing() -> None:
    ledger = Ledger()
    ledger.adopt([WorkerInView(0, 3, settle=0)])
    ledger.adopt([WorkerInView(0, 2, settle=0)])
    assert ledger.marks()[0].incarnation == 3
