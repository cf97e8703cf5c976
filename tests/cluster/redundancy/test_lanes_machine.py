"""Lanes over a channel that loses, repeats, delays and reorders, while either end is replaced at any time.

``Pair`` is one ``OutLane`` and one ``InLane``; the model is a plain list of flushes. ``Job`` is an owner and
two parity servers with their replicators; the model is the owner's records after each flush.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.cluster.protocol.envelope import Envelope, Frame
from holdfast.cluster.protocol.messages import Instant, Peer, WorkerMark
from holdfast.cluster.protocol.retry import Retry
from holdfast.cluster.protocol.stripe_messages import (
    Differences,
    LaneMessage,
    StripePart,
    Taken,
    Values,
)
from holdfast.cluster.redundancy.lanes import InLane, OutLane
from tests.cluster.redundancy.harness import NETWORK, TABLES, Servers, lanes_of, plan_of

PICK = st.integers(0, 1 << 16)
"""Which of the messages that are on their way."""
MOST_EARLY_BYTES = 40
RETRY = 1.0


class Pair(RuleBasedStateMachine):
    """The owner sends numbers, each once; a flush is a list of them, in one message each or several."""

    def __init__(self) -> None:
        super().__init__()
        self.owner, self.parity = Peer("server", 0, 1), Peer("server", 1, 1)
        self.now = 0.0
        self.numbers = 0
        self.flushes: list[list[int]] = []
        """The model: what each flush of this incarnation of the owner holds."""
        self.applied: list[list[int]] = []
        """What the parity server has applied, and not undone."""
        self.base = 0
        """Flushes that were before the lane."""
        self.stable = 0
        """The newest flush that the owner knows to be everywhere, …"""
        self.told = 0
        """… and the parity server, from the owner."""
        self.channel: list[Envelope] = []
        self.out = OutLane(self.owner, self.parity, 0, 0, self.now, Retry(RETRY, factor=2))
        self.into = InLane(self.owner, True, Instant(), Instant())

    # The owner

    @rule(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), others=st.booleans())
    def flush(self, sizes: list[int], others: bool) -> None:
        """In as many messages as there are sizes; the other parity servers may have all that this one has."""
        self.stable = self.out.flush if others else self.stable
        self.flushes.append([])
        instant = self.instant(len(self.flushes))
        for left, size in zip(reversed(range(len(sizes))), sizes, strict=True):
            content = list(range(self.numbers, self.numbers + size))
            self.numbers += size
            self.flushes[-1] += content
            part = StripePart(0, 0, 0, size)
            message = Differences(self.out.next_number, instant, self.stable, (part,), more=left > 0)
            self.post(message, [np.array(content, np.uint32)])

    @rule()
    def answer_a_read(self) -> None:
        instant = self.instant(len(self.flushes))
        self.post(Values(self.out.next_number, instant, 1, 0, 0), [np.zeros(1, np.uint32)])

    def post(self, message: LaneMessage, frames: list[Frame]) -> None:
        self.channel.append(self.out.send(message, frames, self.now))

    @staticmethod
    def instant(flush: int) -> Instant:
        return Instant(flush, (WorkerMark(0, 1, flush),))

    @rule(seconds=st.sampled_from([0.5, 1.0, 8.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        late = self.out.overdue(self.now)
        if late is not None:
            self.channel.append(late)

    # The channel

    @precondition(lambda self: self.channel)
    @rule(pick=PICK)
    def deliver(self, pick: int) -> None:
        self.arrive(self.channel.pop(pick % len(self.channel)))

    @rule(count=st.integers(1, 8))
    def deliver_in_order(self, count: int) -> None:
        for _ in range(min(count, len(self.channel))):
            self.arrive(self.channel.pop(0))

    @precondition(lambda self: self.channel)
    @rule(pick=PICK)
    def deliver_twice(self, pick: int) -> None:
        self.arrive(self.channel[pick % len(self.channel)])

    @precondition(lambda self: self.channel)
    @rule(pick=PICK)
    def lose(self, pick: int) -> None:
        self.channel.pop(pick % len(self.channel))

    def arrive(self, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, Taken):
            if (envelope.source, envelope.target) == (self.out.target, self.out.source):
                self.out.acknowledge(message.number, self.now)
        elif (envelope.source, envelope.target) == (self.into.source, self.parity):
            assert isinstance(message, LaneMessage)
            self.take(message, envelope)

    # The parity server, as ``Replicator.take`` has it

    def take(self, message: LaneMessage, envelope: Envelope) -> None:
        lane = self.into
        if message.number > lane.number + 1:
            lane.lay_aside(message.number, envelope, MOST_EARLY_BYTES)
            return
        if message.number == lane.number + 1:
            self.take_next(message, envelope.frames)
            while (early := lane.next_early()) is not None:
                assert isinstance(early.message, LaneMessage)
                self.take_next(early.message, early.frames)
        self.channel.append(Envelope(self.parity, self.owner, Taken(lane.number)))

    def take_next(self, message: LaneMessage, frames: Any) -> None:
        if isinstance(message, Differences):
            if message.more:
                self.into.begin(message, frames)
                return
            message, frames = self.into.whole(message, frames)
            assert len(message.parts) == len(frames)
            self.told = max(self.told, message.stable)
            self.applied.append([int(number) for frame in frames for number in frame])
        self.into.take(message, frames)

    # Replacement

    @rule(back=st.integers(0, 5))
    def replace_the_owner(self, back: int) -> None:
        """Its lane is sealed, and what is beyond some instant is undone."""
        if self.into.known:
            self.undo(self.into.now.flush - back)
        else:  # nothing has come in the lane: others know how far the owner came
            assert self.applied == []
        self.owner = Peer("server", 0, self.owner.incarnation + 1)
        self.flushes, self.applied, self.base, self.stable, self.told = [], [], 0, 0, 0
        self.out = OutLane(self.owner, self.parity, 0, 0, self.now, Retry(RETRY, factor=2))
        self.into = InLane(self.owner, True, Instant(), Instant())

    def undo(self, flush: int) -> None:
        flush = max(flush, self.into.first.flush, self.stable)  # other parity servers have that, too
        undone = self.into.undo(self.instant(flush))
        for logged in undone:
            assert self.applied.pop() == [int(number) for frame in logged.frames for number in frame]
        assert self.applied == self.flushes[self.base : flush], "exactly what is not beyond the instant"
        assert self.into.now.flush == self.into.first.flush == flush
        assert self.into.early_bytes == 0

    @rule()
    def replace_the_parity_server(self) -> None:
        """The new one has nothing: what was before its lane does not go through it."""
        self.parity = Peer("server", 1, self.parity.incarnation + 1)
        self.base = len(self.flushes)
        self.applied, self.told = [], 0
        self.out = OutLane(self.owner, self.parity, self.base, self.base, self.now, Retry(RETRY, factor=2))
        self.into = InLane(self.owner, False, Instant(), Instant())

    # What must hold at any time

    @invariant()
    def each_flush_counts_once_and_in_order(self) -> None:
        assert self.applied == self.flushes[self.base : self.base + len(self.applied)]
        if self.into.known:
            assert self.into.now.flush == self.base + len(self.applied)
            assert self.into.now.marks in ((), self.instant(self.into.now.flush).marks)

    @invariant()
    def nothing_acknowledged_is_lost(self) -> None:
        assert self.out.flush <= self.base + len(self.applied)

    @invariant()
    def the_log_has_exactly_what_others_may_lack(self) -> None:
        if self.into.known:
            logged = [logged.instant.flush for logged in self.into.log]
            assert self.into.first.flush == max(self.told, self.base)
            assert logged == list(range(self.into.first.flush + 1, self.into.now.flush + 1))

    @invariant()
    def early_messages_are_bounded(self) -> None:
        assert 0 <= self.into.early_bytes <= MOST_EARLY_BYTES

    def teardown(self) -> None:
        """Where nothing is lost any more, everything arrives."""
        for _ in range(2 * self.out.waiting + 2):
            self.now += 1e6
            late = self.out.overdue(self.now)
            if late is not None:
                self.channel.append(late)
            while self.channel:
                self.arrive(self.channel.pop(0))
        assert self.out.waiting == 0
        assert self.applied == self.flushes[self.base :]
        assert self.into.early_bytes == 0
        super().teardown()


class Job(RuleBasedStateMachine):
    """Server 0 is the owner. With a code of 1 + 2, the parities of its records are copies of them."""

    def __init__(self) -> None:
        super().__init__()
        self.servers = Servers(plan_of(k=1, r=2, rows=12, lanes=lanes_of(most_bytes=40)))
        self.servers[0].install()

    @rule(places=st.sets(st.integers(0, 3), min_size=1, max_size=4), flush=st.booleans())
    def push(self, places: set[int], flush: bool) -> None:
        owner = self.servers[0]
        lacking = owner.lacks(TABLES, np.array(sorted(places)))
        here = [place for place, gone in zip(sorted(places), lacking, strict=True) if not gone]
        owner.push(here)
        if flush:
            owner.flush()

    @rule(pick=PICK, what=st.sampled_from(["deliver", "repeat", "lose"]))
    def channel(self, pick: int, what: str) -> None:
        servers = self.servers
        servers.collect()
        if servers.mail:
            at = pick % len(servers.mail)
            envelope = servers.mail[at] if what == "repeat" else servers.mail.pop(at)
            if what != "lose":
                servers.hand(envelope)

    @rule(seconds=st.sampled_from([0.1, 1.0]))
    def wait(self, seconds: float) -> None:
        self.servers.tick(seconds)

    @rule(slot=st.integers(0, 2))
    def replace(self, slot: int) -> None:
        """Only where the code covers it: the others have all of their rows and parities."""
        self.servers.run(30.0, step=0.5)
        stable = self.servers[0].replicator.stable
        before = self.servers[0].flushed
        self.servers.fence(slot)
        until = self.servers.settle(slot)
        if slot == 0:
            assert until.flush >= stable, "what was kept counts"
            self.servers.start(0)
            self.servers.run(30.0, step=0.5)
            for group in (TABLES, NETWORK):
                assert (self.servers[0].shards[group].records == before[until.flush][group]).all()
            self.servers[0].flushed[0] = before[until.flush]
        else:
            self.servers.start(slot)

    @precondition(lambda self: self.servers[0].recovery is None or not self.servers[0].recovery.left)
    @rule(slot=st.integers(1, 2), count=st.integers(0, 8))
    def die_on_the_way(self, slot: int, count: int) -> None:
        """The owner dies when one parity server has got more of its last flushes than the other."""
        servers = self.servers
        servers.run(30.0, step=0.5)
        for places in ([0], [1, 2, 3], [0, 1, 2, 3], [2]):
            servers[0].push(places)
            servers[0].flush()
        first, late = servers.take(Differences, target=slot), servers.take(Differences)
        servers.hand(*first[:count])
        servers.deliver(Taken)
        before, stable = servers[0].flushed, servers[0].replicator.stable
        servers.fence(0)
        until = servers.settle(0)
        servers.hand(*first[count:], *late)
        assert until.flush >= stable, "what was kept counts"
        servers.start(0)
        for node in (servers[1], servers[2]):
            for parity, part in node.replicator.parities.items():
                t = next(t for t in (0, 1) if part.placement.member_server(node.me.slot, t, 0) == 0)
                blocks = np.arange(part.blocks)
                assert (part.get(t, blocks) == before[until.flush][parity][blocks]).all()
        servers.run(30.0, step=0.5)
        servers[0].flushed[0] = before[until.flush]
        for group in (TABLES, NETWORK):
            assert (servers[0].shards[group].records == before[until.flush][group]).all()

    @invariant()
    def parities_are_the_owners_records_of_one_flush(self) -> None:
        owner = self.servers[0]
        for node in (self.servers[1], self.servers[2]):
            flush = node.replicator.progress(0).now.flush
            for group, part in node.replicator.parities.items():
                t = next(t for t in (0, 1) if part.placement.member_server(node.me.slot, t, 0) == 0)
                blocks = np.arange(part.blocks)
                whole = part.whole(t, blocks)
                assert (part.get(t, blocks[whole]) == owner.flushed[flush][group][blocks[whole]]).all()
            assert owner.replicator.stable <= max(flush, self.began(node.me))

    def began(self, peer: Peer) -> int:
        """Flushes before the lane to a parity server that was replaced: they do not go through it."""
        return self.servers[0].replicator.stable if peer.incarnation > 1 else 0

    def teardown(self) -> None:
        """Where nothing is lost any more, everything arrives."""
        self.servers[0].flush()
        self.servers.run(300.0, step=2.0)
        assert self.servers.wrong_parities() == []
        assert all(node.replicator.stable == node.replicator.flushes for node in self.servers)
        super().teardown()


@pytest.mark.parametrize(("machine", "examples", "steps"), [(Pair, 150, 60), (Job, 25, 25)])
def test_lanes(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
