"""A worker's questions to servers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from msgspec.structs import replace

from holdfast.cluster.protocol.envelope import Envelope, Frame, as_array
from holdfast.cluster.protocol.messages import (
    Commit,
    Install,
    Instant,
    Lacks,
    NoCopy,
    Part,
    Peer,
    Position,
    Pull,
    PulledRows,
    Push,
    Pushed,
    ServerInView,
    View,
    ViewNumber,
    WorkerInView,
    WorkerMark,
)
from holdfast.cluster.protocol.plan import Resume
from holdfast.cluster.protocol.wire import Message
from holdfast.cluster.worker.calls import Calls, Copy, Floats, RowSpread, empty_spread
from holdfast.cluster.worker.machine import Item, Worker
from holdfast.sim.cluster import counting_plan


def calls_of_a_worker() -> tuple[Calls, RowSpread]:
    plan = counting_plan(servers=1, workers=1, atomic=False)
    spread = RowSpread(np.zeros(1, np.uint32), np.array([0, 1]))
    calls = Calls(Peer("worker", 0, 1), plan, lambda group: (spread, np.zeros((1, 1), np.float32)))
    calls.adopt([ServerInView(0, 1, "there", starts=True)])
    calls.tick(10.0)
    return calls, spread


def test_a_server_that_is_being_replaced_is_not_stuck() -> None:
    calls, spread = calls_of_a_worker()
    calls.pull([spread, spread], 10.0)
    calls.tick(10.5)
    assert calls.waiting_since() == {0: 10.0}
    calls.adopt([ServerInView(0, 2)])
    assert calls.waiting_since() == {}
    for tenth in range(1, 50):
        calls.tick(10.5 + tenth / 10)
    calls.adopt([ServerInView(0, 2, "elsewhere", starts=True)])
    assert calls.waiting_since() == {0: 10.5 + 4.9}
    assert calls.outbox[-1].target == Peer("server", 0, 2)


def test_a_worker_that_was_stopped_does_not_call_servers_stuck() -> None:
    calls, spread = calls_of_a_worker()
    plan = counting_plan(servers=1, workers=1, atomic=False)
    calls.pull([spread, spread], 10.0)
    calls.tick(10.1)
    calls.tick(70.1)  # stopped for a minute
    assert 70.1 - calls.waiting_since()[0] < plan.timing.stuck_seconds
    for tenth in range(1, 15):
        calls.tick(70.1 + tenth / 10)
    assert 71.5 - calls.waiting_since()[0] > plan.timing.stuck_seconds


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)], ids=str)
def test_a_push_that_only_some_servers_have_applied_before_is_committed(order: tuple[int, ...]) -> None:
    """A worker begins again where the server stands that was replaced; the others know its pushes already."""
    plan = counting_plan(servers=3, workers=1, atomic=True)
    spread = RowSpread(np.zeros(3, np.uint32), np.arange(4))
    zeros = np.zeros((3, 1), np.float32)
    calls = Calls(Peer("worker", 0, 2), plan, lambda group: (spread, zeros))
    calls.adopt([ServerInView(slot, 1, "there", starts=True) for slot in range(3)])

    def answer(server: int, message: Message) -> None:
        calls.receive(Envelope(Peer("server", server, 1), calls.me, message), 10.0)

    call = calls.push(1, Position(0, 0), [spread, spread], [zeros, zeros], 10.0)
    for server in order:
        answer(server, Pushed(1, applied=server != 0))
    calls.send_commits()
    assert call.questions
    assert {e.target.slot for e in calls.outbox if isinstance(e.message, Commit)} == {0, 1, 2}
    for server in order:
        answer(server, Pushed(1, applied=True))
    assert call.done
    second = calls.push(2, Position(0, 1), [spread, spread], [zeros, zeros], 10.0)
    for server in order:
        answer(server, Pushed(2, applied=True))
    assert second.done, "all of them know this one"


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("pushed", [False, True])
def test_a_server_that_lost_the_network_gets_what_was_known_last(pushed: bool, resumed: bool) -> None:
    resume = Resume(version=3, steps=90) if resumed else None
    plan = replace(counting_plan(servers=2, workers=2, atomic=False), dense="workers", resume=resume)
    spread = RowSpread(np.zeros(2, np.uint32), np.array([0, 1, 2]))
    seconds = itertools.count(10.0)
    first, newest = np.zeros((2, 1), np.float32), np.full((2, 1), 7.0, np.float32)
    calls = Calls(Peer("worker", 0, 1), plan, lambda group: (spread, first))
    calls.tick(10.0)
    calls.adopt([ServerInView(slot, 1, "there", starts=True) for slot in range(2)])

    def answers(message: Message) -> list[float | None]:
        """What a server is sent that lacks it: the weight; None: that there is none."""
        calls.outbox.clear()
        incarnation = calls._servers[1].incarnation
        calls.receive(Envelope(Peer("server", 1, incarnation), calls.me, message), next(seconds))
        sent = [envelope for envelope in calls.outbox if isinstance(envelope.message, Install | NoCopy)]
        return [as_array(e.frames[1], np.float32, (1, 1)).item() if e.frames else None for e in sent]

    call = calls.pull([spread, spread], 10.0)
    asked = PulledRows(call.request, (), not_installed=(1,))
    assert answers(asked) == [0.0], "the job begins"
    cut = Instant(1, (WorkerMark(0), WorkerMark(1, 1, int(pushed))), (0,))
    calls.adopt([ServerInView(1, 2, "elsewhere", starts=True, counts_until=cut)])
    lacks = Lacks((1,))
    if not (pushed or resumed):
        assert answers(asked) == answers(lacks) == [0.0], "nothing has been learned yet"
        return
    assert answers(asked) == [], "another worker may have newer ones"
    assert answers(lacks) == [None], "this one has none"
    calls._copies.take(1, Copy(1, np.zeros(1, np.uint32), newest[:1], (3, 4)))
    assert answers(asked) == answers(lacks) == [7.0]
    calls.outbox.clear()
    calls.adopt([ServerInView(1, 3, "elsewhere", starts=True, counts_until=cut)])
    assert sum(isinstance(e.message, Install) for e in calls.outbox) == 1, "not only when it asks"


def test_a_push_is_sent_again_until_a_copy_contains_it() -> None:
    """Servers keep its rows of the tables; of the network only workers have copies."""
    plan = replace(counting_plan(servers=2, workers=2, atomic=False), dense="workers")
    spread = RowSpread(np.zeros(2, np.uint32), np.array([0, 1, 2]))
    one, ones = np.ones((2, 1), np.float32), np.ones((2, 2), np.float32)
    calls = Calls(Peer("worker", 0, 1), plan, lambda group: (spread, ones))
    calls.adopt([ServerInView(slot, 1, "there", starts=True) for slot in range(2)])
    calls.push(1, Position(0, 0), [spread, spread], [one, ones], 10.0, returns=True)

    def answer(slot: int, message: Message, *frames: Floats) -> None:
        calls.receive(Envelope(Peer("server", slot, 1), calls.me, message, frames), 10.0)

    answer(0, Pushed(1, applied=True, kept=1, rows=1, marks=(1, 3)), ones[:1])
    answer(1, Pushed(1, applied=True, kept=1))  # its rows were lost on the way
    assert (calls.applied, calls.unkept) == (True, 1)
    calls.tick(20.0)
    pull = next(e.message for e in calls.outbox if isinstance(e.message, Pull) and e.target.slot == 1)
    assert pull.after == 1
    answer(1, PulledRows(pull.request, pull.parts, marks=(0, 4)), ones[:1])
    assert calls.unkept == 1, "it was made before the push"
    answer(0, PulledRows(pull.request, pull.parts, marks=(1, 4)), ones[:1])
    calls.tick(30.0)
    pull = next(e.message for e in calls.outbox[::-1] if isinstance(e.message, Pull))
    answer(1, PulledRows(pull.request, pull.parts, marks=(1, 4)), ones[:1])
    assert (calls.unkept, calls.kept_sequence) == (0, 1)


def test_part_of_a_network_that_is_still_being_pulled_is_known() -> None:
    plan = replace(counting_plan(servers=2, workers=1, atomic=False), dense="workers")
    spread = RowSpread(np.zeros(2, np.uint32), np.array([0, 1, 2]))
    calls = Calls(Peer("worker", 0, 1), plan, lambda group: (spread, np.zeros((2, 2), np.float32)))
    calls.adopt([ServerInView(slot, 1, "there", starts=True) for slot in range(2)])
    call = calls.pull([empty_spread(2), spread], 10.0)
    weights = np.full((1, 2), 5.0, np.float32)
    for server in range(2):
        assert calls._copies.get(server) is None
        rows = PulledRows(call.request, (Part(1, 1),), marks=(0,))
        calls.receive(Envelope(Peer("server", server, 1), calls.me, rows, [weights]), 10.0)
        known = calls._copies.get(server)
        assert known is not None
        assert known.weights.tolist() == [[5.0, 5.0]]


class Committing:
    """A worker whose first push two servers have just staged. ``asked`` is what it sent then.

    Args:
        fed: batches that it knows; it has pulled the rows of two.
    """

    def __init__(self, fed: int = 3) -> None:
        plan = counting_plan(servers=2, workers=1, atomic=True)
        spread = RowSpread(np.zeros(2, np.uint32), np.arange(3))
        self.spreads = [spread, spread]
        self.gradients = [np.zeros((2, group.dim), np.float32) for group in plan.groups]
        network = self.gradients[1]
        self.worker = Worker(Peer("worker", 0, 1), plan, lambda group: (spread, network))
        self.see(1, 1)
        for index in range(fed):
            self.worker.feed(Item(Position(0, index), self.spreads, samples=8), 0.0)
        for _ in range(2):
            self.answer_pulls(self.sent())
        assert self.worker.take() is not None
        self.worker.finish(self.gradients, 0.0)
        pushes = [message for _, message in self.sent()]
        assert [isinstance(push, Push) and push.stage and push.returns for push in pushes] == [1, 1]
        self.answer(0, Pushed(1, applied=False, rows=1), network[:1] + 3)
        assert self.sent() == []
        assert self.worker.take() is None
        self.answer(1, Pushed(1, applied=False, rows=1), network[:1] + 4)
        self.asked = self.sent()

    def see(self, revision: int, incarnation: int) -> None:
        """Adopt a view in which server 1 has this incarnation."""
        servers = (
            ServerInView(0, 1, "there", starts=True),
            ServerInView(1, incarnation, f"there {incarnation}", starts=True),
        )
        view = View(ViewNumber(1, revision), "running", servers, (WorkerInView(0, 1, starts=True),))
        self.worker.receive(Envelope(Peer("supervisor"), self.worker.me, view), 0.0)

    def sent(self) -> list[tuple[int, Message]]:
        """What it has sent to servers since the last call."""
        found = [(e.target.slot, e.message) for e in self.worker.outbox if e.target.role == "server"]
        self.worker.outbox.clear()
        return found

    def answer(self, server: int, message: Message, *frames: Frame, incarnation: int = 1) -> None:
        """Let a server answer."""
        source = Peer("server", server, incarnation)
        self.worker.receive(Envelope(source, self.worker.me, message, frames), 0.0)

    def answer_pulls(self, asked: list[tuple[int, Message]], incarnation: int = 1) -> None:
        """Let servers answer the pulls among these messages."""
        for server, message in asked:
            if isinstance(message, Pull):
                frames = [self.gradients[part.group][:1] for part in message.parts]
                rows = PulledRows(message.request, message.parts)
                self.answer(server, rows, *frames, incarnation=incarnation)


def test_nothing_waits_for_the_answers_to_a_commit() -> None:
    """Staged answers bring the network that a push will leave; the pull that commits the push contains it."""
    case = Committing()
    worker = case.worker
    pulls = [message for _, message in case.asked]
    assert [server for server, _ in case.asked] == [0, 1]
    assert [(type(pull), pull.after, pull.commits) for pull in pulls if isinstance(pull, Pull)] == [
        (Pull, 1, True)  # of the third batch, which may lack one
    ] * 2
    second = worker.take()
    assert second is not None
    assert second.rows[-1][:, 0].tolist() == [3, 4]
    worker.finish(case.gradients, 0.0)
    assert case.sent() == [], "a push waits until the last is applied"
    case.answer_pulls(case.asked[:1])
    assert worker.applied == 0
    case.answer_pulls(case.asked[1:])
    assert worker.applied == 1
    assert [type(message) for _, message in case.sent()] == [Push, Push]


def test_a_commit_that_no_pull_carries_is_sent_by_itself() -> None:
    case = Committing(fed=2)
    assert case.asked == [(0, Commit(1)), (1, Commit(1))]
    for server in range(2):
        case.answer(server, Pushed(1, applied=True))
    assert case.worker.applied == 1


def test_a_commit_has_an_answer_of_its_own_if_the_rows_are_late() -> None:
    case = Committing()
    for server in range(2):
        case.answer(server, Pushed(1, applied=True))
    assert case.worker.applied == 1
    case.answer_pulls(case.asked)
    assert case.worker.applied == 1


def test_a_commit_is_repeated_by_itself() -> None:
    case = Committing()
    case.answer_pulls(case.asked[:1])
    case.worker.tick(60.0)
    again = case.sent()
    assert (1, Commit(1)) in again
    assert (0, Commit(1)) not in again


def test_rows_of_a_replaced_server_do_not_answer_the_commit_to_its_predecessor() -> None:
    """It may have the rows that the push left, and yet lack what the push did to the network."""
    case = Committing()
    case.answer_pulls(case.asked[:1])
    case.see(2, 2)
    asked = [(server, message) for server, message in case.sent() if server == 1]
    assert [type(message) for _, message in asked if isinstance(message, Push | Commit)] == [Push, Commit]
    case.answer_pulls(asked, incarnation=2)
    assert case.worker.applied == 0
    case.answer(1, Pushed(1, applied=True), incarnation=2)
    assert case.worker.applied == 1
