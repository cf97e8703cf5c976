"""Failures of a job on virtual time: the same seed gives the same schedule, to the last message."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from msgspec.structs import replace

from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.runtime.transport.memory import Weather
from holdfast.sim.cluster import ROWS, Cluster, counting_plan

KINDS = (
    "kill",
    "silence",
    "pause",
    "freeze",
    "zombie",
    "link",
    "link_for_good",
    "slow_link",
    "supervisor",
    "supervisor_freeze",
    "launcher",
    "launcher_zombie",
    "cut",
)
SERVER_KINDS = (
    "server_kill",
    "server_silence",
    "server_pause",
    "server_freeze",
    "server_link",
    "server_link_for_good",
    "server_slow",
    "server_and_worker",
)
LAST_FAULTS = {3: "server_alone", 7: "too_many_servers_kill"}
"""Of one schedule in so many: what a job need not survive, if it says so."""
MOST_SECONDS = 150.0
"""Of virtual time: by then every job has ended, one way or the other."""


@dataclass
class ScheduleOutcome:
    """The result of a simulated job."""

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


def _mixed_plan_of(seed: int) -> JobPlan:
    """With codes; of some jobs only workers have copies of the network."""
    plan = protected_plan_of(seed)
    return replace(plan, dense="workers") if seed % 7 == 3 else plan


def simulate(
    seed: int,
    *,
    protected: bool = False,
    batches: int = 24,
    faults: int = 10,
    cluster: Cluster | None = None,
    most_seconds: float = MOST_SECONDS,
) -> ScheduleOutcome:
    """Run a job with failures at random times, and compare what its rows are with what they must be.

    It must finish: never are more servers gone than the code covers, and there is always a path between any
    two nodes. In a few schedules the last fault is one that the code does not cover, or leaves no path: then
    the job may also say so. Either way it must end within ``most_seconds``.
    """
    if cluster is None:
        weather = Weather(loss=0.02, duplication=0.05, delay_seconds=0.003, ordered=seed % 5 == 0)
        cluster = Cluster(_mixed_plan_of(seed) if protected else plan_of(seed), seed, batches, weather)
    schedule = _Schedule(cluster, faults, LAST_FAULTS.get(seed % 25) if protected else None)
    network = cluster.network
    over = network.run(lambda: cluster.supervisor.view.phase == "stopping", most_seconds, every=8)
    cluster.collect_cuts()
    supervisor = cluster.supervisor
    for _ in range(40 if supervisor.finished and cluster.plan.r else 0):
        network.run(lambda: False, 0.05)  # until the last changes have arrived
        if cluster.is_quiet():
            break
    violations = cluster.violations() if supervisor.finished else []
    failure = supervisor.failure
    if failure is not None:
        expected = schedule.hopeless and failure.kind in ("lost", "stalled", "server")
        if not (expected or cluster.loss_is_right(failure)):
            violations.append(f"the job failed: {failure}")
    elif not over:
        violations.append("the job did not end")
    return ScheduleOutcome(
        seed,
        supervisor.finished,
        violations,
        schedule.done,
        network.now,
        len(cluster.cuts),
        network.counts,
    )


class _Schedule:
    """Injects one fault after the other."""

    def __init__(self, cluster: Cluster, faults: int, last: str | None = None) -> None:
        self.done: Counter[str] = Counter()
        self.hopeless = False
        """Whether something has happened that the job need not survive."""
        self._last = last
        self._doomed: list[tuple[float, set[int]]] = []
        self._cluster = cluster
        self._left = faults
        self._network = cluster.network
        self._random = cluster.random
        self._network.at(self._random.uniform(0.4, 0.8), self._next)

    def _next(self) -> None:
        if self._left == 0:
            return
        self._left -= 1
        going = self._cluster.supervisor.view.phase in ("running", "holding")
        if going and self._last and not self._left:
            self.hopeless = True
            self.done[self._last] += 1
            getattr(self, f"_{self._last}")(self._random.randrange(self._cluster.plan.servers))
        elif going:
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
        self._network.at(self._network.now + self._random.expovariate(1 / 0.25), self._next)

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

    def _server_freeze(self, slot: int) -> None:
        """Suspend a process for good."""
        for peer in [p for p in self._network.nodes if p.role == "server" and p.slot == slot]:
            self._network.pause(peer)

    def _server_link_for_good(self, slot: int) -> None:
        """Two servers cannot talk to each other, or one not to the other, from now on."""
        other = self._random.randrange(self._cluster.plan.servers)
        one_way = self._random.random() < 0.5
        if slot != other and self._leaves_paths(Peer("server", slot), other):
            self._network.break_link(Peer("server", slot), Peer("server", other), one_way=one_way)
            self._doomed.append((self._network.now + 3.0, {slot, other}))

    def _leaves_paths(self, one: Peer, server: int) -> bool:
        """Whether more than one other server could pass messages on if this link were cut, too."""
        target = Peer("server", server)
        near = self._cluster.plan.neighbours
        slots = near[server] & near[one.slot] if one.role == "server" else near[server]
        between = [Peer("server", slot) for slot in slots if slot != one.slot or one.role != "server"]
        cut = self._network.is_broken
        if sum(not cut(one, p) and not cut(p, target) for p in between) < 2:
            return False
        return not any(cut(one, p) or cut(p, target) for p in between)  # nobody counts on this link

    def _server_alone(self, slot: int) -> None:
        """A server reaches no other one any more, though the supervisor and workers."""
        for other in range(self._cluster.plan.servers):
            self._network.break_link(Peer("server", slot), Peer("server", other))

    def _too_many_servers_kill(self, slot: int) -> None:
        plan = self._cluster.plan
        for distance in range(plan.r + 1):
            self._cluster.kill("server", (slot + distance) % plan.servers, noticed=True)

    def _server_slow(self, slot: int) -> None:
        """Whatever a server and another tell each other is late for a while."""
        other = self._random.randrange(self._cluster.plan.servers)
        delay, seconds = self._random.uniform(0.05, 0.8), self._random.uniform(0.5, 4.0)
        self._network.slow_link(Peer("server", slot), Peer("server", other), delay, seconds)
        self._doomed.append((self._network.now + seconds + 2.0, {slot, other}))

    def _server_link(self, slot: int) -> None:
        """Two servers cannot talk to each other, though everybody else can to both: one is replaced."""
        other = self._random.randrange(self._cluster.plan.servers)
        if len(self._cluster.degraded() | {slot, other}) <= max(2, self._cluster.plan.r):
            seconds = self._random.uniform(0.1, 2.5)
            self._network.break_link(Peer("server", slot), Peer("server", other), seconds)
            self._doomed.append((self._network.now + seconds + 2.0, {slot, other}))

    def _dying(self) -> set[int]:
        """Servers that may be dead, or taken for dead, any moment."""
        now = self._network.now
        return set().union(*(slots for until, slots in self._doomed if now < until))

    def _pause(self, worker: int) -> None:
        """As SIGSTOP and SIGCONT do it: often for long enough that another has taken over meanwhile."""
        for peer in [p for p in self._network.nodes if p.role == "worker" and p.slot == worker]:
            self._network.pause(peer, self._random.uniform(0.1, 4.0))

    def _freeze(self, worker: int) -> None:
        """Suspend a process for good."""
        for peer in [p for p in self._network.nodes if p.role == "worker" and p.slot == worker]:
            self._network.pause(peer)

    def _zombie(self, worker: int) -> None:
        """A worker that wakes up when it has just been replaced, while everybody holds for a cut."""
        at = self._network.now
        for peer in [p for p in self._network.nodes if p.role == "worker" and p.slot == worker]:
            self._network.pause(peer, self._random.uniform(1.6, 2.4))
        self._network.at(at + self._random.uniform(1.4, 2.2), lambda: self._cut(worker))

    def _link(self, worker: int) -> None:
        server = Peer("server", self._random.randrange(self._cluster.plan.servers))
        self._network.break_link(Peer("worker", worker), server, self._random.uniform(0.1, 2.5))

    def _link_for_good(self, worker: int) -> None:
        """A worker and a server cannot talk to each other, or one not to the other, from now on."""
        one, server = Peer("worker", worker), self._random.randrange(self._cluster.plan.servers)
        one_way = self._random.random() < 0.5
        if self._leaves_paths(one, server):
            ends = one, Peer("server", server)
            first, second = ends if self._random.random() < 0.5 else ends[::-1]
            self._network.break_link(first, second, one_way=one_way)

    def _slow_link(self, worker: int) -> None:
        server = Peer("server", self._random.randrange(self._cluster.plan.servers))
        delay, seconds = self._random.uniform(0.05, 0.8), self._random.uniform(0.5, 4.0)
        self._network.slow_link(Peer("worker", worker), server, delay, seconds)

    def _supervisor(self, worker: int) -> None:
        if self._cluster.supervisor.me in self._network.nodes:
            self._cluster.restart_supervisor()

    def _supervisor_freeze(self, worker: int) -> None:
        """Stopped: nobody but the launcher can tell, which starts another."""
        self._network.pause(self._cluster.supervisor.me)

    def _launcher(self, worker: int) -> None:
        """The launcher dies. What it has just started, and nobody knows of, runs on."""
        self._network.kill(self._cluster.launcher.me)
        later = self._network.now + self._random.uniform(0.1, 2.0)
        self._network.at(later, self._succeed, self._cluster.launchers)

    def _launcher_zombie(self, worker: int) -> None:
        """The launcher stands still, and wakes up before or after another has taken over."""
        self._network.pause(self._cluster.launcher.me, self._random.uniform(0.1, 4.0))
        later = self._network.now + self._random.uniform(0.1, 2.0)
        self._network.at(later, self._succeed, self._cluster.launchers)

    def _succeed(self, launcher: int) -> None:
        if self._cluster.launchers == launcher:  # nobody has taken over from it yet
            self._cluster.replace_launcher()

    def _cut(self, worker: int) -> None:
        self._cluster.collect_cuts()
        if self._cluster.supervisor.me in self._network.nodes:
            self._cluster.cut()
