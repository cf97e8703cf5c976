"""Real servers that die under partial recovery: their rows go back, all others go on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.cluster.make_plan import plan_job
from holdfast.cluster.protocol.plan import JobPlan, Timing
from holdfast.cluster.runtime.engines.local import LocalLauncher
from holdfast.errors import ConfigError
from holdfast.events import read_events
from holdfast.training.config import load
from tests.cluster.test_kills import counted, expected
from tests.cluster.test_server_deaths import COUNTING, Killer, run, save_a_version


def plan_of(folder: Path, batches: int, protection: str, *more: str) -> JobPlan:
    values = [
        *COUNTING,
        f"data.arguments={{batches: {batches}}}",
        f"checkpoint.path={folder / 'store'}",
        "job.servers=3",
        f"job.protection={protection}",
        *more,
    ]
    return plan_job(load(None, values), timing=Timing(silent_seconds=30.0, retry_seconds=0.3))


@pytest.mark.parametrize(
    ("protection", "every"),
    [
        ("{kind: partial}", 60),
        ("{kind: partial, atomic: true}", 100_000),  # there is no version yet: rows begin anew
        ("{kind: partial, prioritize: mfu, fraction: 0.25}", 120),
    ],
    ids=["all rows", "from the start", "mfu"],
)
def test_only_the_dead_servers_rows_go_back(tmp_path: Path, protection: str, every: int) -> None:
    batches = 500
    plan = plan_of(tmp_path, batches, protection, f"checkpoint.every_steps={every}")
    engine = LocalLauncher(tmp_path)
    killer = Killer(engine, [(1,)], every=200, saved=every < batches)
    result = run(plan, tmp_path, engine, killer)
    assert killer.killed == 1
    assert (result.steps, result.samples) == (batches, 8 * batches)
    (back,) = [e for e in read_events(tmp_path) if e["event"] == "server_rolled_back"]
    found, wanted = counted(plan, tmp_path / "store"), expected(batches)
    on_dead = plan.placement.owner(np.arange(len(found))) == 1
    assert np.array_equal(found[~on_dead], wanted[~on_dead]), "the others lose nothing"
    lost = (wanted - found)[on_dead]
    assert lost.sum() > 0
    assert (lost >= 0).all(), "nothing counts twice"
    assert (found[on_dead] > 0).any(), "it goes on from there"
    if every == 100_000:
        assert back["version"] == 0
    if "prioritize" not in protection:
        # Each batch updates 16 rows; of each worker's push that was on its way, nothing is known.
        share = on_dead.mean()
        assert lost.sum() <= 16 * share * 1.5 * (back["samples_lost"] / 8 + 2 * plan.workers)
    assert 0 < back["pls"] <= 1 / 3  # a third where nothing counts before the server goes on
    assert back["rows"] == on_dead.sum()


def test_going_back_altogether_where_that_costs_less(tmp_path: Path) -> None:
    """A failure every few seconds: a PLS of 0.1 is had only by saving all the time."""
    plan = plan_of(tmp_path, 10, "{kind: partial, target_pls: 0.0001, mtbf_hours: 0.5, save_seconds: 60}")
    assert plan.partial == "full"
    assert "full recovery" in plan.partial_reason
    assert plan.saving is not None
    assert plan.saving.config.every_seconds == pytest.approx(464.8, abs=0.1)


def test_the_whole_job_goes_back_and_says_why(tmp_path: Path) -> None:
    batches = 300
    values = [
        *COUNTING,
        f"data.arguments={{batches: {batches}}}",
        f"checkpoint={{path: '{tmp_path / 'store'}', every_steps: 50}}",
        "job.servers=2",
        "job.protection={kind: partial, target_pls: 0.0001, mtbf_hours: 0.5, save_seconds: 60}",
        "job.kill=['server:1@step:150']",
        f"run={tmp_path / 'r'}",
    ]
    save_a_version(values, 60, tmp_path / "first")
    config = load(None, values)
    result = hf.Job.from_config(config).run()
    (loss,) = result.losses
    assert "full recovery" in loss
    assert result.pls == 0
    assert result.steps == batches
    assert np.array_equal(counted(plan_job(config), tmp_path / "store"), expected(batches)), "nothing is lost"


def test_the_target_says_how_often_to_save(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, 10, "{kind: partial, target_pls: 0.1, mtbf_hours: 2}")
    assert plan.partial == "partial"
    assert plan.saving is not None
    assert plan.saving.config.every_seconds == pytest.approx(2 * 0.1 * 3 * 2 * 3600)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["job.servers=2", "job.protection=partial"], "no checkpoint"),
        (
            ["job.servers=2", "job.protection=partial", "checkpoint.path=x"],
            "the checkpoint interval is unknown",
        ),
        (["job.servers=1", "job.protection=partial"], "2 or more"),
        (["job.protection=partial"], "job.servers is 0"),
        (["job.servers=2", "job.protection={kind: partial, target_pls: 0}"], "target_pls is 0"),
        (["job.servers=2", "job.protection={kind: partial, mtbf_hours: -1}"], "mtbf_hours is -1"),
        (["job.servers=2", "job.protection={kind: partial, prioritize: lru}"], "prioritize"),
        (["job.servers=3", "job.protection={kind: erasure-code, k: 2, beyond: rows}"], "set checkpoint.path"),
        (["job.servers=3", "job.protection={kind: replication, beyond: all}"], "beyond"),
    ],
)
def test_what_cannot_be(tmp_path: Path, values: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_job(load(None, [*values, "data.samples=10", "data.max_rows=20"]))
