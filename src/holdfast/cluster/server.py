"""A server: it holds rows, hands them out, and applies gradients, each batch exactly once.

``Server`` is the machine: a message in, messages out. ``run`` is the process round it. Nothing here loads
torch.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, get_args

import numpy as np
import xxhash
from msgspec.structs import replace
from numpy.typing import NDArray

from holdfast.cluster.loop import memory_bytes, open_transport, run_node
from holdfast.cluster.messages import (
    Beat,
    Collect,
    Commit,
    Figures,
    Install,
    Part,
    Peer,
    Pull,
    Push,
    Pushed,
    Refused,
    Rows,
    Saved,
    View,
    ViewNumber,
)
from holdfast.cluster.node import Assignment
from holdfast.cluster.plan import JobPlan
from holdfast.cluster.resuming import open_saving, restore_rows
from holdfast.cluster.saving import ShardSaver
from holdfast.cluster.transaction import PushLedger
from holdfast.cluster.transport.base import Envelope, Frame, as_array
from holdfast.cluster.transport.zmq import Counters
from holdfast.coding.placement import Placement
from holdfast.errors import HoldfastError
from holdfast.tables.plan import GroupPlan, OptimizerName, OptimizerPlan, TablePlan
from holdfast.tables.shard import GroupShard

Update = tuple[int, NDArray[np.uint32], NDArray[np.float32]]
"""A group, places of its rows, and their gradients."""


class Saver(Protocol):
    """Saves a server's rows behind its back (see ``saving.ShardSaver``)."""

    def cut(self, version: int, *, baseline: bool) -> None:
        """Copy what a version holds, all rows or those that changed: they may go on changing then."""

    def settle(self, committed: int, tidied: int) -> None:
        """The newest version that exists, and the newest behind which files were rearranged."""

    def saved(self) -> int:
        """The newest version whose files are durable, or could not be written."""

    def collect(self, version: int, *, tidy: bool) -> tuple[Saved, Sequence[Frame]] | None:
        """What the supervisor must know of a version; None: not yet."""


