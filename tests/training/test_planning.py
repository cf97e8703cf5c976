from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.make_plan import plan_job
from holdfast.coding.placement import Placement
from holdfast.errors import ConfigError, HoldfastError
from holdfast.options import Chunked
from holdfast.policy.mechanisms import Parities
from holdfast.policy.planner import plan
from holdfast.policy.protections import KINDS
from holdfast.policy.situation import Costs
from holdfast.training import measuring
from holdfast.training.config import load
from holdfast.training.measuring import measure_rates
from holdfast.training.planning import read_question, write_configuration
from holdfast.training.planning_options import Given
from holdfast.training.sizing import model_size

SIZED: dict[str, Any] = {"size": "220GB", "servers": 5, "mtbf": "20h"}
SMALL = """
model: {dim: 8, bottom: [16, 8], top: [16, 1]}
data: {samples: 2000, test_samples: 100, max_rows: 500}
optimizer: {name: adam}
batch_size: 100
job: {servers: 3, workers: 2}
"""


def test_what_is_not_said_is_assumed_and_said() -> None:
    question = read_question(Given(**SIZED))
    situation = question.situation
    assert (situation.table_bytes, situation.servers, situation.workers) == (220e9, 5, 15)
    assert situation.row.raw == 512  # 64 weights with Adagrad's state
    for option in ("--dim", "--optimizer", "--workers", "--write", "--hours", "--touched", "--tolerance"):
        assert any(option in words for words in question.assumed)


def test_what_is_said_is_not_assumed() -> None:
    question = read_question(
        Given(
            **SIZED, dim=128, optimizer="rowwise-adagrad", workers=20, hours="2d", reschedule="0s",
            write="2GB/s", read="3GB/s", copy="4GB/s", network="10Gbit/s", memory="256GB", step="10ms",
            batch_rows=100, dense="1MB", touched=0.1, tolerance=0.0, save_every="30m",
            cost=["tracking=0.01"], k=3,
        )
    )  # fmt: skip
    assert question.assumed == ()
    situation = question.situation
    assert situation.row.raw == 516
    assert situation.hours == 48
    assert situation.network_rate == 1.25e9
    assert situation.save_every_hours == 0.5
    assert situation.costs.tracking == 0.01
    assert question.wishes.k == 3


