"""The supervisor's state machine, without clock and socket: who is alive, and what the job should do.

All decisions follow from the last beats of the nodes, and are published as a view. A view that did not arrive
is sent again when a beat shows an old one. So there is no step in which a lost message, or the restart of
the supervisor, could leave something half done.

A dead worker is replaced in three steps, each complete when every server reports that it follows the
view: *fencing* (servers refuse the old incarnation from now on), *settling* (a push that some servers have
applied and others only staged is applied by all; one that none has applied is dropped), and the *start* of
the new incarnation after the last batch that counts. Every incarnation gets a new epoch, which is durable
before it is published (``views``).

``Supervisor.advance`` is the main path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from msgspec.structs import asdict

from holdfast.cluster.protocol.admission import Admission
from holdfast.cluster.protocol.envelope import Envelope, Frame
from holdfast.cluster.protocol.messages import (
    Evaluation,
    Exit,
    Instant,
    LauncherBeat,
    Peer,
    Saved,
    ServerBeat,
    ServerInView,
    View,
    ViewNumber,
    WorkerBeat,
)
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.protocol.retry import Retry
from holdfast.cluster.protocol.wire import Message
from holdfast.cluster.supervisor.evaluations import Evaluations
from holdfast.cluster.supervisor.members import Cut, JobFailure, Member, ServerMember, Tally, WorkerMember
from holdfast.cluster.supervisor.recovery_log import RecoveryLog
from holdfast.cluster.supervisor.views import Storage, Views


class Keeper(Protocol):
    """Decides when to save the job, and makes a version of the rows that servers have copied."""

    def receive(self, slot: int, message: Saved, frames: Sequence[Frame]) -> None:
        """Process a server's report on what it has saved."""

    def advance(self, supervisor: Supervisor, now: float) -> None:
        """Do everything that has become possible; called after every message and tick."""

    def may_stop(self, supervisor: Supervisor, now: float) -> bool:
        """Whether everything is saved; called repeatedly at the end of the job."""


