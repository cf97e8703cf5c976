"""A few servers' redundancy, and the messages between them, which a test delivers by hand.

``Node`` is what ``server/machine.py`` makes of a replicator, stripes and a recovery, without workers and
without beats. ``Servers`` holds one node per slot, the view, the time and the messages on their way:

    servers = Servers(plan_of(k=2, r=1))
    servers[0].push([0, 1])                 # rows of group 0 at server 0 change
    servers[0].flush()
    servers.deliver()                       # all messages, and what they lead to
    assert servers.wrong_parities() == []

``take`` takes messages out of the mail to be delivered late, twice, in another order or never (``hand``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from holdfast.cluster.protocol.admission import Admission
from holdfast.cluster.protocol.envelope import Envelope, Frame
from holdfast.cluster.protocol.messages import (
    Instant,
    Peer,
    Position,
    ServerInView,
    View,
    ViewNumber,
    WorkerMark,
)
from holdfast.cluster.protocol.plan import JobPlan, LaneOptions, Timing
from holdfast.cluster.protocol.stripe_messages import (
    Agreed,
    Compare,
    LaneMessage,
    ReadStripes,
    Recover,
    StripePart,
    Syndromes,
    Taken,
    Values,
)
from holdfast.cluster.redundancy.parity import Blocks, Records
from holdfast.cluster.redundancy.recover import Recovery
from holdfast.cluster.redundancy.replicator import Replicator
from holdfast.cluster.redundancy.stripes import Stripes
from holdfast.cluster.redundancy.throttle import Throttle
from holdfast.tables.plan import GroupPlan, OptimizerPlan, TablePlan
from holdfast.tables.shard import GroupShard
from tests.coding.field import product, times

TABLES, NETWORK = 0, 1
"""The groups of every plan here: tables with a code of k + r, and the network with r copies."""

START = 1024.0
"""Seconds when a test begins: not 0, so that what counts from the wrong time shows."""

_Kind = TypeVar("_Kind")


def plan_of(
    *, k: int, r: int, servers: int = 0, rows: int = 80, workers: int = 1, lanes: LaneOptions | None = None
) -> JobPlan:
    """A job of two small groups; nothing is flushed, scanned in part or scrubbed unless ``lanes`` says so."""
    tables = GroupPlan(
        name="tables",
        dim=2,
        tables=(TablePlan("clicks", rows),),
        optimizer=OptimizerPlan(name="rowwise-adagrad", lr=0.5),
    )
    network = GroupPlan(
        name="network",
        dim=1,
        tables=(TablePlan("network", 16),),
        optimizer=OptimizerPlan(name="sgd", lr=-1.0),
        initial="installed",
    )
    return JobPlan(
        job="harness",
        seed=7,
        groups=(tables, network),
        servers=servers or k + r,
        workers=workers,
        k=k,
        r=r,
        dense="replicate",
        lanes=lanes or lanes_of(),
        timing=Timing(retry_seconds=1.0, stuck_seconds=10.0),
    )


def lanes_of(**changes: Any) -> LaneOptions:
    """Lanes in which nothing happens by itself, but for these options."""
    calm: dict[str, Any] = {"pushes": 1000, "window": 2000, "seconds": 1e6, "idle_seconds": 1e6, "share": 1.0}
    return LaneOptions(**{**calm, **changes})


class Node:
    """The redundancy of one server."""

    def __init__(self, me: Peer, plan: JobPlan, *, fresh: bool = True) -> None:
        replaces = me.incarnation > 1
        self.me, self.plan, self.now = me, plan, START
        self.outbox: list[Envelope] = []
        self.pushes = [0] * plan.workers
        """The last push of each worker."""
        self.flushed: dict[int, list[Records]] = {}
        """Records of each group as they were after each flush."""
        self.lost: list[tuple[int, list[int]]] = []
        """What ``Recovery`` said is lost: group and rows."""
        self.served = 0
        """How often it said that rows have come back."""
        self.doubted: list[Peer] = []
        self.shards = [
            GroupShard(group, placement, me.slot, plan.seed, keep_changes=True, empty=replaces or not fresh)
            for group, placement in zip(plan.groups, plan.placements, strict=True)
        ]
        self.replicator = Replicator(
            me,
            plan,
            self.shards,
            self.outbox,
            self.marks,
            self.pushes.__getitem__,
            fresh=fresh and not replaces,
            lacks=self.lacks,
            on_change=self._on_change,
            on_values=self._on_values,
            doubt=lambda target, now: self.doubted.append(target),
        )
        self.throttle = Throttle(plan.lanes.share)
        self.stripes = Stripes(plan, self.replicator, self.throttle)
        self.recovery: Recovery | None = None
        if replaces:
            self.recovery = Recovery(
                plan, self.shards, self.replicator, self.throttle, self._on_rows, self._on_lost
            )
        self._admission = Admission(me, plan)
        self._note_flush()

    # What the server round it does

    def marks(self) -> tuple[WorkerMark, ...]:
        """How far each worker has come."""
        return tuple(
            WorkerMark(w, 1, sequence, Position(0, sequence)) for w, sequence in enumerate(self.pushes)
        )

    def lacks(self, group: int, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which records are still to come back."""
        if self.recovery is None:
            return np.zeros(len(places), np.bool_)
        return self.recovery.lacks(group, places)

    def _on_change(self, part: StripePart, blocks: Blocks, differences: Records) -> None:
        self.stripes.note_change(part, blocks, differences)

    def _on_values(self, source: Peer, message: Values, frames: Sequence[Frame]) -> None:
        self.stripes.take_values(source, message, frames)

    def _on_rows(self) -> None:
        self.served += 1

    def _on_lost(self, group: int, rows: NDArray[np.int64]) -> None:
        self.lost.append((group, sorted(rows.tolist())))

    def receive(self, envelope: Envelope, now: float) -> None:
        """Take a message. Machines count on what admission checks, so it must pass that."""
        assert self._admission.admits(envelope), f"not admitted: {envelope}"
        self.now = now
        source, message, frames = envelope.source, envelope.message, envelope.frames
        replicator, stripes = self.replicator, self.stripes
        if isinstance(message, LaneMessage):
            replicator.take(source, message, frames)
        elif isinstance(message, Taken):
            replicator.taken(source, message.number, now)
        elif isinstance(message, ReadStripes):
            replicator.read(source, message, frames, now)
        elif isinstance(message, Recover):
            stripes.recover(source, message, frames, now)
        elif isinstance(message, Compare):
            stripes.compare(source, message, frames, now)
        elif isinstance(message, Agreed):
            stripes.take_vote(message, frames, now)
        elif isinstance(message, Syndromes) and self.recovery is not None:
            self.recovery.receive(source, message, frames, now)
        stripes.finish(now)
        stripes.rebuild(now, beside=self.recovery is not None and self.recovery.left > 0)

    def tick(self, now: float) -> None:
        """Let time pass."""
        self.now = now
        self.replicator.tick(now)
        self.stripes.tick(now)
        if self.recovery is not None:
            self.recovery.tick(now)
            self.recovery.ask(now)
        self.stripes.rebuild(now, beside=self.recovery is not None and self.recovery.left > 0)
        if self.recovery is None or not self.recovery.left:
            self.stripes.scrub(now)
        self._note_flush()

    def adopt(self, view: View) -> None:
        """Follow a view."""
        self.replicator.adopt(view, view.servers[self.me.slot], self.now)

    def start(self, until: Instant) -> None:
        """Take the slot over with what counts of the last incarnation."""
        for mark in until.marks:
            self.pushes[mark.slot] = mark.sequence
        for group, shard in enumerate(self.shards):
            shard.installed = group in until.installed
            if self.recovery is not None and not shard.installed:
                self.recovery.leave_out(group)
        self.replicator.start()
        self._note_flush()

    # What a test does to it

    def push(self, places: Sequence[int], group: int = TABLES, worker: int = 0) -> None:
        """Apply a push to some records, by place."""
        at = np.array(places, np.int64)
        gradients = np.arange(1.0, 1.0 + at.size * self.plan.groups[group].dim, dtype=np.float32)
        self.shards[group].push(at, gradients.reshape(len(at), -1))
        self.pushes[worker] += 1
        self.replicator.changed(self.now, worker)
        self._note_flush()

    def install(self) -> None:
        """Give the network its first values."""
        shard = self.shards[NETWORK]
        places = np.flatnonzero(shard.rows_of(np.arange(len(shard.records))) < shard.plan.rows)
        shard.install(places, np.full((len(places), 1), 3.5, np.float32))
        self.replicator.changed(self.now)

    def flush(self) -> None:
        """Send what has changed."""
        self.replicator.flush(self.now)
        self._note_flush()

    def _note_flush(self) -> None:
        if self.replicator.flushes not in self.flushed:
            self.flushed[self.replicator.flushes] = [shard.records.copy() for shard in self.shards]


