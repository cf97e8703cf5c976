"""A server's part in protecting rows: send own changes to parity servers, and apply others' changes to the
parities here.

The owner of a row is the only server that changes it, so the changes that parities must follow are known in
one place. After some pushes the owner combines their changes, old XOR new of each record, into one *flush*,
and puts each parity server's share into the lane to it. A push is *kept* once all parity servers have its
flush: recovery from any failure that the code covers then includes it. A worker may continue before that; if
a server is replaced, it resends pushes that were not kept.

When an owner dies, its parity servers may have received different flushes. They seal their lanes and report
their last flush; the supervisor chooses the minimum, and servers ahead of it undo later flushes, which is
the same XOR again. No later flush was kept, since that takes all parity servers. So a replacement's rows are
all of one instant, with one mark for each worker, like any server's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.cluster.protocol.envelope import Envelope, Frame, as_array
from holdfast.cluster.protocol.messages import (
    Instant,
    LaneState,
    Peer,
    ServerInView,
    View,
    ViewNumber,
    WorkerMark,
)
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.protocol.retry import Retry
from holdfast.cluster.protocol.stripe_messages import (
    Differences,
    Forget,
    LaneMessage,
    ReadStripes,
    StripePart,
    Taken,
    Values,
)
from holdfast.cluster.protocol.wire import Message
from holdfast.cluster.redundancy.lanes import InLane, OutLane
from holdfast.cluster.redundancy.parity import Blocks, ParityShard, Records
from holdfast.kernels.teams import ALONE, Team
from holdfast.tables.changes import MemberChange
from holdfast.tables.shard import GroupShard

_Share = tuple[StripePart, Blocks, Records]


class Replicator:
    """The state machine of replication: no clock, no socket. Incoming messages have been validated
    (``protocol/admission.py``): what they refer to exists, and their arrays have the right size.

    Args:
        me: the server.
        plan: the job's plan.
        shards: its rows.
        outbox: for outgoing messages.
        marks: returns which pushes are applied.
        applied: returns the last applied push of a worker; called at every push, so it must be fast.
        fresh: whether all rows of the job have their initial values; otherwise rows determine parities.
        lacks: returns which records of a group this server lacks (see ``recover``).
        on_change: called after part of a flush was applied to parities, or undone.
        on_values: called with records read from an owner, at their position in its lane.
        doubt: called with a server that has not answered (see ``routes``).
        team: the threads that change parities.
    """

    def __init__(
        self,
        me: Peer,
        plan: JobPlan,
        shards: Sequence[GroupShard],
        outbox: list[Envelope],
        marks: Callable[[], tuple[WorkerMark, ...]],
        applied: Callable[[int], int],
        *,
        fresh: bool,
        lacks: Callable[[int, NDArray[np.int64]], NDArray[np.bool_]],
        on_change: Callable[[StripePart, Blocks, Records], None],
        on_values: Callable[[Peer, Values, Sequence[Frame]], None],
        doubt: Callable[[Peer, float], None] = lambda target, now: None,
        team: Team = ALONE,
    ) -> None:
        self.me = me
        self.plan = plan
        self.outbox = outbox
        self.parities = {
            g: ParityShard(group, placement, me.slot, plan.seed if fresh else None, team)
            for g, (group, placement) in enumerate(zip(plan.groups, plan.placements, strict=True))
            if placement.r
        }
        self.flushes = 0
        """Number of flushes of own changes so far, which is the number of the last one."""
        self.stable = 0
        """The newest flush that all parity servers have."""
        self._on_change, self._on_values = on_change, on_values
        self._shards = shards
        self._marks, self._applied = marks, applied
        self._lacks = lacks
        self.doubt = doubt
        self._out: dict[int, OutLane] = {}
        self._in: dict[int, InLane] = {}
        self._incarnations: dict[int, int] = {}
        self._undone: dict[int, int] = {}
        self._started: dict[int, int] = {}
        self._parity_servers = set(self._neighbours(parities=True))
        self._owners = set(self._neighbours(parities=False))
        self._unstable: deque[tuple[Instant, list[MemberChange]]] = deque()
        """Flushes that some parity server lacks. Others may have to undo them, and read them in place: until
        then their arrays must not change."""
        self._kept = self._flushed = Instant()
        self._pending_since: float | None = None
        self._pending_pushes = 0
        self._changed_at = self._ticked = 0.0
        self._holds = self._hurry = False

    def _neighbours(self, *, parities: bool) -> Iterator[int]:
        """The servers with parities of this server's rows, or those whose parities it stores."""
        for g in self.parities:
            placement = self.plan.placements[g]
            find = placement.parity_server if parities else placement.member_server
            for t in range(placement.r):
                for m in range(placement.k):
                    yield find(self.me.slot, m, t) if parities else find(self.me.slot, t, m)

    # Own changes, to parity servers

    def start(self) -> None:
        """Start when this server takes over its slot."""
        self._kept = self._flushed = self._instant()

    @property
    def is_quiet(self) -> bool:
        """Whether all parity servers have all changes."""
        return self._pending_since is None and not any(lane.waiting for lane in self._out.values())

    def kept(self, worker: int) -> int:
        """The newest push of a worker that no failure covered by the code can undo."""
        return self._kept.marks[worker].sequence if self._kept.marks else 0

    def changed(self, now: float, worker: int | None = None) -> None:
        """Note that rows have changed, by a push of a worker or otherwise."""
        if self._pending_since is None:
            self._pending_since = now
        self._changed_at = now
        if worker is not None:
            self._pending_pushes += 1
            lanes, told = self.plan.lanes, self._flushed.marks[worker].sequence
            many = self._applied(worker) >= told + max(1, lanes.window // 2)
            large = self._pending_bytes() >= lanes.most_bytes
            if many or large or self._pending_pushes >= lanes.pushes:
                self.flush(now)

    def _pending_bytes(self) -> int:
        """Size of the changes since the last flush."""
        groups = self.plan.groups
        return sum(len(self._shards[g].changes) * groups[g].words * 4 for g in self.parities)

    def flush(self, now: float) -> None:
        """Send all changes to the parity servers, as the next flush."""
        if self._pending_since is None:
            return
        self._pending_since = None
        self._pending_pushes = 0
        self.flushes += 1
        self._flushed = self._instant()
        changes: list[MemberChange] = []
        shares: dict[int, list[_Share]] = {slot: [] for slot in self._out}
        for g in self.parities:
            placement = self.plan.placements[g]
            for change in self._shards[g].changes.take():
                member, blocks, differences = change
                changes.append(change)
                for t in range(placement.r):
                    share = shares.get(placement.parity_server(self.me.slot, member, t))
                    if share is not None:
                        share.append((StripePart(g, t, member, len(blocks)), blocks, differences))
        self._unstable.append((self._flushed, changes))
        for slot, share in shares.items():
            lane = self._out[slot]
            messages = list(_in_messages(share, self.plan.lanes.most_bytes))
            for left, (parts, frames) in zip(reversed(range(len(messages))), messages, strict=True):
                message = Differences(lane.next_number, self._flushed, self.stable, parts, more=left > 0)
                self._send(lane, message, frames, now)
        self._advance()

    def tick(self, now: float) -> None:
        """Flush changes that have waited long enough, and resend unacknowledged messages."""
        since, lanes = self._pending_since, self.plan.lanes
        stood_still, self._ticked = now - self._ticked, now
        if stood_still > self.plan.timing.stuck_seconds / 2:
            for lane in self._out.values():  # time suspended is not time waited
                lane.since += stood_still
        if since is not None and (
            self._hurry or now - since >= lanes.seconds or now - self._changed_at >= lanes.idle_seconds
        ):
            self.flush(now)
            self._hurry = self._holds
        for lane in self._out.values():
            late = lane.overdue(now)
            if late is not None:
                self.doubt(lane.target, now)
                self.outbox.append(late)

    def stuck_on(self, now: float) -> tuple[int, ...]:
        """Parity servers that have not acknowledged anything for a long time."""
        limit = self.plan.timing.stuck_seconds
        return tuple(s for s, lane in self._out.items() if lane.waiting and now - lane.since > limit)

    def read(self, source: Peer, message: ReadStripes, frames: Sequence[Frame], now: float) -> None:
        """Answer a parity server's request for records: send them in its lane, as of the last flush."""
        lane = self._out.get(source.slot)
        if lane is None or lane.target != source or self.stable < lane.began:
            # Wait until all others have the flushes before the lane began: the lane cannot undo those.
            return
        shard = self._shards[message.group]
        blocks = as_array(frames[0], np.uint32, (message.rows,)).astype(np.int64)
        places = blocks * self.plan.placements[message.group].k + message.member
        absent = self._lacks(message.group, places)
        lacked = np.flatnonzero(absent).astype(np.uint32)
        here = shard.changes.told(places[~absent] if len(lacked) else places)
        values = Values(lane.next_number, self._flushed, message.job, message.member, len(here), len(lacked))
        self._send(lane, values, (here, lacked), now)

    def forget(self, group: int, member: int, blocks: NDArray[np.int64], now: float) -> None:
        """Tell parity servers that own lost records have new values, which their parities do not contain.

        The messages go through the lanes, so that no parity server has one of these values and still trusts
        its old parity. A server without a lane yet starts without any parity.
        """
        for t in range(self.plan.placements[group].r):
            lane = self._out.get(self.plan.placements[group].parity_server(self.me.slot, member, t))
            if lane is not None:
                part = StripePart(group, t, member, len(blocks))
                message = Forget(lane.next_number, self._flushed, (part,))
                self._send(lane, message, [blocks.astype(np.uint32)], now)

    def taken(self, source: Peer, number: int, now: float) -> None:
        """Process a parity server's acknowledgement of everything up to this number."""
        lane = self._out.get(source.slot)
        if lane is not None and lane.target == source:
            lane.acknowledge(number, now)
            self._advance()

    def _send(self, lane: OutLane, message: LaneMessage, frames: Sequence[Frame], now: float) -> None:
        self.outbox.append(lane.send(message, frames, now))

    def _advance(self) -> None:
        self.stable = min((lane.flush for lane in self._out.values()), default=self.flushes)
        while self._unstable and self._unstable[0][0].flush <= self.stable:
            self._kept, _ = self._unstable.popleft()

    def _instant(self) -> Instant:
        installed = tuple(g for g, shard in enumerate(self._shards) if shard.installed)
        return Instant(self.flushes, self._marks(), installed)

    # Changes of others

    def take(self, source: Peer, message: LaneMessage, frames: Sequence[Frame]) -> None:
        """Process a message of a lane: the next one, an early one, or one that does not count."""
        lane = self._in.get(source.slot)
        if lane is None or lane.source != source or self._incarnations.get(source.slot) != source.incarnation:
            return
        if message.number > lane.number + 1:
            early = Envelope(source, self.me, message, frames)
            lane.lay_aside(message.number, early, 2 * self.plan.lanes.most_bytes)
            return
        if message.number == lane.number + 1:
            self._take_next(lane, source, message, frames)
            while (early_one := lane.next_early()) is not None:
                assert isinstance(early_one.message, LaneMessage)
                self._take_next(lane, source, early_one.message, early_one.frames)
        self._post(source, Taken(lane.number))

    def _take_next(self, lane: InLane, source: Peer, message: LaneMessage, frames: Sequence[Frame]) -> None:
        if isinstance(message, Differences) and message.more:
            lane.begin(message, frames)
            return
        if isinstance(message, Differences):
            message, frames = lane.whole(message, frames)
            self._apply(message.parts, frames)
        elif isinstance(message, Forget):
            for part, frame in zip(message.parts, frames, strict=True):
                blocks = as_array(frame, np.uint32, (part.rows,))
                self.parities[part.group].forget(part.parity, blocks)
        else:
            self._on_values(source, message, frames)
        lane.take(message, frames)

    def progress(self, slot: int) -> LaneState:
        """The state of a lane."""
        lane = self._in.get(slot)
        if lane is None:
            return LaneState(slot, 0)
        return LaneState(slot, lane.source.incarnation, Instant(lane.now.flush))

    def sealed(self) -> tuple[LaneState, ...]:
        """The state of the lanes whose owners are dead and have no replacement yet."""
        return tuple(
            LaneState(slot, lane.source.incarnation, lane.now, lane.first)
            for slot, lane in self._in.items()
            if lane.known and self._incarnations[slot] > lane.source.incarnation
        )

    def peer(self, slot: int) -> Peer | None:
        """The server that has started in a slot; None if there is none."""
        incarnation = self._started.get(slot)
        if incarnation is None or incarnation != self._incarnations.get(slot):
            return None
        return Peer("server", slot, incarnation)

    def _apply(self, parts: Sequence[StripePart], frames: Sequence[Frame]) -> None:
        """Apply a flush to parities, or undo it: both are the same XOR."""
        for part, places, records in zip(parts, frames[::2], frames[1::2], strict=True):
            parity = self.parities[part.group]
            blocks = as_array(places, np.uint32, (part.rows,))
            differences = as_array(records, np.uint32, (part.rows, parity.plan.words))
            parity.change(part.parity, part.member, blocks, differences)
            self._on_change(part, blocks, differences)

    # The other servers

    def adopt(self, view: View, mine: ServerInView, now: float) -> None:
        """Follow a view: seal the lanes of dead servers, undo flushes that do not count, start new lanes.

        ``mine`` is this server's own entry; it has started.
        """
        # Also once for each new node: the replacement of a worker waits until its last pushes are kept.
        self._hurry = True
        self._holds = view.phase != "running"
        for entry in view.servers:
            if entry.slot == self.me.slot:
                continue
            if entry.incarnation > self._incarnations.get(entry.slot, 0):
                self._incarnations[entry.slot] = entry.incarnation
                self._out.pop(entry.slot, None)
            if entry.counts_until is not None and self._undone.get(entry.slot, 0) < entry.incarnation:
                self._undone[entry.slot] = entry.incarnation
                self._undo(entry.slot, entry.counts_until)
            if entry.starts and self._started.get(entry.slot, 0) < entry.incarnation:
                self._started[entry.slot] = entry.incarnation
                self._begin(entry, mine.since, now)
        self._advance()

    def _undo(self, slot: int, until: Instant) -> None:
        lane = self._in.get(slot)
        if lane is None or self._incarnations[slot] <= lane.source.incarnation:
            return
        for logged in lane.undo(until):
            self._apply(logged.parts, logged.frames)

    def _begin(self, entry: ServerInView, since: ViewNumber, now: float) -> None:
        peer = Peer("server", entry.slot, entry.incarnation)
        if entry.slot in self._parity_servers:
            timing = self.plan.timing
            # A message that is lost again and again must get through before the lane counts as stuck.
            retry = Retry(timing.retry_seconds, factor=2, longest=timing.stuck_seconds / 4)
            self._out[entry.slot] = OutLane(self.me, peer, self.flushes, self.flushes, now, retry)
        if entry.slot in self._owners:
            # A server that started no later than the owner has seen all of its flushes.
            before = Instant(installed=self.plan.first_installed)
            if entry.counts_until is not None:
                before = msgspec.structs.replace(entry.counts_until, flush=0)
            self._in[entry.slot] = InLane(peer, entry.since >= since, before, before)

    def _post(self, target: Peer, message: Message) -> None:
        self.outbox.append(Envelope(self.me, target, message))


def _in_messages(
    share: Sequence[_Share], most_bytes: int
) -> Iterator[tuple[tuple[StripePart, ...], list[Frame]]]:
    """Split a parity server's share of a flush into messages. Yields the parts and frames of each.

    At least one message, as the parity server must learn of every flush.
    """
    parts: list[StripePart] = []
    frames: list[Frame] = []
    room = most_bytes
    for part, blocks, differences in share:
        row_bytes = blocks.itemsize + differences[:1].nbytes
        first = 0
        while first < part.rows:
            if parts and room < row_bytes:
                yield tuple(parts), frames
                parts, frames, room = [], [], most_bytes
            count = min(part.rows - first, max(1, room // row_bytes))
            parts.append(msgspec.structs.replace(part, rows=count))
            frames += [blocks[first : first + count], differences[first : first + count]]
            room -= count * row_bytes
            first += count
    yield tuple(parts), frames
