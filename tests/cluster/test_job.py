"""``Job``: what becomes of its arguments, and jobs in real processes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast import options as hf_options
from holdfast.cluster import job as api
from holdfast.cluster.make_plan import plan_job
from holdfast.cluster.report.progress import JobProgress
from holdfast.cluster.worker.calls import spread_by
from holdfast.cluster.worker.model import WorkerModel
from holdfast.errors import ConfigError
from holdfast.events import read_events
from holdfast.models.recommender import table_dims
from holdfast.tables.lookup import Placer
from holdfast.tables.shard import GroupShard, digest
from holdfast.training.config import Config, OwnDataConfig, OwnModelConfig, load
from holdfast.training.metrics import auc, log_loss
from holdfast.training.networks import build_network
from holdfast.training.readers import build_readers
from tests.training.test_own import clicks

__all__ = ["clicks"]  # a fixture
TABLES = [40, 300, 7]


def reader(**changes: Any) -> hf.Synthetic:
    made = {"samples": 4000, "batch_size": 100, "table_rows": TABLES, "seed": 3}
    return hf.Synthetic(**{**made, **changes})


def network() -> hf.DLRM:
    return hf.DLRM(dense_features=13, tables=3, dim=4, bottom=(8, 4), top=(8, 1))


def data_of(job: hf.Job) -> OwnDataConfig:
    assert isinstance(job.config.data, OwnDataConfig)
    return job.config.data


def test_a_model_and_a_reader_become_what_other_processes_make_again() -> None:
    training = hf.Training(optimizer="adam", lr=0.01, seed=5, max_steps=7)
    job = hf.Job(network(), reader(), training=training, kill=["worker:1@step:3"])
    config = job.config
    assert isinstance(config.model, OwnModelConfig)
    assert (config.model.build, config.model.arguments["bottom"]) == ("holdfast.models.dlrm:DLRM", [8, 4])
    assert (config.optimizer.name, config.optimizer.rate, config.seed) == ("adam", 0.01, 5)
    assert (config.batch_size, config.job.servers, config.job.workers) == (100, 4, 2)
    train, test = build_readers(config)
    assert isinstance(train, hf.Synthetic)
    assert isinstance(test, hf.Synthetic)
    assert (train.part, train.samples, train.seed) == ("train", 4000, 3)
    assert (test.part, test.samples, test.seed, test.table_rows) == ("test", 100_000, 3, train.table_rows)
    assert (config.checkpoint, config.job.kills) == (None, (hf_options.Kill("worker", 1, 3),))
    assert load(None, [], **msgspec.to_builtins(config)) == config, "config.yaml repeats the run"


def test_where_a_job_is_saved() -> None:
    for given in ("a/b", Path("a/b"), {"path": "a/b", "every_steps": 7}):
        checkpoint = hf.Job(network(), reader(), checkpoint=given).config.checkpoint
        assert checkpoint is not None
        assert (checkpoint.path, checkpoint.every_steps) == ("a/b", 7 if isinstance(given, dict) else None)
    with pytest.raises(ConfigError, match=r"did you mean checkpoint\.every_steps\?"):
        hf.Job(network(), reader(), checkpoint={"path": "a", "every_step": 3})


def test_what_is_tested_on(tmp_path: Path) -> None:
    given = hf.Job(network(), reader(), test_data=reader(samples=50, part="test"))
    assert build_readers(given.config)[1].samples == 50  # type: ignore[attr-defined]
    line = "\t".join(["1", *["3"] * 13, *["0a"] * 26])
    (tmp_path / "a.tsv").write_text(f"{line}\n" * 700)
    criteo = hf.Criteo(tmp_path / "a.tsv", batch_size=10, table_rows=[9] * 26, drop_last=True)
    assert data_of(hf.Job(network(), criteo)).test is not None
    train, test = build_readers(hf.Job(network(), criteo).config)
    assert [sum(len(batch) for batch in part) for part in (train, test)] == [600, 99], "of 601 and 99"
    by_path = hf.Job("m:build", ("m:reader", {"files": 3}), training=hf.Training(batch_size=7))
    assert (data_of(by_path).test, data_of(by_path).arguments, by_path.config.batch_size) == (
        None,
        {"files": 3},
        7,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "slurm"}, "engine is 'slurm': expected 'local', 'ray', a Local"),
        ({"servers": 0}, "servers is 0: expected at least 1"),
        ({"workers": 0}, r"job\.workers: expected `int` >= 1"),
        ({"training": hf.Training(batch_size=7)}, "batch_size is 7 but the reader's is 100"),
        ({"training": hf.Training(optimizer="adagard")}, r"optimizer\.name: invalid enum value 'adagard'"),
        (
            {"kill": ["server:4@step:3"]},
            "kill server:4@step:3: the job has 4 servers, expected one of 0 to 3",
        ),
        ({"kill": ["server:x"]}, "expected ROLE:SLOT@step:N"),
        ({"data": reader(part="test")}, "reader of part 'test': give test_data"),
        ({"model": "__main__:build"}, "move it to a module"),
        ({"model": ("m:build",)}, r'expected \("package\.module:callable", \{arguments\}\)'),
        ({"model": torch.nn.Linear(1, 1)}, "cannot be made in another process"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hf.Job(**{"model": network(), "data": reader(), **arguments})


def test_processors_of_servers() -> None:
    here = sorted(os.sched_getaffinity(0))
    for wanted in (here, [here[-1] + 1]):  # none would be left for workers; there is no such processor
        job = hf.Job(network(), reader(), engine=hf.Local(server_processors=wanted))
        with pytest.raises(ConfigError, match=r"job\.server_processors is \[.*\]: expected some of"):
            plan_job(job.config)
    assert plan_job(hf.Job(network(), reader(), engine=hf.Local(server_threads=3)).config).server_threads == 3
    code = hf.ErasureCode(2, 1)
    together = plan_job(hf.Job(network(), reader(), protection=code).config)
    assert (together.server_processors, together.lanes.share) == ((), 0.3)
    if len(here) > 1:
        # Recovery takes nothing from workers then: it is as fast as it can be, unless one says otherwise.
        apart = hf.Job(network(), reader(), protection=code, engine=hf.Local(server_processors=here[:1]))
        assert plan_job(apart.config).server_processors == (here[0],)
        assert plan_job(apart.config).lanes.share == 1
        slow = hf.Job(
            network(),
            reader(),
            protection=hf.ErasureCode(2, 1, recovery_share=0.1),
            engine=hf.Local(server_processors=here[:1]),
        )
        assert plan_job(slow.config).lanes.share == 0.1


def test_a_configuration_without_servers_is_no_job() -> None:
    with pytest.raises(ConfigError, match=r"job\.servers is 0"):
        hf.Job.from_config(load())


def test_what_a_model_by_import_path_lacks_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no module no_such_module"):
        hf.Job("no_such_module:build", reader(), run=tmp_path / "r").run()
    assert read_events(tmp_path / "r")[-1]["event"] == "run_failed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"bind": "192.168.0.1"},
            r'is not a valid address: expected "ipc", or an address like tcp://127\.0\.0\.1$',
        ),
        ({"bind": "tcp://0.0.0.0"}, "is not an address that others can connect to"),
        ({"bind": "tcp://127.0.0.1:4000"}, r"all processes of a job use it: expected one without a port"),
        ({"bind": "ipc:///dev/null/job"}, "/dev/null"),
    ],
)
def test_what_is_not_safe_is_refused_before_a_process_starts(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        hf.Job(network(), reader(), run=tmp_path / "r", engine=hf.Local(**arguments)).run()
    assert not (tmp_path / "r" / "logs").exists()


@pytest.mark.parametrize(("locked", "most"), [(3, 60.0), (10**6, 0.05)])
def test_a_job_that_lost_data_waits_for_the_lease_of_a_dead_supervisor(
    monkeypatch: pytest.MonkeyPatch, locked: int, most: float
) -> None:
    """And not for ever: another writer may be at work."""
    job = hf.Job(network(), reader(), servers=1, workers=1)
    tried: list[Config] = []

    def plan_job(config: Config) -> Any:
        tried.append(config)
        if len(tried) <= locked:
            raise hf.StoreLocked("s3://a is being written", "here", 7)
        return "a plan"

    monkeypatch.setattr(api, "plan_job", plan_job)
    monkeypatch.setattr(api, "_LOCKED_SECONDS", most)
    monkeypatch.setattr(api, "_LOCKED_AGAIN_SECONDS", 0.01)
    said: list[str] = []
    runner: Any = SimpleNamespace(say=lambda event, **figures: said.append(event))
    if locked == 3:
        plan: Any = api._plan_again(job.config, runner, lambda: False)
        assert plan == "a plan"
        assert len(tried) == 4
    else:
        with pytest.raises(hf.StoreLocked):
            api._plan_again(job.config, runner, lambda: False)
        before = len(tried)
        with pytest.raises(hf.StoreLocked):
            api._plan_again(job.config, runner, lambda: True)
        assert len(tried) == before + 1, "nobody wants it to wait"
    assert said == ["store_locked"]


def gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def test_own_model_and_reader_with_a_worker_that_dies(tmp_path: Path, clicks: Path) -> None:
    seen: list[JobProgress] = []
    job = hf.Job(
        "own_model:build", ("own_model:reader", {"path": str(clicks)}), servers=3, workers=2,
        training=hf.Training(batch_size=90, lr=0.1, epochs=2, test_every=100),
        protection=hf.NoProtection(atomic=True),
        kill=["worker:1@step:100"], run=tmp_path / "r",
    )  # fmt: skip
    result = job.run(seen.append)
    assert (result.steps, result.samples, result.workers_replaced) == (400, 36_000, 1)
    assert result.auc > 0.9
    assert result.samples_per_second > 0
    assert (result.interrupted, result.kills_missed, result.test) == (False, (), result.tests[-1])
    assert (len(result.tests) > 1, result.test.step) == (True, 400)

    events = read_events(result.folder)
    by_name = {name: [e for e in events if e["event"] == name] for name in {e["event"] for e in events}}
    assert (events[0]["event"], events[-1]["event"]) == ("config", "run_finished")
    assert events[-1]["auc"] == result.auc
    assert sorted(e["seconds"] for e in events) == pytest.approx([e["seconds"] for e in events], abs=1.0)
    assert by_name["worker_lost"][0]["reason"] == "was killed by signal 9"
    assert by_name["killed"][0]["step"] >= 100
    assert [e["incarnation"] for e in by_name["worker_started"] if e["slot"] == 1] == [1, 2]
    assert len(by_name["test"]) == len(result.tests)
    assert by_name["progress"][-1]["fraction"] == 1.0
    processes = by_name["job_started"][0]["processes"] + by_name["process_started"]
    assert len(processes) == 1 + 3 + 2 + 1
    assert all(gone(process["pid"]) for process in processes)
    logs = {path.name for path in (result.folder / "logs").iterdir()}
    assert {"supervisor-0-0.log", "server-2-1.log", "worker-1-1.log", "worker-1-2.log"} <= logs

    last = seen[-1]
    assert [p.role for p in last.processes] == ["supervisor"] + ["server"] * 3 + ["worker"] * 2
    assert sum(p.rows for p in last.processes) > 0
    assert all(p.memory_bytes > 0 for p in last.processes)
    assert [n.event for p in seen for n in p.news].count("killed") == 1
    assert max(p.samples_per_second for p in seen) > 0


class Twin:
    """A job of one worker without staleness in one process: the same kernels, called one after the other."""

    def __init__(self, config: Config, servers: int) -> None:
        self.plan = plan = plan_job(
            msgspec.structs.replace(
                config, job=msgspec.structs.replace(config.job, servers=servers, workers=1)
            )
        )
        torch.manual_seed(config.seed)
        self.train, self.test = build_readers(config)
        made = build_network(config, self.train)
        rows = self.train.table_rows
        self.model = WorkerModel(made, rows, table_dims(made, len(rows)))
        self.shards = [
            [
                GroupShard(group, placement, server, plan.seed)
                for group, placement in zip(plan.groups, plan.placements, strict=True)
            ]
            for server in range(servers)
        ]
        self.placers = [Placer(group, plan.placement) for group in plan.groups[:-1]]
        numbers = np.arange(plan.groups[-1].rows)
        placement = plan.placements[-1]
        self.spread, self.order = spread_by(placement.owner(numbers), placement.place(numbers), servers)
        first = self.model.initial_network()[self.order]
        for server in range(servers):
            begin, end = self.spread.starts[server : server + 2]
            self.shards[server][-1].install(self.spread.places[begin:end], first[begin:end])

    def look_up(self, batch: hf.Batch) -> tuple[Any, list[Any]]:
        placed: list[Any] = self.model.look_up(batch, self.placers)
        pulled = [
            np.concatenate(
                [
                    shards[g].pull(p.places[p.starts[s] : p.starts[s + 1]])
                    for s, shards in enumerate(self.shards)
                ]
            )
            for g, p in enumerate([*placed, self.spread])
        ]
        ordered = np.empty_like(pulled[-1])
        ordered[self.order] = pulled.pop()
        self.model.load_network(ordered)
        return placed, pulled

    def run(self) -> None:
        """Train, and test at the end."""
        for batch in self.train:
            placed, pulled = self.look_up(batch)
            _, gradients, network = self.model.train(batch, placed, pulled)
            for g, (p, values) in enumerate(
                zip([*placed, self.spread], [*gradients, network[self.order]], strict=True)
            ):
                for s, shards in enumerate(self.shards):
                    here = slice(p.starts[s], p.starts[s + 1])
                    shards[g].push(p.places[here], values[here])
        logits, labels = [], []
        for batch in self.test:
            logits.append(self.model.predict(batch, *self.look_up(batch)))
            labels.append(batch.labels)
        scores = np.concatenate(logits), np.concatenate(labels)
        self.tested = auc(*scores), log_loss(*scores)

    def records(self) -> str:
        digests = "".join(digest(shards) for shards in self.shards)
        return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()


def twin_of(job: hf.Job, servers: int) -> Twin:
    """What a job makes of its servers, made here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        twin = Twin(job.config, servers)
        twin.run()
    finally:
        torch.set_num_threads(before)
    return twin


def test_one_worker_without_staleness_equals_one_process_bit_for_bit(tmp_path: Path) -> None:
    job = hf.Job(
        network(), reader(), test_data=reader(samples=2000, part="test"), servers=3, workers=1,
        training=hf.Training(staleness=0, optimizer="adam"), run=tmp_path / "r",
    )  # fmt: skip
    result = job.run()
    twin = twin_of(job, servers=3)
    assert (result.test.auc, result.test.log_loss) == twin.tested
    assert result.records == twin.records()
