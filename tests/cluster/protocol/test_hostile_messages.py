"""Whatever arrives is dropped and counted: no message ends a node, and none is half done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from holdfast.cluster.protocol.admission import Admission
from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import (
    AskKept,
    Board,
    CanResend,
    Claim,
    Claimed,
    Collect,
    Commit,
    Denied,
    Deposit,
    Deposited,
    Exit,
    Happening,
    NoCopy,
    Peer,
    Pull,
    Refused,
    Relay,
    Role,
    Saved,
    ServerBeat,
    Status,
    View,
    ViewNumber,
)
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.protocol.stripe_messages import Agreed, Compare, Forget
from holdfast.cluster.protocol.wire import ROUTES, Header, Message, encode
from holdfast.cluster.report.failures import Failures, SpeedMeter
from holdfast.cluster.report.progress import Reports, tell
from holdfast.cluster.runner import Launcher, TrainingClock
from holdfast.cluster.runtime.engines.base import Draining
from holdfast.cluster.runtime.keys import Keys
from holdfast.cluster.runtime.node import Assignment
from holdfast.cluster.runtime.transport.memory import Weather
from holdfast.cluster.supervisor.process import _status
from holdfast.events import EventLog
from holdfast.sim.cluster import Cluster, counting_plan
from holdfast.sim.saving import SavedCluster, saved_plan, wrong_versions
from holdfast.training.config import load
from holdfast.training.saving import CheckpointConfig
from tests.cluster.protocol.hostile import Hostile, Mutator

STORM = Weather(loss=0.02, duplication=0.02, delay_seconds=0.01)
SHAPES: list[dict[str, Any]] = [
    {"servers": 4, "workers": 2, "k": 2, "r": 2, "atomic": True},
    {"servers": 3, "workers": 3, "k": 2, "r": 1, "atomic": False, "beyond": "rows"},
    {"servers": 3, "workers": 2, "k": 1, "r": 1, "atomic": False, "dense": "workers"},
    {"servers": 2, "workers": 2, "atomic": True, "staleness": 0},
]


def hostile_job(shape: dict[str, Any], seed: int, share: float, batches: int = 24) -> Hostile:
    """A job in which a server and a worker die, and copies of all nodes get wrong messages."""
    other = Cluster(counting_plan(servers=2, workers=5, atomic=True, rows=9, k=1, r=1), seed, 4)
    recorded = Hostile(other, Mutator(seed), 0.0)
    other.network.run(lambda: other.supervisor.finished, 60)
    cluster = Cluster(counting_plan(**shape), seed, batches, STORM)
    hostile = Hostile(cluster, Mutator(seed, recorded.seen), share)
    network = cluster.network
    if cluster.plan.r:
        network.at(1.2, lambda: cluster.kill("server", 1, noticed=True))
    network.at(2.0, lambda: cluster.kill("worker", 0, noticed=True))
    network.at(1.0, cluster.cut)
    assert network.run(lambda: cluster.supervisor.finished, 600)
    assert not cluster.violations(), "what was done to copies has come to the nodes"
    machines: list[Any] = [*cluster.servers.values(), cluster.supervisor]
    assert all(machine.admission.dropped == 0 for machine in machines), "a message of the job itself"
    return hostile


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_message_ends_a_node(shape: dict[str, Any]) -> None:
    hostile = hostile_job(shape, 1, share=0.05)
    assert min(hostile.tried[role] for role in ("server", "worker", "supervisor")) > 20
    assert hostile.dropped > 50


@pytest.mark.soak
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_no_message_ends_a_node_for_longer(shape: dict[str, Any], seed: int) -> None:
    hostile_job(shape, seed, share=0.5, batches=60)


class NoEngine:
    """Starts nothing."""

    most_vaults = 0
    launcher = 1

    def __init__(self) -> None:
        self.started: list[Peer] = []

    def keep(self, charter: bytes) -> None:
        pass

    def processes(self) -> frozenset[Peer] | None:
        return frozenset()

    def is_spread(self) -> bool | None:
        return None

    def misplaced(self) -> Peer | None:
        return None

    def draining(self) -> Sequence[Draining]:
        return ()

    def open_vaults(self, job: str, keys: Sequence[Keys]) -> Board:
        return ()

    def warm(self, role: str, slot: int | None = None) -> None:
        pass

    def announce(self, supervisor: str) -> None:
        pass

    def machine(self, peer: Peer) -> str:
        return ""

    def read(self, name: str) -> bytes | None:
        return None

    def start(self, assignment: Assignment) -> None:
        self.started.append(assignment.me)

    def signal(self, peer: Peer, number: int) -> None:
        pass

    def pids(self) -> dict[Peer, int]:
        return {}

    def exited(self) -> list[Exit]:
        return []

    def close(self, timeout_seconds: float = 5.0) -> None:
        pass


def reports(seed: int) -> tuple[JobPlan, list[Envelope]]:
    """What the supervisor of a job in which a server dies tells whoever started it."""
    cluster = Cluster(counting_plan(servers=3, workers=2, k=2, r=1, atomic=True), seed, 60)
    recorded = Hostile(cluster, Mutator(seed), 0.0)
    network, launcher = cluster.network, cluster.launcher.me
    sent: list[Envelope] = []
    happened: list[Happening] = []

    def report() -> None:
        supervisor = cluster.supervisor
        happened.extend(Happening(network.now, *event) for event in supervisor.events)
        supervisor.events.clear()
        status = _status(supervisor, None, network.now, happened[-16:], 0)
        sent.append(Envelope(supervisor.me, launcher, status))
        network.at(network.now + 0.1, report)

    network.at(0.0, report)
    network.at(1.2, lambda: cluster.kill("server", 1, noticed=True))
    assert network.run(lambda: cluster.supervisor.finished, 600)
    report()
    views = [envelope for envelope in recorded.seen if envelope.target == launcher]
    assert any(isinstance(e.message, Status) and e.message.finished for e in sent)
    return cluster.plan, [*views, *sent]


def follow(plan: JobPlan, envelopes: list[Envelope], folder: Path) -> NoEngine:
    """What the process that has started a job does with reports."""
    engine = NoEngine()
    template = Assignment(me=Peer("supervisor"), plan=plan, supervisor="", folder=str(folder))
    launcher = Launcher(engine, template)
    config = load(None, ["job.servers=3", "job.protection=2+1"])
    clock, speeds, failures = TrainingClock(0), SpeedMeter(), Failures()
    with EventLog(folder) as events:
        noted = Reports(config, events)
        for now, envelope in enumerate(envelopes):
            launcher.receive(envelope, float(now))
            launcher.tick(float(now))
            status = launcher.status
            if status is not None:
                clock.note(status)
                failures.note(status.happened)
                speeds.note(status.samples, degraded=status.degraded)
                for news in noted.note(status).news:
                    tell(news)
                assert not status.finished or status.tests
    assert failures() is not None
    return engine


@pytest.mark.parametrize("seed", range(2))
def test_no_report_ends_whoever_has_started_a_job(tmp_path: Path, seed: int) -> None:
    plan, envelopes = reports(seed)
    right = follow(plan, envelopes, tmp_path)
    assert len(right.started) == 3 + 2 + 1, "those that views name"
    mutate = Mutator(seed)
    for _ in range(5):
        wrong = [mutate(mutate.random.choice(envelopes)) for _ in range(200)]
        engine = follow(plan, [envelope for envelope in wrong if envelope is not None], tmp_path)
        slots = {"server": 3, "worker": 2}
        assert all(0 <= peer.slot < slots[peer.role] for peer in engine.started), "no other is started"


def test_every_message_says_who_may_send_it() -> None:
    assert set(ROUTES) == set(get_args(Message))
    assert all(routes for routes in ROUTES.values())


RARE = {
    AskKept,
    Agreed,
    CanResend,
    Collect,
    Compare,
    Forget,
    NoCopy,
    Refused,
    Relay,
    Saved,
    Status,
    Claim,
    Claimed,
    Deposit,
    Deposited,
    Denied,
}
"""That a short job may do without."""


def test_a_message_counts_only_from_who_may_send_it() -> None:
    """Every message of a job, from every other role: a server takes no view of a worker, and gives no rows to
    a launcher."""
    cluster = Cluster(counting_plan(**SHAPES[0]), 1, 24, STORM)
    hostile = Hostile(cluster, Mutator(3), 0.0)
    roles: tuple[Role, ...] = ("server", "worker", "supervisor", "launcher")
    tried: set[tuple[type, str, str]] = set()

    def others(envelope: Envelope, now: float) -> None:
        kind, target = type(envelope.message), envelope.target
        for role in roles:
            if (role, target.role) not in ROUTES[kind] and (kind, role, target.role) not in tried:
                tried.add((kind, role, target.role))
                source = Peer(role, 0, envelope.source.incarnation)
                wrong = Envelope(source, target, envelope.message, envelope.frames)
                assert hostile.give(target, wrong, now) != "taken"

    hostile.also = others
    cluster.network.at(1.2, lambda: cluster.kill("server", 1, noticed=True))
    assert cluster.network.run(lambda: cluster.supervisor.finished, 600)
    assert {kind for kind, _, _ in tried} >= set(ROUTES) - RARE
    assert (View, "worker", "server") in tried
    assert (Pull, "launcher", "server") in tried


WORKER, OTHER, SERVER = Peer("worker", 0, 1), Peer("worker", 1, 1), Peer("server", 1, 1)


@pytest.mark.parametrize(
    ("source", "header", "taken"),
    [
        (WORKER, Header("sim", WORKER, SERVER, Commit(1)), True),
        (SERVER, Header("sim", WORKER, Peer("server"), Commit(1)), True),
        (WORKER, Header("sim", OTHER, SERVER, Commit(1)), False),
        (WORKER, Header("other", WORKER, SERVER, Commit(1)), False),
        (WORKER, Header("sim", WORKER, OTHER, Commit(1)), False),
        (WORKER, Header("sim", WORKER, Peer("server", 9, 1), Commit(1)), False),
        (WORKER, Header("sim", WORKER, SERVER, Relay(b"")), False),
        (WORKER, Header("sim", WORKER, SERVER, View(ViewNumber(9, 9), "stopping")), False),
        (SERVER, Header("sim", Peer("supervisor"), SERVER, View(ViewNumber(9, 9), "stopping")), False),
        (SERVER, Header("sim", SERVER, Peer("supervisor"), ServerBeat("ready", ViewNumber())), False),
        (Peer("supervisor"), Header("sim", WORKER, SERVER, Commit(1)), False),
    ],
)
def test_what_is_passed_on_is_of_servers_and_workers(source: Peer, header: Header, taken: bool) -> None:
    plan = counting_plan(servers=3, workers=2, k=2, r=1, atomic=True)
    admission = Admission(Peer("server", 0, 1), plan)
    assert admission.admits(Envelope(source, Peer("server", 0, 1), Relay(encode(header)), ())) == taken


def test_what_servers_say_of_their_files_can_be_anything(tmp_path: Path) -> None:
    """A version of which a server says nonsense comes to nothing; others are right."""
    config = CheckpointConfig(path=str(tmp_path / "store"), every_steps=10)
    plan = saved_plan(counting_plan(servers=2, workers=2, atomic=True, rows=60), config)
    cluster = SavedCluster(plan, 1, 100)
    deliver, mutate = cluster.network._deliver, Mutator(1)
    wrong = [b"", b"[" * 100_000, b'{"x":' + b"[" * 100_000, b"\xff", b'{"added": [{}]}']

    def both(envelope: Envelope) -> None:
        if isinstance(envelope.message, Saved) and wrong and mutate.random.random() < 0.5:
            envelope = Envelope(
                envelope.source,
                envelope.target,
                replace(envelope.message, change=wrong.pop()),
                envelope.frames,
            )
        deliver(envelope)

    cluster.network._deliver = both  # type: ignore[method-assign]
    assert cluster.network.run(lambda: cluster.supervisor.finished, 600)
    cluster.close()
    assert not wrong
    assert cluster.keepers[-1].failures()
    versions, problems = wrong_versions(plan, 100, servers=3)
    assert versions
    assert not problems
    assert not cluster.violations()