class Server:
    """The machine of one server.

    Args:
        me: which one.
        plan: the job's.
        endpoint: where it listens; it tells the supervisor.
        fresh: whether the job starts from first values; a server that takes over from another, or whose rows
            come from a checkpoint, must never take them.
        saver: who saves its rows; None if nobody does. It may be set later, before the job starts.
        counters: of its transport.

    Attributes:
        restoring: whether rows are being read from a checkpoint: until then the job does not start.
        error: why this server cannot go on; the job ends with it.
    """

    def __init__(
        self,
        me: Peer,
        plan: JobPlan,
        endpoint: str = "",
        *,
        fresh: bool = True,
        saver: Saver | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.me = me
        self.plan = plan
        self.outbox: list[Envelope] = []
        self.shards = [GroupShard(group, plan.placement, me.slot, plan.seed) for group in plan.groups]
        self.view = View(ViewNumber(), "starting")
        self.malformed = 0
        self.pushes = 0
        self._ledger: PushLedger[list[Update]] = PushLedger(plan.workers, self._apply)
        self._endpoint = endpoint
        self.restoring = False
        self.error = ""
        self.saver = saver
        self._fresh = fresh
        self._counters = counters or Counters()
        self._cut = 0
        self._next_beat = 0.0
        self._told: tuple[bool, int] = (False, 0)

    @property
    def over(self) -> bool:
        """Whether it is to end: the job does, or another has taken its place."""
        mine = next((s for s in self.view.servers if s.slot == self.me.slot), None)
        return self.view.phase == "stopping" or (mine is not None and mine.incarnation > self.me.incarnation)

    def receive(self, envelope: Envelope, now: float) -> None:
        """Take one message."""
        if envelope.target.incarnation != self.me.incarnation and not isinstance(envelope.message, View):
            return  # meant for another that had this slot
        try:
            answer, frames = self._answer(envelope)
        except ValueError:
            self.malformed += 1
            answer, frames = Refused("malformed"), ()
        if isinstance(envelope.message, View):
            self.beat(now)
        elif answer is not None:
            self.outbox.append(Envelope(self.me, envelope.source, answer, frames))

    def tick(self, now: float) -> None:
        """Give a sign of life when it is time, or when something has come to an end."""
        if now >= self._next_beat or self._told != (self.restoring, self._saved()):
            self.beat(now)

    def beat(self, now: float) -> None:
        """Tell the supervisor where this server stands."""
        self._next_beat = now + self.plan.timing.beat_seconds
        self._told = self.restoring, self._saved()
        message = Beat(
            state="failed" if self.error else "restoring" if self.restoring else "ready",
            view=self.view.number,
            endpoint=self._endpoint,
            pid=os.getpid(),
            marks=self._ledger.marks(),
            cut=self._cut,
            saved=self._saved(),
            error=self.error,
            figures=self.figures(),
        )
        self.outbox.append(Envelope(self.me, Peer("supervisor"), message))

    def figures(self) -> Figures:
        """What the live view shows."""
        return Figures(
            steps=self.pushes,
            rows=sum(shard.rows for shard in self.shards),
            malformed=self.malformed + self._counters.malformed,
            bytes_in=self._counters.received_bytes,
            bytes_out=self._counters.sent_bytes,
            memory_bytes=memory_bytes(),
            cpu_seconds=(("process", time.process_time()),),
            digest=digest(self.shards) if self.view.phase == "stopping" else "",
        )

    def _saved(self) -> int:
        return self.saver.saved() if self.saver is not None else 0

    def _answer(self, envelope: Envelope) -> tuple[Rows | Pushed | Refused | Saved | None, Sequence[Frame]]:
        message, frames, source = envelope.message, envelope.frames, envelope.source
        if isinstance(message, Pull):
            return self._pull(message, frames)
        if isinstance(message, Push):
            updates = self._updates(message.parts, frames)
            answer = self._ledger.push(
                source,
                message.sequence,
                message.batch,
                updates,
                samples=message.samples,
                stage=message.stage,
            )
            return answer, ()
        if isinstance(message, Commit):
            return self._ledger.commit(source, message.sequence), ()
        if isinstance(message, Install):
            self._install(message, frames)
        elif isinstance(message, View):
            self._adopt(message)
        elif isinstance(message, Collect) and source.role == "supervisor" and self.saver is not None:
            return self.saver.collect(message.version, tidy=message.tidy) or (None, ())
        return None, ()

    def _adopt(self, view: View) -> None:
        if view.number <= self.view.number:
            return
        self.view = view
        self._ledger.adopt(view.workers)
        if self.saver is None:
            return
        self.saver.settle(view.committed, view.tidied)  # first: a new cut takes up what came to nothing
        if view.cut > self._cut:
            # All workers hold, and all their pushes are applied: this is the same instant everywhere.
            self.saver.cut(view.cut, baseline=view.baseline)
            self._cut = view.cut

    def _pull(self, message: Pull, frames: Sequence[Frame]) -> tuple[Rows, Sequence[Frame]]:
        if len(frames) != len(message.parts):
            raise ValueError("a pull whose frames do not fit its parts")
        missing = tuple(p.group for p in message.parts if not self._shard(p).installed)
        if missing:
            return Rows(message.request, (), missing), ()
        rows = [
            self._shard(part).pull(as_array(frame, np.uint32, (part.rows,)))
            for part, frame in zip(message.parts, frames, strict=True)
        ]
        return Rows(message.request, message.parts), rows

    def _install(self, message: Install, frames: Sequence[Frame]) -> None:
        for group, places, weights in self._updates(message.parts, frames):
            shard = self.shards[group]
            if self._fresh and not shard.installed:
                shard.install(places, weights)

    def _updates(self, parts: Sequence[Part], frames: Sequence[Frame]) -> list[Update]:
        """The parts of a push as arrays, all of them checked: what is applied in part cannot be undone."""
        if len(frames) != 2 * len(parts):
            raise ValueError("a push whose frames do not fit its parts")
        updates: list[Update] = []
        for number, part in enumerate(parts):
            shard = self._shard(part)
            places = as_array(frames[2 * number], np.uint32, (part.rows,))
            values = as_array(frames[2 * number + 1], np.float32, (part.rows, shard.plan.dim))
            shard.check(places)
            updates.append((part.group, places, values))
        return updates

    def _shard(self, part: Part) -> GroupShard:
        if not 0 <= part.group < len(self.shards):
            raise ValueError(f"group {part.group}: there are {len(self.shards)}")
        return self.shards[part.group]

    def _apply(self, updates: list[Update]) -> None:
        for group, places, gradients in updates:
            self.shards[group].push(places, gradients)
        self.pushes += 1


def digest(shards: Sequence[GroupShard]) -> str:
    """A checksum over all records, to the bit."""
    state = xxhash.xxh3_128()
    for shard in shards:
        state.update(np.ascontiguousarray(shard.records).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def run(assignment: Assignment) -> None:
    """Be a server until the job ends."""
    plan = assignment.plan
    _warm_up(plan.groups)
    with open_transport(assignment) as transport:
        fresh = plan.resume is None and assignment.me.incarnation == 1
        server = Server(assignment.me, plan, transport.endpoint, fresh=fresh, counters=transport.counters)
        if plan.saving is not None:
            # Behind its back, so that it gives signs of life meanwhile: reading may take minutes.
            server.restoring = True
            threading.Thread(target=_prepare, args=(server,), name="restore", daemon=True).start()
        run_node(server, transport, until=lambda: server.over)


def _prepare(server: Server) -> None:
    """Open the store and read what rows there are; what goes wrong ends the job."""
    plan, slot, shards = server.plan, server.me.slot, server.shards
    try:
        store = open_saving(plan)
        saver = ShardSaver(plan, slot, shards, store, ThreadPoolExecutor(1, "holdfast-save"))
        if plan.resume is not None:
            version = restore_rows(plan, shards, store, plan.resume.version)
            if plan.resume.continues:
                saver.resume(version)
        if server.me.incarnation > 1:
            for shard in shards:  # what its predecessor had marked went with it
                shard.mark_all()
        server.saver = saver
    except Exception as error:
        traceback.print_exc()
        server.error = str(error) if isinstance(error, HoldfastError) else repr(error)
    server.restoring = False  # last: the job starts with this


def prepare() -> None:
    """Load the loops of every optimizer."""
    names = get_args(OptimizerName)
    _warm_up(
        GroupPlan(name=name, dim=1, tables=(), optimizer=OptimizerPlan(name=name, lr=0.0)) for name in names
    )


def _warm_up(groups: Iterable[GroupPlan]) -> None:
    """Compile every loop before the first sign of life: the first time it takes longer than silence may."""
    few = np.arange(3, dtype=np.uint32).tobytes()
    for group in groups:
        shard = GroupShard(replace(group, tables=(TablePlan("few", 3),)), Placement(1), 0, 0)
        zeros = bytes(3 * 4 * group.dim)
        # As they come in messages: for arrays of another kind, other code would be compiled.
        places = as_array(few, np.uint32, (3,))
        values = as_array(zeros, np.float32, (3, group.dim))
        shard.install(places, values)
        shard.push(places, values)
        shard.pull(places)
