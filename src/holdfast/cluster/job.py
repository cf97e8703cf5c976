"""A job as whoever started it sees it: processes, the supervisor's reports, a result.

``Runner.run`` is the main path. The process that calls it starts all others, starts those again that the
supervisor asks for, and ends them; it decides nothing.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.cluster.keys import Keys, load_keys
from holdfast.cluster.launch.base import Engine
from holdfast.cluster.loop import flush
from holdfast.cluster.membership import Durable
from holdfast.cluster.messages import Beat, Evaluation, Exit, Peer, Role, Status, View, ViewNumber
from holdfast.cluster.node import Assignment
from holdfast.cluster.plan import JobPlan
from holdfast.cluster.supervisor import STATE_FILE
from holdfast.cluster.transport.base import Envelope
from holdfast.cluster.transport.zmq import ZmqTransport
from holdfast.errors import ConfigError, JobFailed, ServerLost, WorkerFailed
from holdfast.events import EventLog

_POLL_SECONDS = 0.05
_START_SECONDS = 60.0
_MOST_SUPERVISORS = 10


@dataclass(frozen=True, slots=True)
class Kill:
    """A process that is killed when the job has done so many steps: ``server:2@step:300``."""

    role: Role
    slot: int
    step: int

    @classmethod
    def parse(cls, text: str) -> Kill:
        """Read one; ConfigError if it is none."""
        who, _, when = text.partition("@")
        role, _, slot = who.partition(":")
        what, _, step = when.partition(":")
        if role not in ("server", "worker") or what != "step" or not (slot.isdecimal() and step.isdecimal()):
            raise ConfigError(f"kill {text!r}: expected ROLE:SLOT@step:N, such as server:2@step:300")
        return cls("server" if role == "server" else "worker", int(slot), int(step))


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a job ends with."""

    steps: int
    samples: int
    seconds: float
    """From the first step to the last, tests included."""
    samples_per_second: float
    test: Evaluation
    """The last one."""
    tests: tuple[Evaluation, ...]
    workers_replaced: int
    folder: Path
    interrupted: bool
    versions: tuple[int, ...] = ()
    """Checkpoints that were saved."""
    save_errors: tuple[str, ...] = ()
    """Why others could not be: the job went on without them."""

    @property
    def auc(self) -> float:
        """On the test part, at the end."""
        return self.test.auc


class Launcher:
    """The machine that starts what views ask for and says what has ended."""

    def __init__(
        self, engine: Engine, template: Assignment, faults: Mapping[int, tuple[str, ...]] | None = None
    ) -> None:
        self.me = Peer("launcher")
        self.outbox: list[Envelope] = []
        self.view = View(ViewNumber(), "starting")
        self.status: Status | None = None
        self.exited: list[Exit] = []
        self.stopping = False
        """Whether the job is to end before its time."""
        self.holding = False
        """Whether workers are to wait between two batches."""
        self._faults = faults or {}
        self._engine = engine
        self._template = template
        self._current: dict[tuple[str, int], Peer] = {}
        self._supervisors = 0

    def receive(self, envelope: Envelope, now: float) -> None:
        """Take a view or a report."""
        message = envelope.message
        if isinstance(message, Status):
            self.status = message
        elif isinstance(message, View) and message.number > self.view.number:
            self.view = message
            for worker in message.workers:
                self.start(Peer("worker", worker.slot, worker.incarnation))
            for server in message.servers:
                self.start(Peer("server", server.slot, server.incarnation))

    def tick(self, now: float) -> None:
        """Say what has ended, again and again, and start the supervisor again if it is among it."""
        for peer, code in self._engine.exited():
            if peer.role == "supervisor" and self.view.phase != "stopping":
                self._supervisors += 1
                if self._supervisors > _MOST_SUPERVISORS:
                    raise JobFailed(f"the supervisor ended {self._supervisors} times: see its logs")
                self._engine.start(self._assignment(peer))
            elif self._current.get((peer.role, peer.slot)) == peer:
                self.exited.append(Exit(peer, code))
        state: Literal["done", "held", "ready"] = (
            "done" if self.stopping else "held" if self.holding else "ready"
        )
        beat = Beat(state, self.view.number, exited=tuple(self.exited))
        self.outbox.append(Envelope(self.me, Peer("supervisor"), beat))

    def start(self, peer: Peer) -> None:
        """Fill a slot, if no process of this incarnation does; an older one is no longer wanted."""
        key = peer.role, peer.slot
        old = self._current.get(key)
        if self.view.phase == "stopping" or (old is not None and old.incarnation >= peer.incarnation):
            return
        if old is not None:
            self._engine.signal(old, signal.SIGKILL)
            self.exited = [e for e in self.exited if e.peer != old]
        self._current[key] = peer
        self._engine.start(self._assignment(peer))
        if old is not None:
            self._engine.warm(peer.role)

    def kill(self, role: Role, slot: int) -> None:
        """kill -9 whoever fills a slot."""
        peer = self._current.get((role, slot))
        if peer is not None:
            self._engine.signal(peer, signal.SIGKILL)

    def _assignment(self, peer: Peer) -> Assignment:
        faults = self._faults.get(peer.slot, ()) if peer.role == "worker" and peer.incarnation == 1 else ()
        return msgspec.structs.replace(self._template, me=peer, faults=faults)


