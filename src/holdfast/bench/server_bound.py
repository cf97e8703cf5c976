"""``bench server-bound``: what protection costs servers when workers do not compute.

In a job on this machine, workers' computing hides the servers. Here, pushes are prepared before anything is
measured: ids of Criteo's shape (Zipf), 26 x 2,048 lookups each, gradients of noise for every different row of
the tables. All modes get the same pushes, from two workers in turns, and nothing else: no pulls, no network.
A cost is the servers' processor time, relative to that without protection:

- ``cost`` is that of server processes, with their transport: this process sends the pushes over ZeroMQ.
- ``machine_cost`` is that of the servers' state machines alone, all in this process, without sockets.
- ``step_cost`` is ``cost`` if workers also pull the rows before they push, as in training. A pull carries the
  commit of the worker's last push; without pulls, commits are messages of their own.
- ``threads2.speedup`` is how many times faster a window passes on the clock if the only server, on all cores,
  has two threads instead of one; ``threads2.cost`` is what it takes of the processors. The process that sends
  the pushes runs on the same cores. ``threads2.machine_speedup`` and the same of ``ecrm.k4``, with the state
  machines of five servers, are those of the servers' code alone, in this process.
- ``bytes_minimum`` is computed: a gradient and a record are read and the record is written for every row of a
  push; for all pushes of a flush together, each different record's difference is sent to every parity server,
  where a parity is read and written.

Sides of a comparison run in turns. Pushes and bytes decide when servers flush, as in uninterrupted training
at this speed; pauses between windows do not count as time that changes have waited.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from holdfast.bench.harness import Report, Spread, interleave, ratio
from holdfast.bench.live import BATCH, WORKERS, cpu_seconds, preset_config, with_servers
from holdfast.cluster.make_plan import plan_job
from holdfast.cluster.protocol.envelope import Envelope, Frame
from holdfast.cluster.protocol.messages import (
    Commit,
    Install,
    Kept,
    Lacks,
    Part,
    Peer,
    Position,
    Pull,
    PulledRows,
    Push,
    Pushed,
    Relay,
    ServerBeat,
    ServerInView,
    View,
    ViewNumber,
    WorkerInView,
)
from holdfast.cluster.protocol.plan import JobPlan, LaneOptions
from holdfast.cluster.protocol.wire import Message, decode
from holdfast.cluster.runtime.engines.local import LocalLauncher
from holdfast.cluster.runtime.node import Assignment
from holdfast.cluster.runtime.transport.address import address_of
from holdfast.cluster.runtime.transport.private import private_folder
from holdfast.cluster.runtime.transport.zmq import ZmqTransport
from holdfast.cluster.server.machine import Server
from holdfast.data.reader import Batch
from holdfast.errors import HoldfastError
from holdfast.kernels.teams import ALONE, Team
from holdfast.options import ErasureCode, NoProtection, Protection, Replication
from holdfast.tables.lookup import Placer
from holdfast.training.readers import build_readers

Mode = Literal["none", "ecrm", "ecrec", "replication"]

_LANES = LaneOptions(seconds=3600.0, idle_seconds=3600.0)
FLUSH = _LANES.pushes
"""Pushes of a flush."""
_SETTLE_SECONDS = 0.2
"""After the last answer, servers still send and apply changes of parities."""
_GRADIENT_BYTES = 64 << 20  # of noise, of which pushes have pieces: more than caches hold
_MOST_SECONDS = 120.0
_SUPERVISOR = Peer("supervisor")
_FIRST_VIEW = ViewNumber(1, 1)


@dataclass(frozen=True, slots=True)
class Side:
    """A way to protect rows."""

    mode: Mode
    k: int = 0
    r: int = 1

    @property
    def name(self) -> str:
        """As in the names of figures; without protection there is no k."""
        more = f".r{self.r}" if self.r > 1 else ""
        return f"{self.mode}.k{self.k}{more}" if self.k else self.mode

    @property
    def protection(self) -> Protection:
        """The option of a job."""
        match self.mode:
            case "ecrm":
                return ErasureCode(self.k, self.r, atomic=False, dense="workers")
            case "ecrec":
                return ErasureCode(self.k, self.r, atomic=True, dense="replicate")
            case "replication":
                return Replication(self.r + 1)
        return NoProtection()


NONE = Side("none")


@dataclass(frozen=True, slots=True)
class Case:
    """Sides that are compared with each other, and with ``NONE``, on as many servers."""

    preset: str
    servers: int
    sides: tuple[Side, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of the measurement."""

    max_rows: int
    pushes: int
    """Of a window."""
    rounds: int
    cases: tuple[Case, ...]


