"""The supervisor's process: it runs the state machine, its durable file and the run log."""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import (
    Figures,
    Happening,
    NodeStatus,
    Redundancy,
    ServerBeat,
    Status,
    VaultAt,
)
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.protocol.tenure import Tenure
from holdfast.cluster.runtime.loop import TICK_SECONDS, memory_bytes, open_transport, send_outbox
from holdfast.cluster.runtime.node import Assignment, announced_vaults
from holdfast.cluster.runtime.transport.zmq import ZmqTransport
from holdfast.cluster.supervisor.machine import Supervisor
from holdfast.cluster.supervisor.members import Member
from holdfast.cluster.supervisor.views import Durable
from holdfast.errors import JobFailed
from holdfast.events import EventLog

if TYPE_CHECKING:
    from holdfast.cluster.saving.coordinator import SaveCoordinator

STATE_FILE = "supervisor.json"
_STATUS_SECONDS = 0.25
_FAREWELL_SECONDS = 3.0
_LET_GO_SECONDS = 2.0
_MOST_HAPPENINGS = 16


class FileStorage:
    """The durable state in a file, which is replaced atomically and synced before anybody learns of it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATE_FILE
        self.endpoint = ""

    def load(self) -> Durable | None:
        """Read the last saved state; None if there is none."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Durable)
        except FileNotFoundError:
            return None

    def hold(self) -> None:
        """Nothing: whoever starts a supervisor has ended the one before."""

    def save(self, state: Durable) -> None:
        """Replace the file and sync it and its folder."""
        state = msgspec.structs.replace(state, endpoint=self.endpoint or state.endpoint)
        temporary = self._path.with_suffix(".new")
        with open(temporary, "wb", opener=_open_private) as file:
            file.write(msgspec.json.encode(state))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class VaultStorage:
    """The durable state in the vaults of all machines. Also the supervisor's right to act: see ``vault``.

    The run's folder gets a copy, which is for the launcher: it wants to know the address.
    """

    def __init__(self, assignment: Assignment) -> None:
        plan = assignment.plan
        self._file = FileStorage(Path(assignment.folder))
        self._known: Durable | None = None
        self._patience = plan.timing.start_seconds
        self._tenure = Tenure(assignment.me, assignment.vaults, secrets.randbits(63))
        self._transport = ZmqTransport(assignment.me, plan.job, None, assignment.keys)
        self._connected: frozenset[VaultAt] = frozenset()

    @property
    def endpoint(self) -> str:
        """Where this supervisor listens."""
        return self._file.endpoint

    @endpoint.setter
    def endpoint(self, endpoint: str) -> None:
        self._file.endpoint = endpoint

    def load(self) -> Durable | None:
        """Claim the office; what the last supervisor saved, None if there was none."""
        if self._tenure.stage == "claiming":
            self._wait(lambda: self._tenure.stage == "holding")
            found = self._tenure.found
            self._known = msgspec.json.decode(found, type=Durable) if found else None
        return self._known

    def save(self, state: Durable) -> None:
        """Deposit the state. It returns when it is durable, and this supervisor may act."""
        board = self._tenure.board
        state = msgspec.structs.replace(state, endpoint=self.endpoint or state.endpoint, vaults=board)
        number = self._tenure.deposit(msgspec.json.encode(state), time.monotonic())
        self._wait(lambda: self._tenure.is_stored(number) and self._tenure.may_act(time.monotonic()))
        self._known = state
        self._file.save(state)

    def hold(self) -> None:
        """Renew the lease. Without one it waits until there is one again. Let new vaults decide, too.

        Raises JobFailed if another supervisor has taken over.
        """
        announced = announced_vaults()
        if announced:
            self._tenure.replace(announced)
        self._exchange(0.0)
        if self._known is not None and self._known.vaults != self._tenure.board:
            self._known = msgspec.structs.replace(self._known, vaults=self._tenure.board)
            self._file.save(self._known)
        if not self._tenure.may_act(time.monotonic()):
            self._wait(lambda: self._tenure.may_act(time.monotonic()))

    def close(self) -> None:
        """Close the sockets."""
        self._transport.close()

    def _wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + self._patience
        while not condition():
            if self._tenure.stage == "over":
                raise JobFailed("another supervisor has taken over")
            if time.monotonic() > end:
                raise JobFailed(f"most machines have not answered for {self._patience:g} s")
            self._exchange(TICK_SECONDS)

    def _exchange(self, seconds: float) -> None:
        self._tenure.tick(time.monotonic())
        vaults = self._tenure.vaults
        for vault in vaults - self._connected:
            self._transport.connect("vault", vault.slot, vault.endpoint)
        self._connected |= vaults
        send_outbox(self._tenure, self._transport)
        for envelope in self._transport.poll(seconds):
            self._tenure.receive(envelope, time.monotonic())


def _open_private(path: str, flags: int) -> int:
    """Open a file that only this user can read."""
    handle = os.open(path, flags, 0o600)
    os.fchmod(handle, 0o600)
    return handle


