"""Values that only workers have: who is asked, which copy is taken, and what it lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import (
    AskKept,
    CanResend,
    Install,
    Lacks,
    NoCopy,
    Peer,
    View,
    ViewNumber,
    WorkerInView,
)
from holdfast.cluster.protocol.plan import JobPlan, Timing
from holdfast.cluster.server.initial_values import Contents, Installing, Offer
from holdfast.cluster.server.requests import Update

ME = Peer("server", 0, 2)
WORKERS = [Peer("worker", slot, 1) for slot in range(3)]
PLAN = JobPlan(
    job="j", seed=1, groups=(), servers=1, workers=3, timing=Timing(retry_seconds=1.0, stuck_seconds=10.0)
)
UPDATE: Update = (1, np.arange(2, dtype=np.uint32), np.ones((2, 1), np.float32))


class Shard:
    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.installed = False
        self.pushed: list[Any] = []

    def push(self, places: Any, gradients: Any) -> None:
        self.pushed.append(places.tolist())


class Ledger:
    def __init__(self) -> None:
        self.counts = [0, 0, 0]
        self.known = True

    def applied(self, worker: int) -> int:
        return self.counts[worker]

    def knows(self, source: Peer) -> bool:
        return self.known

    def marks(self) -> list[Any]:
        return []


class Case:
    def __init__(self) -> None:
        self.shards: Any = [Shard(10), Shard(7)]
        self.outbox: list[Envelope] = []
        self.doubted: list[tuple[Peer, float]] = []
        self.installing = Installing(
            ME, PLAN, self.shards, self.outbox, lambda *who: self.doubted.append(who)
        )
        self.ledger: Any = Ledger()
        self.touched: list[Update] = []
        ledger: Any = self.ledger
        self.contents = Contents(self.shards[1], ledger, self.installing, self.touched.append)
        self.contents.marks = [0, 0, 0]

    def view(self, *, starts: bool = True) -> View:
        workers = tuple(WorkerInView(peer.slot, peer.incarnation, starts=starts) for peer in WORKERS)
        return View(ViewNumber(1), "running", workers=workers)

    def asked(self, now: float, unsure: list[Peer] | None = None) -> list[tuple[Peer, Any]]:
        self.outbox.clear()
        self.doubted.clear()
        self.installing.tick(self.view(), now, unsure or [])
        assert all(envelope.source == ME for envelope in self.outbox)
        return [(envelope.target, envelope.message) for envelope in self.outbox]

    def offer(self, worker: int, *marks: int, pushed: int = 0, kept: int = 0) -> None:
        message = Install((), marks, pushed, kept)
        self.installing.answered(WORKERS[worker], message)
        self.contents.offer(WORKERS[worker], message, UPDATE)


@pytest.fixture
def case() -> Case:
    return Case()


class TestAsking:
    def test_all_workers_until_the_values_are_here(self, case: Case) -> None:
        assert case.installing.rows == 17
        assert case.asked(5.0) == [(peer, Lacks((0, 1))) for peer in WORKERS]
        assert case.asked(5.9) == []
        case.shards[0].installed = True
        assert case.asked(6.0) == [(peer, Lacks((1,))) for peer in WORKERS]
        assert case.installing.rows == 7
        case.shards[1].installed = True
        assert case.asked(7.0) == []
        assert case.installing.groups == ()

    def test_what_is_there_stays_there_until_the_slot_is_taken_over(self, case: Case) -> None:
        for shard in case.shards:
            shard.installed = True
        assert case.installing.rows == 0
        case.shards[1].installed = False
        assert case.installing.rows == 0
        case.installing.look_again()
        assert case.installing.rows == 7

    def test_those_that_have_none_are_not_asked_again(self, case: Case) -> None:
        case.installing.answered(WORKERS[1], NoCopy())
        case.installing.answered(WORKERS[0], CanResend(3))
        assert [peer for peer, _ in case.asked(0.0)] == [WORKERS[0], WORKERS[2]]
        assert not case.installing.lost

    def test_if_nobody_has_them_they_are_lost(self, case: Case) -> None:
        for peer in WORKERS:
            case.installing.answered(peer, NoCopy())
        assert case.asked(0.0) == []
        assert case.installing.lost
        assert case.asked(100.0) == []

    def test_without_workers_nothing_is_lost_yet(self, case: Case) -> None:
        case.installing.tick(View(ViewNumber(1), "running"), 0.0)
        assert not case.installing.lost

    def test_who_does_not_answer_for_long_is_doubted(self, case: Case) -> None:
        """Its process may not be there yet."""
        case.asked(5.0)
        case.asked(15.0)
        assert case.doubted == []
        case.offer(1, 0, 0, 0)
        case.asked(16.0)
        assert case.doubted == [(WORKERS[0], 16.0), (WORKERS[2], 16.0)]

    def test_time_may_begin_at_zero(self, case: Case) -> None:
        case.asked(0.0)
        case.asked(1.0)
        case.asked(10.5)
        assert [peer for peer, _ in case.doubted] == WORKERS

    def test_who_may_be_unable_to_send_again_is_asked_that(self, case: Case) -> None:
        for shard in case.shards:
            shard.installed = True
        assert case.asked(5.0, [WORKERS[2]]) == [(WORKERS[2], AskKept())]
        assert case.doubted == [(WORKERS[2], 5.0)]
        assert case.asked(5.9, [WORKERS[2]]) == []
        assert case.asked(6.0, [WORKERS[2]]) == [(WORKERS[2], AskKept())]

    def test_the_newest_push_that_cannot_come_again(self, case: Case) -> None:
        mine = WorkerInView(1, 1)
        assert case.installing.kept(mine) == 0
        case.installing.answered(WORKERS[1], CanResend(4))
        case.installing.answered(WORKERS[1], Install((), kept=3))
        assert case.installing.kept(mine) == 4
        assert case.installing.kept(WorkerInView(1, 2)) == 0


class TestChoosing:
    def test_a_copy_contains_what_each_worker_pushed(self) -> None:
        offer = Offer(WORKERS[0], Install((), (2, 3, 4)), UPDATE)
        assert offer.contains([2, 3, 4])
        assert offer.contains([0, 3, 1])
        assert not offer.contains([2, 4, 4])

    def test_one_that_contains_all_that_counts_is_enough(self, case: Case) -> None:
        case.offer(1, 2, 3, 4)
        chosen = case.installing.choose(case.view(), [2, 3, 4])
        assert chosen is not None
        assert chosen.source == WORKERS[1]
        assert case.installing.choose(case.view(), [2, 3, 5]) is None

    def test_otherwise_all_must_have_answered(self, case: Case) -> None:
        assert case.installing.choose(case.view(), [9, 9, 9]) is None
        case.offer(1, 2, 3, 4)
        case.offer(2, 3, 3, 4)
        assert case.installing.choose(case.view(), [9, 9, 9]) is None
        case.installing.answered(WORKERS[0], NoCopy())
        chosen = case.installing.choose(case.view(), [9, 9, 9])
        assert chosen is not None
        assert chosen.source == WORKERS[2]

    def test_workers_that_were_replaced_do_not_count(self, case: Case) -> None:
        case.installing.offer(Peer("worker", 0, 9), Install((), (5, 5, 5)), UPDATE)
        assert case.installing.choose(case.view(), [0, 0, 0]) is None

    def test_the_first_copy_of_a_worker_counts(self, case: Case) -> None:
        case.offer(0, 1, 1, 1)
        case.offer(0, 2, 2, 2)
        chosen = case.installing.choose(case.view(), [0, 0, 0])
        assert chosen is not None
        assert chosen.message.marks == (1, 1, 1)

    def test_a_copy_with_another_number_of_marks(self, case: Case) -> None:
        with pytest.raises(ValueError, match="a copy with 2 marks, of 3 workers"):
            case.offer(0, 1, 1)


class TestContents:
    def test_what_is_applied_is_contained(self, case: Case) -> None:
        case.contents.note(1, 4)
        case.contents.note(1, 3)
        assert case.contents.marks == [0, 4, 0]
        assert case.contents.has(1, 4)
        assert not case.contents.has(1, 5)

    def test_pushes_ahead_and_behind(self, case: Case) -> None:
        case.contents.marks, case.ledger.counts = [5, 2, 3], [2, 2, 3]
        assert case.contents.ahead == 3
        assert [case.contents.is_behind] == [False]
        assert case.contents.unsure(case.view()) == []
        case.ledger.counts = [2, 3, 4]
        assert case.contents.ahead == 3
        assert case.contents.is_behind
        assert case.contents.unsure(case.view()) == WORKERS[1:]
        assert case.contents.unsure(case.view(starts=False)) == []

    @pytest.mark.parametrize(("sequence", "lacks"), [(2, False), (3, True), (5, True), (6, False)])
    def test_a_push_that_counts_and_is_not_in_the_rows(self, case: Case, sequence: int, lacks: bool) -> None:
        case.contents.marks, case.ledger.counts = [0, 2, 0], [0, 5, 0]
        assert case.contents.lacks(WORKERS[1], sequence) is lacks
        case.ledger.known = False
        assert not case.contents.lacks(WORKERS[1], sequence)

    def test_what_is_lacking_is_applied_in_order(self, case: Case) -> None:
        case.contents.marks, case.ledger.counts = [0, 2, 0], [0, 4, 0]
        other: Update = (0, *UPDATE[1:])
        assert not case.contents.complete(WORKERS[1], 4, [UPDATE])
        assert not case.contents.complete(WORKERS[1], 5, [UPDATE])
        assert case.contents.complete(WORKERS[1], 2, [UPDATE])
        assert case.shards[1].pushed == []
        assert case.contents.complete(WORKERS[1], 3, [other, UPDATE])
        assert case.shards[1].pushed == [[0, 1]]
        assert case.touched == [UPDATE]
        assert case.contents.marks == [0, 3, 0]
        assert case.contents.complete(WORKERS[1], 4, [UPDATE])
        assert case.contents.complete(WORKERS[1], 5, [UPDATE])  # new: the ledger applies it
        assert len(case.shards[1].pushed) == 2

    def test_who_is_not_known_changes_nothing(self, case: Case) -> None:
        case.contents.marks, case.ledger.counts = [0, 2, 0], [0, 4, 0]
        case.ledger.known = False
        assert case.contents.complete(WORKERS[1], 3, [UPDATE])
        assert case.shards[1].pushed == []


class TestAdvancing:
    def test_the_newest_copy_is_taken_with_what_it_contains(self, case: Case) -> None:
        assert case.contents.advance(case.view()) is None
        case.ledger.counts = [2, 3, 4]
        case.offer(1, 2, 3, 4, pushed=6)
        assert case.contents.advance(case.view()) is UPDATE
        assert case.contents.marks == [2, 6, 4]
        assert case.contents.lost == 0

    def test_what_nobody_can_send_again_is_lost_and_counted_once(self, case: Case) -> None:
        case.ledger.counts = [5, 3, 4]
        case.offer(0, 2, 3, 4, kept=4)
        case.offer(1, 1, 1, 1)
        case.offer(2, 1, 1, 1, kept=9)
        assert case.contents.advance(case.view()) is UPDATE
        assert case.contents.marks == [4, 3, 4]
        assert case.contents.lost == 2
        case.shards[1].installed = True
        assert case.contents.advance(case.view()) is None
        assert case.contents.lost == 2
        case.installing.answered(WORKERS[0], CanResend(9))
        case.contents.advance(case.view())
        assert case.contents.marks == [5, 3, 4]
        assert case.contents.lost == 3

    def test_before_a_copy_is_chosen_nothing_is_lost(self, case: Case) -> None:
        case.ledger.counts = [5, 3, 4]
        case.installing.answered(WORKERS[0], CanResend(5))
        assert case.contents.advance(case.view()) is None
        assert case.contents.lost == 0
