"""What the process that starts a job does of itself."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import (
    Evaluation,
    Exit,
    NodeStatus,
    Peer,
    Status,
    View,
    ViewNumber,
    WorkerInView,
)
from holdfast.cluster.protocol.plan import Timing
from holdfast.cluster.runner import Launcher, TrainingClock
from holdfast.cluster.runtime.engines.local import ONE_THREAD, LocalLauncher
from holdfast.cluster.runtime.node import Assignment
from holdfast.errors import JobFailed
from tests.cluster.runtime.engines.test_local import COMMAND, PATHS, assignment


def test_spares_wait_for_whoever_dies_next(tmp_path: Path) -> None:
    """One of a kind, and not while others start."""
    with LocalLauncher(tmp_path, COMMAND, {**ONE_THREAD, "PYTHONPATH": PATHS}) as engine:
        launcher = Launcher(engine, assignment(sleep=60.0))

        def spares(now: float, worker: int, epoch: int) -> list[int]:
            workers = (WorkerInView(0, worker),)
            view = View(ViewNumber(epoch), "running", workers=workers)
            launcher.receive(Envelope(Peer("supervisor"), launcher.me, view), now)
            launcher.tick(now)
            return [len(engine.warm_pids(role)) for role in ("server", "worker")]

        assert spares(100.0, worker=1, epoch=1) == [0, 0]
        assert spares(104.0, worker=1, epoch=2) == [0, 0]
        assert spares(106.0, worker=1, epoch=3) == [1, 1]
        assert spares(206.0, worker=1, epoch=4) == [1, 1]
        [spare] = engine.warm_pids("worker")
        assert spares(207.0, worker=2, epoch=5) == [1, 0]
        assert engine.pids()[Peer("worker", 0, 2)] == spare
        assert spares(208.0, worker=3, epoch=6) == [1, 0]
        assert spares(213.0, worker=3, epoch=7) == [1, 1]


@pytest.mark.parametrize(
    ("reports", "seconds"),
    [
        ([(5.0, "ready", 0), (6.0, "working", 0), (6.5, "working", 512), (6.51, "done", 1024)], 0.51),
        ([(5.0, "ready", 0), (6.0, "working", 0), (6.5, "done", 1024), (9.0, "done", 1024)], 0.5),
        ([(5.0, "ready", 0), (6.0, "done", 1024), (9.0, "done", 1024)], 1.0),
    ],
)
def test_the_speed_of_a_job_that_is_over_at_once(
    reports: list[tuple[float, str, int]], seconds: float
) -> None:
    """All its samples may come in one report, or in two that have next to no time between them."""
    times = iter([0.0, *(at for at, _, _ in reports)])
    clock = TrainingClock(3000, lambda: next(times))
    for _, state, samples in reports:
        node = NodeStatus(Peer("worker", 0, 1), state, 0.0)
        clock.note(Status("running", 0, 3000 + samples, (node,)))
    assert clock.samples() == 1024
    assert clock.seconds() == pytest.approx(seconds)


def test_a_job_without_a_batch_has_no_speed() -> None:
    clock = TrainingClock(5)
    assert (clock.samples(), clock.seconds()) == (0, 0)


class Ended:
    """An engine whose supervisor has ended."""

    launcher = 0

    def __init__(self) -> None:
        self.left = [Exit(Peer("supervisor"), -9)]

    def exited(self) -> list[Exit]:
        found, self.left = self.left, []
        return found


@pytest.mark.parametrize("told", [True, False])
def test_a_supervisor_that_dies_before_it_has_said_how_the_job_ended(told: bool) -> None:
    """Its last words may still be on their way; without them nobody would ever hear of the end."""
    launcher = Launcher(Ended(), assignment())  # type: ignore[arg-type]
    supervisor = Peer("supervisor")
    launcher.receive(Envelope(supervisor, launcher.me, View(ViewNumber(1), "stopping")), 0.0)
    launcher.receive(Envelope(supervisor, launcher.me, Status("stopping", 5, 5, ())), 0.0)
    launcher.tick(1.0)
    launcher.tick(2.0)
    if told:
        last = Status("stopping", 5, 5, (), tests=(Evaluation(1, 0.5, 0.5, 1),), finished=True)
        launcher.receive(Envelope(supervisor, launcher.me, last), 2.5)
        launcher.tick(10.0)
    else:
        with pytest.raises(JobFailed, match="while the job was ending"):
            launcher.tick(3.5)


class Obedient:
    """An engine that notes what it is told to do."""

    launcher = 0

    def __init__(self) -> None:
        self.killed: list[Peer] = []
        self.started: list[Peer] = []
        self._left: list[Exit] = []

    def signal(self, peer: Peer, number: int) -> None:
        assert number == signal.SIGKILL
        self.killed.append(peer)
        self._left.append(Exit(peer, -9))

    def start(self, assignment: Assignment) -> None:
        self.started.append(assignment.me)

    def exited(self) -> list[Exit]:
        found, self._left = self._left, []
        return found


def test_a_supervisor_that_sends_no_reports_is_ended_and_started_again() -> None:
    engine, supervisor = Obedient(), Peer("supervisor")
    launcher = Launcher(engine, assignment(supervisor))  # type: ignore[arg-type]
    silent = Timing().silent_seconds

    def pass_time(first: int, last: float, *, reports: bool) -> None:
        for now in range(first, int(last)):
            if reports:
                launcher.receive(Envelope(supervisor, launcher.me, Status("running", 5, 5, ())), float(now))
            launcher.tick(float(now))

    pass_time(0, 5 * silent, reports=True)
    assert engine.killed == []
    pass_time(50, 50 + silent + 2, reports=False)
    assert engine.killed == [supervisor]
    assert len(launcher.silences) == 1
    pass_time(62, 66, reports=False)
    assert engine.started == [supervisor], "as one that ended by itself"
    pass_time(66, 66 + 5 * silent, reports=False)
    assert len(engine.killed) == 1, "it may take a while to start"
    pass_time(120, 130, reports=True)
    launcher.tick(1000.0)
    launcher.tick(1000.5)
    assert len(engine.killed) == 1, "a launcher that stood still blames nobody"
