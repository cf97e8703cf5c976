"""A process that is no member of a job, and what it can do to the job: nothing (hole 36)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.cluster.make_plan import plan_job
from holdfast.cluster.protocol.messages import Status
from holdfast.cluster.report.result import JobResult
from holdfast.cluster.runner import Runner
from holdfast.cluster.runtime.engines.local import LocalLauncher
from holdfast.events import EventLog
from holdfast.testing.stranger import Stranger, endpoints_of, most_memory_of
from tests.cluster.test_job import network, reader, twin_of
from tests.other_user import CAN_BE_ANOTHER, NOBODY

STEPS = 1000
MOST_GROWTH = 64 << 20


class Attacked:
    """A job of two protected servers that a stranger attacks while it trains."""

    def __init__(self, folder: Path, bind: str, uid: int | None, megabytes: int, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.job = hf.Job(
            network(), reader(samples=100 * STEPS), test_data=reader(samples=500, part="test"),
            servers=2, workers=1, training=hf.Training(staleness=0), protection=hf.ErasureCode(k=1, r=1),
            engine=hf.Local(bind=bind),
        )  # fmt: skip
        self.plan = plan_job(self.job.config)
        self._uid, self._megabytes = uid, megabytes
        self.stranger: Stranger | None = None
        self.before: dict[int, int] = {}
        self.grown: dict[int, int] = {}
        self.steps: list[int] = []
        self.steps_then = 0
        self._done = False

    def run(self) -> JobResult:
        self.folder.mkdir(exist_ok=True)
        with LocalLauncher(self.folder) as self.engine, EventLog(self.folder) as events:
            runner = Runner(self.plan, self.engine, self.folder, events, self.job.config.job.bind)
            try:
                return runner.run(self._look, hold_requested=self._holds)
            finally:
                if self.stranger is not None:
                    self.findings = self.stranger.close()

    def _holds(self) -> bool:
        """The job must not end before the stranger does; until a report tells of it, workers go on."""
        return bool(self.steps) and self.steps[-1] >= STEPS // 2 and not self._done

    def _look(self, status: Status) -> None:
        self.steps.append(status.steps)
        if self.stranger is None and status.phase == "running" and status.steps > 20:
            pids = [*self.engine.pids().values(), os.getpid()]
            self.endpoints = [endpoint for pid in pids[:-1] for endpoint in endpoints_of(pid)]
            for pid in pids:  # what it once needed to start does not hide what it takes from now on
                Path(f"/proc/{pid}/clear_refs").write_text("5")
            self.before = {pid: most_memory_of(pid) for pid in pids}
            self.stranger = Stranger(self.endpoints, self.plan.job, self._uid, self._megabytes)
            self.first_step = status.steps
        elif self.stranger is not None:
            for pid, before in self.before.items():
                self.grown[pid] = max(self.grown.get(pid, 0), most_memory_of(pid) - before)
            assert not self.stranger.ended
            if not self._done and self.stranger.findings.rounds >= self.rounds:
                self._done, self.steps_then = True, status.steps


def check(attacked: Attacked, result: JobResult) -> None:
    """Nothing was read, nothing stopped, nobody has grown, and every batch counts once, to the bit."""
    assert len(attacked.endpoints) == 3, "the supervisor's and the servers'"
    assert max(attacked.grown.values()) <= MOST_GROWTH, attacked.grown
    assert attacked.findings.rounds >= attacked.rounds
    assert attacked.findings.answers == 0
    assert attacked.first_step < attacked.steps_then <= STEPS, "it was trained on meanwhile"
    assert (result.steps, result.workers_replaced, result.failures) == (STEPS, 0, ())
    assert result.messages_dropped == 0, "of strangers none comes as far as a message"
    assert result.records == twin_of(attacked.job, servers=2).records()


def test_another_user_cannot_even_connect(tmp_path: Path) -> None:
    if not CAN_BE_ANOTHER:
        pytest.skip("takes root, to be another user")
    attacked = Attacked(tmp_path / "run", "ipc", NOBODY, megabytes=64, rounds=1)
    result = attacked.run()
    check(attacked, result)
    assert attacked.findings.connected == 0
    assert attacked.findings.unreachable > 1000


def test_over_tcp_a_stranger_gets_nowhere(tmp_path: Path) -> None:
    uid = NOBODY if CAN_BE_ANOTHER else None
    attacked = Attacked(tmp_path / "run", "tcp://127.0.0.1", uid, megabytes=64, rounds=1)
    check(attacked, attacked.run())
    assert attacked.findings.connected > 1000


@pytest.mark.soak
@pytest.mark.parametrize("bind", ["ipc", "tcp://127.0.0.1"])
def test_for_longer(tmp_path: Path, bind: str) -> None:
    if bind == "ipc" and not CAN_BE_ANOTHER:
        pytest.skip("takes root, to be another user")
    uid = NOBODY if CAN_BE_ANOTHER else None
    attacked = Attacked(tmp_path / "run", bind, uid, megabytes=2048, rounds=10)
    check(attacked, attacked.run())
