"""Who is alive, and what the job is to be: the supervisor as a machine without clock and socket.

Everything is decided from what nodes last said of themselves, and told to them as a view; a view that did
not arrive is sent again when a beat shows an old one. So there is no step in which a lost message, or a
supervisor that dies and comes back, could leave something half done.

A worker that dies is replaced in three steps, each complete when every server says that it follows the
view: *fencing* (servers refuse the old incarnation from now on), *settling* (a push that some servers have
applied and others only staged is applied by all; one that none has applied is dropped), and the *start* of
the new incarnation behind the last batch that counts. Every incarnation gets a new epoch, which is durable
before anybody hears of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from msgspec.structs import asdict, replace

from holdfast.cluster.members import Cut, Durable, Failure, Member, ServerMember, Storage, WorkerMember
from holdfast.cluster.messages import (
    Beat,
    Evaluation,
    Exit,
    Instant,
    Peer,
    Redundancy,
    Saved,
    ServerInView,
    View,
    ViewNumber,
    WorkerInView,
)
from holdfast.cluster.plan import JobPlan
from holdfast.cluster.recoveries import Recoveries
from holdfast.cluster.transport.base import Envelope, Frame
from holdfast.cluster.wire import Message

_TESTS_OF_AN_EPOCH = 1 << 20

_Entry = TypeVar("_Entry", ServerInView, WorkerInView)


class Keeper(Protocol):
    """Decides when the job is saved, and makes what servers have copied a version."""

    def receive(self, slot: int, message: Saved, frames: Sequence[Frame]) -> None:
        """What a server has saved."""

    def advance(self, supervisor: Supervisor, now: float) -> None:
        """Do whatever what is known allows; called after every message and tick."""

    def may_stop(self, supervisor: Supervisor, now: float) -> bool:
        """Whether everything is saved; asked again and again at the end of the job."""


class Supervisor:
    """The machine of the supervisor.

    Args:
        plan: the job's.
        storage: where epochs are kept.
        now: the time.
        test_every: batches between tests; 0: only at the end.
        keeper: who saves the job; None if nobody does.
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
        self.outbox: list[Envelope] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.failure: Failure | None = None
        self.cut: Cut | None = None
        self.cuts_made: list[Cut] = []
        """Cuts that all servers have copied; whoever saves takes them out."""
        self.tests: list[Evaluation] = []
        self.finished = False
        self._storage = storage
        self._test_every = test_every
        self._keeper = keeper
        self._before = plan.resume.steps if plan.resume else 0
        self._hold = False
        self._ticked = now
        self._tested_at = self._before
        known = storage.load() or Durable(servers=(1,) * plan.servers, workers=(1,) * plan.workers)
        # Beyond all numbers of the supervisor before: the worker that tests does each number once.
        self._test = self._tests_before = known.epoch * _TESTS_OF_AN_EPOCH
        self._durable = replace(known, epoch=known.epoch + 1)
        storage.save(self._durable)  # before anybody hears of this epoch
        self.servers = [ServerMember("server", s, i, now) for s, i in enumerate(known.servers)]
        entries = tuple(ServerInView(m.slot, m.incarnation) for m in self.servers)
        for entry in known.started:
            if entry.incarnation == known.servers[entry.slot]:
                entries = _with(entries, entry)
                self.servers[entry.slot].stage = "started"
        self.workers = [WorkerMember("worker", w, i, now) for w, i in enumerate(known.workers)]
        self.view = View(
            ViewNumber(self._durable.epoch, 0),
            "starting",
            entries,
            tuple(WorkerInView(m.slot, m.incarnation) for m in self.workers),
        )
        for server in self.servers:
            server.since_view = self.view.number
        for worker in self.workers:
            worker.since_view = self.view.number
        self._first = self.view.number
        self._steps = [0] * plan.workers
        self._recoveries = Recoveries()
        self._samples_lost = 0.0

    def receive(self, envelope: Envelope, now: float) -> None:
        """Take one message."""
        beat, source = envelope.message, envelope.source
        if isinstance(beat, Saved):
            member = self._member(source)
            if self._keeper is not None and member is not None and member.peer == source:
                self._keeper.receive(source.slot, beat, envelope.frames)
                self.advance(now)
            return
        if not isinstance(beat, Beat):
            return
        if source.role == "launcher":
            for exited in beat.exited:
                self._note_exit(exited, now)
            if beat.state == "done":
                self.request_stop()
            self._hold = beat.state == "held"
        else:
            member = self._member(source)
            if member is None or (source.role == "server" and len(beat.marks) != self.plan.workers):
                return
            if source.incarnation == member.incarnation:
                member.beat, member.heard = beat, now
                self._look_at(member, beat, now)
        self.advance(now)
        if beat.view < self.view.number:
            self._send(source, self.view)

    def tick(self, now: float) -> None:
        """Look for nodes that have fallen silent."""
        timing = self.plan.timing
        stood_still = now - self._ticked
        self._ticked = now
        if stood_still > timing.silent_seconds / 2:
            # Whoever does not listen cannot tell who was silent.
            for member in [*self.servers, *self.workers]:
                member.since += stood_still
                member.heard = None if member.heard is None else member.heard + stood_still
        members: list[ServerMember | WorkerMember] = [*self.servers, *self.workers]
        for member in members:
            silence = now - (member.since if member.heard is None else member.heard)
            if silence > (timing.start_seconds if member.heard is None else timing.silent_seconds):
                self._lose(member, f"gave no sign of life for {silence:.1f} s", now)
        self.advance(now)

    def request_cut(self, version: int, *, baseline: bool = True, whole: bool = True) -> None:
        """Make a consistent cut of all rows for this version: workers hold, servers copy, workers go on.

        ``version`` must be beyond all that any server has heard of; ask ``may_cut`` before.
        """
        assert self.cut is None
        if self.view.phase == "running":
            self._change(phase="holding", baseline=baseline, whole=whole)
            self.cut = Cut(version, self.view.number)
        elif self.view.phase == "ending":  # they finish their batch anyway, and do not go on
            self._change(baseline=baseline, whole=whole)
            self.cut = Cut(version, self.view.number)

    def may_cut(self) -> bool:
        """Whether a cut can be asked for, and servers' beats say which was the last they heard of.

        A beat that was sent before this supervisor came to be may be older than a cut that the one before it
        asked for: the same number would then stand for two instants.
        """
        going = self.view.phase in ("running", "ending") and self.cut is None
        return going and all(s.follows(self._first) and self._is_whole(s) for s in self.servers)

    @property
    def degraded(self) -> bool:
        """Whether rows or parities are lacking."""
        return self._recoveries.degraded

    def _is_sound(self, server: ServerMember) -> bool:
        """Whether a server has all of its rows and parities: another may be lost."""
        return self._is_whole(server) and server.beat is not None and not server.beat.redundancy.parities

    def _is_whole(self, server: ServerMember) -> bool:
        """Whether a server has all of its rows."""
        whole = server.beat is not None and not server.beat.redundancy.not_installed
        return whole and server.stage == "started" and bool(server.marks) and not server.recovering

    def _makes_wait(self, server: ServerMember) -> bool:
        """Whether workers may well wait for a server though they reach it: it is not there yet, or lacks rows
        that do not come from them. A checkpoint may take minutes to read."""
        if server.stage != "started" or server.beat is None:
            return True
        lacking = server.beat.redundancy.rows - server.beat.redundancy.not_installed
        return server.recovering and lacking > 0

    def announce(self, **changes: int) -> None:
        """Tell everybody what has become of a version: "committed" or "tidied"."""
        if self.view.phase != "stopping":
            self._change(**changes)

    def send(self, server: int, message: Message) -> None:
        """Send something to a server."""
        self._send(self.servers[server].peer, message)

    def request_stop(self) -> None:
        """End the job before its time: workers finish their batch, a test is made, everything stops."""
        if self.view.phase in ("running", "holding"):
            self.cut = None
            self._change(phase="ending")

    def steps(self) -> int:
        """Batches that count so far, of all workers together and of the runs that this one goes on from."""
        return self._before + sum(self._sequence(worker) for worker in self.workers)

    def samples(self) -> int:
        """Samples of those batches."""
        marks = [s.marks for s in self.servers if s.marks]
        before = self.plan.resume.samples if self.plan.resume else 0
        return before + sum(min((m[w.slot].samples for m in marks), default=0) for w in self.workers)

    def advance(self, now: float) -> None:
        """Do whatever what is known allows."""
        if self.view.phase == "stopping":
            return
        for server in self.servers:
            self._bring_in_server(server, now)
        self._note_redundancy(now)
        if self.view.phase == "starting" and all(m.stage == "started" for m in self.servers):
            self._change(phase="running")
        for worker in self.workers:
            self._bring_in(worker)
        self._advance_cut()
        if self.cut is None and self.view.phase == ("running" if self._hold else "holding"):
            self._change(phase="holding" if self._hold else "running")
        if self._keeper is not None:
            self._keeper.advance(self, now)
        self._advance_tests(now)

    def _bring_in_server(self, server: ServerMember, now: float) -> None:
        """Take a new incarnation of a server one step further, if all others are ready for it."""
        beat = server.beat
        if server.stage == "started":
            self._note_recovery(server, now)
            return
        if beat is not None and beat.started.epoch:  # this supervisor came back, or another saw it start
            since = beat.started
            self._change_server(server, endpoint=beat.endpoint, starts=True, since=since)
            server.stage = "started"
            self._note_recovery(server, now)  # at once: without its rows there must be no cut
        elif server.incarnation == 1:
            if all(_is_ready(s) for s in self.servers):
                self._begin()
        elif server.stage == "fencing":
            if (beat is not None or server.lost_at is not None) and self._others_follow(server):
                self._settle_server(server)
        elif beat is not None and _is_ready(server) and self._others_follow(server):
            self._start_server(server, beat.endpoint)
            self._recoveries.start(
                server.slot, [s.marks for s in self.servers if s is not server and s.marks]
            )
            self._say("server_started", server, after_seconds=_since(server.lost_at, now))

    def _start_server(self, server: ServerMember, endpoint: str) -> None:
        """A replacement takes its slot over; a supervisor that comes after this one will say the same."""
        self._durable = replace(self._durable, epoch=self._durable.epoch + 1)
        entry = self.view.servers[server.slot]
        entry = replace(entry, endpoint=endpoint, starts=True, since=self._next_number())
        others = (other for other in self._durable.started if other.slot != server.slot)
        self._durable = replace(self._durable, started=(*others, entry))
        self._storage.save(self._durable)  # before anybody hears of it
        self._change(servers=_with(self.view.servers, entry))
        server.stage, server.recovering = "started", True

    def _begin(self) -> None:
        """All servers have their rows: the first ones of all slots begin in one view."""
        if not self._durable.began:
            self._durable = replace(self._durable, epoch=self._durable.epoch + 1, began=True)
            self._storage.save(self._durable)
        since = self._next_number()
        for server in self.servers:
            if server.incarnation == 1 and server.beat is not None and server.beat.started.epoch:
                since = server.beat.started  # by a view that the others have missed
        entries = self.view.servers
        for server in self.servers:
            if server.incarnation == 1 and server.stage != "started" and server.beat is not None:
                server.stage = "started"
                entry = ServerInView(server.slot, 1, server.beat.endpoint, starts=True, since=since)
                entries = _with(entries, entry)
        self._change(servers=entries)

    def _others_follow(self, server: ServerMember) -> bool:
        """Whether all other servers know of what was said of this one last, or have nothing to do with it."""
        for other in self.servers:
            if other is server:
                continue
            if other.beat is None or (other.beat.started.epoch and not other.follows(server.since_view)):
                return False
        return True

    def _settle_server(self, server: ServerMember) -> None:
        """Decide how much of a dead server's work counts: what all of its parity servers have."""
        server.samples_then = self.samples()
        states = [
            state
            for other in self.servers
            if other is not server and other.beat is not None
            for state in other.beat.lanes
            if state.slot == server.slot
        ]
        if not states:
            self._settle_without_parities(server)
            return
        newest = max(state.incarnation for state in states)
        mine = [state for state in states if state.incarnation == newest]
        cut = min((state.now for state in mine), key=lambda instant: instant.batch)
        if len(mine) < len(states):
            # Some have not even heard that the last one began: nothing of it can have been kept.
            cut = next(state.first for state in mine if state.first.batch == 0)
        self._settle_at(server, cut)

    def _settle_without_parities(self, server: ServerMember) -> None:
        """All rows of a dead server go back to what was saved; workers go on from where all others stand.

        A worker sends a push only when all servers have applied the one before. So what the others have in
        common is that push, which is new to the replacement, or the one before it.
        """
        others = [other.marks for other in self.servers if other is not server and other.marks]
        if not others:
            self._fail(Failure("lost", server.peer, "and all other servers"))
            return
        if not (self.plan.partial or self.plan.beyond == "rows"):
            self._fail(Failure("lost", server.peer, "and all servers that hold its parities"))
            return
        marks = tuple(min(of_one, key=lambda mark: mark.sequence) for of_one in zip(*others, strict=True))
        pushed = any(mark.sequence for mark in marks)  # which takes first values everywhere
        installed = tuple(range(len(self.plan.groups))) if pushed else self.plan.first_installed
        self._settle_at(server, Instant(0, marks, installed))

    def _settle_at(self, server: ServerMember, cut: Instant) -> None:
        self._change_server(server, cut=cut)
        server.stage = "settling"
        server.since_view = self.view.number

    def _note_rollback(self, server: ServerMember, back: Redundancy, now: float) -> None:
        """Say what was lost when rows of a server went back to a version."""
        lost = max(0, server.samples_then - back.version_samples)
        share = back.went_back / max(1, sum(group.rows for group in self.plan.groups[:-1]))
        self._samples_lost += lost * share
        done = self._done()
        pls = done and self._samples_lost * done / self.samples()
        self._say(
            "server_rolled_back", server, version=back.version, rows=back.went_back, what=back.lost,
            samples_lost=lost, pls=pls, after_seconds=_since(server.lost_at, now),
        )  # fmt: skip

    def _done(self) -> float | None:
        """How much of the whole run is done, by what workers say; None: they do not know."""
        steps = self.plan.training.get("max_steps")
        parts = [w.beat.figures.progress for w in self.workers if w.beat is not None]
        done = max(parts, default=0.0)
        return max(done, self.steps() / steps if steps else 0.0) or None

    def _note_recovery(self, server: ServerMember, now: float) -> None:
        beat = server.beat
        if beat is None or not beat.started.epoch:
            return
        redundancy = beat.redundancy
        if (redundancy.wrong, redundancy.repaired) != server.wrong:
            server.wrong = redundancy.wrong, redundancy.repaired
            self._say("parities_wrong", server, wrong=redundancy.wrong, repaired=redundancy.repaired)
        if redundancy.network_lost and not redundancy.lost:
            text = f"took over, but lacks {redundancy.not_installed:,} rows of the network"
            self._fail(Failure("network", server.peer, text))
        elif redundancy.lost and (self.plan.beyond != "rows" or redundancy.network_lost):
            text = f"took over, but could not recover {redundancy.lost}"
            self._fail(Failure("lost", server.peer, text))
        elif redundancy.rows:
            server.recovering = not server.recovered
        elif not server.recovering:
            server.recovered = True
        else:
            server.recovering, server.recovered = False, True
            server.deaths = 0
            seconds = _since(server.lost_at, now)
            if redundancy.version >= 0:
                self._note_rollback(server, redundancy, now)
            if self.plan.partial:
                return
            found = {"compared": redundancy.compared, "unequal": redundancy.unequal}
            said = found if self.plan.compare_recovered else {}
            self._say("server_recovered", server, rows=redundancy.recovered, after_seconds=seconds, **said)
        at_work = [w.beat is not None and w.beat.state == "working" for w in self.workers]
        if self._recoveries.has_resumed(server.slot, server.marks, at_work):
            self._say("training_resumed", server, after_seconds=_since(server.lost_at, now))

    def _note_redundancy(self, now: float) -> None:
        """Say when every server has all rows and parities again."""
        beats = [s.beat for s in self.servers if s.stage == "started" and s.beat is not None]
        lacking = any(beat.redundancy.rows or beat.redundancy.parities for beat in beats)
        sound = all(self._is_sound(s) for s in self.servers)
        if self._recoveries.is_restored(sound=sound, lacking=lacking) and not self.plan.partial:
            seconds = _since(self._recoveries.since, now)
            self.events.append(("redundancy_restored", {"after_seconds": seconds}))

    def _bring_in(self, worker: WorkerMember) -> None:
        """Take a new incarnation of a worker one step further, if all servers are ready for it."""
        ready = all(s.stage == "started" and s.marks and s.follows(worker.since_view) for s in self.servers)
        if worker.stage == "started" or not ready:
            return
        marks = [s.marks[worker.slot] for s in self.servers]
        if worker.stage == "fencing":
            # Nothing that the old incarnation sent can change these marks any more.
            self._change_worker(worker, settle=max(mark.sequence for mark in marks))
            worker.stage = "settling"
        elif all(mark.kept >= mark.sequence for mark in marks):
            # Nobody has its pushes any more: what a server that died had not kept would be lost.
            # With atomic pushes all marks are equal by now. Without, some servers may be one batch ahead: it
            # is computed again, and they recognise its number.
            last = min(marks, key=lambda mark: mark.sequence)
            self._change_worker(worker, starts=True, sequence=last.sequence, batch=last.batch)
            worker.stage = "started"
            self._say("worker_started", worker, sequence=last.sequence)
        else:
            return
        worker.since_view = self.view.number

    def _advance_cut(self) -> None:
        cut = self.cut
        if cut is None:
            return
        if not cut.positions:
            if all(self._holds(worker, cut.view) for worker in self.workers):
                cut.positions = tuple(w.beat.batch for w in self.workers if w.beat is not None)
                self._change(cut=cut.version)
        elif all(s.stage == "started" and s.beat and s.beat.cut >= cut.version for s in self.servers):
            # Nobody has gone on yet, so these beats say what is in the cut.
            cut.steps, cut.samples = self.steps(), self.samples()
            self.cut = None
            self.cuts_made.append(cut)
            if self.view.phase == "holding":
                self._change(phase="running")

    def _holds(self, worker: WorkerMember, since: ViewNumber) -> bool:
        beat = worker.beat
        return (
            worker.stage == "started"
            and beat is not None
            and worker.follows(since)
            and beat.state in ("held", "done")
        )

    def _advance_tests(self, now: float) -> None:
        tester = self.workers[0]
        tested = tester.beat.tested if tester.beat is not None else None
        if tested is not None and self._last_test() < tested.number <= self._test:
            tested = replace(tested, step=self._tested_at)
            self.tests.append(tested)
            self.events.append(("test", asdict(tested)))
        waiting = self._test > self._last_test()
        done = all(
            w.stage == "started" and w.beat is not None and w.beat.state == "done" for w in self.workers
        )
        steps = self.steps()
        if done and not waiting and self.cut is None and all(self._is_whole(s) for s in self.servers):
            if not (self._test > self._tests_before and self._tested_at == steps):
                self._start_test(steps)
            elif self._keeper is None or self._keeper.may_stop(self, now):
                self.finished = True
                self._change(phase="stopping")
        elif not waiting and self._test_every and steps - self._tested_at >= self._test_every:
            self._start_test(steps)

    def _last_test(self) -> int:
        return self.tests[-1].number if self.tests else self._tests_before

    def _start_test(self, steps: int) -> None:
        self._test += 1
        self._tested_at = steps
        self._change_worker(self.workers[0], test=self._test)

    def _look_at(self, member: ServerMember | WorkerMember, beat: Beat, now: float) -> None:
        if beat.state == "failed":
            self._fail(Failure("error", member.peer, beat.error))
        elif isinstance(member, WorkerMember) and beat.stuck_on and member.stage == "started":
            # Both are alive, but cannot talk to each other. A worker can be replaced at no cost.
            if not any(self._makes_wait(self.servers[s]) for s in beat.stuck_on) and all(
                beat.view >= self.view.servers[s].since for s in beat.stuck_on
            ):
                self._lose(member, f"cannot reach server {beat.stuck_on[0]}", now)
        elif member.role == "server" and beat.stuck_on and all(self._is_sound(s) for s in self.servers):
            # Two servers cannot talk to each other: one is replaced, while all others have their rows.
            other = self.servers[beat.stuck_on[0]]
            self._lose(other, f"cannot be reached by server {member.slot}", now)

    def _note_exit(self, exited: Exit, now: float) -> None:
        member = self._member(exited.peer)
        if member is None or exited.peer.incarnation != member.incarnation or self.view.phase == "stopping":
            return
        how = f"was killed by signal {-exited.code}" if exited.code < 0 else f"ended with code {exited.code}"
        self._lose(member, how, now)

    def _lose(self, member: ServerMember | WorkerMember, how: str, now: float) -> None:
        """A node no longer counts: it is replaced, or the job ends."""
        if self.view.phase == "stopping":
            return
        covered = (self.plan.r and self.plan.dense != "none") or self.plan.partial
        protected = bool(covered and self._durable.began)
        partial = {"partial": True} if self.plan.partial else {}
        protects = {"protected": protected, **partial} if member.role == "server" else {}
        self._say(f"{member.role}_lost", member, reason=how, step=self.steps(), **protects)
        if isinstance(member, ServerMember) and not protected:
            self._fail(Failure("server", member.peer, how))
            return
        if isinstance(member, ServerMember) and self.plan.partial == "full":
            self._fail(Failure("lost", member.peer, how))
            return
        if isinstance(member, WorkerMember):
            sequence = self._sequence(member)
            member.deaths = 0 if sequence != member.died_at else member.deaths
            member.died_at = sequence
        member.deaths += 1
        if member.deaths > self.plan.most_deaths:
            self._fail(Failure("worker" if member.role == "worker" else "server", member.peer, how))
            return
        member.incarnation += 1
        member.since, member.heard, member.beat = now, None, None
        workers = tuple(m.incarnation for m in self.workers)
        servers = tuple(m.incarnation for m in self.servers)
        self._durable = replace(
            self._durable, epoch=self._durable.epoch + 1, workers=workers, servers=servers
        )
        self._storage.save(self._durable)  # before anybody hears of this incarnation
        if isinstance(member, ServerMember):
            member.lost_at = now
            member.recovering = member.recovered = False
            self._recoveries.lose(member.slot, now)
            entry = ServerInView(member.slot, member.incarnation)
            self._change(servers=_with(self.view.servers, entry))
            self._give_up_cut()
        else:
            old = self.view.workers[member.slot]
            fresh = WorkerInView(member.slot, member.incarnation, test=old.test)
            self._change(workers=_with(self.view.workers, fresh))
        member.stage = "fencing"
        member.since_view = self.view.number

    def _give_up_cut(self) -> None:
        """A cut that not all servers have copied comes to nothing."""
        if self.cut is not None:
            self.cut = None
            if self.view.phase == "holding":
                self._change(phase="running")

    def _fail(self, failure: Failure) -> None:
        if self.failure is None and self.view.phase != "stopping":
            self.failure = failure
            self._change(phase="stopping")

    def _sequence(self, worker: WorkerMember) -> int:
        """The last batch that all servers have applied."""
        marks = [s.marks[worker.slot].sequence for s in self.servers if s.marks]
        said = worker.beat.sequence if worker.beat is not None else 0  # often before servers say it
        # A server that was replaced may say less: what it lacks is being pushed again.
        self._steps[worker.slot] = max(min(marks, default=0), said, self._steps[worker.slot])
        return self._steps[worker.slot]

    def _member(self, peer: Peer) -> ServerMember | WorkerMember | None:
        slots: dict[str, list[Any]] = {"server": self.servers, "worker": self.workers}
        members = slots.get(peer.role, [])
        return members[peer.slot] if 0 <= peer.slot < len(members) else None

    def _change_server(self, server: ServerMember, **changes: Any) -> None:
        changed = replace(self.view.servers[server.slot], **changes)
        self._change(servers=_with(self.view.servers, changed))

    def _change_worker(self, worker: WorkerMember, **changes: Any) -> None:
        changed = replace(self.view.workers[worker.slot], **changes)
        self._change(workers=_with(self.view.workers, changed))

    def _change(self, **changes: Any) -> None:
        """A new view, sent to everybody who is known to listen."""
        self.view = replace(self.view, number=self._next_number(), **changes)
        for member in [*self.servers, *self.workers]:
            if member.beat is not None:
                self._send(member.peer, self.view)
        self._send(Peer("launcher"), self.view)

    def _next_number(self) -> ViewNumber:
        old = self.view.number
        return ViewNumber(self._durable.epoch, old.revision + 1 if old.epoch == self._durable.epoch else 0)

    def _send(self, target: Peer, message: Message) -> None:
        self.outbox.append(Envelope(self.me, target, message))

    def _say(self, event: str, member: Member, **figures: Any) -> None:
        figures = {"slot": member.slot, "incarnation": member.incarnation, **figures}
        self.events.append((event, figures))


def _since(before: float | None, now: float) -> float | None:
    return None if before is None else round(now - before, 3)


def _is_ready(server: Member) -> bool:
    return server.beat is not None and server.beat.state != "restoring"


def _with(entries: tuple[_Entry, ...], changed: _Entry) -> tuple[_Entry, ...]:
    return tuple(changed if entry.slot == changed.slot else entry for entry in entries)