def run(assignment: Assignment) -> None:
    """Run the supervisor until the job ends. A restarted one listens on the same endpoint as the last."""
    folder = Path(assignment.folder)
    storage = VaultStorage(assignment) if assignment.vaults else FileStorage(folder)
    known = storage.load()
    if known is not None:
        here = not assignment.vaults or known.endpoint.startswith(f"{assignment.bind}:")
        assignment = msgspec.structs.replace(assignment, supervisor=known.endpoint if here else "")
    with open_transport(assignment) as transport, EventLog(folder) as events:
        storage.endpoint = transport.endpoint
        test_every = int(assignment.plan.training.get("test_every", 0))
        runs = ThreadPoolExecutor(1, "holdfast-save")
        keeper = _keeper(assignment.plan, events, runs, first=known is None)
        machine = Supervisor(assignment.plan, storage, time.monotonic(), test_every, keeper)
        _Watch(machine, keeper, transport, events, runs, storage.hold).run()


def _keeper(
    plan: JobPlan, events: EventLog, runs: ThreadPoolExecutor, *, first: bool
) -> SaveCoordinator | None:
    resume = plan.resume
    if resume is not None and first:
        for problem in resume.problems:
            events.emit("checkpoint_damaged", version=None, error=problem)
        events.emit(
            "job_resumed",
            version=resume.version,
            step=resume.steps,
            samples=resume.samples,
            continues_era=resume.continues,
        )
    if plan.saving is None:
        return None
    # These imports take half a second, which jobs that do not save should not wait for.
    from holdfast.cluster.saving.coordinator import SaveCoordinator  # noqa: PLC0415
    from holdfast.cluster.saving.resume import open_saving  # noqa: PLC0415

    return SaveCoordinator(plan, lambda: open_saving(plan), runs, time.monotonic())


class _Watch:
    def __init__(
        self,
        machine: Supervisor,
        keeper: SaveCoordinator | None,
        transport: ZmqTransport,
        events: EventLog,
        runs: ThreadPoolExecutor,
        hold: Callable[[], None],
    ) -> None:
        self._machine = machine
        self._hold = hold
        self._keeper = keeper
        self._transport = transport
        self._events = events
        self._happened: deque[Happening] = deque(maxlen=_MOST_HAPPENINGS)
        self._next_tick = 0.0
        self._next_status = 0.0
        self._shown: object = None
        self._runs = runs
        self._letting_go: Future[None] | None = None
        self._let_go_by = 0.0

    def run(self) -> None:
        machine = self._machine
        gone_by = None
        while True:
            now = time.monotonic()
            if machine.view.phase == "stopping" and self._has_let_go(now):
                gone_by = gone_by or now + _FAREWELL_SECONDS
                if now > gone_by:
                    return
            self._pass_time(now)
            for envelope in self._transport.poll(max(0.0, self._next_tick - time.monotonic())):
                self._hold()
                machine.receive(envelope, time.monotonic())
                self._tell()

    def _pass_time(self, now: float) -> None:
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._hold()
            self._machine.tick(now)
            self._tell()
        machine = self._machine
        states = [member.beat.state for member in machine.workers if member.beat is not None]
        ending = machine.view.phase == "stopping" and not self._has_let_go(now)
        shown = machine.view.number, states, ending
        if now >= self._next_status or shown != self._shown:
            self._shown = shown
            self._next_status = now + _STATUS_SECONDS
            dropped = self._machine.admission.dropped + self._transport.counters.dropped
            status = _status(self._machine, self._keeper, now, self._happened, dropped)
            if ending:
                # The launcher ends this process once it learns of the end, and may restart the job at once.
                status = msgspec.structs.replace(status, finished=False, failure=None)
            self._transport.send(Envelope(self._machine.me, self._machine.launcher, status))

    def _has_let_go(self, now: float) -> bool:
        """Whether the store is released, or too slow to wait for: then its lease must expire."""
        if self._keeper is None:
            return True
        if self._letting_go is None:
            self._letting_go = self._runs.submit(self._keeper.close)  # after pending writes
            self._let_go_by = now + _LET_GO_SECONDS
        return self._letting_go.done() or now > self._let_go_by

    def _tell(self) -> None:
        for said in [self._machine.events, *([self._keeper.events] if self._keeper else [])]:
            for name, figures in said:
                self._events.emit(name, **figures)
                self._happened.append(Happening(time.time(), name, figures))
            said.clear()
        send_outbox(self._machine, self._transport)


def _status(
    machine: Supervisor,
    keeper: SaveCoordinator | None,
    now: float,
    happened: Iterable[Happening],
    dropped: int,
) -> Status:
    failure = machine.failure
    me = NodeStatus(machine.me, "watching", 0.0, Figures(memory_bytes=memory_bytes(), dropped=dropped))
    return Status(
        phase=machine.view.phase,
        steps=machine.steps(),
        samples=machine.samples(),
        nodes=(me, *(_node_status(member, now) for member in [*machine.servers, *machine.workers])),
        tests=tuple(machine.tests),
        versions=tuple(keeper.saved) if keeper else (),
        save_failures=keeper.failures() if keeper else (),
        unsaved=keeper is not None and keeper.failures.unsaved,
        last_version=keeper.last_version if keeper else 0,
        saved_steps=keeper.saved_steps if keeper else 0,
        replaced=sum(worker.incarnation - 1 for worker in machine.workers),
        finished=machine.finished,
        failure=(failure.kind, failure.peer, failure.text) if failure else None,
        happened=tuple(happened),
        degraded=machine.degraded,
    )


def _node_status(member: Member, now: float) -> NodeStatus:
    if member.beat is None or member.heard is None:
        return NodeStatus(member.peer, "starting", 0.0, Figures())
    beat = member.beat
    redundancy = beat.redundancy if isinstance(beat, ServerBeat) else Redundancy()
    return NodeStatus(member.peer, beat.state, now - member.heard, beat.figures, redundancy)
