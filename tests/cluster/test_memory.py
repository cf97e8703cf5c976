"""Estimates of memory against what processes take, and who decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.cluster.job import Job
from holdfast.cluster.make_plan import plan_job
from holdfast.cluster.memory import server_bytes, with_estimates, worker_bytes
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.training.config import load

SETTINGS = (
    "job.servers=3", "job.protection=2+1", "job.workers=1", "data.test_samples=1000", "model.dim=32",
    "model.bottom=[32,32]", "model.top=[32,1]",
)  # fmt: skip


def plan_of(*settings: str) -> JobPlan:
    return plan_job(load(None, [*SETTINGS, *settings]))


@pytest.mark.parametrize(("rows", "batch"), [(250_000, 256), (20_000, 2048)])
def test_estimates_are_enough_and_not_much_more(rows: int, batch: int, tmp_path: Path) -> None:
    settings = [
        *SETTINGS, f"data.max_rows={rows}", f"batch_size={batch}", f"data.samples={60 * batch}",
        "report_every=5",
    ]  # fmt: skip
    most = {"server": 0, "worker": 0}

    def note(progress: Any) -> None:
        for process in progress.processes:
            if process.role in most:
                most[process.role] = max(most[process.role], process.memory_bytes)

    job = Job.from_config(load(None, settings, run=str(tmp_path / "run")))
    job.run(note)
    plan = plan_job(job.config)
    for role, estimated in (("server", server_bytes(plan)), ("worker", worker_bytes(plan))):
        assert most[role] <= estimated < 1.7 * most[role], (role, most[role] / 1e6, estimated / 1e6)


def test_rows_parities_and_saves_count(tmp_path: Path) -> None:
    small, large = plan_of("data.max_rows=1000"), plan_of("data.max_rows=1000000")
    rows = sum(group.rows for group in large.groups) - sum(group.rows for group in small.groups)
    grown = server_bytes(large) - server_bytes(small)
    assert 1.0 < grown / (rows / 3 * (1 + 1 / 2) * 64 * 4) < 1.1
    bare = server_bytes(plan_of("data.max_rows=1000000", "job.protection=none"))
    assert bare < 0.75 * server_bytes(large)
    saved = plan_of("data.max_rows=1000", f"checkpoint.path={tmp_path / 'store'}")
    assert server_bytes(saved) > server_bytes(small) + (256 << 20)
    assert worker_bytes(plan_of("batch_size=8192")) > worker_bytes(plan_of("batch_size=64"))


def test_the_users_number_wins() -> None:
    plan = plan_of()
    assert with_estimates(hf.Ray(), plan) == hf.Ray(
        server_memory=server_bytes(plan), worker_memory=worker_bytes(plan)
    )
    chosen = hf.Ray(server_memory=0, worker_memory=5)
    assert with_estimates(chosen, plan) == chosen
