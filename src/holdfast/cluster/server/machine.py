"""A server: it holds rows, answers pulls, and applies gradients, each batch exactly once.

``Server`` is the state machine: a message in, messages out. ``process`` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from holdfast.cluster.protocol.admission import Admission
from holdfast.cluster.protocol.envelope import Counters, Envelope, Frame
from holdfast.cluster.protocol.messages import (
    CanResend,
    Collect,
    Commit,
    Figures,
    Install,
    NoCopy,
    Peer,
    Pull,
    PulledRows,
    Push,
    Pushed,
    Redundancy,
    Refused,
    Relay,
    Saved,
    ServerBeat,
    ServerInView,
    View,
    ViewNumber,
    WorkerMark,
)
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.protocol.routes import Routes
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
from holdfast.cluster.protocol.wire import Message
from holdfast.cluster.redundancy.parity import Blocks, Records
from holdfast.cluster.redundancy.recover import Recovery, SavedRecords
from holdfast.cluster.redundancy.replicator import Replicator
from holdfast.cluster.redundancy.stripes import Stripes
from holdfast.cluster.redundancy.throttle import Throttle
from holdfast.cluster.server.deferred import Waiting
from holdfast.cluster.server.durability import KeptPushes
from holdfast.cluster.server.initial_values import Contents, Installing
from holdfast.cluster.server.ledger import PushLedger
from holdfast.cluster.server.requests import Update, pulled_rows, pushed_rows, shard_of
from holdfast.errors import HoldfastError, message_of
from holdfast.kernels.memory import Bytes, new_bytes
from holdfast.kernels.teams import ALONE, Team
from holdfast.tables.shard import GroupShard, digest

if TYPE_CHECKING:
    from holdfast.cluster.server.witness import Witness


class Saver(Protocol):
    """Saves a server's rows in the background (see ``saving.ShardSaver``)."""

    def touched(self, group: int, places: NDArray[np.uint32]) -> None:
        """Note that a push has updated these rows."""

    def cut(self, version: int, *, baseline: bool, whole: bool) -> None:
        """Copy the rows of a version: all, the changed ones, or of those only the ones with priority.

        The rows may change as soon as this returns.
        """

    def confirm(self, committed: int, tidied: int) -> None:
        """Note the newest version that exists, and the newest whose files were rearranged."""

    def saved(self) -> int:
        """The newest version whose files are durable, or could not be written."""

    def collect(
        self, version: int, *, tidy: bool, kept: Sequence[int] = ()
    ) -> tuple[Saved, Sequence[Frame]] | None:
        """The report on a version for the supervisor; None: not ready yet.

        With ``tidy``, ``kept`` are the versions since the last baseline that must stay restorable.
        """


@dataclass(frozen=True, slots=True)
class Opened:
    """The result of opening a server's store and reading its rows."""

    saver: Saver
    """Saves its rows."""
    rolled_back: Redundancy = field(default_factory=Redundancy)
    """With partial recovery: what the rows went back to."""
    saved: SavedRecords | None = None
    """The last saved values of its rows, for rows that cannot be recovered."""