class Supervisor:
    """The state machine of the supervisor.

    Args:
        plan: the job's plan.
        storage: stores epochs durably.
        now: the current time.
        test_every: batches between tests; 0: only at the end.
        keeper: saves the job; None if it is not saved.
    """

    def __init__(
        self,
        plan: JobPlan,
        storage: Storage,
        now: float,
        test_every: int = 0,
        keeper: Keeper | None = None,
    ) -> None:
        self.me = Peer("supervisor")
        self.plan = plan
        self.admission = Admission(self.me, plan)
        self.outbox: list[Envelope] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.failure: JobFailure | None = None
        self.cut: Cut | None = None
        self.cuts_made: list[Cut] = []
        """Cuts that all servers have copied; the keeper takes them out."""
        self.finished = False
        self._keeper = keeper
        self._hold = False
        self._launcher_beat: LauncherBeat | None = None
        self._look = Retry(plan.timing.beat_seconds)
        self._advanced = ViewNumber()
        self._ticked = now
        self._views = Views(plan, storage, self._tell)
        self._first = self.view.number
        self.servers = [
            ServerMember(
                "server",
                entry.slot,
                entry.incarnation,
                now,
                stage="started" if entry.starts else "fencing",
                since_view=self._first,
            )
            for entry in self.view.servers
        ]
        self.workers = [
            WorkerMember("worker", entry.slot, entry.incarnation, now, since_view=self._first)
            for entry in self.view.workers
        ]
        self._tally = Tally(plan, self.servers, self.workers)
        self._evaluations = Evaluations(self._first.epoch, test_every, self.steps())
        self._stalls = Stalls(plan, self.servers, now)
        self._log = RecoveryLog(plan, self.servers, self.workers, self._tally, self.events)

    @property
    def view(self) -> View:
        """The current view."""
        return self._views.now

    @property
    def launcher(self) -> Peer:
        """The launcher of the current view."""
        return Peer("launcher", 0, self.view.launcher)

    @property
    def tests(self) -> list[Evaluation]:
        """Results of tests."""
        return self._evaluations.results

    def receive(self, envelope: Envelope, now: float) -> None:
        """Process one message."""
        beat, source = envelope.message, envelope.source
        if not self.admission.admits(envelope):
            return
        if isinstance(beat, Saved):
            member = self._member(source)
            if self._keeper is not None and member is not None and member.peer == source:
                self._keeper.receive(source.slot, beat, envelope.frames)
                self.advance(now)
            return
        if isinstance(beat, LauncherBeat):
            if source.incarnation < self.view.launcher:
                self._send(source, self.view)  # it is told that another one has taken over
                return
            if source.incarnation > self.view.launcher:
                self._views.replace_launcher(source.incarnation)
            news = beat != self._launcher_beat
            self._launcher_beat = beat
            for exited in beat.exited:
                self._note_exit(exited, now)
            if beat.state == "done":
                self.request_stop()
            self._hold = beat.state == "held"
        elif isinstance(beat, ServerBeat | WorkerBeat):
            news = self._note_beat(source, beat, now)
        else:
            return
        if news:  # most beats repeat the last one
            self.advance(now)
        if beat.view < self.view.number:
            self._send(source, self.view)

    def tick(self, now: float) -> None:
        """Detect nodes that have fallen silent."""
        timing = self.plan.timing
        stood_still = now - self._ticked
        self._ticked = now
        if stood_still > timing.silent_seconds / 2:
            # This supervisor was suspended itself, so it cannot tell who was silent.
            for member in [*self.servers, *self.workers]:
                member.since += stood_still
                member.heard = None if member.heard is None else member.heard + stood_still
            self._stalls.forgive(stood_still)
        members: list[ServerMember | WorkerMember] = [*self.servers, *self.workers]
        for member in members:
            silence = now - (member.since if member.heard is None else member.heard)
            if silence > (timing.start_seconds if member.heard is None else timing.silent_seconds):
                self._lose(member, f"sent no heartbeat for {silence:.1f} s", now)
        if self._keeper is not None or self.view.number != self._advanced:
            self.advance(now)
        if self.view.phase != "starting" and self._look.is_due(now):
            self._look.again(now)
            stalled = self._stalls.look(self.steps(), members, now)
            if stalled is not None:
                self._fail(stalled)

    def request_cut(self, version: int, *, baseline: bool = True, whole: bool = True) -> None:
        """Make a consistent cut of all rows for this version: workers hold, servers copy, workers continue.

        ``version`` must be greater than any that a server has seen; check ``may_cut`` first.
        """
        assert self.cut is None
        if self.view.phase == "running":
            self._views.change(phase="holding", baseline=baseline, whole=whole)
            self.cut = Cut(version, self.view.number)
        elif self.view.phase == "ending":  # workers finish their batch and stop anyway
            self._views.change(baseline=baseline, whole=whole)
            self.cut = Cut(version, self.view.number)

    def may_cut(self) -> bool:
        """Whether a cut can be requested, and servers' beats say which was the last they saw.

        A beat sent before this supervisor started may be older than a cut that its predecessor requested: the
        same number would then mean two instants.
        """
        going = self.view.phase in ("running", "ending") and self.cut is None
        # Pushes that are ahead will count soon, unless the job ends before that.
        ahead = self.view.phase == "running" and any(s.ahead for s in self.servers)
        return going and not ahead and all(s.follows(self._first) and s.whole for s in self.servers)

    @property
    def degraded(self) -> bool:
        """Whether any server lacks rows or parities."""
        return self._log.degraded

    def announce(self, **changes: int) -> None:
        """Publish the state of a version: "committed" or "tidied"."""
        if self.view.phase != "stopping":
            self._views.change(**changes)

    def send(self, server: int, message: Message) -> None:
        """Send a message to a server."""
        self._send(self.servers[server].peer, message)

    def request_stop(self) -> None:
        """End the job early: workers finish their batch, a test runs, everything stops."""
        if self.view.phase in ("running", "holding"):
            self.cut = None
            self._views.change(phase="ending")

    def steps(self) -> int:
        """Batches that count so far, of all workers and of the runs that this one resumes."""
        return self._tally.steps()

    def samples(self) -> int:
        """Samples of those batches."""
        return self._tally.samples()

    def advance(self, now: float) -> None:
        """Do everything that has become possible."""
        self._advanced = self.view.number
        if self.view.phase == "stopping":
            return
        for server in self.servers:
            self._bring_in_server(server, now)
        self._log.note_redundancy(now)
        if self.view.phase == "starting" and all(m.stage == "started" for m in self.servers):
            self._views.change(phase="running")
        for worker in self.workers:
            self._bring_in(worker)
        self._advance_cut()
        if self.cut is None and self.view.phase == ("running" if self._hold else "holding"):
            self._views.change(phase="holding" if self._hold else "running")
        if self._keeper is not None:
            self._keeper.advance(self, now)
        self._advance_tests(now)

    def _bring_in_server(self, server: ServerMember, now: float) -> None:
        """Take a new incarnation of a server one step further, if all others are ready for it."""
        beat = server.beat
        if server.stage == "started":
            self._note_recovery(server, now)
        elif beat is not None and beat.started.epoch:  # it started under an earlier supervisor
            since = beat.started
            self._views.change_server(server.slot, endpoint=beat.endpoint, starts=True, since=since)
            server.stage = "started"
            self._note_recovery(server, now)  # now: there must be no cut without its rows
        elif server.incarnation == 1:
            if all(s.ready for s in self.servers):
                self._begin()
        elif server.stage == "fencing":
            if (beat is not None or server.lost_at is not None) and self._others_follow(server):
                self._settle_server(server)
        elif beat is not None and server.ready and self._others_follow(server):
            self._views.start_server(server.slot, beat.endpoint)
            server.stage = "started"
            self._log.note_start(server, now)

    def _note_recovery(self, server: ServerMember, now: float) -> None:
        failure = self._log.note(server, now)
        if failure is not None:
            self._fail(failure)

    def _begin(self) -> None:
        """Start the first incarnations of all slots in one view: all servers have their rows."""
        self._views.begin()
        since = self._views.next_number()
        for server in self.servers:
            if server.incarnation == 1 and server.beat is not None and server.beat.started.epoch:
                since = server.beat.started  # in a view that the others have missed
        entries = list(self.view.servers)
        for server in self.servers:
            if server.incarnation == 1 and server.stage != "started" and server.beat is not None:
                server.stage = "started"
                endpoint = server.beat.endpoint
                entries[server.slot] = ServerInView(server.slot, 1, endpoint, starts=True, since=since)
        self._views.change(servers=tuple(entries))

    def _others_follow(self, server: ServerMember) -> bool:
        """Whether all other servers have seen this server's last change, or share nothing with it."""
        for other in self.servers:
            if other is server:
                continue
            if other.beat is None or (other.beat.started.epoch and not other.follows(server.since_view)):
                return False
        return True

    def _settle_server(self, server: ServerMember) -> None:
        """Decide how much of a dead server's work counts, if the job can continue without it."""
        server.samples_then = self.samples()
        counts = what_counts(self.plan, server, self.servers)
        if isinstance(counts, JobFailure):
            self._fail(counts)
            return
        self._views.change_server(server.slot, counts_until=counts)
        server.stage = "settling"
        server.since_view = self.view.number

    def _bring_in(self, worker: WorkerMember) -> None:
        """Take a new incarnation of a worker one step further, if all servers are ready for it."""
        if worker.stage == "started":
            return
        if not all(s.stage == "started" and s.marks and s.follows(worker.since_view) for s in self.servers):
            return
        marks = [s.marks[worker.slot] for s in self.servers]
        if worker.stage == "fencing":
            # No message of the old incarnation can change these marks any more.
            self._views.change_worker(worker.slot, settle=max(mark.sequence for mark in marks))
            worker.stage = "settling"
        elif all(mark.kept >= mark.sequence for mark in marks):
            # No worker can resend its pushes any more: any that a dead server had not kept would be lost.
            # With atomic pushes all marks are equal by now. Otherwise some servers may be one batch ahead: it
            # is computed again, and they recognize its number.
            last = min(marks, key=lambda mark: mark.sequence)
            owes = max(mark.contained for mark in marks)
            sequence, batch = last.sequence, last.batch
            self._views.change_worker(worker.slot, starts=True, sequence=sequence, batch=batch, owes=owes)
            worker.stage = "started"
            self.events.append(worker.event("worker_started", sequence=last.sequence))
        else:
            return
        worker.since_view = self.view.number

    def _advance_cut(self) -> None:
        cut = self.cut
        if cut is None:
            return
        if not cut.positions:
            if all(worker.holds(cut.view) for worker in self.workers):
                cut.positions = tuple(w.beat.batch for w in self.workers if w.beat is not None)
                self._views.change(cut=cut.version)
        elif all(s.stage == "started" and s.beat and s.beat.cut >= cut.version for s in self.servers):
            # Workers still hold, so these beats describe the cut.
            cut.steps, cut.samples = self.steps(), self.samples()
            self.cut = None
            self.cuts_made.append(cut)

    def _advance_tests(self, now: float) -> None:
        tester, tests = self.workers[0], self._evaluations
        tested = tests.take(tester.beat.tested if tester.beat is not None else None)
        if tested is not None:
            self.events.append(("test", asdict(tested)))
        done = all(
            w.stage == "started" and w.beat is not None and w.beat.state == "done" for w in self.workers
        )
        if not (done or tests.every):
            return
        steps = self.steps()
        if done and not tests.waiting and self.cut is None and all(s.whole for s in self.servers):
            if not tests.has_tested(steps):
                self._views.change_worker(tester.slot, test=tests.begin(steps))
            elif self._keeper is None or self._keeper.may_stop(self, now):
                self.events += [
                    s.event("network_updates_lost", updates=s.ahead) for s in self.servers if s.ahead
                ]
                self.finished = True
                self._views.change(phase="stopping")
        elif not tests.waiting and tests.is_due(steps):
            self._views.change_worker(tester.slot, test=tests.begin(steps))

    def _note_beat(self, source: Peer, beat: ServerBeat | WorkerBeat, now: float) -> bool:
        """Process a node's beat. Returns whether it contains anything new."""
        member = self._member(source)
        if member is None or source.incarnation != member.incarnation:
            return False
        news, member.heard = beat != member.beat, now
        member.beat = beat  # admission has checked that the role matches
        self._look_at(member, beat, now)
        return news

    def _look_at(
        self, member: ServerMember | WorkerMember, beat: ServerBeat | WorkerBeat, now: float
    ) -> None:
        if beat.state == "failed":
            self._fail(JobFailure("error", member.peer, beat.error))
        elif isinstance(member, WorkerMember) and beat.stuck_on and member.stage == "started":
            # Both are alive, but cannot communicate. Replacing the worker costs nothing.
            if not any(self.servers[s].makes_wait for s in beat.stuck_on) and all(
                beat.view >= self.view.servers[s].since for s in beat.stuck_on
            ):
                self._lose(member, f"cannot reach server {beat.stuck_on[0]}", now)
        elif member.role == "server":
            # Two servers cannot communicate: one is replaced, if the code covers that.
            for other in [self.servers[s] for s in beat.stuck_on if 0 <= s < len(self.servers)]:
                known = other.stage == "started" and beat.view >= self.view.servers[other.slot].since
                if known and self._can_lose(other):
                    self._lose(other, f"cannot be reached by server {member.slot}", now)
                    return

    def _can_lose(self, victim: ServerMember) -> bool:
        """Whether the code covers the loss of this server, in addition to those that are not sound."""
        gone = {victim.slot} | {server.slot for server in self.servers if not server.sound}
        ring = self.plan.placement.ring(victim.slot)
        return len(gone.intersection(ring)) <= self.plan.r

    def _note_exit(self, exited: Exit, now: float) -> None:
        member = self._member(exited.peer)
        if member is None or exited.peer.incarnation != member.incarnation or self.view.phase == "stopping":
            return
        how = f"was killed by signal {-exited.code}" if exited.code < 0 else f"ended with code {exited.code}"
        self._lose(member, exited.reason or how, now)

    def _lose(self, member: ServerMember | WorkerMember, how: str, now: float) -> None:
        """Replace a node that no longer counts, or end the job."""
        if self.view.phase == "stopping":
            return
        covered = (self.plan.r and self.plan.dense != "none") or self.plan.partial
        protected = bool(covered and self._views.began)
        partial = {"partial": True} if self.plan.partial else {}
        protects = {"protected": protected, **partial} if member.role == "server" else {}
        self.events.append(member.event(f"{member.role}_lost", reason=how, step=self.steps(), **protects))
        if isinstance(member, ServerMember) and not protected:
            self._fail(JobFailure("server", member.peer, how))
        elif isinstance(member, ServerMember) and self.plan.partial == "full":
            self._fail(JobFailure("lost", member.peer, how))
        elif self._count_death(member) > self.plan.most_deaths:
            self._fail(JobFailure("worker" if member.role == "worker" else "server", member.peer, how))
        elif (stalled := self._stalls.note_loss(member, how, now)) is not None:
            self._fail(stalled)
        else:
            self._replace(member, now)

    def _count_death(self, member: ServerMember | WorkerMember) -> int:
        """Count a death. Returns how often it has died; for a worker, at the same batch."""
        if isinstance(member, WorkerMember):
            sequence = self._tally.sequence(member)
            member.deaths = 0 if sequence != member.died_at else member.deaths
            member.died_at = sequence
        member.deaths += 1
        return member.deaths

    def _replace(self, member: ServerMember | WorkerMember, now: float) -> None:
        """Request a new incarnation for the slot: first the old one is fenced."""
        member.incarnation += 1
        member.since, member.heard, member.beat = now, None, None
        if isinstance(member, ServerMember):
            self._log.note_loss(member, now)
            self._views.replace_server(member.slot)
            self._give_up_cut()
        else:
            self._views.replace_worker(member.slot)
        member.stage = "fencing"
        member.since_view = self.view.number

    def _give_up_cut(self) -> None:
        """Abandon a cut that not all servers have copied."""
        if self.cut is not None:
            self.cut = None
            if self.view.phase == "holding":
                self._views.change(phase="running")

    def _fail(self, failure: JobFailure) -> None:
        if self.failure is None and self.view.phase != "stopping":
            self.failure = failure
            self._views.change(phase="stopping")

    def _member(self, peer: Peer) -> ServerMember | WorkerMember | None:
        slots: dict[str, list[Any]] = {"server": self.servers, "worker": self.workers}
        return slots[peer.role][peer.slot] if peer.role in slots else None  # admission checks slots

    def _tell(self, view: View) -> None:
        """Send a new view to all nodes with a known address."""
        for member in [*self.servers, *self.workers]:
            if member.beat is not None:
                self._send(member.peer, view)
        self._send(self.launcher, view)

    def _send(self, target: Peer, message: Message) -> None:
        self.outbox.append(Envelope(self.me, target, message))


