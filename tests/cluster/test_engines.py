"""What a job on a cluster needs is checked before any process starts."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.cluster import job as jobs
from holdfast.cluster.job import Job
from holdfast.cluster.make_plan import plan_job
from holdfast.training.config import load, to_yaml

SMALL = (
    "job.servers=3", "job.protection=2+1", "data.samples=2000", "data.test_samples=100", "data.max_rows=100"
)  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("job.server_processors=[0]", r"job\.server_processors works on one machine only"),
        ("job.compare_recovered=true", r"job\.compare_recovered works on one machine only"),
        ("job.bind='tcp://10.0.0.1'", r"job\.bind is for one machine"),
        ("job.engine.machines=0", r"machines is 0: expected at least 1"),
        ("job.engine.spread=perhaps", r"job\.engine\.spread"),
        ("job.engine.domain='my rack'", r"domain is 'my rack': expected 'node', or the name of a label"),
        ("job.engine.domain=''", r"domain is ''"),
        ("job.engine.machine=3", r"did you mean job\.engine\.machines"),
    ],
)
def test_what_a_cluster_cannot_do(setting: str, says: str) -> None:
    with pytest.raises(hf.ConfigError, match=says):
        load(None, [*SMALL, "job.engine=ray", setting])


def test_keys_and_arguments_are_the_same(tmp_path: Path) -> None:
    config = load(None, [*SMALL, "job.engine=ray", "job.engine.machines=4", "job.engine.name=ctr"])
    assert config.job.engine == hf.Ray(machines=4, name="ctr")
    (tmp_path / "job.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "job.yaml") == config
    made = Job(
        hf.DLRM(dense_features=13, tables=26, dim=4, bottom=(8, 4), top=(8, 1)),
        hf.Synthetic(samples=1000, batch_size=10),
        engine=hf.Ray(machines=4, name="ctr"),
    )
    assert made.config.job.engine == config.job.engine
    with pytest.raises(hf.ConfigError, match=r"expected 'local', 'ray'"):
        Job("m:f", "m:g", engine="slurm")  # type: ignore[arg-type]


@pytest.mark.parametrize("domain", ["node", "rack", "topology.kubernetes.io/zone"])
def test_a_failure_domain_is_a_machine_or_a_label(domain: str) -> None:
    config = load(None, [*SMALL, "job.engine=ray", f"job.engine.domain={domain}"])
    assert config.job.engine == hf.Ray(domain=domain)
    assert load(None, [*SMALL, "job.engine=ray"]).job.engine == hf.Ray(domain="node")


def test_the_option_keeps_the_keys_of_a_file(tmp_path: Path) -> None:
    """``--engine ray`` is ``job.engine=ray`` on top of what the file says."""
    (tmp_path / "job.yaml").write_text("job: {servers: 3, engine: {kind: ray, machines: 4}}")
    on_top = load(tmp_path / "job.yaml", ["job.engine=ray", "job.engine.name=ctr"])
    assert on_top.job.engine == hf.Ray(machines=4, name="ctr")
    assert load(tmp_path / "job.yaml", ["job.engine=local"]).job.engine == "local"


def test_processes_are_silent_for_less_time_on_a_cluster() -> None:
    assert plan_job(load(None, SMALL)).timing.silent_seconds == 10.0
    on_ray = plan_job(load(None, [*SMALL, "job.engine=ray", "job.engine.silent_seconds=4"]))
    assert on_ray.timing.silent_seconds == 4.0


def test_a_checkpoint_must_be_where_all_machines_reach_it(tmp_path: Path) -> None:
    settings = [*SMALL, "job.engine=ray", f"checkpoint.path={tmp_path / 'store'}"]
    with pytest.raises(hf.ConfigError, match=r"all machines of the cluster must reach it.*shared_paths"):
        plan_job(load(None, settings))
    assert plan_job(load(None, [*settings, "job.engine.shared_paths=true"])).saving is not None


def test_without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.import_module

    def without(name: str, *more: Any) -> Any:
        if name.endswith("engines.ray"):
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(jobs.importlib, "import_module", without)  # type: ignore[attr-defined]
    job = Job.from_config(load(None, [*SMALL, "job.engine=ray"], run=str(tmp_path / "run")))
    with pytest.raises(hf.ConfigError, match=r"pip install 'holdfast\[ray\]'"):
        job.run()
