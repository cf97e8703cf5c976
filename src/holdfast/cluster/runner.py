"""The launcher: start the processes of a job, follow the supervisor's reports, build the result.

``Runner.run`` is the main path. The process that calls it starts all others, restarts those that the
supervisor asks for, and ends them. It makes no decisions.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from holdfast.cluster.protocol.admission import Admission
from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import (
    Board,
    Exit,
    Happening,
    LauncherBeat,
    Peer,
    Role,
    Status,
    View,
)
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.report.failures import Failures, SpeedMeter, lost_rows_path
from holdfast.cluster.report.result import JobResult, SaveLedger, count, in_short
from holdfast.cluster.runtime.engines.base import Engine
from holdfast.cluster.runtime.engines.draining import Evacuation
from holdfast.cluster.runtime.keys import JobKeys, KeyPair
from holdfast.cluster.runtime.loop import send_outbox
from holdfast.cluster.runtime.node import Assignment
from holdfast.cluster.runtime.transport.address import LOCAL, host_of
from holdfast.cluster.runtime.transport.private import private_folder
from holdfast.cluster.runtime.transport.zmq import ZmqTransport
from holdfast.cluster.succession import Charter, Past, encode_charter
from holdfast.cluster.supervisor.process import STATE_FILE
from holdfast.cluster.supervisor.starts import Starts
from holdfast.cluster.supervisor.views import Durable
from holdfast.cluster.supervisor.watch import SupervisorWatch
from holdfast.errors import DataLoss, JobFailed, ServerLost, WorkerFailed
from holdfast.events import EventLog
from holdfast.options import Kill

_POLL_SECONDS = 0.05
_START_SECONDS = 60.0
_MOST_SUPERVISORS = 10
_LAST_WORDS_SECONDS = 2.0
_FAILED_SECONDS = 0.5
_CALM_SECONDS = 3.0
"""A server is moved only after so long in which nothing was lacking."""
_SPARE_AFTER_SECONDS = 5.0
"""Before that, starting processes need the processors, and a short job would be over."""


class Launcher:
    """The state machine that starts the processes that views ask for, and reports those that have ended."""

    def __init__(
        self,
        engine: Engine,
        template: Assignment,
        faults: Mapping[int, Sequence[str]] | None = None,
        keys: JobKeys | None = None,
        starts: Starts | None = None,
    ) -> None:
        self.me = Peer("launcher", 0, engine.launcher)
        self.admission = Admission(self.me, template.plan)
        self.outbox: list[Envelope] = []
        self.template = template
        """What all assignments have in common."""
        self.status: Status | None = None
        self.exited: list[Exit] = []
        self.stopping = False
        """Whether to end the job early."""
        self.started: list[Peer] = []
        """Processes started since the caller last cleared this list."""
        self.holding = False
        """Whether workers should wait between two batches."""
        self.awaits_supervisor = False
        """Whether a supervisor was restarted, and its address may have changed."""
        self._faults = faults or {}
        self._engine = engine
        self._keys = keys
        self._starts = starts or Starts(engine.launcher)
        self._takes_stock = self._starts.takes_over
        """Whether it is not known yet what of the processes of its predecessor runs."""
        self.silences: list[float] = []
        """Seconds of silence of each supervisor killed for it, since the caller last cleared this list."""
        self._watch = SupervisorWatch(template.plan.timing)
        self._supervisors = 0
        self._left_at: float | None = None  # when the supervisor ended, with the job
        self._died_at = 0
        self._spares_at: dict[Role, float] | None = None
        self._now = 0.0

    def receive(self, envelope: Envelope, now: float) -> None:
        """Process a view or a status report."""
        message = envelope.message
        if not self.admission.admits(envelope):
            return
        self._watch.hear(now)
        self.awaits_supervisor = False
        if isinstance(message, Status):
            self.status = message
        elif isinstance(message, View):
            for peer in self._starts.take(message):
                self.start(peer)

    @property
    def view(self) -> View:
        """The newest view that is for this launcher."""
        return self._starts.view

    def _keep_spares(self) -> None:
        """Keep one spare process per role, with its imports done, for the next replacement."""
        if self._spares_at is None:
            if self.view.phase != "running":
                return
            at = self._now + _SPARE_AFTER_SECONDS
            self._spares_at = {"server": at, "worker": at}
        for role in [role for role, at in self._spares_at.items() if self._now >= at]:
            del self._spares_at[role]
            self._engine.warm(role)

    def tick(self, now: float) -> None:
        """Report ended processes (repeatedly, as messages may be lost), and restart a dead supervisor."""
        self._now = now
        if self._starts.superseded:
            self._engine.exited()  # it raises an error when the engine knows of the other one, too
            return
        self._keep_spares()
        self._watch_supervisor(now)
        for ended in self._engine.exited():
            peer = ended.peer
            if peer.role == "supervisor" and self.view.phase != "stopping":
                steps = self.status.steps if self.status is not None else 0
                self._supervisors = self._supervisors + 1 if steps == self._died_at else 1
                self._died_at = steps
                if self._supervisors > _MOST_SUPERVISORS:
                    raise JobFailed(
                        f"the supervisor ended {self._supervisors} times without completing a batch: see its "
                        "logs"
                    )
                self._start_supervisor(now)
            elif peer.role == "supervisor":
                self._left_at = now
            elif self._starts.running.get((peer.role, peer.slot)) == peer:
                self.exited.append(ended)
        if self._takes_stock:
            self._take_stock(now)
        told = self.status is not None and (self.status.finished or self.status.failure is not None)
        if self._left_at is not None and not told and now > self._left_at + _LAST_WORDS_SECONDS:
            raise JobFailed(
                "the supervisor died while the job was ending, before it could report the result: see its "
                "logs; if the job saves checkpoints, start it again to resume from the last one"
            )
        state: Literal["done", "held", "ready"] = (
            "done" if self.stopping else "held" if self.holding else "ready"
        )
        beat = LauncherBeat(state, self.view.number, exited=tuple(self.exited))
        self.outbox.append(Envelope(self.me, Peer("supervisor"), beat))

    def _watch_supervisor(self, now: float) -> None:
        """Kill a supervisor that has been silent for too long, for example suspended (SIGSTOP). It is then
        restarted like one that ended by itself."""
        silent = self._watch.silence(now) if self._left_at is None else 0.0
        if silent:
            self.silences.append(silent)
            self._engine.signal(self.template.me, signal.SIGKILL)
            self._watch.start(now)

    def _start_supervisor(self, now: float) -> None:
        peer = self.template.me
        self._engine.start(self._assignment(peer))
        self._watch.start(now)
        self.awaits_supervisor = bool(self.template.vaults)
        self.started.append(peer)

    def _take_stock(self, now: float) -> None:
        """After it has taken over: see what of its predecessor's processes there is. Report those that the
        view has, and that do not run; without a supervisor there is no view, so start one."""
        runs = self._engine.processes()
        if runs is None:
            return
        if self.template.me not in runs:
            self._start_supervisor(now)
        elif not self._starts.takes_over:
            self._takes_stock = False
            missing = [peer for peer in self._starts.running.values() if peer not in runs]
            self.exited += [Exit(peer, 1, "was lost with the controller") for peer in missing]

    def start(self, peer: Peer) -> None:
        """Start this incarnation unless it, or a newer one, already runs; kill an older one."""
        key = peer.role, peer.slot
        old = self._starts.running.get(key)
        if self.view.phase == "stopping" or not self._starts.is_new(peer):
            return
        if old is not None:
            self._engine.signal(old, signal.SIGKILL)
            self.exited = [e for e in self.exited if e.peer != old]
        self._starts.running[key] = peer
        self._engine.start(self._assignment(peer))
        self.started.append(peer)
        if old is not None and self._spares_at is not None:
            self._spares_at.setdefault(peer.role, self._now + _SPARE_AFTER_SECONDS)

    def processes(self) -> list[Peer]:
        """The servers and workers that were started last."""
        return list(self._starts.running.values())

    def follow(self, supervisor: str) -> None:
        """Note where the restarted supervisor listens, and tell all processes."""
        if supervisor != self.template.supervisor:
            self.template = msgspec.structs.replace(self.template, supervisor=supervisor)
            self._engine.announce(supervisor)

    def note_vaults(self, vaults: Board) -> bool:
        """Note where the supervisor's state lies; whether that is elsewhere than before."""
        if not vaults or set(vaults) == set(self.template.vaults):
            return False
        self.template = msgspec.structs.replace(self.template, vaults=vaults)
        return True

    def kill(self, role: Role, slot: int) -> None:
        """Send SIGKILL to the process in a slot."""
        peer = self.template.me if role == "supervisor" else self._starts.running.get((role, slot))
        if peer is not None:
            self._engine.signal(peer, signal.SIGKILL)

    @property
    def key_pairs(self) -> tuple[KeyPair, ...]:
        """The keys of all nodes; none where the kernel protects their sockets."""
        return self._keys.pairs if self._keys is not None else ()

    def _assignment(self, peer: Peer) -> Assignment:
        planned = self._faults.get(peer.slot, ()) if peer.role == "worker" else ()
        mine = tuple(planned[peer.incarnation - 1 : peer.incarnation])
        keys = self._keys.of(peer) if self._keys is not None else None
        return msgspec.structs.replace(self.template, me=peer, faults=mine, keys=keys)