_QUIET = 0.25
"""A share of ``hopeless_seconds``: after this long without problems, the job counts as healthy."""


class Stalls:
    """Detects that a job makes no progress while some server lacks something or cannot be reached.

    Progress is a batch that counts, or fewer missing rows and parities. Replacing a server is not progress by
    itself: that could repeat forever.

    Args:
        plan: the job's plan.
        servers: the servers' members.
        now: the current time.
    """

    def __init__(self, plan: JobPlan, servers: Sequence[ServerMember], now: float) -> None:
        self._plan, self._servers = plan, servers
        self._since = now
        self._seen = -math.inf
        """When there was last a problem."""
        self._steps = -1
        self._lacking: int | None = None

    def forgive(self, seconds: float) -> None:
        """Ignore this much time, in which the supervisor was suspended."""
        self._since += seconds

    def note_loss(self, member: Member, how: str, now: float) -> JobFailure | None:
        """Note that a node is lost. Returns a failure if there was no progress for too long to replace it."""
        self._seen = now
        if isinstance(member, ServerMember):
            self._lacking = None  # more is missing from now on
        if self._is_patient(now):
            return None
        limit = self._plan.timing.hopeless_seconds
        return JobFailure("stalled", member.peer, f"{how}, and no batch has counted for {limit:g} s")

    def look(self, steps: int, members: Sequence[Member], now: float) -> JobFailure | None:
        """Returns why the job cannot continue, if there was no progress for too long."""
        beats = [s.beat for s in self._servers if s.beat is not None]
        lacking = sum(beat.redundancy.rows + beat.redundancy.parities for beat in beats)
        moved = steps != self._steps or (self._lacking is not None and lacking < self._lacking)
        # Reading from a store may take long.
        reading = any(beat.state == "restoring" or beat.redundancy.lost for beat in beats)
        stuck = [m for m in members if m.beat is not None and m.beat.stuck_on]
        ill = [s for s in self._servers if not s.sound]
        if stuck or ill:
            self._seen = now
        # A server that is replaced over and over has no problem for a moment each time.
        if moved or reading or now - self._seen > self._plan.timing.hopeless_seconds * _QUIET:
            self._since = now
        self._steps = steps
        self._lacking = lacking if self._lacking is None else min(lacking, self._lacking)
        return None if self._is_patient(now) or not (ill or stuck) else self._describe(ill, stuck)

    def _is_patient(self, now: float) -> bool:
        return not self._plan.r or now - self._since <= self._plan.timing.hopeless_seconds

    def _describe(self, ill: Sequence[ServerMember], stuck: Sequence[Member]) -> JobFailure:
        limit = self._plan.timing.hopeless_seconds
        who = (*ill, *stuck)[0]
        said = ill[0].beat.redundancy if ill and ill[0].beat is not None else None
        lacks = f"lacks {said.rows:,} rows and {said.parities:,} parities" if said else "is not running"
        links = "; ".join(
            f"{m.peer} cannot reach server {m.beat.stuck_on[0]}" for m in stuck if m.beat is not None
        )
        text = f"{lacks if ill else 'waits'}, and nothing has been recovered for {limit:g} s"
        return JobFailure("stalled", who.peer, f"{text} ({links})" if links else text)


