"""A worker's questions to servers."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from holdfast.cluster.calls import Calls, Spread
from holdfast.cluster.messages import (
    Commit,
    Install,
    Message,
    Peer,
    Position,
    Pull,
    Push,
    Pushed,
    Rows,
    ServerInView,
    View,
    ViewNumber,
    WorkerInView,
)
from holdfast.cluster.steps import Item, Worker
from holdfast.cluster.transport.base import Envelope, Frame
from holdfast.sim.cluster import counting_plan


def calls_of_a_worker() -> tuple[Calls, Spread]:
    plan = counting_plan(servers=1, workers=1, atomic=False)
    spread = Spread(np.zeros(1, np.uint32), np.array([0, 1]))
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
    spread = Spread(np.zeros(3, np.uint32), np.arange(4))
    zeros = np.zeros((3, 1), np.float32)
    calls = Calls(Peer("worker", 0, 2), plan, lambda group: (spread, zeros))
    calls.adopt([ServerInView(slot, 1, "there", starts=True) for slot in range(3)])

    def answer(server: int, message: Message) -> None:
        calls.receive(Envelope(Peer("server", server, 1), calls.me, message), 10.0)

    call = calls.push(1, Position(0, 0), [spread, spread], [zeros, zeros], 10.0)
    for server in order:
        answer(server, Pushed(1, applied=server != 0))
    assert call.questions
    assert {e.target.slot for e in calls.outbox if isinstance(e.message, Commit)} == {0, 1, 2}
    for server in order:
        answer(server, Pushed(1, applied=True))
    assert call.done
    second = calls.push(2, Position(0, 1), [spread, spread], [zeros, zeros], 10.0)
    for server in order:
        answer(server, Pushed(2, applied=True))
    assert second.done, "all of them know this one"


def test_a_server_that_lost_the_network_gets_what_was_used_last() -> None:
    plan = replace(counting_plan(servers=1, workers=2, atomic=False), dense="workers")
    spread = Spread(np.zeros(1, np.uint32), np.array([0, 1]))
    first, newest = np.zeros((1, 1), np.float32), np.full((1, 1), 7.0, np.float32)
    calls = Calls(Peer("worker", 0, 1), plan, lambda group: (spread, first))
    calls.tick(10.0)
    calls.adopt([ServerInView(0, 1, "there", starts=True)])
    call = calls.pull([spread, spread], 10.0)

    def lacks(incarnation: int, now: float) -> list[Frame]:
        calls.outbox.clear()
        missing = Rows(call.request, (), not_installed=(1,))
        calls.receive(Envelope(Peer("server", 0, incarnation), calls.me, missing), now)
        (frames,) = [e.frames for e in calls.outbox if isinstance(e.message, Install)] or [[]]
        return list(frames)

    assert lacks(1, 10.0)[1] == first, "the job begins"
    calls.adopt([ServerInView(0, 2, "elsewhere", starts=True)])
    assert lacks(2, 10.1) == [], "another worker has newer ones"
    assert calls.outbox == [], "and is not asked for at once"
    calls.used = spread, newest
    assert lacks(2, 10.2)[1] == newest
    calls.used = None
    for tenth in range(3, 3 + round(10 * plan.timing.stuck_seconds)):
        calls.tick(10.0 + tenth / 10)
    assert lacks(2, 10.3 + plan.timing.stuck_seconds)[1] == first, "nobody has: better than to wait for ever"


def test_nothing_waits_for_the_answers_to_a_commit() -> None:
    """Staged answers bring the network that a push will leave; what is pulled behind a commit contains it."""
    plan = counting_plan(servers=2, workers=1, atomic=True)
    spread = Spread(np.zeros(2, np.uint32), np.arange(3))
    zeros, network = (np.zeros((2, group.dim), np.float32) for group in plan.groups)
    worker = Worker(Peer("worker", 0, 1), plan, lambda group: (spread, network))
    servers = tuple(ServerInView(slot, 1, "there", starts=True) for slot in range(2))
    view = View(ViewNumber(1), "running", servers, (WorkerInView(0, 1, starts=True),))
    worker.receive(Envelope(Peer("supervisor"), worker.me, view), 0.0)

    def sent() -> list[tuple[int, Message]]:
        found = [(e.target.slot, e.message) for e in worker.outbox if e.target.role == "server"]
        worker.outbox.clear()
        return found

    def answer(server: int, message: Message, *frames: Frame) -> None:
        worker.receive(Envelope(Peer("server", server, 1), worker.me, message, frames), 0.0)

    def answer_pulls(asked: list[tuple[int, Message]]) -> None:
        for server, message in asked:
            if isinstance(message, Pull):
                frames = [(zeros, network)[part.group][:1] for part in message.parts]
                answer(server, Rows(message.request, message.parts), *frames)

    for index in range(3):
        worker.feed(Item(Position(0, index), [spread, spread], samples=8), 0.0)
    answer_pulls(sent())
    answer_pulls(sent())
    first = worker.take()
    assert first is not None
    worker.finish([zeros, network], 0.0)
    (_, push), _ = sent()
    assert isinstance(push, Push)
    assert push.stage
    assert push.returns == 1
    answer(0, Pushed(1, applied=False, rows=1), network[:1] + 3)
    assert sent() == []
    assert worker.take() is None
    answer(1, Pushed(1, applied=False, rows=1), network[:1] + 4)
    asked = sent()
    for server in range(2):
        commit, pull = (message for slot, message in asked if slot == server)
        assert commit == Commit(1)
        assert isinstance(pull, Pull)
        assert pull.after == 1, "of the third batch, which may lack one"
    second = worker.take()
    assert second is not None
    assert second.rows[-1][:, 0].tolist() == [3, 4]
    worker.finish([zeros, network], 0.0)
    assert sent() == [], "a push waits until the last is applied"
    assert worker.applied == 0
    for server in range(2):
        answer(server, Pushed(1, applied=True))
    assert worker.applied == 1
    assert [type(message) for _, message in sent()] == [Push, Push]