def _cases() -> tuple[Case, ...]:
    one = (Side("ecrm", 4), Side("ecrec", 4), Side("ecrm", 2), Side("ecrec", 2), Side("replication", 1))
    two = (Side("ecrm", 4, 2), Side("ecrec", 4, 2), Side("replication", 1, 2))
    return tuple(
        Case(preset, servers, sides)
        for preset in ("terabyte", "kaggle")
        for servers, sides in ((5, one), (6, two))
    )


FULL = Scale(100_000, 2 * FLUSH, 7, _cases())
QUICK = Scale(2000, FLUSH, 2, (Case("terabyte", 5, (Side("ecrm", 4), Side("ecrec", 4))),))


def run(report: Report) -> None:
    """All modes and sizes; or, quickly, two modes on small tables."""
    measure(report, QUICK if report.quick else FULL)


def measure(report: Report, scale: Scale) -> None:
    """All cases, then one server against several, and one thread against two."""
    report.settings.update(
        batch_size=BATCH, max_rows=scale.max_rows, workers=WORKERS, optimizer="momentum",
        pushes=scale.pushes, rounds=scale.rounds,
    )  # fmt: skip
    for case in scale.cases:
        _compare(report, case, scale)
        report.save()
    _one_server(report, scale)
    _threads(report, scale)


def _compare(report: Report, case: Case, scale: Scale) -> None:
    where = "server_bound" if case.preset == "terabyte" else f"server_bound.{case.preset}"
    sides = (NONE, *case.sides)
    prepared = {side: Pushes.of(case.preset, case.servers, side, scale) for side in sides}
    none = prepared[NONE].bytes_minimum()
    for side in case.sides:
        least = prepared[side].bytes_minimum() / none
        report.figure(f"{where}.{side.name}.bytes_minimum", least, "computed: bytes that must move")
    machines = {side.name: Machines(pushes) for side, pushes in prepared.items()}
    measured = _windows({name: side.window for name, side in machines.items()}, scale.rounds)
    _figures(report, where, case, "machine_cost", measured, "the servers' code alone")
    del machines
    with ExitStack() as stack:
        running = {name.name: stack.enter_context(processes(pushes)) for name, pushes in prepared.items()}
        for figure, pulls, note in (
            ("cost", False, "server processes, transport included"),
            ("step_cost", True, "the same with pulls"),
        ):
            windows = {name: functools.partial(side.window, pulls=pulls) for name, side in running.items()}
            _figures(report, where, case, figure, _windows(windows, scale.rounds), note)


