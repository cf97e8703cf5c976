"""A whole job in one thread on virtual time, with an oracle that knows every batch.

The machines are those of a real job. Batches are made up: batch *b* adds 1 to each of some rows, so that a
row's value says how many batches have counted for it, and any batch that was lost or counted twice shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import (
    Evaluation,
    Exit,
    LauncherBeat,
    Peer,
    Position,
    Redundancy,
    Status,
    View,
)
from holdfast.cluster.protocol.plan import JobPlan, LaneOptions, Timing
from holdfast.cluster.redundancy.recover import Recovery
from holdfast.cluster.runtime.transport.memory import CALM, Network, Weather
from holdfast.cluster.runtime.transport.shared import Arena
from holdfast.cluster.server.machine import Opened, Saver, Server
from holdfast.cluster.supervisor.machine import Supervisor
from holdfast.cluster.supervisor.members import JobFailure
from holdfast.cluster.supervisor.starts import Starts
from holdfast.cluster.supervisor.watch import SupervisorWatch
from holdfast.cluster.worker.calls import Floats, RowSpread, spread_by
from holdfast.cluster.worker.machine import Item, Worker
from holdfast.coding.placement import Placement
from holdfast.sim.storage import MemoryStorage
from holdfast.tables.plan import GroupPlan, OptimizerPlan, TablePlan

ROWS = 40
ROWS_OF_A_BATCH = 5
COMPUTE_SECONDS = 0.035
START_SECONDS = 0.3
READ_SECONDS = 0.1
REPORT_SECONDS = 0.25
ARENA_BYTES = 16 << 20
ARENA_SEEDS = 3
"""In one of so many jobs servers share memory: what goes through lanes is read where its owner has it."""
FIRST_VALUE = 1000.0
"""Of every weight. Not 0, which is also what nobody has written to."""


def counting_plan(
    *,
    servers: int,
    workers: int,
    atomic: bool,
    staleness: int = 1,
    rows: int = ROWS,
    k: int = 1,
    r: int = 0,
    lanes: LaneOptions | None = None,
    beyond: Literal["job", "rows"] = "job",
    dense: Literal["replicate", "workers"] = "replicate",
) -> JobPlan:
    """A job whose rows count the batches that touched them."""
    count = OptimizerPlan(name="sgd", lr=-1.0)
    groups = (
        GroupPlan(
            name="a",
            dim=1,
            tables=(TablePlan("a", rows),),
            optimizer=count,
            initial="installed",
        ),
        GroupPlan(name="b", dim=2, tables=(TablePlan("b", 7),), optimizer=count, initial="installed"),
    )
    timing = Timing(
        silent_seconds=1.5, start_seconds=10.0, retry_seconds=0.1, stuck_seconds=1.0, hopeless_seconds=20.0
    )
    return JobPlan(
        job="sim",
        seed=0,
        groups=groups,
        servers=servers,
        workers=workers,
        k=k,
        r=r,
        dense=dense,
        beyond=beyond,
        lanes=lanes
        or LaneOptions(
            pushes=4, seconds=0.15, idle_seconds=0.15, window=8, chunk_rows=3, share=0.5, scrub_seconds=4.0
        ),
        atomic=atomic,
        staleness=staleness,
        timing=timing,
        most_deaths=1000,  # a schedule of faults may well kill one again and again
    )


def rows_of(plan: JobPlan, batch: int) -> list[NDArray[np.int64]]:
    """The rows of each group that a batch counts for, all different."""
    tables, network = _rows_of(batch, *(group.rows for group in plan.groups))
    if plan.dense == "workers":  # who are to have all of it
        network = np.arange(plan.groups[-1].rows)
    return [tables, network]


@cache
def _rows_of(batch: int, first: int, second: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    random = np.random.default_rng(batch)
    return (
        random.choice(first, ROWS_OF_A_BATCH, replace=False),
        random.choice(second, random.integers(0, 3), replace=False),
    )


def counts(plan: JobPlan, batches: Sequence[int]) -> list[NDArray[np.float32]]:
    """The expected value of each row when exactly these batches count."""
    expected = [np.full(group.rows, FIRST_VALUE, np.float32) for group in plan.groups]
    for batch in batches:
        for group, rows in enumerate(rows_of(plan, batch)):
            expected[group][rows] += 1
    return expected


class CutCopies:
    """A saver that keeps a copy of each cut, also after a server's end.

    ``lost`` counts, for each cut, the pushes that the slot's network had lost with workers by then.
    """

    def __init__(self, server: Server, before: CutCopies | None) -> None:
        self._server = server
        self._before = before.lost_now() if before else 0
        self.copies: dict[int, list[NDArray[np.uint32]]] = before.copies if before else {}
        self.lost: dict[int, int] = before.lost if before else {}

    def lost_now(self) -> int:
        """Pushes that the network of this slot has lost so far."""
        contents = self._server.contents
        return self._before + (contents.lost if contents is not None else 0)

    def touched(self, group: int, places: NDArray[np.uint32]) -> None:
        """All rows are copied."""

    def cut(self, version: int, *, baseline: bool, whole: bool) -> None:
        """Copy all records."""
        self.copies[version] = [shard.records.copy() for shard in self._server.shards]
        self.lost[version] = self.lost_now()

    def confirm(self, committed: int, tidied: int) -> None:
        """They are here for good."""

    def saved(self) -> int:
        """At once."""
        return max(self.copies, default=0)

    def collect(self, version: int, *, tidy: bool, kept: Sequence[int] = ()) -> None:
        """Nobody asks."""


class LastCopy:
    """What was last copied of a server's rows, some time after it was asked for."""

    def __init__(self, cluster: Cluster, server: Server) -> None:
        self._cluster, self._server = cluster, server
        self._ready_at: float | None = None

    def get(self) -> tuple[list[NDArray[np.uint32]], Redundancy] | None:
        """Of the newest cut; without one, first values."""
        now = self._cluster.network.now
        if self._ready_at is None:
            self._ready_at = now + self._cluster.random.expovariate(1 / READ_SECONDS)
        if now < self._ready_at:
            return None
        copies = self._cluster.savers[self._server.me.slot].copies
        version = max(copies, default=0)
        first = [
            np.full_like(shard.records, np.float32(FIRST_VALUE).view(np.uint32))
            for shard in self._server.shards
        ]
        return copies.get(version, first), Redundancy(version=version)


