"""A launcher takes over from one that was lost."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import (
    Exit,
    Happening,
    LauncherBeat,
    Peer,
    ServerInView,
    VaultAt,
    View,
    ViewNumber,
)
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.runner import Launcher, TrainingClock
from holdfast.cluster.runtime.engines.base import Inheritance
from holdfast.cluster.runtime.files import Journal
from holdfast.cluster.runtime.keys import JobKeys
from holdfast.cluster.runtime.node import Assignment
from holdfast.cluster.succession import Charter, Past, Succession, encode_charter, past_of
from holdfast.cluster.supervisor.starts import Starts
from holdfast.errors import JobFailed
from holdfast.events import EventLog, read_events
from holdfast.options import Kill

PLAN = JobPlan(job="job", seed=1, groups=(), servers=2, workers=0)
SUPERVISOR = Peer("supervisor")


class Engine:
    """What runs, and what is to be started."""

    launcher = 2

    def __init__(self, *runs: Peer) -> None:
        self.runs: frozenset[Peer] | None = frozenset(runs)
        self.started: list[Peer] = []
        self.killed: list[Peer] = []
        self.replaced = False

    def processes(self) -> frozenset[Peer] | None:
        return None if self.runs is None else self.runs | set(self.started)

    def start(self, assignment: Assignment) -> None:
        self.started.append(assignment.me)

    def signal(self, peer: Peer, number: int) -> None:
        assert number == signal.SIGKILL
        self.killed.append(peer)

    def exited(self) -> list[Exit]:
        if self.replaced:
            raise JobFailed("another controller has taken over the job")
        return []

    def warm(self, role: str, slot: int | None = None) -> None:
        pass


class Successor:
    """A launcher that takes over, and a supervisor that tells it what a test wants."""

    def __init__(self, *runs: Peer) -> None:
        self.engine = Engine(*runs)
        template = Assignment(me=SUPERVISOR, plan=PLAN, supervisor="tcp://10.0.0.1:1", folder="")
        engine: Any = self.engine
        self.launcher = Launcher(engine, template, starts=Starts(2, takes_over=True))
        self.now = 0.0

    def view(self, number: int, *servers: int, launcher: int = 2) -> None:
        entries = tuple(ServerInView(slot, incarnation) for slot, incarnation in enumerate(servers))
        view = View(ViewNumber(number), "running", entries, launcher=launcher)
        self.launcher.receive(Envelope(SUPERVISOR, self.launcher.me, view), self.now)

    def tick(self) -> list[Exit]:
        """Let it report; what it says has ended."""
        self.now += 0.1
        self.launcher.tick(self.now)
        (*_, last) = self.launcher.outbox
        assert last.source == Peer("launcher", 0, 2)
        assert isinstance(last.message, LauncherBeat)
        return list(last.message.exited)


def server(slot: int, incarnation: int) -> Peer:
    return Peer("server", slot, incarnation)


def test_what_runs_is_left_alone_and_what_does_not_is_reported() -> None:
    successor = Successor(SUPERVISOR, server(0, 4))
    assert successor.tick() == []
    successor.view(7, 4, 3)
    (missing,) = successor.tick()
    assert missing.peer == server(1, 3)
    assert "controller" in missing.reason
    assert (successor.engine.started, successor.engine.killed) == ([], [])
    successor.view(8, 4, 4)
    assert successor.engine.started == [server(1, 4)]
    assert successor.engine.killed == [server(1, 3)], "in case that it runs where nobody sees it"
    assert successor.tick() == []


def test_it_waits_until_it_knows_what_runs() -> None:
    successor = Successor(SUPERVISOR)
    successor.engine.runs = None
    successor.view(7, 4, 3)
    assert successor.tick() == []
    successor.engine.runs = frozenset({SUPERVISOR, server(0, 4), server(1, 3)})
    assert successor.tick() == []
    successor.view(8, 4, 3)
    assert successor.engine.started == []


def test_a_supervisor_that_is_gone_is_started_again() -> None:
    successor = Successor(server(0, 4), server(1, 3))
    for _ in range(3):
        assert successor.tick() == []
    assert successor.engine.started == [SUPERVISOR]


def test_it_does_nothing_once_another_has_taken_over() -> None:
    successor = Successor(SUPERVISOR, server(0, 4), server(1, 3))
    successor.view(7, 4, 3)
    successor.tick()
    successor.view(9, 4, 5, launcher=3)
    said = len(successor.launcher.outbox)
    successor.launcher.tick(1000.0)
    assert (len(successor.launcher.outbox), successor.engine.started, successor.engine.killed) == (
        said,
        [],
        [],
    )
    successor.engine.replaced = True
    with pytest.raises(JobFailed, match="another controller"):
        successor.launcher.tick(1001.0)


def test_a_charter_has_all_that_a_successor_needs(tmp_path: Path) -> None:
    keys = JobKeys(2, 1, 3)
    vaults = (VaultAt(1, "tcp://10.0.0.2:2"),)
    charter = Charter(PLAN, "tcp", "tcp://10.0.0.1:1", vaults, keys.pairs)
    kept = encode_charter(charter)
    succession = Succession.after(5, Journal(tmp_path / "log"), Inheritance("job/1", 3), kept, most_vaults=3)
    assert (succession.launcher, succession.charter) == (5, charter)
    assert succession.inheritance is not None
    assert succession.inheritance.vaults == vaults
    assert [k.public for k in succession.inheritance.vault_keys] == [
        keys.of(Peer("vault", slot)).public for slot in range(3)
    ]
    again = JobKeys(2, 1, pairs=charter.keys)
    assert again.of(server(1, 9)) == keys.of(server(1, 1))
    assert succession.begin_again().charter is None
    assert "secret=…" in repr(charter.keys[0])
    assert charter.keys[0].secret not in repr(charter)


def test_the_log_says_what_has_happened(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log:
        log.emit("progress", step=1)
        log.emit("killed", role="server", slot=1, step=5)
        log.emit("data_lost", message="server 1 is gone")
        log.emit("progress", step=7)
        log.emit("server_lost", slot=0, incarnation=1, reason="was killed", host="10.0.0.3")
    past = past_of(read_events(tmp_path))
    assert past.losses == ["server 1 is gone"]
    assert past.began == pytest.approx(read_events(tmp_path)[3]["time"])
    kills = Kill("server", 1, 5), Kill("server", 1, 9), Kill("worker", 1, 5)
    assert past.left(kills) == kills[1:]
    told = Happening(1.0, "server_lost", {"slot": 0, "incarnation": 1, "reason": "was killed"})
    later = Happening(2.0, "server_lost", {"slot": 0, "incarnation": 2, "reason": "was killed"})
    assert past.without([told, later]) == [later], "by its own clock the supervisor says it again"
    assert Past().without([told, told]) == [told, told]


@pytest.mark.parametrize(
    ("said", "is_spread"),
    [([], True), (["spread_lost"], False), (["spread_lost", "spread_restored"], True)],
)
def test_what_was_said_last_of_machines(tmp_path: Path, said: list[str], is_spread: bool) -> None:
    """Servers may come to share a machine while no launcher is there to say so."""
    with EventLog(tmp_path) as log:
        for event in ["progress", *said]:
            log.emit(event)
    assert past_of(read_events(tmp_path)).is_spread == is_spread


def test_training_time_includes_that_under_the_last_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.cluster.runner.time.time", lambda: 1000.0)
    clock = TrainingClock(0, lambda: 50.0, began=990.0)
    assert clock._last - clock._began == pytest.approx(10.0)