def test_a_configuration_says_how_large_its_model_is(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(SMALL)
    question = read_question(Given(config=path, mtbf="20h"))
    situation = question.situation
    config = load(path)
    size = model_size(config)
    rows = sum(min(rows, 500) for rows in (1460, 583, 305, 24, 633, 3, 27, 10, 4, 18, 15, 105)) + 14 * 500
    assert size.row.raw == 4 * (8 + 16 + 1)  # weights, two moments, a count
    assert size.table_bytes == rows * 100
    assert 100 < size.rows_per_batch < rows
    assert size.dense_bytes > 4 * (13 * 16 + 16 * 8)
    assert (situation.servers, situation.workers) == (3, 2)
    assert situation.table_bytes == size.table_bytes
    assert read_question(Given(config=path, mtbf="20h", servers=9, size="1GB")).situation.servers == 9


def test_machines_come_from_the_configuration_or_the_command(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(SMALL.replace("workers: 2}", "workers: 2, engine: {kind: ray, machines: 4}}"))
    assert read_question(Given(config=path, mtbf="20h")).situation.machines == 4
    assert read_question(Given(config=path, mtbf="20h", machines=3)).situation.machines == 3
    path.write_text(SMALL)
    assert read_question(Given(config=path, mtbf="20h")).situation.machines is None


def test_failures_of_machines_and_of_processes_are_told_apart() -> None:
    given = Given(size="220GB", servers=6, machines=3, mtbf="100h", machine_mtbf="300h")
    question = read_question(given)
    situation = question.situation
    assert (situation.machines, situation.machine_mtbf_hours) == (3, 300)
    assert situation.mtbf_hours == pytest.approx(50)
    assert situation.servers_per_failure == pytest.approx(1.5)
    assert situation.process_failures_per_hour == pytest.approx(0.01)
    assert not any("machines" in words or "--mtbf" in words for words in question.assumed)

    alone = read_question(Given(size="220GB", servers=6, machine_mtbf="300h"))
    assert alone.situation.machines == 6
    assert alone.situation.mtbf_hours == pytest.approx(50)
    assert alone.situation.process_failures_per_hour == pytest.approx(0, abs=1e-12)
    assert "a machine for each server (--machines)" in alone.assumed
    assert "servers fail only with their machine (--mtbf)" in alone.assumed


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, r"give --mtbf, such as 20h, --machine-mtbf or --failure-log FILE"),
        ({"machine_mtbf": "90d", "servers_per_failure": 2}, r"both say how many servers fail together"),
        ({"machine_mtbf": "90d", "machines": 0}, r"the number of machines is 0: expected above 0"),
        ({"machine_mtbf": "90d", "mtbf": "0h"}, r"the mean time between failures in hours is 0"),
        ({"machine_mtbf": "-1d"}, r"failures of a machine in hours is -24: expected above 0"),
        ({"machine_mtbf": "soon"}, r"--machine-mtbf is 'soon': expected a time"),
    ],
)
def test_failures_that_cannot_be(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_question(Given(size="220GB", servers=6, **given))


def test_failures_come_from_a_log(tmp_path: Path) -> None:
    log = tmp_path / "failures.csv"
    log.write_text("time,server\n" + "".join(f"{10 * i + i % 3},{i % 5}\n" for i in range(40)))
    question = read_question(Given(size="1GB", servers=5, failure_log=log))
    assert question.situation.mtbf_hours == pytest.approx(10, rel=0.05)
    assert question.fits[0].lifetime.name in ("gamma", "weibull")
    assert question.log is not None
    assert len(question.log.trace) == 40
    assert read_question(Given(**SIZED, failure_log=log)).situation.mtbf_hours == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtbf": "-5h"}, "the mean time between failures in hours is -5: expected above 0"),
        ({"mtbf": "often"}, "--mtbf is 'often': expected a time such as"),
        ({"mtbf": None}, "the failure rate is unknown: give --mtbf"),
        ({"size": None}, "the size of the model is unknown: give --size"),
        ({"servers": None}, "the number of servers is unknown: give --servers"),
        ({"servers": 0}, "the number of servers is 0"),
        ({"dim": 0}, "--dim is 0: expected 1 to 1,000,000 weights in a row"),
        ({"optimizer": "lion"}, "--optimizer is 'lion': expected one of sgd, momentum"),
        ({"write": "-1GB/s"}, "the speed of writing to the store is -1e"),
        ({"touched": 0.0}, "the share of rows touched is 0"),
        ({"cost": ["speed=1"]}, "--cost speed=1: expected NAME=NUMBER with a name of tracking"),
        ({"cost": ["tracking=much"]}, "--cost tracking=much: expected NAME=NUMBER"),
        ({"cost": ["rebuild_share=0"]}, "the cost rebuild_share is 0: expected above 0, up to 1"),
        ({"cost": ["rebuild_share=2"]}, "the cost rebuild_share is 2: expected above 0, up to 1"),
        ({"cost": ["rebuild_drop=2"]}, "the cost rebuild_drop is 2: expected 0 to 1"),
        ({"cost": ["tracking=-1"]}, "the cost tracking is -1: expected 0 or more"),
        ({"cost": ["atomic=nan"]}, "the cost atomic is nan: expected 0 or more"),
        ({"cost": ["pause_hours=inf"]}, "the cost pause_hours is inf: expected 0 or more"),
        ({"target_pls": 1.5}, r"the target PLS is 1\.5"),
        ({"r": 4}, "r is 4: expected 1 to 3 parities"),
        ({"failure_log": Path("no.csv")}, r"the failure log no\.csv cannot be read"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HoldfastError, match=message):
        read_question(Given(**{**SIZED, **changes}))


def test_the_planned_configuration_can_be_loaded(tmp_path: Path) -> None:
    base = tmp_path / "job.yaml"
    base.write_text(SMALL)
    question = read_question(Given(config=base, mtbf="20h"))
    found = plan(question.situation, among=["chunked"])
    out = tmp_path / "planned.yaml"
    write_configuration(found, question.config, out, "s3://bucket/run", force=False)
    planned = load(out)
    assert planned.checkpoint is not None
    assert planned.checkpoint.path == "s3://bucket/run"
    assert planned.checkpoint.strategy == Chunked()
    assert planned.checkpoint.every_seconds == pytest.approx((found.best.interval_hours or 0) * 3600, abs=0.5)
    assert planned.job.servers == 3
    assert planned.optimizer.name == "adam"
    assert out.read_text().startswith("# Planned by holdfast ")
    with pytest.raises(ConfigError, match="already exists: name another file, or overwrite it with --force"):
        write_configuration(found, None, out, None, force=False)
    write_configuration(found, None, out, None, force=True)
    alone = load(out)
    assert alone.checkpoint is not None
    assert alone.checkpoint.path == "checkpoints"


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_can_be_made_of_every_kind_that_is_planned(kind: str, tmp_path: Path) -> None:
    base = tmp_path / "job.yaml"
    base.write_text(SMALL)
    question = read_question(Given(config=base, mtbf="20h", servers=6))
    found = plan(question.situation, among=[kind])
    out = tmp_path / "planned.yaml"
    write_configuration(found, question.config, out, str(tmp_path / "store"), force=True)
    config = load(out)
    job = plan_job(config)
    assert job.servers == 6
    assert (job.r, bool(job.partial)) == {
        "ecrm": (1, False), "ecrec": (1, False), "replication": (1, False), "partial": (0, True),
    }.get(kind, (0, False))  # fmt: skip
    assert (job.saving is None) == (kind == "none")
    if kind in ("full", "differential", "chunked"):
        assert config.checkpoint is not None
        assert config.checkpoint.policy.keep == 2


def test_speeds_are_measured_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(measuring, "_TALK_BYTES", 1 << 20)
    monkeypatch.setattr(measuring, "_STORE_BYTES", 1 << 20)
    store = tmp_path / "store"
    rates = measure_rates(str(store))
    assert min(rates.write, rates.read, rates.copy, rates.network) > 1e5
    assert not [path for path in store.rglob("*") if path.is_file() and path.stat().st_size > 4096]
    question = read_question(Given(**SIZED, measure=str(store), write="1GB/s"))
    assert question.situation.write_rate == 1e9
    assert [words.split()[0] for words in question.measured] == ["read", "copy", "network"]
    assert not any("--network" in words for words in question.assumed)


def test_every_cost_and_every_protection_is_documented() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    for name in (*(one.name for one in fields(Costs)), *KINDS):
        assert f"`{name}`" in guide


@pytest.mark.parametrize(("servers", "rings"), [(11, 1), (12, 2), (19, 3)])
@pytest.mark.parametrize("kind", ["ecrm", "ecrec", "replication"])
def test_a_job_places_servers_as_its_plan_does(tmp_path: Path, kind: str, servers: int, rings: int) -> None:
    question = read_question(Given(size="220GB", servers=servers, mtbf="20h", k=4, r=2))
    found = plan(question.situation, question.wishes, [kind])
    mechanism = found.best.mechanism
    assert isinstance(mechanism, Parities)
    config = load(None)
    out = tmp_path / "planned.yaml"
    write_configuration(found, config, out, None, force=False)
    placement = plan_job(load(out)).placement
    assert placement == Placement.grouped(servers, mechanism.code.k, mechanism.code.r)
    if kind != "replication":
        assert placement.groups == rings