@dataclass
class Runner:
    """Runs one job from start to end.

    Args:
        plan: the job's.
        engine: where its processes run.
        folder: the run's.
        events: the run's log.
        bind: the address that processes listen on.
        keys: the folder of keys, "" for none.
        kills: processes to kill on the way.
        faults: for workers, by slot: where to end them by force (see ``faults``).
    """

    plan: JobPlan
    engine: Engine
    folder: Path
    events: EventLog
    bind: str = "tcp://127.0.0.1"
    keys: str = ""
    kills: Sequence[Kill] = ()
    faults: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def run(
        self,
        on_status: Callable[[Status], None] = lambda status: None,
        stop_requested: Callable[[], bool] = lambda: False,
        hold_requested: Callable[[], bool] = lambda: False,
    ) -> JobResult:
        """Run the job; while ``hold_requested`` says so, workers wait between two batches.

        Raises JobFailed or what is under it when it cannot go on; no process is left
        behind."""
        try:
            return self._run(on_status, stop_requested, hold_requested)
        finally:
            self.engine.close()

    def _run(
        self,
        on_status: Callable[[Status], None],
        stop_requested: Callable[[], bool],
        hold_requested: Callable[[], bool],
    ) -> JobResult:
        template = Assignment(
            me=Peer("supervisor"),
            plan=self.plan,
            supervisor="",
            folder=str(self.folder),
            bind=self.bind,
            keys=self.keys,
        )
        self.engine.start(template)
        endpoint = self._wait_for_supervisor()
        template = msgspec.structs.replace(template, supervisor=endpoint)
        launcher = Launcher(self.engine, template, self.faults)
        with ZmqTransport(launcher.me, self.plan.job, None, _keys(self.keys)) as transport:
            transport.connect("supervisor", 0, endpoint)
            for slot in range(self.plan.servers):
                launcher.start(Peer("server", slot, 1))
            for slot in range(self.plan.workers):
                launcher.start(Peer("worker", slot, 1))
            return self._watch(launcher, transport, on_status, stop_requested, hold_requested)

    def _wait_for_supervisor(self) -> str:
        """Where the supervisor listens: it says so in its file."""
        path = self.folder / STATE_FILE
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if path.exists():
                return msgspec.json.decode(path.read_bytes(), type=Durable).endpoint
            for peer, code in self.engine.exited():
                raise JobFailed(
                    f"the {peer} ended with code {code} as it started: see its log in {self.folder}"
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
        clock = _Clock(self.plan.resume.samples if self.plan.resume else 0)
        kills = list(self.kills)
        seen: Status | None = None
        while True:
            launcher.stopping = launcher.stopping or stop_requested()
            launcher.holding = hold_requested()
            launcher.tick(time.monotonic())
            flush(launcher, transport)
            for envelope in transport.poll(_POLL_SECONDS):
                launcher.receive(envelope, time.monotonic())
            status = launcher.status
            if status is None or status is seen:
                continue
            seen = status
            clock.note(status)
            on_status(status)
            for kill in [k for k in kills if status.steps >= k.step]:
                kills.remove(kill)
                self.events.emit("killed", role=kill.role, slot=kill.slot, step=status.steps)
                launcher.kill(kill.role, kill.slot)
            if status.failure is not None:
                raise self._error(status)
            if status.finished:
                return self._result(status, clock, launcher)

    def _result(self, status: Status, clock: _Clock, launcher: Launcher) -> JobResult:
        seconds = clock.seconds()
        return JobResult(
            steps=status.steps,
            samples=status.samples,
            seconds=seconds,
            samples_per_second=clock.samples() / seconds if seconds else 0.0,
            test=status.tests[-1],
            tests=status.tests,
            workers_replaced=status.replaced,
            folder=self.folder,
            interrupted=launcher.stopping,
            versions=status.versions,
            save_errors=status.save_errors,
        )

    def _error(self, status: Status) -> JobFailed:
        assert status.failure is not None
        kind, peer, text = status.failure
        logs = self.folder / "logs"
        if kind == "server":
            rows = sum(n.figures.rows for n in status.nodes if n.peer == peer)
            return ServerLost(
                f"{peer} {text} after {status.steps:,} steps: the {rows:,} rows that it held are lost, and "
                f"nothing protects them; {self._way_out(status)} (logs: {logs})"
            )
        if kind == "worker":
            return WorkerFailed(
                f"{peer} {text}, for the {self.plan.most_deaths + 1}th time at the same batch: no other "
                f"process will get further; its log in {logs} says more"
            )
        kind_of_error = WorkerFailed if peer.role == "worker" else JobFailed
        return kind_of_error(f"{peer} failed: {text} (its log is in {logs})")

    def _way_out(self, status: Status) -> str:
        """What to do about a server that is lost."""
        if self.plan.saving is None:
            return "give the job a checkpoint to start again from, or protection that survives a server"
        if not status.versions and self.plan.resume is None:
            return "no version had been saved: start the job again, and save more often"
        version = status.versions[-1] if status.versions else self.plan.resume and self.plan.resume.version
        return f"start the job again: it goes on from version {version} in {self.plan.saving.config.path}"


class _Clock:
    """The time between the first sign of training and the last; before it there were so many samples."""

    def __init__(self, before: int) -> None:
        self._before = before
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None

    def note(self, status: Status) -> None:
        if status.samples > self._before and (self._last is None or status.samples != self._last[1]):
            self._last = time.monotonic(), status.samples
            self._first = self._first or self._last

    def seconds(self) -> float:
        return self._last[0] - self._first[0] if self._first and self._last else 0.0

    def samples(self) -> int:
        """Of the time between."""
        return self._last[1] - self._first[1] if self._first and self._last else 0


def _keys(folder: str) -> Keys | None:
    return load_keys(Path(folder)) if folder else None