class SimWorker:
    """A worker whose computation takes virtual time."""

    def __init__(
        self, me: Peer, plan: JobPlan, network: Network, batches: int, compute_seconds: float
    ) -> None:
        self.me = me
        self.machine = Worker(me, plan, self._first_values)
        self.outbox = self.machine.outbox
        self._plan, self._network, self._batches = plan, network, batches
        self._seconds = compute_seconds
        self._next: int | None = None

    def receive(self, envelope: Envelope, now: float) -> None:
        """Receive a message, as the worker process does."""
        self.machine.receive(envelope, now)
        self._work(now)

    def tick(self, now: float) -> None:
        """Likewise."""
        self.machine.tick(now)
        self._work(now)

    def _work(self, now: float) -> None:
        machine = self.machine
        if machine.over:
            self._network.kill(self.me)
            return
        if machine.test_due:
            machine.tested = Evaluation(machine.test_due, 0.5, 0.5, 1)
            machine.beat(now)
        if machine.started is not None and self._next is None:
            done = machine.started.batch.index
            self._next = self.me.slot if done < 0 else done + self._plan.workers
        while machine.wants_batch():
            assert self._next is not None
            if self._is_done(self._next):
                self._next += self._plan.workers
                continue
            if self._next >= self._batches:
                machine.feed(None, now)
                break
            machine.feed(self._item(self._next), now)
            self._next += self._plan.workers
        if machine.take() is not None:
            self._network.at(now + self._seconds, self._computed)

    def _is_done(self, batch: int) -> bool:
        """Whether a run that this one goes on from has trained on it."""
        resume = self._plan.resume
        layouts = resume.layouts if resume else ()
        return batch < self._batches and any(layout.has(Position(0, batch)) for layout in layouts)

    def _computed(self) -> None:
        if self._network.nodes.get(self.me) is not self:
            return
        if self._network.paused(self.me):
            self._network.at(self._network.now + self._seconds, self._computed)
            return
        item = self.machine._computing
        assert item is not None
        ones = [
            np.ones((len(spread.places), group.dim), np.float32)
            for spread, group in zip(item.spreads, self._plan.groups, strict=True)
        ]
        self.machine.finish(ones, self._network.now)
        self._work(self._network.now)
        self._network.send_outbox(self)

    def _item(self, batch: int) -> Item:
        spreads = [self._spread(group, rows) for group, rows in enumerate(rows_of(self._plan, batch))]
        return Item(Position(0, batch), spreads, batch, 1)

    def _spread(self, group: int, rows: NDArray[np.int64]) -> RowSpread:
        placement = self._plan.placements[group]
        return _spread_over(placement, rows.tobytes())

    def _first_values(self, group: int) -> tuple[RowSpread, Floats]:
        plan = self._plan.groups[group]
        assert plan.initial == "installed", "a server lacks first values that it draws itself"
        rows = np.arange(plan.rows)
        return self._spread(group, rows), np.full((plan.rows, plan.dim), FIRST_VALUE, np.float32)


