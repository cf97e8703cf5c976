"""Lanes from owners to parity servers: in order, each message once, and not more than needed."""

from __future__ import annotations

import numpy as np

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Instant, Peer
from holdfast.cluster.protocol.stripe_messages import Differences
from holdfast.cluster.redundancy.lanes import InLane, OutLane
from holdfast.sim.cluster import Cluster, counting_plan

OWNER, PARITY = Peer("server", 0, 1), Peer("server", 1, 1)


def sent(lane: OutLane, count: int, now: float = 0.0) -> list[Envelope]:
    return [
        lane.send(Differences(lane.next_number, Instant(lane.next_number), 0, ()), (), now, 1.0)
        for _ in range(count)
    ]


def test_only_the_oldest_message_is_sent_again_and_ever_more_rarely() -> None:
    """A slow parity server got its whole backlog again every second."""
    lane = OutLane(OWNER, PARITY, 0, 0)
    envelopes = sent(lane, 50)
    again = [(now, lane.overdue(now)) for now in np.arange(0.0, 20.0, 0.25)]
    found = [(now, envelope) for now, envelope in again if envelope is not None]
    assert all(envelope is envelopes[0] for _, envelope in found)
    assert [now for now, _ in found] == [1.0, 3.0, 7.0, 15.0]
    lane.acknowledge(7, 20.0, 1.0)
    assert lane.overdue(21.0) is None, "it is slow, so it gets its time"
    assert lane.overdue(29.0) is envelopes[7]


def test_messages_that_come_early_count_when_their_turn_comes() -> None:
    lane = InLane(OWNER, True, Instant(), Instant())
    first, second, third = sent(OutLane(OWNER, PARITY, 0, 0), 3)
    for envelope in (third, second, third):
        assert isinstance(envelope.message, Differences)
        lane.lay_aside(envelope.message.number, envelope, 1 << 20)
    assert lane.next_early() is None
    lane.number = 1
    assert lane.next_early() is second
    lane.number = 2
    assert lane.next_early() is third
    assert lane.next_early() is None
    assert first.message != second.message


def test_what_is_laid_aside_is_bounded() -> None:
    lane = InLane(OWNER, True, Instant(), Instant())
    for number in range(2, 100):
        frame = np.zeros(100, np.uint8)
        lane.lay_aside(number, Envelope(OWNER, PARITY, Differences(number, Instant(), 0, ()), [frame]), 1000)
    assert len(lane._early) == 10


def test_a_push_does_not_look_at_all_workers() -> None:
    """``changed`` is called at every push: it must not cost more with more workers."""
    cluster = Cluster(counting_plan(servers=3, workers=2, atomic=False, k=2, r=1), 1, 40)
    assert cluster.network.run(lambda: cluster.supervisor.steps() > 10, 60.0)
    protection = cluster.servers[0].replicator
    assert protection is not None

    def all_marks() -> tuple[()]:
        raise AssertionError("marks of all workers are made")

    protection.flush(cluster.network.now)
    protection._marks = all_marks
    protection._pending_pushes = -100  # so that nothing is sent yet
    protection.changed(cluster.network.now, 1)
