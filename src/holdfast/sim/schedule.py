"""Failures of a job on virtual time: the same seed gives the same schedule, to the last message."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from holdfast.cluster.messages import Peer
from holdfast.cluster.plan import JobPlan
from holdfast.cluster.transport.memory import Weather
from holdfast.sim.cluster import ROWS, Cluster, counting_plan

KINDS = ("kill", "silence", "pause", "zombie", "link", "supervisor", "cut")
SERVER_KINDS = ("server_kill", "server_silence", "server_pause", "server_link", "server_and_worker")


@dataclass
class Outcome:
    """How a simulated job went."""

    seed: int
    finished: bool
    violations: list[str]
    faults: Counter[str]
    virtual_seconds: float
    cuts: int
    messages: Counter[str] = field(default_factory=Counter)


def plan_of(seed: int, rows: int = ROWS) -> JobPlan:
    """Shapes of jobs in turn: numbers of servers and workers, one or two phases, staleness."""
    return counting_plan(
        servers=(1, 2, 3, 4)[seed % 4],
        workers=(2, 1, 3)[seed // 4 % 3],
        atomic=seed % 2 == 0,
        staleness=(1, 0, 2)[seed // 2 % 3],
        rows=rows,
    )


def protected_plan_of(seed: int, rows: int = ROWS) -> JobPlan:
    """The same, with codes: one to three parities, as many servers as a stripe has records, or more."""
    k, r = ((2, 1), (4, 1), (1, 1), (2, 2), (3, 1), (3, 2), (1, 2), (2, 3))[seed % 8]
    return counting_plan(
        servers=k + r + (0, 1, 3)[seed // 8 % 3],
        workers=(2, 1, 3)[seed // 4 % 3],
        atomic=seed // 3 % 2 == 0,
        staleness=(1, 0, 2)[seed // 2 % 3],
        rows=rows,
        k=k,
        r=r,
    )


def simulate(
    seed: int,
    *,
    protected: bool = False,
    batches: int = 40,
    faults: int = 10,
    cluster: Cluster | None = None,
    most_seconds: float = 600.0,
) -> Outcome:
    """Run a job with failures at random times, and compare what its rows are with what they must be."""
    if cluster is None:
        weather = Weather(loss=0.02, duplication=0.05, delay_seconds=0.003, ordered=seed % 5 == 0)
        plan = protected_plan_of(seed) if protected else plan_of(seed)
        cluster = Cluster(plan, seed, batches, weather)
    schedule = _Schedule(cluster, faults)
    network = cluster.network
    over = network.run(lambda: cluster.supervisor.view.phase == "stopping", most_seconds)
    cluster.collect_cuts()
    supervisor = cluster.supervisor
    if supervisor.finished and cluster.plan.r:
        network.run(lambda: False, 2.0)  # until the last changes have arrived
    violations = cluster.violations() if supervisor.finished else []
    if supervisor.failure is not None:
        violations.append(f"the job failed: {supervisor.failure}")
    elif not over:
        violations.append("the job did not end")
    return Outcome(
        seed,
        supervisor.finished,
        violations,
        schedule.done,
        network.now,
        len(cluster.cuts),
        network.counts,
    )


class _Schedule:
    """One fault after the other, until there have been enough."""

    def __init__(self, cluster: Cluster, faults: int) -> None:
        self.done: Counter[str] = Counter()
        self._doomed: list[tuple[float, set[int]]] = []
        self._cluster = cluster
        self._left = faults
        self._network = cluster.network
        self._random = cluster.random
        self._network.at(self._random.uniform(0.5, 1.0), self._next)

    def _next(self) -> None:
        if self._left == 0:
            return
        self._left -= 1
        if self._cluster.supervisor.view.phase in ("running", "holding"):
            plan = self._cluster.plan
            most = plan.servers - 1 if plan.beyond == "rows" else plan.r
            kind = self._random.choice((*KINDS, *SERVER_KINDS) if plan.r else KINDS)
            if kind in SERVER_KINDS:
                slot = self._random.randrange(plan.servers)
                if len(self._cluster.degraded() | self._dying() | {slot}) <= most:
                    self.done[kind] += 1
                    getattr(self, f"_{kind}")(slot)
            else:
                self.done[kind] += 1
                getattr(self, f"_{kind}")(self._random.randrange(plan.workers))
        self._network.at(self._network.now + self._random.expovariate(1 / 0.3), self._next)

    def _kill(self, worker: int) -> None:
        self._cluster.kill("worker", worker, noticed=True)

    def _silence(self, worker: int) -> None:
        self._cluster.kill("worker", worker, noticed=False)

    def _server_kill(self, slot: int) -> None:
        self._cluster.kill("server", slot, noticed=True)

    def _server_silence(self, slot: int) -> None:
        self._cluster.kill("server", slot, noticed=False)

    def _server_pause(self, slot: int) -> None:
        for peer in [p for p in self._network.nodes if p.role == "server" and p.slot == slot]:
            seconds = self._random.uniform(0.1, 4.0)
            self._network.pause(peer, seconds)
            # Whoever waited for it may have it replaced even when it has just woken up.
            self._doomed.append((self._network.now + seconds + 0.5, {slot}))

    def _server_and_worker(self, slot: int) -> None:
        """A worker dies with pushes that are not kept, and then the server that would have kept them."""
        self._cluster.kill("worker", self._random.randrange(self._cluster.plan.workers), noticed=True)
        later = self._network.now + self._random.uniform(0.0, 0.12)
        self._doomed.append((later + 0.1, {slot}))
        self._network.at(later, lambda: self._cluster.kill("server", slot, noticed=True))

    def _server_link(self, slot: int) -> None:
        """Two servers cannot talk to each other, though everybody else can to both: one is replaced."""
        other = self._random.randrange(self._cluster.plan.servers)
        if len(self._cluster.degraded() | {slot, other}) <= max(2, self._cluster.plan.r):
            seconds = self._random.uniform(0.1, 2.5)
            self._network.cut_link(Peer("server", slot), Peer("server", other), seconds)
            self._doomed.append((self._network.now + seconds + 2.0, {slot, other}))

    def _dying(self) -> set[int]:
        """Servers that may be dead, or taken for dead, any moment."""
        now = self._network.now
        return set().union(*(slots for until, slots in self._doomed if now < until))

    def _pause(self, worker: int) -> None:
        """As SIGSTOP and SIGCONT do it: often for long enough that another has taken over meanwhile."""
        for peer in [p for p in self._network.nodes if p.role == "worker" and p.slot == worker]:
            self._network.pause(peer, self._random.uniform(0.1, 4.0))

    def _zombie(self, worker: int) -> None:
        """A worker that wakes up when it has just been replaced, while everybody holds for a cut."""
        at = self._network.now
        for peer in [p for p in self._network.nodes if p.role == "worker" and p.slot == worker]:
            self._network.pause(peer, self._random.uniform(1.6, 2.4))
        self._network.at(at + self._random.uniform(1.4, 2.2), lambda: self._cut(worker))

    def _link(self, worker: int) -> None:
        server = Peer("server", self._random.randrange(self._cluster.plan.servers))
        self._network.cut_link(Peer("worker", worker), server, self._random.uniform(0.1, 2.5))

    def _supervisor(self, worker: int) -> None:
        cluster, network = self._cluster, self._network
        if cluster.supervisor.me in network.nodes:
            cluster.collect_cuts()
            network.kill(cluster.supervisor.me)
            network.at(network.now + self._random.uniform(0.05, 0.5), cluster.start_supervisor)

    def _cut(self, worker: int) -> None:
        self._cluster.collect_cuts()
        if self._cluster.supervisor.me in self._network.nodes:
            self._cluster.cut()