@lru_cache(maxsize=1 << 14)
def _spread_over(placement: Placement, rows: bytes) -> RowSpread:
    """Rows by server; jobs of the same shape ask for the same ones."""
    ids = np.frombuffer(rows, np.int64)
    return spread_by(placement.owner(ids), placement.place(ids), placement.servers)[0]


class SimSupervisor:
    """A supervisor that reports to the launcher, as its process does."""

    def __init__(self, machine: Supervisor) -> None:
        self.me, self.outbox = machine.me, machine.outbox
        self.receive = machine.receive
        self.machine = machine
        self._next_report = 0.0

    def tick(self, now: float) -> None:
        """Advance the time, and report."""
        self.machine.tick(now)
        if now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            report = Status(self.machine.view.phase, 0, 0, ())
            self.outbox.append(Envelope(self.me, self.machine.launcher, report))


class SimLauncher:
    """Starts the processes that views ask for, and reports exits.

    Args:
        cluster: the job.
        starts: what it has to start.
        me: the launcher.
    """

    def __init__(self, cluster: Cluster, starts: Starts, me: Peer) -> None:
        self.me = me
        self.outbox: list[Envelope] = []
        self.exited: list[Exit] = []
        self.supervisors_killed = 0
        """For their silence."""
        self.starts = starts
        self._told: LauncherBeat | None = None
        self._next_beat = 0.0
        self._watch = SupervisorWatch(cluster.plan.timing)
        self._cluster = cluster

    def receive(self, envelope: Envelope, now: float) -> None:
        """Take a view or a report."""
        self._watch.hear(now)
        if not isinstance(envelope.message, View):
            return
        took_over = self.starts.takes_over
        for peer in self.starts.take(envelope.message):
            self.starts.running[peer.role, peer.slot] = peer
            start = self._cluster.start_worker if peer.role == "worker" else self._cluster.start_server
            start(peer.slot, peer.incarnation)
        if took_over and not self.starts.takes_over:
            there = self._cluster.network.nodes
            missing = [peer for peer in self.starts.running.values() if peer not in there]
            self.exited += [Exit(peer, 1, "was lost with its launcher") for peer in missing]

    def tick(self, now: float) -> None:
        """Report exited processes repeatedly; restart a silent supervisor."""
        if self.starts.superseded:
            return
        if self._watch.silence(now):
            self.supervisors_killed += 1
            self._watch.start(now)
            self._cluster.restart_supervisor()
        beat = LauncherBeat("ready", self.starts.view.number, exited=tuple(self.exited))
        if beat != self._told or now >= self._next_beat:
            self._told, self._next_beat = beat, now + REPORT_SECONDS
            self.outbox.append(Envelope(self.me, Peer("supervisor"), beat))