@dataclass
class Runner:
    """Runs one job from start to end.

    Args:
        plan: the job's plan.
        engine: starts and kills the processes.
        folder: the run's folder.
        events: the run log.
        bind: where processes listen: "ipc" for Unix sockets in a private folder, or a TCP address without a
            port; over TCP, messages are encrypted with keys made for this run.
        kills: processes to kill during the run.
        faults: for workers, by slot: where each incarnation is killed (see ``worker.faults``).
        chaos: the folder that controls broken links (see ``transport.links``), "" for none.
        charter: what the launcher has left from which this one takes over; None: it starts the job.
    """

    plan: JobPlan
    engine: Engine
    folder: Path
    events: EventLog
    bind: str = LOCAL
    kills: Sequence[Kill] = ()
    faults: dict[int, Sequence[str]] = field(default_factory=dict)
    chaos: str = ""
    charter: Charter | None = None
    past: Past = field(default_factory=Past)
    """What happened under earlier launchers."""
    kills_left: tuple[Kill, ...] = field(default=(), init=False)
    """Those of ``kills`` that were not due when the job ended."""
    happened: list[Happening] = field(default_factory=list)
    """Events that this process itself has recorded."""
    failures: Failures = field(default_factory=Failures)
    """Servers that died, including in the runs that this one resumes."""
    saves: SaveLedger = field(default_factory=SaveLedger)
    """Checkpoints that could not be saved, including in the runs that this one resumes."""
    _is_spread: bool | None = None
    _calm_since: float = 0.0
    _state: bytes = b""
    """The supervisor's state file, as it was read last."""
    _chartered: Assignment | None = None
    """The template of which the engine keeps the charter."""

    def __post_init__(self) -> None:
        self._evacuation = Evacuation(self.plan.placement, self.say)

    def run(
        self,
        on_status: Callable[[Status], None] = lambda status: None,
        stop_requested: Callable[[], bool] = lambda: False,
        hold_requested: Callable[[], bool] = lambda: False,
    ) -> JobResult:
        """Run the job. While ``hold_requested`` returns True, workers wait between two batches.

        Raises JobFailed or a subclass of it when the job cannot continue; no process is left behind.
        """
        with private_folder() if self.bind == LOCAL else contextlib.nullcontext() as folder:
            try:
                bind = self.bind if folder is None else f"ipc://{folder}"
                result = self._run(bind, on_status, stop_requested, hold_requested)
            except BaseException:
                self.engine.close(_FAILED_SECONDS)
                raise
            self.engine.close()
            return result

    def _run(
        self,
        bind: str,
        on_status: Callable[[Status], None],
        stop_requested: Callable[[], bool],
        hold_requested: Callable[[], bool],
    ) -> JobResult:
        if self.charter is not None:
            return self._take_over(self.charter, on_status, stop_requested, hold_requested)
        most = self.engine.most_vaults
        keys = JobKeys(self.plan.servers, self.plan.workers, most) if self.bind != LOCAL else None
        of_vaults = [keys.of(Peer("vault", slot)) for slot in range(most)] if keys is not None else []
        template = Assignment(
            vaults=self.engine.open_vaults(self.plan.job, of_vaults),
            me=Peer("supervisor"),
            plan=self.plan,
            supervisor="",
            folder=str(self.folder),
            bind=bind,
            keys=keys.of(Peer("supervisor")) if keys is not None else None,
            chaos=self.chaos,
        )
        (self.folder / STATE_FILE).unlink(missing_ok=True)  # left by an earlier job
        self.engine.start(template)
        endpoint = self._wait_for_supervisor()
        template = msgspec.structs.replace(template, supervisor=endpoint)
        launcher = Launcher(self.engine, template, self.faults, keys)
        mine = keys.of(launcher.me) if keys is not None else None
        with ZmqTransport(launcher.me, self.plan.job, None, mine) as transport:
            transport.connect("supervisor", 0, endpoint)
            for slot in range(self.plan.servers):
                launcher.start(Peer("server", slot, 1))
            for slot in range(self.plan.workers):
                launcher.start(Peer("worker", slot, 1))
            launcher.started.clear()
            pids = self.engine.pids()
            started = [template.me, *launcher.processes()]
            self.say("job_started", processes=[self._process(peer, pids.get(peer, 0)) for peer in started])
            if self.plan.partial:
                self.say("recovery_chosen", recovery=self.plan.partial, reason=self.plan.partial_reason)
            return self._watch(launcher, transport, on_status, stop_requested, hold_requested)

    def _take_over(
        self,
        charter: Charter,
        on_status: Callable[[Status], None],
        stop_requested: Callable[[], bool],
        hold_requested: Callable[[], bool],
    ) -> JobResult:
        """Go on with a job whose launcher was lost. Its processes run."""
        plan = self.plan
        keys = JobKeys(plan.servers, plan.workers, pairs=charter.keys) if charter.keys else None
        me = Peer("supervisor")
        template = Assignment(
            vaults=charter.vaults,
            me=me,
            plan=plan,
            supervisor=charter.supervisor,
            folder=str(self.folder),
            bind=charter.bind,
            keys=keys.of(me) if keys is not None else None,
            chaos=self.chaos,
        )
        self.failures.note(self.past.happened)
        self._is_spread = self.past.is_spread
        self.say("controller_replaced", machine=self.engine.machine(Peer("launcher")))
        launcher = Launcher(
            self.engine, template, self.faults, keys, Starts(self.engine.launcher, takes_over=True)
        )
        launcher.awaits_supervisor = True
        mine = keys.of(launcher.me) if keys is not None else None
        with ZmqTransport(launcher.me, plan.job, None, mine) as transport:
            transport.connect("supervisor", 0, charter.supervisor)
            return self._watch(launcher, transport, on_status, stop_requested, hold_requested)

    def _keep_charter(self, launcher: Launcher) -> None:
        """Leave to a successor what it must know, once the job runs."""
        template = launcher.template
        if template is not self._chartered and launcher.view.phase == "running":
            self._chartered = template
            pairs = launcher.key_pairs
            charter = Charter(template.plan, template.bind, template.supervisor, template.vaults, pairs)
            self.engine.keep(encode_charter(charter))

    def _wait_for_supervisor(self) -> str:
        """Wait for the supervisor's state file. Returns the endpoint in it."""
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            state = self.engine.read(STATE_FILE)
            if state is not None:
                return msgspec.json.decode(state, type=Durable).endpoint
            for ended in self.engine.exited():
                raise JobFailed(
                    f"the {ended.peer} ended with code {ended.code} during startup: see its log in "
                    f"{self.folder}"
                )
            time.sleep(0.005)
        raise JobFailed(f"the supervisor did not start within {_START_SECONDS:.0f} s")

    def _watch(
        self,
        launcher: Launcher,
        transport: ZmqTransport,
        on_status: Callable[[Status], None],
        stop_requested: Callable[[], bool],
        hold_requested: Callable[[], bool],
    ) -> JobResult:
        before = self.plan.resume.samples if self.plan.resume else 0
        clock, speeds = TrainingClock(before, began=self.past.began), SpeedMeter(before)
        kills = list(self.kills)
        self.kills_left = tuple(kills)
        seen: Status | None = None
        finished_at = None
        while True:
            launcher.stopping = launcher.stopping or stop_requested()
            launcher.holding = hold_requested()
            self._pass_time(launcher, transport)
            status = launcher.status
            if status is not None and status is not seen:
                seen = status
                self._mend(status, launcher)
                clock.note(status)
                self.failures.note(self.past.without(status.happened))
                self.saves.note(status)
                speeds.note(status.samples, degraded=status.degraded and bool(self.failures()))
                on_status(self._with_what_it_knows(status))
                self._kill(kills, status, launcher)
                if status.failure is not None:
                    raise self._error(status)
            if seen is not None and seen.finished:
                finished_at = finished_at or time.monotonic()
                records = _records(seen, self.plan.servers)
                if records or time.monotonic() > finished_at + _LAST_WORDS_SECONDS:
                    result = self._result(seen, clock, launcher.stopping, tuple(kills), records)
                    return replace(result, speeds=speeds() if self.failures() else None)

    def _pass_time(self, launcher: Launcher, transport: ZmqTransport) -> None:
        launcher.tick(time.monotonic())
        self._keep_charter(launcher)
        self._find_supervisor(launcher, transport)
        send_outbox(launcher, transport)
        for envelope in transport.poll(_POLL_SECONDS):
            launcher.receive(envelope, time.monotonic())
        pids = self.engine.pids() if launcher.started else {}
        for peer in launcher.started:
            self.say("process_started", **self._process(peer, pids.get(peer, 0)))
        launcher.started.clear()
        for seconds in launcher.silences:
            self.say("supervisor_lost", reason=f"sent no report for {seconds:.1f} s")
        launcher.silences.clear()

    def _find_supervisor(self, launcher: Launcher, transport: ZmqTransport) -> None:
        """After a supervisor was restarted on another machine, tell everybody where it is. Note where its
        state lies, for the next one."""
        state = self.engine.read(STATE_FILE) if self.engine.most_vaults else None
        if state is None or (state == self._state and not launcher.awaits_supervisor):
            return
        self._state = state
        known = msgspec.json.decode(state, type=Durable)
        if launcher.note_vaults(known.vaults):
            machines = [host_of(vault.endpoint) for vault in known.vaults]
            self.say("vaults_changed", machines=machines)
        if launcher.awaits_supervisor:
            transport.connect("supervisor", 0, known.endpoint)
            launcher.follow(known.endpoint)

    def _mend(self, status: Status, launcher: Launcher) -> None:
        """Say whether the code covers the loss of a machine. After a loss, when there are machines enough
        again, move one server after the other, each time that all rows and parities are there."""
        is_spread = self.engine.is_spread()
        if is_spread is not None and is_spread != self._is_spread:
            if self._is_spread is not None:
                self.say("spread_restored" if is_spread else "spread_lost")
            self._is_spread = is_spread
        now = time.monotonic()
        for peer in self._evacuation.next(self.engine.draining(), status, now):
            launcher.kill(peer.role, peer.slot)
            self._calm_since = now
        if status.degraded or status.phase != "running" or is_spread is not False:
            self._calm_since = now
        elif now > self._calm_since + _CALM_SECONDS:
            self._calm_since = now  # with many servers, looking for a move takes a while
            server = self.engine.misplaced()
            if server is not None:
                machine = self.engine.machine(server)
                self.say("server_moved", slot=server.slot, machine=machine, step=status.steps)
                self._evacuation.wait_for(server, now)
                launcher.kill("server", server.slot)

    def _kill(self, kills: list[Kill], status: Status, launcher: Launcher) -> None:
        """Execute the kills that are due, and remove them from the list."""
        for kill in [k for k in kills if status.steps >= k.step and not status.finished]:
            kills.remove(kill)
            self.kills_left = tuple(kills)
            self.say("killed", role=kill.role, slot=kill.slot, step=status.steps)
            launcher.kill(kill.role, kill.slot)

    def _process(self, peer: Peer, pid: int) -> dict[str, Any]:
        machine = self.engine.machine(peer)
        of_many = {"machine": machine} if machine else {}
        return {"role": peer.role, "slot": peer.slot, "incarnation": peer.incarnation, "pid": pid, **of_many}

    def say(self, event: str, **figures: Any) -> None:
        """Log an event, and add it to the status that observers see."""
        self.events.emit(event, **figures)
        self.happened.append(Happening(time.time(), event, figures))

    def _with_what_it_knows(self, status: Status) -> Status:
        """A report with this process's own events, and with the machines of nodes."""
        happened = sorted([*status.happened, *self.happened], key=lambda happening: happening.at)
        nodes = [msgspec.structs.replace(n, machine=self.engine.machine(n.peer)) for n in status.nodes]
        return msgspec.structs.replace(status, happened=tuple(happened), nodes=tuple(nodes))

    def _result(
        self, status: Status, clock: TrainingClock, interrupted: bool, kills: tuple[Kill, ...], records: str
    ) -> JobResult:
        seconds = clock.seconds()
        return JobResult(
            steps=status.steps,
            samples=status.samples,
            train_seconds=seconds,
            samples_per_second=clock.samples() / seconds if seconds else 0.0,
            test=status.tests[-1],
            tests=status.tests,
            workers_replaced=status.replaced,
            bad_lines=sum(node.figures.bad_lines for node in status.nodes),
            kills_missed=kills,
            records=records,
            folder=self.folder,
            interrupted=interrupted,
            versions=status.versions,
            save_failures=self.saves(),
            unsaved=self.saves.unsaved,
            last_checkpoint=status.last_version or None,
            unsaved_steps=status.steps - status.saved_steps,
            failures=self.failures(),
            pls=sum(failure.samples_lost * failure.went_back for failure in self.failures())
            / max(1, status.samples * sum(group.rows for group in self.plan.groups[:-1])),
            parities_checked=sum(node.redundancy.scrubbed for node in status.nodes),
            parities_wrong=sum(node.redundancy.wrong for node in status.nodes),
            messages_dropped=sum(node.figures.dropped for node in status.nodes),
        )

    def _error(self, status: Status) -> JobFailed:
        assert status.failure is not None
        kind, peer, text = status.failure
        logs = self.folder / "logs"
        if kind == "server":
            rows = sum(n.figures.rows for n in status.nodes if n.peer == peer)
            held = f"the {rows:,} rows that it held" if rows else "its rows"
            return ServerLost(
                f"{peer} {text} after {status.steps:,} steps: {held} are lost, and the job cannot continue "
                f"without them; {self._cure(status)} (logs: {logs})"
            )
        if kind in ("lost", "network", "stalled"):
            why = f"more servers have died than a code of {self.plan.k} + {self.plan.r} covers"
            if self.plan.partial:
                why = self.plan.partial_reason if self.plan.partial == "full" else "no server is left"
            if kind == "stalled":
                why = "the job cannot continue with these processes"
            if kind == "network":
                why = "only workers had copies, and no worker that has used one is left"
            lost = lost_rows_path(self.folder, peer, self.plan)
            where = f", lost rows found so far, perhaps not all: {lost}" if lost.exists() else ""
            return DataLoss(
                f"{peer} {text} after {status.steps:,} steps: {why}; {self._cure(status, by_itself=True)} "
                f"(logs: {logs}{where})"
            )
        if kind == "worker":
            return WorkerFailed(
                f"{peer} {text}, for the {self.plan.most_deaths + 1}th time at the same batch: restarting it "
                f"again would not help; see its log in {logs}"
            )
        kind_of_error = WorkerFailed if peer.role == "worker" else JobFailed
        return kind_of_error(f"{peer} failed: {text} (its log is in {logs})")

    def _cure(self, status: Status, *, by_itself: bool = False) -> str:
        """What the user should do about lost rows; ``by_itself``: the job may restart from a checkpoint."""
        version = status.last_version
        if version and by_itself:
            return f"the job restarts from its last checkpoint, version {version}"
        if version:
            return f"start it again to resume from its last checkpoint, version {version}"
        failed = self.saves()
        if failed:
            return (
                f"none of its {count(failed):,} checkpoints could be saved ({in_short(failed)}): fix "
                "that and start it again"
            )
        if self.plan.saving is not None:
            return "it had not saved a checkpoint yet: lower checkpoint.every_steps and start it again"
        return "set checkpoint.path and checkpoint.every_steps, so that it can resume from the last version"