def _windows(windows: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a push by side and round, after a first round that does not count."""
    interleave(windows, 1)
    return interleave(windows, rounds)


def _figures(
    report: Report, where: str, case: Case, figure: str, measured: dict[str, list[float]], note: str
) -> None:
    servers = f"servers{case.servers}"
    report.raw[f"{where}.{servers}.{figure}"] = measured
    none = measured[NONE.name]
    of = figure.removesuffix("cost") + "cpu_ms"
    report.figure(f"{where}.none.{servers}.{of}", Spread.of(none), "a push, all servers")
    for side in case.sides:
        report.figure(f"{where}.{side.name}.{figure}", ratio(measured[side.name], none), note)


def _one_server(report: Report, scale: Scale) -> None:
    """What it costs that a push is spread over several servers, without protection."""
    counts = (1, 2, 5)
    with ExitStack() as stack:
        sides = {
            f"servers{count}": stack.enter_context(
                processes(Pushes.of("terabyte", count, NONE, scale))
            ).window
            for count in counts
        }
        measured = _windows(sides, scale.rounds)
    report.raw["server_bound.none.servers"] = measured
    for count in counts[1:]:
        more = ratio(measured[f"servers{count}"], measured["servers1"])
        report.figure(f"server_bound.none.servers{count}.cost", more, "without protection, against one")


def _threads(report: Report, scale: Scale) -> None:
    """What a second thread gains, and what it costs."""
    threads = {"threads1": 1, "threads2": 2}
    pushes = Pushes.of("terabyte", 1, NONE, scale)
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(processes(pushes.with_threads(count), pinned=False))
            for name, count in threads.items()
        }
        used = _windows({name: side.window for name, side in running.items()}, scale.rounds)
    walls = {name: side.walls[-scale.rounds :] for name, side in running.items()}
    report.raw["server_bound.threads"] = {"used": used, "walls": walls}
    report.figure("server_bound.threads1.wall_ms", Spread.of(walls["threads1"]), "a push, one server")
    speedup = ratio(walls["threads1"], walls["threads2"])
    report.figure("server_bound.threads2.speedup", speedup, "one server, on the clock")
    report.figure("server_bound.threads2.cost", ratio(used["threads2"], used["threads1"]), "processor time")
    for servers, side in ((1, NONE), (5, Side("ecrm", 4))):
        pushes = Pushes.of("terabyte", servers, side, scale)
        machines = {name: Machines(pushes, Team(count)) for name, count in threads.items()}
        _windows({name: one.window for name, one in machines.items()}, scale.rounds)
        walls = {name: one.walls[-scale.rounds :] for name, one in machines.items()}
        where = f"server_bound.threads2{'' if side == NONE else f'.{side.name}'}.machine_speedup"
        report.raw[where] = walls
        report.figure(where, ratio(walls["threads1"], walls["threads2"]), "the servers' code alone")


# Pushes


@dataclass(frozen=True, slots=True)
class Pushes:
    """What workers send in a window: the same rows and gradients for every side."""

    plan: JobPlan
    shares: list[list[tuple[Part, Sequence[Frame]]]]
    """By push and server: the rows, and frames of places and gradients."""

    @classmethod
    def of(cls, preset: str, servers: int, side: Side, scale: Scale) -> Pushes:
        """Prepare the pushes of a side."""
        config = preset_config(preset, scale.max_rows, "momentum")
        plan = plan_job(with_servers(config, servers, protection=side.protection), lanes=_LANES)
        reader, _ = build_readers(config)
        batches = [batch for batch, _ in zip(reader, range(scale.pushes), strict=False)]
        return cls(plan, list(_shares(plan, batches)))

    def with_threads(self, threads: int) -> Pushes:
        """The same pushes to servers with so many threads."""
        return Pushes(replace(self.plan, server_threads=threads), self.shares)

    def bytes_minimum(self) -> float:
        """What must move for all pushes: see the module."""
        tables, placement = self.plan.groups[0], self.plan.placement
        gradient, record = tables.dim * 4, tables.words * 4
        total = sum(part.rows * (gradient + 2 * record) for shares in self.shares for part, _ in shares)
        for first in range(0, len(self.shares) if placement.r else 0, FLUSH):
            for server in range(self.plan.servers):
                places = [shares[server][1][0] for shares in self.shares[first : first + FLUSH]]
                total += len(np.unique(np.concatenate(places))) * placement.r * 3 * record
        return total


def _shares(plan: JobPlan, batches: Sequence[Batch]) -> Iterator[list[tuple[Part, Sequence[Frame]]]]:
    tables = plan.groups[0]
    placer = Placer(tables, plan.placement)
    noise = _noise()
    at = 0
    for batch in batches:
        placed = placer.place(batch.ids)
        shares: list[tuple[Part, Sequence[Frame]]] = []
        for places in np.split(placed.places, placed.starts[1:-1]):
            size = len(places) * tables.dim
            at = 0 if at + size > len(noise) else at
            frames = places.copy(), noise[at : at + size]
            shares.append((Part(0, len(places)), frames))
            at += size
        yield shares


@functools.cache
def _noise() -> NDArray[np.float32]:
    noise = np.random.default_rng(0).normal(0, 1e-3, _GRADIENT_BYTES // 4).astype(np.float32)
    noise.flags.writeable = False
    return noise


def _view(plan: JobPlan, endpoints: Sequence[str]) -> View:
    servers = tuple(
        ServerInView(slot, 1, endpoint, starts=True, since=_FIRST_VIEW)
        for slot, endpoint in enumerate(endpoints)
    )
    return View(
        _FIRST_VIEW, "running", servers, tuple(WorkerInView(slot, 1, starts=True) for slot in range(WORKERS))
    )


def _push(plan: JobPlan, sequence: int, part: Part) -> Push:
    return Push(sequence, Position(0, sequence - 1), BATCH // plan.servers, (part,), plan.atomic)


# State machines


class Machines:
    """The servers of a job in this process; messages between them are handed over.

    Attributes:
        walls: milliseconds on the clock for a push, of each window.
    """

    def __init__(self, pushes: Pushes, team: Team = ALONE) -> None:
        self._plan, self._pushes = pushes.plan, pushes
        self.walls: list[float] = []
        self.servers = [
            Server(Peer("server", slot, 1), self._plan, team=team) for slot in range(self._plan.servers)
        ]
        self._sequences = [0] * WORKERS
        self._now = 0.0
        view = _view(self._plan, [""] * self._plan.servers)
        self._deliver([Envelope(_SUPERVISOR, server.me, view) for server in self.servers])

    def window(self) -> float:
        """Milliseconds of processor time for a push."""
        started, began = time.process_time(), time.perf_counter()
        for number, shares in enumerate(self._pushes.shares):
            self._now += 1e-3
            worker = Peer("worker", number % WORKERS, 1)
            self._sequences[worker.slot] += 1
            sequence = self._sequences[worker.slot]
            self._deliver(
                [
                    Envelope(worker, server.me, _push(self._plan, sequence, part), frames)
                    for server, (part, frames) in zip(self.servers, shares, strict=True)
                ]
            )
            if self._plan.atomic:
                self._deliver([Envelope(worker, server.me, Commit(sequence)) for server in self.servers])
        self.walls.append((time.perf_counter() - began) / len(self._pushes.shares) * 1000)
        return (time.process_time() - started) / len(self._pushes.shares) * 1000

    def _deliver(self, envelopes: list[Envelope]) -> None:
        """Pass messages to servers, and what those send each other, until nobody has one left."""
        while envelopes:
            for envelope in envelopes:
                self.servers[envelope.target.slot].receive(envelope, self._now)
            envelopes = [e for server in self.servers for e in server.outbox if e.target.role == "server"]
            for server in self.servers:
                server.outbox.clear()


# Processes


@contextlib.contextmanager
def processes(pushes: Pushes, *, pinned: bool = True) -> Iterator[Processes]:
    """Server processes, each on one core or all on all cores, and a transport for each worker."""
    plan = pushes.plan
    with (
        private_folder() as sockets,
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder,
        ZmqTransport(_SUPERVISOR, plan.job, address_of(f"ipc://{sockets}", _SUPERVISOR)) as supervisor,
        LocalLauncher(Path(folder)) as engine,
        ExitStack() as stack,
    ):
        for slot in range(plan.servers):
            engine.start(
                Assignment(
                    me=Peer("server", slot, 1), plan=plan, supervisor=supervisor.endpoint, folder=folder,
                    bind=f"ipc://{sockets}",
                )
            )  # fmt: skip
        endpoints = _wait_for_beats(supervisor, engine, plan.servers)
        view = _view(plan, endpoints)
        workers = [
            stack.enter_context(ZmqTransport(Peer("worker", slot, 1), plan.job, None))
            for slot in range(WORKERS)
        ]
        for slot, endpoint in enumerate(endpoints):
            supervisor.send(Envelope(_SUPERVISOR, Peer("server", slot, 1), view))
            for worker in workers:
                worker.connect("server", slot, endpoint)
        pushers = [_Pusher(worker, plan) for worker in workers]
        yield Processes(pushes, supervisor, pushers, engine.pids(), pinned=pinned)


def _wait_for_beats(supervisor: ZmqTransport, engine: LocalLauncher, servers: int) -> list[str]:
    """The endpoints of servers once all of them are ready."""
    found: dict[int, str] = {}
    until = time.monotonic() + _MOST_SECONDS
    while len(found) < servers:
        for envelope in supervisor.poll(0.1):
            if isinstance(envelope.message, ServerBeat):
                found[envelope.source.slot] = envelope.message.endpoint
        for ended in engine.exited():
            raise HoldfastError(f"{ended.peer} ended with code {ended.code} as it started")
        if time.monotonic() > until:
            raise HoldfastError(f"{len(found)} of {servers} servers started within {_MOST_SECONDS:.0f} s")
    return [found[slot] for slot in range(servers)]


class Processes:
    """The servers of a job as processes, driven by this one.

    Attributes:
        walls: milliseconds on the clock for a push, of each window, until all are answered.
    """

    def __init__(
        self,
        pushes: Pushes,
        supervisor: ZmqTransport,
        workers: Sequence[_Pusher],
        pids: dict[Peer, int],
        *,
        pinned: bool,
    ) -> None:
        self.walls: list[float] = []
        self._pushes, self._supervisor, self._workers = pushes, supervisor, workers
        self._pids = list(pids.values())
        cores = sorted(os.sched_getaffinity(0))
        for number, pid in enumerate(self._pids if pinned else ()):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), {cores[number % len(cores)]})

    def window(self, *, pulls: bool = False) -> float:
        """Milliseconds of processor time of all servers for a push, until parities have changed, too."""
        started, began = self._used(), time.perf_counter()
        waiting = [self._pushes.shares[slot::WORKERS] for slot in range(WORKERS)]
        while any(waiting) or not all(worker.is_free for worker in self._workers):
            for worker, shares in zip(self._workers, waiting, strict=True):
                if shares and worker.is_free:
                    worker.begin(shares.pop(0), pulls=pulls)
                worker.hear(0.0005)
            self._supervisor.poll(0.0)
        self.walls.append((time.perf_counter() - began) / len(self._pushes.shares) * 1000)
        time.sleep(_SETTLE_SECONDS)
        return (self._used() - started) / len(self._pushes.shares) * 1000

    def _used(self) -> float:
        """Processor time of all threads of all servers, in seconds."""
        return sum(map(cpu_seconds, self._pids))


class _Pusher:
    """A worker that only sends: one push at a time, and the next when all servers have applied it, or will
    do so before they answer the next pull."""

    def __init__(self, transport: ZmqTransport, plan: JobPlan) -> None:
        self._transport, self._plan = transport, plan
        self._sequence = 0
        self._shares: list[tuple[Part, Sequence[Frame]]] = []
        self._pulls = False
        self._waiting: set[int] = set()
        self._stage: Literal["pull", "push", "commit", "done"] = "done"
        self._kept = [0] * plan.servers

    @property
    def is_free(self) -> bool:
        """Whether to call ``begin``."""
        window = self._plan.lanes.window
        return self._stage == "done" and self._sequence - min(self._kept) < window

    def begin(self, shares: list[tuple[Part, Sequence[Frame]]], *, pulls: bool) -> None:
        """Send the next push, or its pull."""
        self._sequence += 1
        self._shares, self._pulls = shares, pulls
        self._send("pull" if pulls else "push")

    def _send(self, stage: Literal["pull", "push", "commit"]) -> None:
        self._stage = stage
        self._waiting = set(range(self._plan.servers))
        for slot, (part, frames) in enumerate(self._shares):
            message: Message = Commit(self._sequence)
            sent: Sequence[Frame] = ()
            if stage == "pull":
                commits = self._plan.atomic and self._sequence > 1
                message, sent = Pull(self._sequence, (part,), self._sequence - 1, commits), frames[:1]
            elif stage == "push":
                message, sent = _push(self._plan, self._sequence, part), frames
            envelope = Envelope(self._transport.me, Peer("server", slot, 1), message, sent)
            if not self._transport.send(envelope):
                raise HoldfastError(f"a {type(message).__name__} to server {slot} was dropped")

    def hear(self, seconds: float) -> None:
        """Process answers; send what comes next when all have arrived."""
        for envelope in self._transport.poll(seconds):
            message, slot = envelope.message, envelope.source.slot
            if isinstance(message, Relay):  # of a server that has not heard from here for a while
                header = decode(message.header)
                message, slot = header.message, header.source.slot
            if isinstance(message, Pushed | Kept):
                kept = message.kept if isinstance(message, Pushed) else message.sequence
                self._kept[slot] = max(self._kept[slot], kept)
            if isinstance(message, Pushed | PulledRows):
                self._waiting.discard(slot)
            elif isinstance(message, Lacks):
                self._install(Peer("server", slot, 1))
            elif not isinstance(message, Kept):
                raise HoldfastError(f"server {slot} answers {message}: expected Pushed")
        if not self._waiting and self._stage != "done":
            self._go_on()

    def _install(self, server: Peer) -> None:
        """Send the network's first values, without which a server asks for them again and again."""
        network, placement = self._plan.groups[-1], self._plan.placements[-1]
        rows = np.flatnonzero(placement.owner(np.arange(network.rows)) == server.slot)
        places = placement.place(rows).astype(np.uint32)
        message = Install((Part(len(self._plan.groups) - 1, len(places)),))
        weights = np.zeros((len(places), network.dim), np.float32)
        self._transport.send(Envelope(self._transport.me, server, message, (places, weights)))

    def _go_on(self) -> None:
        if self._stage == "pull":
            self._send("push")
        elif self._stage == "push" and self._plan.atomic and not self._pulls:
            self._send("commit")
        else:
            self._stage = "done"