class Server:
    """The state machine of one server.

    Args:
        me: the server's slot and incarnation.
        plan: the job's plan.
        endpoint: the address it listens on, reported to the supervisor.
        fresh: whether the job starts from initial values, not from a checkpoint.
        opens: whether a store is being opened, from which rows may be read: the job does not start before
            ``open`` or ``fail`` is called.
        counters: those of its transport.
        measure: returns the process's memory in bytes and its processor time in seconds.
        pressure: returns how scarce processors are (see ``Throttle``).
        rounds: whether the caller receives several messages before it calls ``end_round``, in which rows that
            they wait for are asked for together; otherwise every message is a round.
        witness: compares recovered rows with the lost ones; None: no comparison.
        allocate: returns memory for what other servers are sent.
        team: the threads that read and update rows and parities; all else happens in the calling thread.
        on_lost: called with rows of a group that cannot be recovered.

    Attributes:
        saver: saves its rows; None if nothing is saved, or not yet.
        error: why this server cannot continue; it ends the job.
    """

    def __init__(
        self,
        me: Peer,
        plan: JobPlan,
        endpoint: str = "",
        *,
        fresh: bool = True,
        opens: bool = False,
        counters: Counters | None = None,
        measure: Callable[[], tuple[int, float]] = lambda: (0, 0.0),
        pressure: Callable[[], float] = lambda: 1.0,
        rounds: bool = False,
        witness: Witness | None = None,
        allocate: Callable[[int], Bytes] = new_bytes,
        team: Team = ALONE,
        on_lost: Callable[[int, NDArray[np.int64]], None] = lambda group, rows: None,
    ) -> None:
        self._measure = measure
        self.me = me
        self.plan = plan
        self.outbox: list[Envelope] = []
        replaces = me.incarnation > 1
        self._witness = witness
        self.shards = _make_shards(me, plan, witness, allocate, team, empty=replaces or not fresh)
        self.view = View(ViewNumber(), "starting")
        self.started = ViewNumber()
        """The view in which this server took over its slot; (0, 0) before that."""
        self.admission = Admission(me, plan)
        self.pushes = 0
        self._ledger: PushLedger[list[Update]] = PushLedger(plan.workers, self._apply)
        self._endpoint = endpoint
        self._restoring = opens
        self._rolled_back = Redundancy()
        self.error = ""
        self.saver: Saver | None = None
        self._takes_first_values = fresh or plan.dense == "workers"
        self._counters = counters or Counters()
        self._cut = 0
        self._next_beat = 0.0
        self._told: tuple[object, ...] = ()
        self._waiting = Waiting()
        self.routes = Routes(me, plan, self._started_servers)
        self._changed = False
        self._rounds = rounds
        self._throttle = Throttle(plan.lanes.share, pressure)
        self.replicator: Replicator | None = None
        self.stripes: Stripes | None = None
        self.recovery: Recovery | None = None
        if plan.r:
            self.replicator = self._make_replicator(team, fresh=fresh and not replaces)
            self.stripes = Stripes(plan, self.replicator, self._throttle, allocate)
            if replaces:
                self.recovery = Recovery(
                    plan, self.shards, self.replicator, self._throttle, self._serve_waiting, on_lost
                )
        self._kept = KeptPushes(me, plan, self._ledger, self.replicator, self.outbox)
        self._installing = Installing(me, plan, self.shards, self.outbox, self.routes.doubt)
        self.contents: Contents | None = None
        """Which pushes the network's rows contain; None: those applied."""
        if plan.dense == "workers" and self.shards[-1].rows:
            self.contents = Contents(self.shards[-1], self._ledger, self._installing, self._touched)
        self._now = 0.0

    def _make_replicator(self, team: Team, *, fresh: bool) -> Replicator:
        marks, shards = self._ledger.marks, self.shards
        replicator = Replicator(
            self.me,
            self.plan,
            shards,
            self.outbox,
            marks,
            self._ledger.applied,
            fresh=fresh,
            lacks=self._lacks,
            on_change=self._note_change,
            on_values=self._take_values,
            doubt=self.routes.doubt,
            team=team,
        )
        if self._witness is not None:
            self._witness.replicator = replicator
        return replicator

    def open(self, opened: Opened) -> None:
        """Note that the store is open, and rows are read."""
        self._rolled_back, self.saver, self._restoring = opened.rolled_back, opened.saver, False
        if self.recovery is not None and self.plan.beyond == "rows":
            self.recovery.saved = opened.saved

    def fail(self, error: str) -> None:
        """Note that this server cannot continue."""
        self.error = error

    def _note_change(self, part: StripePart, blocks: Blocks, differences: Records) -> None:
        assert self.stripes is not None
        self.stripes.note_change(part, blocks, differences)

    def _take_values(self, source: Peer, message: Values, frames: Sequence[Frame]) -> None:
        assert self.stripes is not None
        self.stripes.take_values(source, message, frames)

    @property
    def over(self) -> bool:
        """Whether to end this server: the job ends, or a newer incarnation has replaced it."""
        mine = next((s for s in self.view.servers if s.slot == self.me.slot), None)
        return self.view.phase == "stopping" or (mine is not None and mine.incarnation > self.me.incarnation)

    def receive(self, envelope: Envelope, now: float) -> None:
        """Process one message."""
        if isinstance(envelope.message, Pull | Push):
            self._throttle.note_request(now)
        self._receive(envelope, now)
        if not self._rounds:
            self.end_round(now)

    def end_round(self, now: float) -> None:
        """Ask for the rows that messages since the last call wait for."""
        if self.recovery is not None:
            self.recovery.ask(now)
            if self.outbox:
                self.routes.divert(self.outbox, now)

    def _receive(self, envelope: Envelope, now: float) -> None:
        self._now = now
        if not self.admission.admits(envelope):
            return
        if envelope.target.incarnation != self.me.incarnation and not isinstance(envelope.message, View):
            return  # addressed to another incarnation
        if isinstance(envelope.message, Relay):
            unwrapped = self._unwrap(envelope, now)
            if unwrapped is None:
                return
            envelope = unwrapped
        else:
            self.routes.came_directly(envelope.source, now)
        known = self.view
        try:
            answer, frames = self._answer(envelope)
        except ValueError:  # it does not match the state here; nothing has changed
            self.admission.dropped += 1
            answer, frames = Refused("malformed"), ()
        if isinstance(envelope.message, View):
            if self.view is not known:
                self.beat(now)
            if self.started.epoch:
                for each in self._waiting.at_start():
                    self._receive(each, now)
        elif answer is not None and envelope.source.role != "server":
            self.outbox.append(Envelope(self.me, envelope.source, answer, frames))
        if self.outbox:
            self.routes.divert(self.outbox, now)

    def _unwrap(self, envelope: Envelope, now: float) -> Envelope | None:
        """Unwrap a relayed message for this server; forward one that is for another node."""
        unwrapped = self.routes.unwrap(envelope)
        if unwrapped is not None and unwrapped.target != self.me:
            self.outbox.append(unwrapped)
        elif unwrapped is not None and self.admission.admits(unwrapped):
            self.routes.came_by(envelope.source, unwrapped.source, now)
            return unwrapped
        return None

    def _started_servers(self) -> list[Peer]:
        return [Peer("server", s.slot, s.incarnation) for s in self.view.servers if s.starts]

    def tick(self, now: float) -> None:
        """Send a beat when it is time, or when the supervisor should hear of a change at once."""
        self._now = now
        if self.replicator is not None and self.stripes is not None and self.started.epoch:
            self.replicator.tick(now)
            self.stripes.tick(now)
            if self.recovery is not None:
                self._recover(self.recovery, now)
            self._rebuild(self.stripes, now)
            if self.recovery is None or not self.recovery.left:
                self.stripes.scrub(now)
            self._kept.tell(self.view, now)
        if self.started.epoch:
            unsure = self.contents.unsure(self.view) if self.contents is not None else ()
            self._installing.tick(self.view, now, unsure)
            self._install_copy()
        if self.outbox:
            self.routes.divert(self.outbox, now)
        if now >= self._next_beat or self._told != self._news():
            self.beat(now)

    def _recover(self, recovery: Recovery, now: float) -> None:
        try:
            recovery.tick(now)
            recovery.ask(now)
        except HoldfastError as error:  # the saved rows cannot be read
            self.fail(message_of(error))

    def beat(self, now: float) -> None:
        """Report this server's state to the supervisor."""
        self._next_beat = now + self.plan.timing.beat_seconds
        self._told = self._news()
        replicator = self.replicator
        message = ServerBeat(
            state="failed" if self.error else "restoring" if self._restoring else "ready",
            view=self.view.number,
            endpoint=self._endpoint,
            marks=self.marks(),
            cut=self._cut,
            saved=self._saved(),
            started=self.started,
            lanes=replicator.sealed() if replicator else (),
            stuck_on=replicator.stuck_on(now) if replicator else (),
            redundancy=self.redundancy(),
            error=self.error,
            figures=self.figures(),
        )
        self.outbox.append(Envelope(self.me, Peer("supervisor"), message))

    def _news(self) -> tuple[object, ...]:
        """The state whose changes are reported to the supervisor at once."""
        recovery = self.recovery
        left = recovery is not None and recovery.left > 0
        lost = recovery is not None and (recovery.lost(), recovery.network_lost)
        lacking = self.stripes is not None and self.stripes.lacking() > 0
        contents = self.contents
        updates = (contents.lost, contents.is_behind, contents.ahead) if contents is not None else None
        return (
            self._restoring,
            self._saved(),
            left,
            lacking,
            lost,
            updates,
            self._installing.groups,
            self._installing.lost,
        )

    def marks(self) -> tuple[WorkerMark, ...]:
        """The mark of every worker."""
        contained = self.contents.marks if self.contents is not None else [0] * self.plan.workers
        return tuple(
            replace(mark, kept=self._kept.kept(mark.slot), contained=contained[mark.slot])
            for mark in self._ledger.marks()
        )

    def redundancy(self) -> Redundancy:
        """What this server lacks, and what it has recovered."""
        not_installed, network_lost = self._not_installed(), self._installing.lost
        lacking = not_installed if self.me.incarnation > 1 else 0
        contents = self.contents
        updates_lost, ahead = (contents.lost, contents.ahead) if contents is not None else (0, 0)
        recovery, stripes = self.recovery, self.stripes
        if stripes is None:
            return replace(
                self._rolled_back,
                rows=lacking,
                not_installed=not_installed,
                network_lost=network_lost,
                updates_lost=updates_lost,
                updates_ahead=ahead,
            )
        network_lost = network_lost or (recovery is not None and recovery.network_lost)
        back = recovery.went_back if recovery else self._rolled_back
        return Redundancy(
            rows=lacking + (recovery.left if recovery else 0),
            recovered=recovery.recovered if recovery else 0,
            parities=stripes.lacking(),
            rebuilt=stripes.rebuilt,
            lost=recovery.lost() if recovery else "",
            scrubbed=stripes.scrubbed,
            wrong=stripes.wrong,
            repaired=stripes.repaired,
            compared=self._witness.compared if self._witness else 0,
            unequal=self._witness.unequal if self._witness else 0,
            went_back=back.went_back,
            version=back.version,
            version_samples=back.version_samples,
            not_installed=not_installed,
            network_lost=network_lost,
            updates_lost=updates_lost,
            updates_ahead=ahead,
        )

    def _not_installed(self) -> int:
        """The number of rows whose values have not arrived, or lack pushes that count."""
        rows = self._installing.rows
        if not rows and self.contents is not None and self.contents.is_behind:
            rows = self.shards[-1].rows
        return rows

    def figures(self) -> Figures:
        """Metrics for the live view."""
        memory, seconds = self._measure()
        return Figures(
            steps=self.pushes,
            rows=sum(shard.rows for shard in self.shards),
            dropped=self.admission.dropped + self._counters.dropped,
            bytes_in=self._counters.received_bytes,
            bytes_out=self._counters.sent_bytes,
            memory_bytes=memory,
            cpu_seconds=(("process", seconds),),
            digest=digest(self.shards) if self.view.phase == "stopping" else "",
        )

    def _saved(self) -> int:
        return self.saver.saved() if self.saver is not None else 0

    def _answer(self, envelope: Envelope) -> tuple[Message | None, Sequence[Frame]]:
        message, frames, source = envelope.message, envelope.frames, envelope.source
        if isinstance(message, View):
            self._adopt(message)
        elif not self.started.epoch:
            self._waiting.until_start(envelope)
            return None, ()
        elif isinstance(message, Pull):
            return self._pull(envelope, message)
        elif isinstance(message, Push):
            return self._push(envelope, message)
        elif isinstance(message, Commit):
            return self._commit(envelope, message)
        elif isinstance(message, Install):
            self._installing.answered(source, message)
            self._install(source, message, frames)
        elif isinstance(message, NoCopy | CanResend):
            self._installing.answered(source, message)
        elif isinstance(message, Collect) and self.saver is not None:
            return self.saver.collect(message.version, tidy=message.tidy, kept=message.kept) or (None, ())
        elif self.replicator is not None and self.stripes is not None:
            self._protect(self.replicator, self.stripes, envelope)
        return None, ()

    def _protect(self, replicator: Replicator, stripes: Stripes, envelope: Envelope) -> None:
        """Process a message between servers."""
        message, frames, source = envelope.message, envelope.frames, envelope.source
        if isinstance(message, Taken | Values | Syndromes | Agreed):
            self.routes.trust(source, self._now)
        if isinstance(message, LaneMessage):
            replicator.take(source, message, frames)
        elif isinstance(message, Taken):
            replicator.taken(source, message.number, self._now)
        elif isinstance(message, ReadStripes):
            replicator.read(source, message, frames, self._now)
        elif isinstance(message, Recover):
            stripes.recover(source, message, frames, self._now)
        elif isinstance(message, Compare):
            stripes.compare(source, message, frames, self._now)
        elif isinstance(message, Agreed):
            stripes.take_vote(message, frames, self._now)
        elif isinstance(message, Syndromes) and self.recovery is not None:
            self.recovery.receive(source, message, frames, self._now)
        stripes.finish(self._now)
        self._rebuild(stripes, self._now)

    def _rebuild(self, stripes: Stripes, now: float) -> None:
        stripes.rebuild(now, beside=self.recovery is not None and self.recovery.left > 0)

    def _adopt(self, view: View) -> None:
        if view.number <= self.view.number:
            return
        self.view = view
        mine = next((s for s in view.servers if s.slot == self.me.slot), None)
        if mine is None or mine.incarnation != self.me.incarnation:
            return  # replaced: nothing that this one does counts any more
        self._ledger.adopt(view.workers)
        self._waiting.forget_others({Peer("worker", w.slot, w.incarnation) for w in view.workers})
        self._note_changes()
        if mine.starts and not self.started.epoch:
            self._start(mine, view)
        self._install_copy()
        if self.replicator is not None and self.started.epoch:
            self.replicator.adopt(view, mine, self._now)
        self._throttle.hurry = view.phase != "running"
        if self.saver is None or not self.started.epoch:
            return
        self.saver.confirm(view.committed, view.tidied)  # first: a new cut includes rows of failed saves
        if view.cut > self._cut:
            # All workers hold, and all their pushes are applied: the cut is the same instant on all servers.
            self.saver.cut(view.cut, baseline=view.baseline, whole=view.whole)
            self._cut = view.cut

    def _start(self, mine: ServerInView, view: View) -> None:
        """Take over the slot, with everything that its last incarnation had kept."""
        self.started = mine.since
        if mine.counts_until is not None:
            self._ledger.restore(mine.counts_until.marks)
            for group, shard in enumerate(self.shards):
                kept = group in mine.counts_until.installed and shard.placement.r > 0
                # With partial recovery, rows of tables are here already; the network's come from a worker.
                shard.installed = kept or (bool(self.plan.partial) and group < len(self.shards) - 1)
                if self.recovery is not None and not kept:
                    self.recovery.leave_out(group)
            self._installing.look_again()
            self._cut = view.cut  # this cut was made without this server and its rows
            if self._witness is not None:
                self._witness.counts_until = mine.counts_until.flush
        if self.replicator is not None:
            self.replicator.start()

    def _lacks(self, group: int, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        if self.recovery is None:
            return np.zeros(len(places), np.bool_)
        return self.recovery.lacks(group, places)

    def _waits(
        self, envelope: Envelope, kind: Literal["pull", "push"], number: int, parts: Sequence[Update]
    ) -> bool:
        """Whether a message must wait for rows that are not recovered yet; if so, it is deferred."""
        recovery = self.recovery
        if recovery is None or not recovery.left:
            return False
        waits = kind == "push" and self._waiting.push_waits(envelope.source)
        for group, places, _ in parts:
            self.shards[group].check(places, once=False)
            if recovery.lacks(group, wide := places.astype(np.int64)).any():
                recovery.want(group, wide, self._now)
                waits = True
        if waits:
            self._waiting.until_rows(envelope, kind, number)
        return waits

    def _serve_waiting(self) -> None:
        """Process deferred messages, as rows have been recovered."""
        for envelope in self._waiting.at_rows():
            self._receive(envelope, self._now)
        if self.recovery is not None and not self.recovery.left:
            self.beat(self._now)

    def _with_kept(self, answer: Pushed | Refused | None, source: Peer) -> Pushed | Refused | None:
        self._note_changes(source.slot)
        if isinstance(answer, Pushed):
            return self._kept.answer(answer, source.slot, self._now)
        return answer

    def _note_changes(self, worker: int | None = None) -> None:
        """Tell the replicator that rows have changed, if they have."""
        if self._changed and self.replicator is not None:
            self.replicator.changed(self._now, worker)
        self._changed = False

    def _push(self, envelope: Envelope, message: Push) -> tuple[Pushed | Refused | None, Sequence[Frame]]:
        source = envelope.source
        updates = pushed_rows(self.shards, message.parts, envelope.frames)
        if not all(self.shards[group].installed for group, _, _ in updates):
            return Refused("not installed", message.sequence), ()
        if self._waits(envelope, "push", message.sequence, updates):
            return None, ()
        if self.contents is not None and not self.contents.complete(source, message.sequence, updates):
            return Refused("gap", message.sequence), ()
        answer = self._ledger.push(
            source, message.sequence, message.batch, updates, samples=message.samples, stage=message.stage
        )
        answered = self._with_rows(self._with_kept(answer, source), source, updates, message.returns)
        self._serve_ahead(source)  # afterwards: a pull may commit the push
        return answered

    def _commit(self, envelope: Envelope, message: Commit) -> tuple[Pushed | Refused | None, Sequence[Frame]]:
        source = envelope.source
        if self._waiting.push_waits(source, message.sequence):
            self._waiting.until_rows(envelope, "commit", message.sequence)
            return None, ()
        if self.contents is not None and self.contents.lacks(source, message.sequence):
            return Refused("not staged", message.sequence), ()
        answer = self._with_kept(self._ledger.commit(source, message.sequence), source)
        self._serve_ahead(source)
        return answer, ()

    def _commit_before(self, envelope: Envelope, message: Pull) -> Pushed | None:
        """Process the commit that a pull carries. Returns its answer if the push is applied now; otherwise
        the worker sends the commit by itself when it finds no answer."""
        source = envelope.source
        if self._ledger.applied(source.slot) >= message.after:
            return None
        for group, places, _ in pulled_rows(message.parts, envelope.frames):
            self.shards[group].check(places, once=False)  # now: a message that is refused changes nothing
        answer = self._ledger.commit(source, message.after)
        if not isinstance(answer, Pushed):
            return None
        self._note_changes(source.slot)
        self._serve_ahead(source)
        return answer

    def _is_ahead(self, envelope: Envelope, message: Pull) -> bool:
        """Whether a pull has overtaken the push whose effect it must see; if so, it is deferred."""
        if self._ledger.applied(envelope.source.slot) >= message.after:
            return False
        self._waiting.until_push(envelope, message.request)
        return True

    def _serve_ahead(self, source: Peer) -> None:
        for envelope in self._waiting.at_push(source):
            self._receive(envelope, self._now)

    def _with_rows(
        self, answer: Pushed | Refused | None, source: Peer, updates: Sequence[Update], group: int
    ) -> tuple[Pushed | Refused | None, Sequence[Frame]]:
        """Add the new weights of a group's rows to the answer to a push, if requested. For a staged push,
        these are the weights that it will produce, so that the worker need not wait for its commit."""
        if group >= 0 and isinstance(answer, Pushed):
            for number, places, gradients in updates:
                if number == group:
                    shard = self.shards[group]
                    here = answer.applied or (
                        self.contents is not None and self.contents.has(source.slot, answer.sequence)
                    )
                    rows = shard.pull(places) if here else shard.preview(places, gradients)
                    return replace(answer, rows=len(places), marks=self._contained(group)), [rows]
        return answer, ()

    def _pull(self, envelope: Envelope, message: Pull) -> tuple[PulledRows | None, Sequence[Frame]]:
        committed = self._commit_before(envelope, message) if message.commits else None
        answer, frames = self._pulled(envelope, message)
        if committed is not None and (answer is None or answer.not_installed):
            # The rows come later: the commit gets an answer of its own.
            told = self._kept.answer(committed, envelope.source.slot, self._now)
            self.outbox.append(Envelope(self.me, envelope.source, told))
        return answer, frames

    def _pulled(self, envelope: Envelope, message: Pull) -> tuple[PulledRows | None, Sequence[Frame]]:
        if self._is_ahead(envelope, message):
            return None, ()
        missing = tuple(p.group for p in message.parts if not shard_of(self.shards, p).installed)
        if missing:
            return PulledRows(message.request, (), missing), ()
        wanted = pulled_rows(message.parts, envelope.frames)
        if self._waits(envelope, "pull", message.request, wanted):
            return None, ()
        marks = self._contained(message.parts[-1].group) if message.parts else ()
        rows = [self.shards[g].pull(places) for g, places, _ in wanted]
        return PulledRows(message.request, message.parts, marks=marks), rows

    def _install(self, source: Peer, message: Install, frames: Sequence[Frame]) -> None:
        network = len(self.shards) - 1
        for update in pushed_rows(self.shards, message.parts, frames):
            if not self._takes_first_values or self.shards[update[0]].installed:
                continue
            if update[0] == network and self.contents is not None and self.me.incarnation > 1:
                self.contents.offer(source, message, update)
            else:
                self._put_first_values(update)
        self._install_copy()

    def _put_first_values(self, update: Update) -> None:
        group, places, weights = update
        self.shards[group].install(places, weights)
        if self.replicator is not None:
            self.replicator.changed(self._now)

    def _apply(self, worker: int, sequence: int, updates: list[Update]) -> None:
        network = len(self.shards) - 1
        contents = self.contents
        skipped = network if contents is not None and contents.has(worker, sequence) else -1
        for update in updates:
            if update[0] != skipped:
                self.shards[update[0]].push(*update[1:])
                self._touched(update)
        if contents is not None:
            contents.note(worker, sequence)
        self.pushes += 1
        self._changed = True

    def _touched(self, update: Update) -> None:
        if self.saver is not None:
            self.saver.touched(*update[:2])

    def _install_copy(self) -> None:
        """Install a worker's copy of the network, once it is certain which."""
        if self.contents is not None and self.started.epoch:
            chosen = self.contents.advance(self.view)
            if chosen is not None:
                self._put_first_values(chosen)

    def _contained(self, group: int) -> tuple[int, ...]:
        """The marks that accompany rows of this group."""
        network = len(self.shards) - 1
        return tuple(self.contents.marks) if self.contents is not None and group == network else ()


def _make_shards(
    me: Peer,
    plan: JobPlan,
    witness: Witness | None,
    allocate: Callable[[int], Bytes],
    team: Team,
    *,
    empty: bool,
) -> list[GroupShard]:
    make = GroupShard if witness is None else witness.shard
    return [
        make(
            group,
            placement,
            me.slot,
            plan.seed,
            keep_changes=placement.r > 0,
            empty=empty,
            allocate=allocate,
            team=team,
        )
        for group, placement in zip(plan.groups, plan.placements, strict=True)
    ]