@dataclass
class Cluster:
    """A job on virtual time.

    Args:
        plan: from ``counting_plan``.
        seed: decides everything that is left to chance.
        batches: how many there are.
    """

    plan: JobPlan
    seed: int
    batches: int
    weather: Weather = CALM
    storage: MemoryStorage = field(default_factory=MemoryStorage)
    server_class: type[Server] = Server
    supervisor_class: type[Supervisor] = Supervisor
    compute_seconds: float = COMPUTE_SECONDS

    def __post_init__(self) -> None:
        self.network = Network(self.seed, self.weather)
        self.random = self.network.random
        slots = range(self.plan.servers)
        near = self.plan.neighbours
        self.network.unconnected = {(a, b) for a in slots for b in slots if b not in near[a]}
        self.servers: dict[int, Server] = {}
        self.recoveries: list[Recovery] = []
        """Of all servers that there have ever been."""
        self.savers: dict[int, CutCopies] = {}
        for slot in range(self.plan.servers):
            self._add_server(slot, 1)
        self.launchers = 1
        first = Starts(self.launchers)
        first.running = {(peer.role, peer.slot): peer for peer in self.network.nodes}
        self.add_launcher(first)
        self.cuts: list[tuple[int, tuple[Position, ...]]] = []
        self.start_supervisor()

    def _add_server(self, slot: int, incarnation: int) -> None:
        fresh = self.plan.resume is None
        peer = Peer("server", slot, incarnation)
        options: dict[str, Any] = {}
        if self.plan.r and self.seed % ARENA_SEEDS == 0:
            arena = self.network.arenas[peer] = Arena(ARENA_BYTES, shared_from_bytes=1)
            options["allocate"] = arena.allocate
        server = self.server_class(peer, self.plan, f"s{slot}.{incarnation}", fresh=fresh, **options)
        # A launcher that wakes up late may start what has been replaced meanwhile.
        replaced = slot in self.servers and self.servers[slot].me.incarnation > incarnation
        saver = CutCopies(server, None) if replaced else self.saver_of(server)
        server.open(Opened(saver, saved=LastCopy(self, server)))
        if server.recovery is not None:
            self.recoveries.append(server.recovery)
        if not replaced:
            self.servers[slot] = server
        self.network.add(server)

    def saver_of(self, server: Server) -> Saver:
        """Who saves its rows."""
        saver = self.savers[server.me.slot] = CutCopies(server, self.savers.get(server.me.slot))
        return saver

    def start_supervisor(self) -> None:
        """Start it, or start it again."""
        self.supervisor = self.supervisor_class(self.plan, self.storage, self.network.now)
        self.network.add(SimSupervisor(self.supervisor))

    def restart_supervisor(self) -> None:
        """Kill it, and start another a moment later."""
        self.collect_cuts()
        self.network.kill(self.supervisor.me)
        self.network.at(self.network.now + self.random.uniform(0.05, 0.5), self.start_supervisor)

    def add_launcher(self, starts: Starts) -> None:
        """Add a launcher; an earlier one may still be there."""
        self.launcher = SimLauncher(self, starts, Peer("launcher", 0, self.launchers))
        self.network.add(self.launcher)

    def replace_launcher(self) -> None:
        """Let another launcher take over. The earlier one may still be there."""
        self.launchers += 1
        self.add_launcher(Starts(self.launchers, takes_over=True))

    def start_worker(self, slot: int, incarnation: int) -> None:
        """Start a worker after a delay."""
        peer = Peer("worker", slot, incarnation)
        worker = SimWorker(peer, self.plan, self.network, self.batches, self.compute_seconds)
        self.network.at(self.network.now + START_SECONDS, lambda: self.network.add(worker))

    def start_server(self, slot: int, incarnation: int) -> None:
        """Likewise."""
        self.network.at(self.network.now + START_SECONDS, lambda: self._add_server(slot, incarnation))

    def kill(self, role: str, slot: int, *, noticed: bool) -> None:
        """Kill a process; without ``noticed``, only its silence shows it."""
        for peer in [p for p in self.network.nodes if (p.role, p.slot) == (role, slot)]:
            self.network.kill(peer)
            if noticed:
                self.launcher.exited.append(Exit(peer, -9))

    def cut(self) -> None:
        """Make a consistent cut as soon as that is possible."""
        if self.supervisor.may_cut() and self.supervisor.view.phase == "running":
            self.supervisor.request_cut(
                1 + max((v for s in self.savers.values() for v in s.copies), default=0)
            )
            self.network.send_outbox(self.supervisor)

    def collect_cuts(self) -> None:
        """Note the cuts that were made since last asked."""
        for cut in self.supervisor.cuts_made:
            self.cuts.append((cut.version, cut.positions))
        self.supervisor.cuts_made.clear()

    def values(self, group: int, copies: list[list[NDArray[np.uint32]]] | None = None) -> Floats:
        """The first weight of every row of a group: now, or in copies of each server's records."""
        plan = self.plan.groups[group]
        values = np.full(plan.rows, np.nan, np.float32)
        for server in self.servers.values():
            records = copies[server.me.slot][group] if copies else server.shards[group].records
            rows = self.plan.placements[group].row(server.me.slot, np.arange(len(records)))
            real = rows < plan.rows
            values[rows[real]] = records[real, 0].view(np.float32)
        return values

    def violations(self) -> list[str]:
        """What is wrong when the job is done: batches that did not count once, cuts that are not one
        instant."""
        right = self._without_lost(counts(self.plan, range(self.batches)), self.network_lost())
        wrong = self._differences("at the end", right, None)
        if any(self.network_lost()) and all(member.incarnation == 1 for member in self.supervisor.workers):
            wrong.append(f"the network lost {self.network_lost()} pushes, but no worker died")
        wrong += self._wrong_parities()
        for version, positions in self.cuts:
            done = [b for b in range(self.batches) if b <= positions[b % self.plan.workers].index]
            copies = [self.savers[slot].copies[version] for slot in range(self.plan.servers)]
            lost = [self.savers[slot].lost[version] for slot in range(self.plan.servers)]
            right = self._without_lost(counts(self.plan, done), lost)
            wrong += self._differences(f"in cut {version}", right, copies)
        return wrong

    def loss_is_right(self, failure: JobFailure) -> bool:
        """Whether the network is lost, as the job says, that only workers had copies of."""
        current = {member.peer for member in self.supervisor.workers}
        workers = [n for n in self.network.nodes.values() if isinstance(n, SimWorker) and n.me in current]
        copies = [worker.machine.calls.copy_of(failure.peer.slot) for worker in workers]
        return failure.kind == "network" and all(copy is None for copy in copies)

    def network_lost(self) -> list[int]:
        """Of each slot, the pushes that its network has lost with workers that had the only copies of it."""
        return [self.savers[slot].lost_now() if slot in self.savers else 0 for slot in self.servers]

    def _without_lost(
        self, expected: list[NDArray[np.float32]], lost: Sequence[int]
    ) -> list[NDArray[np.float32]]:
        """What is expected where the network lacks so many pushes at each server."""
        if any(lost):
            rows = np.arange(len(expected[-1]))
            expected[-1] -= np.array(lost, np.float32)[self.plan.placements[-1].owner(rows)]
        return expected

    def degraded(self) -> set[int]:
        """The slots whose server is gone or paused, or has not brought everything back."""
        found = set()
        for slot, server in self.servers.items():
            current = self.supervisor.servers[slot].incarnation == server.me.incarnation
            alive = server.me in self.network.nodes and not self.network.paused(server.me)
            recovery, rebuilding = server.recovery, server.stripes
            whole = (recovery is None or not recovery.left) and not (rebuilding and rebuilding.lacking())
            if not (current and alive and whole and server.started.epoch):
                found.add(slot)
        return found

    def is_quiet(self) -> bool:
        """Whether all parity servers have all changes."""
        protections = [server.replicator for server in self.servers.values()]
        return all(protection is None or protection.is_quiet for protection in protections)

    def lost(self, group: int) -> NDArray[np.int64]:
        """The rows of a group that have gone back to a copy, at whatever time."""
        found = [rows for recovery in self.recoveries for rows in recovery.lost_rows(group)]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)

    def _wrong_parities(self) -> list[str]:
        """Parities that are whole and are not the code of their members (invariant 1)."""
        wrong = []
        coded = [(g, placement) for g, placement in enumerate(self.plan.placements) if placement.r]
        for group, placement in coded:
            for slot, server in self.servers.items():
                assert server.replicator is not None
                parity = server.replicator.parities[group]
                blocks = np.arange(parity.blocks)
                for t in range(placement.r):
                    expected = np.zeros((len(blocks), parity.plan.words), np.uint32)
                    for m in range(placement.k):
                        owner = self.servers[placement.member_server(slot, t, m)]
                        records = owner.shards[group].records[blocks * placement.k + m]
                        parity.code.add(expected, t, m, np.ascontiguousarray(records))
                    bad = (parity.get(t, blocks) != expected).any(1) & parity.whole(t, blocks)
                    wrong += [
                        f"parity {t} of block {b} of group {group} at server {slot}" for b in blocks[bad]
                    ]
        return wrong

    def _differences(
        self, where: str, expected: list[NDArray[np.float32]], copies: list[list[NDArray[np.uint32]]] | None
    ) -> list[str]:
        wrong = []
        for group, right in enumerate(expected):
            found = self.values(group, copies)
            wrongly = found != right
            wrongly[self.lost(group)] = False  # for some batches they count no more, but for none twice
            wrongly |= found > right
            for row in np.flatnonzero(wrongly):
                wrong.append(f"{where}: row {row} of group {group} is {found[row]}, expected {right[row]}")
        return wrong