def what_counts(plan: JobPlan, dead: ServerMember, servers: Sequence[ServerMember]) -> Instant | JobFailure:
    """The last instant that all parity servers of a dead server have, or see ``_without_parities``."""
    others = [server for server in servers if server is not dead]
    states = [
        state
        for other in others
        if other.beat is not None
        for state in other.beat.lanes
        if state.slot == dead.slot
    ]
    if not states:
        return _without_parities(plan, dead, others)
    newest = max(state.incarnation for state in states)
    last = [state for state in states if state.incarnation == newest]
    if len(last) < len(states):
        # Some have not even seen the last incarnation start: nothing of it can have been kept.
        return next(state.first for state in last if state.first.flush == 0)
    return min((state.now for state in last), key=lambda instant: instant.flush)


def _without_parities(
    plan: JobPlan, dead: ServerMember, others: Sequence[ServerMember]
) -> Instant | JobFailure:
    """All rows of the server go back to saved values; workers resume from the least mark of other servers.

    A worker sends a push only when all servers have applied the previous one. So the others have in common
    either that push, which is new to the replacement, or the one before it.
    """
    known = [other.marks for other in others if other.marks]
    if not known:
        return JobFailure("lost", dead.peer, "and all other servers died")
    if not (plan.partial or plan.beyond == "rows"):
        return JobFailure("lost", dead.peer, "and all servers with its parities died")
    marks = tuple(min(of_one, key=lambda mark: mark.sequence) for of_one in zip(*known, strict=True))
    pushed = any(mark.sequence for mark in marks)  # so all servers had initial values
    return Instant(0, marks, tuple(range(len(plan.groups))) if pushed else plan.first_installed)