class TrainingClock:
    """Measures training time, from the workers' start to the last batch that counts, and its samples.

    Measuring from the first batch that counts would give a job of a few batches no time at all.

    Args:
        before: samples that counted before this job began.
        clock: returns the time in seconds.
        began: when training began under an earlier launcher, Unix seconds.
    """

    def __init__(
        self, before: int, clock: Callable[[], float] = time.monotonic, began: float | None = None
    ) -> None:
        self._before = self._samples = before
        self._clock = clock
        self._began = self._last = clock()
        self._at_work = began is not None
        if began is not None:
            self._began -= max(0.0, time.time() - began)

    def note(self, status: Status) -> None:
        """Process the next report."""
        now = self._clock()
        counted = status.samples > self._before
        if not self._at_work:
            # A worker at work is reported at once; if no report said so, it began after the previous one.
            self._began = self._last if counted else now
            states = (node.state for node in status.nodes if node.peer.role == "worker")
            self._at_work = counted or "working" in states
        if status.samples != self._samples or not self._at_work:
            self._last, self._samples = now, status.samples

    def seconds(self) -> float:
        """Seconds of training so far."""
        return self._last - self._began if self.samples() else 0.0

    def samples(self) -> int:
        """Samples trained on in that time."""
        return self._samples - self._before


def _records(status: Status, servers: int) -> str:
    """One checksum of all servers' records; "" until every server has reported its own."""
    digests = [n.figures.digest for n in status.nodes if n.peer.role == "server" and n.figures.digest]
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest() * (len(digests) == servers)