class Servers:
    """Nodes of one job, the view that they follow, and the messages between them."""

    def __init__(self, plan: JobPlan, *, fresh: bool = True) -> None:
        self.plan = plan
        self.now = START
        self.mail: list[Envelope] = []
        """On their way, in the order in which they were sent."""
        self.nodes = {slot: Node(Peer("server", slot, 1), plan, fresh=fresh) for slot in range(plan.servers)}
        self.dead: dict[Peer, Node] = {}
        number = ViewNumber(1)
        entries = tuple(ServerInView(s, 1, starts=True, since=number) for s in range(plan.servers))
        self.view = View(number, "running", entries)
        for node in self.nodes.values():
            node.start(Instant(installed=plan.first_installed))
            node.adopt(self.view)

    def __getitem__(self, slot: int) -> Node:
        return self.nodes[slot]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    # Messages

    def collect(self) -> None:
        """Put what nodes want to send into the mail."""
        for node in self:
            self.mail += node.outbox
            node.outbox.clear()

    def take(self, *kinds: type, source: int | None = None, target: int | None = None) -> list[Envelope]:
        """Take messages of some kinds, or all, out of the mail: they do not arrive unless they are handed."""
        self.collect()
        taken = [envelope for envelope in self.mail if _fits(envelope, kinds, source, target)]
        self.mail = [envelope for envelope in self.mail if not any(envelope is one for one in taken)]
        return taken

    def hand(self, *envelopes: Envelope) -> None:
        """Let messages arrive, in this order. What is meant for a process that is gone does not."""
        for envelope in envelopes:
            node = self.nodes.get(envelope.target.slot)
            if node is not None and node.me == envelope.target:
                node.receive(envelope, self.now)

    def deliver(self, *kinds: type, source: int | None = None, target: int | None = None) -> None:
        """Let all messages of some kinds arrive, or all, and what they lead to, until none is left."""
        while found := self.take(*kinds, source=source, target=target):
            self.hand(*found)

    def step(self) -> None:
        """Let the oldest message arrive."""
        self.collect()
        self.hand(self.mail.pop(0))

    def jumble(self, chance: Random) -> None:
        """Let some of the messages arrive, in any order, now and then twice; the others stay on their way."""
        found = self.take()
        chance.shuffle(found)
        half = len(found) // 2
        self.mail = found[half:] + [envelope for envelope in found[:half] if chance.random() < 0.1]
        self.hand(*found[:half])

    # Time

    def tick(self, seconds: float = 0.0) -> None:
        """Let time pass, and every node look what is overdue. Nothing is delivered."""
        self.now += seconds
        for node in self:
            node.tick(self.now)

    def run(self, seconds: float, step: float = 0.1, drop: Callable[[Envelope], bool] | None = None) -> None:
        """Let time pass while messages arrive, but for those that are to be dropped."""
        for _ in range(round(seconds / step)):
            self.tick(step)
            while found := self.take():
                self.hand(*(envelope for envelope in found if drop is None or not drop(envelope)))

    # Replacement, in the three stages of docs/protocol.md

    def change_view(self, slot: int, entry: ServerInView) -> None:
        """Tell everybody of the next view."""
        entries = list(self.view.servers)
        entries[slot] = entry
        number = ViewNumber(self.view.number.epoch + 1)
        self.view = replace(self.view, number=number, servers=tuple(entries))
        for node in self:
            node.now = self.now
            node.adopt(self.view)

    def fence(self, slot: int) -> Node:
        """A server dies, with all that it had not sent; the others seal their lanes from it."""
        self.collect()
        dead = self.nodes.pop(slot)
        self.dead[dead.me] = dead
        self.change_view(slot, ServerInView(slot, dead.me.incarnation + 1))
        return dead

    def settle(self, slot: int, until: Instant | None = None) -> Instant:
        """Decide how much of it counts, the least that a parity server has, and have the rest undone."""
        if until is None:
            states = [state for node in self for state in node.replicator.sealed() if state.slot == slot]
            until = min((state.now for state in states), key=lambda instant: instant.flush)
        self.change_view(slot, replace(self.view.servers[slot], counts_until=until))
        return until

    def start(self, slot: int) -> Node:
        """Its replacement takes the slot over, without a row."""
        entry = self.view.servers[slot]
        assert entry.counts_until is not None
        node = self.nodes[slot] = Node(Peer("server", slot, entry.incarnation), self.plan)
        node.now = self.now
        node.start(entry.counts_until)
        since = ViewNumber(self.view.number.epoch + 1)
        self.change_view(slot, replace(entry, starts=True, since=since))
        return node

    def replace(self, slot: int) -> Node:
        """All three stages."""
        self.fence(slot)
        self.settle(slot)
        return self.start(slot)

    # The slow twin

    def parity_of(self, slot: int, group: int, parity: int) -> Records:
        """A server's parities by their definition, from members as they are: the sum of 2^(t m) * member."""
        placement = self.plan.placements[group]
        blocks = np.arange(placement.blocks(self.plan.groups[group].rows))
        total = np.zeros((len(blocks), self.plan.groups[group].words), np.uint32)
        for member in range(placement.k):
            owner = self.nodes[placement.member_server(slot, parity, member)]
            records = owner.shards[group].records[blocks * placement.k + member]
            total ^= times(coefficient(parity, member), records)
        return total

    def wrong_parities(self) -> list[str]:
        """Parities that are not the code of their members, or that are not whole."""
        wrong = []
        for node in self:
            for group, shard in node.replicator.parities.items():
                blocks = np.arange(shard.blocks)
                for t in range(shard.placement.r):
                    expected = self.parity_of(node.me.slot, group, t)
                    bad = (shard.get(t, blocks) != expected).any(1) | ~shard.whole(t, blocks)
                    wrong += [f"{node.me}: group {group}, parity {t}, block {b}" for b in blocks[bad]]
        return wrong


def coefficient(parity: int, member: int) -> int:
    """2^(parity * member), by the schoolbook."""
    power = 1
    for _ in range(parity * member):
        power = product(power, 2)
    return power


def _fits(envelope: Envelope, kinds: tuple[type, ...], source: int | None, target: int | None) -> bool:
    return (
        (not kinds or isinstance(envelope.message, kinds))
        and source in (None, envelope.source.slot)
        and target in (None, envelope.target.slot)
    )


def message_of(envelope: Envelope, kind: type[_Kind]) -> _Kind:
    """The message, which is of this kind."""
    assert isinstance(envelope.message, kind)
    return envelope.message
