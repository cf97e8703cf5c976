"""When workers hear of pushes that are kept."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Kept, Peer, Pushed, View, ViewNumber, WorkerInView
from holdfast.cluster.protocol.plan import JobPlan, LaneOptions
from holdfast.cluster.server.durability import KeptPushes

ME = Peer("server", 0, 1)
PLAN = JobPlan(
    job="j", seed=1, groups=(), servers=1, workers=2, lanes=LaneOptions(window=4, idle_seconds=0.5)
)


class Counts:
    """A ledger and a replicator: what is applied, and what of it is kept."""

    def __init__(self) -> None:
        self.applied_to = [0, 0]
        self.kept_to = [0, 0]

    def applied(self, worker: int) -> int:
        return self.applied_to[worker]

    def kept(self, worker: int) -> int:
        return self.kept_to[worker]


class Telling:
    def __init__(self, *, protected: bool = True) -> None:
        self.counts: Any = Counts()
        self.outbox: list[Envelope] = []
        ledger: Any = self.counts
        replicator: Any = self.counts if protected else None
        self.kept = KeptPushes(ME, PLAN, ledger, replicator, self.outbox)

    def tell(self, now: float, phase: Any = "running", starts: bool = True) -> list[tuple[int, int]]:
        """Whom it tells what."""
        self.outbox.clear()
        workers = (WorkerInView(0, 3, starts=starts), WorkerInView(1, 5, starts=True))
        self.kept.tell(View(ViewNumber(1), phase, workers=workers), now)
        assert all(e.source == ME and e.target.incarnation == (3, 5)[e.target.slot] for e in self.outbox)
        return [(e.target.slot, e.message.sequence) for e in self.outbox if isinstance(e.message, Kept)]


@pytest.fixture
def telling() -> Telling:
    return Telling()


def test_what_is_applied_is_kept_where_nothing_protects_it() -> None:
    telling = Telling(protected=False)
    telling.counts.applied_to[1] = 7
    assert telling.kept.kept(1) == 7


def test_an_answer_says_what_is_kept(telling: Telling) -> None:
    telling.counts.applied_to[1], telling.counts.kept_to[1] = 7, 5
    assert telling.kept.answer(Pushed(7, applied=True), 1, 10.0) == Pushed(7, applied=True, kept=5)
    assert telling.tell(100.0) == []  # it has heard


def test_who_pushes_hears_with_the_next_answer(telling: Telling) -> None:
    telling.kept.answer(Pushed(1, applied=True), 0, 10.0)
    telling.counts.applied_to[0] = telling.counts.kept_to[0] = 1
    assert telling.tell(10.4) == []
    assert telling.tell(10.5) == [(0, 1)]
    assert telling.tell(20.0) == []


def test_who_holds_hears_at_once(telling: Telling) -> None:
    telling.kept.answer(Pushed(1, applied=True), 0, 10.0)
    telling.counts.applied_to[0] = telling.counts.kept_to[0] = 1
    assert telling.tell(10.0, phase="holding") == [(0, 1)]


@pytest.mark.parametrize(("applied", "told"), [(3, []), (4, [(0, 1)])])
def test_who_waits_for_it_hears_at_once(telling: Telling, applied: int, told: list[tuple[int, int]]) -> None:
    telling.kept.answer(Pushed(1, applied=True), 0, 10.0)
    telling.counts.applied_to[0], telling.counts.kept_to[0] = applied, 1
    assert telling.tell(10.0) == told


def test_nobody_hears_of_nothing_or_before_the_start(telling: Telling) -> None:
    assert telling.tell(100.0) == []
    telling.counts.kept_to[:] = [2, 3]
    assert telling.tell(100.0, starts=False) == [(1, 3)]
    assert telling.tell(100.0) == [(0, 2)]
