"""A launcher moves servers that share a machine: only in calm times, and one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.protocol.messages import NodeStatus, Peer, Status
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.runner import Runner
from holdfast.cluster.runtime.engines.base import Draining
from holdfast.events import EventLog, read_events

CALM = Status("running", 10, 100, ())
DEGRADED = Status("running", 10, 100, (), degraded=True)


class Engine:
    """Knows whether servers are spread, and which one should move."""

    def __init__(self) -> None:
        self.spread: bool | None = True
        self.server: Peer | None = None
        self.asked = 0
        self.leaving: tuple[Draining, ...] = ()

    def is_spread(self) -> bool | None:
        return self.spread

    def misplaced(self) -> Peer | None:
        self.asked += 1
        return self.server

    def draining(self) -> tuple[Draining, ...]:
        return self.leaving

    def machine(self, peer: Peer) -> str:
        return f"machine of {peer}"


class Launcher:
    """Notes what is killed."""

    def __init__(self) -> None:
        self.killed: list[tuple[str, int]] = []

    def kill(self, role: str, slot: int) -> None:
        self.killed.append((role, slot))


class Mending:
    """A launcher's part that mends, on a clock of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now = folder, 100.0
        self.engine, self.launcher = Engine(), Launcher()
        plan = JobPlan(job="job", seed=1, groups=(), servers=4, workers=1, k=2, r=1)
        engine: Any = self.engine
        self.runner = Runner(plan, engine, folder, EventLog(folder))
        monkeypatch.setattr("holdfast.cluster.runner.time.monotonic", lambda: self.now)

    def pass_time(self, seconds: float, status: Status = CALM) -> None:
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            launcher: Any = self.launcher
            self.runner._mend(status, launcher)

    @property
    def events(self) -> list[str]:
        return [event["event"] for event in read_events(self.folder)]


@pytest.fixture
def mending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mending:
    return Mending(tmp_path, monkeypatch)


def test_a_server_moves_when_it_has_been_calm(mending: Mending) -> None:
    mending.pass_time(5.0)
    mending.engine.spread, mending.engine.server = False, Peer("server", 2, 1)
    mending.pass_time(10.0, DEGRADED)
    assert mending.launcher.killed == []
    mending.pass_time(2.0)
    assert mending.launcher.killed == []
    mending.pass_time(2.0)
    assert mending.launcher.killed == [("server", 2)]
    mending.pass_time(10.0, DEGRADED)  # its rows come back
    assert mending.launcher.killed == [("server", 2)]
    mending.engine.spread = True
    mending.pass_time(10.0)
    assert mending.launcher.killed == [("server", 2)]
    assert mending.events == ["spread_lost", "server_moved", "spread_restored"]


def test_without_a_machine_to_go_to_nothing_moves(mending: Mending) -> None:
    mending.pass_time(1.0)
    mending.engine.spread = False
    mending.pass_time(12.0)
    assert mending.launcher.killed == []
    assert mending.engine.asked < 5, "looking takes a while"
    assert mending.events == ["spread_lost"]


def test_nobody_leaves_a_drained_machine_while_a_server_moves(mending: Mending) -> None:
    """Even where there is no time, and before a report says that something is lacking."""
    mending.pass_time(5.0)
    mending.engine.spread, mending.engine.server = False, Peer("server", 2, 1)
    while not mending.launcher.killed:
        mending.pass_time(0.25)
    mending.engine.leaving = (Draining("m", mending.now + 1.0, (Peer("server", 0, 1),)),)
    mending.pass_time(3.0)
    assert mending.launcher.killed == [("server", 2)]
    there = NodeStatus(Peer("server", 2, 2), "ready", 0.0)
    mending.pass_time(1.0, Status("running", 10, 100, (there,)))
    assert mending.launcher.killed == [("server", 2), ("server", 0)]


def test_one_machine_has_nothing_to_mend(mending: Mending) -> None:
    mending.engine.spread = None
    mending.pass_time(12.0)
    assert (mending.engine.asked, mending.launcher.killed, mending.events) == (0, [], [])


def test_a_job_that_never_was_spread_says_nothing(mending: Mending) -> None:
    """As on a single machine with ``spread="prefer"``."""
    mending.engine.spread = False
    mending.pass_time(12.0)
    assert mending.events == []
