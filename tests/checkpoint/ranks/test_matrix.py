"""Kinds of tables, strategies and encodings: every version of ranks is what one process would have saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import holdfast as hf
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.tools.export import export_model
from holdfast.checkpoint.tools.verify import verify_versions
from tests.checkpoint.ranks.jobs import Jobs
from tests.checkpoint.ranks.trainer import Run
from tests.checkpoint.test_checkpointer import STRATEGIES

KINDS: dict[str, dict[str, Any]] = {
    "ddp-sparse": {"kind": "ddp"},
    "ddp-dense": {"kind": "ddp", "sparse": False},
    "ddp-adam": {"kind": "ddp", "sparse": False, "optimizer": "adam"},
    "ddp-sparse-adam": {"kind": "ddp", "optimizer": "sparse-adam"},
    "dtensor": {"kind": "dtensor", "optimizer": "sgd"},
    "fsdp": {"kind": "fsdp"},
    "fsdp-adam": {"kind": "fsdp", "optimizer": "adam", "small": 2},
}
SLICE = {("ddp-dense", 5, 2), ("fsdp-adam", 1, 3)}
ALL = [(kind, strategy, 2) for kind in KINDS for strategy in range(len(STRATEGIES))]
ALL += [(kind, 5, 3) for kind in KINDS if kind != "fsdp-adam"] + [("fsdp-adam", 1, 3)]


def marked(one: tuple[str, int, int]) -> Any:
    return pytest.param(*one, marks=[] if one in SLICE else pytest.mark.soak)


def restored_alone(folder: Path, order: dict[str, Any], version: int) -> str:
    """What one process, without ranks, has of the tables and the network after it has restored a version."""
    run = Run(order, 0, 1)
    with hf.Checkpointer(folder / "store", run.objects) as ckpt:
        ckpt.restore(version)
        return run.digests()["shared"]


@pytest.mark.parametrize(("kind", "strategy", "world_size"), [marked(one) for one in ALL])
def test_every_version_is_that_of_one_process(
    jobs: Jobs, tmp_path: Path, kind: str, strategy: int, world_size: int
) -> None:
    order = KINDS[kind]
    policy = {"strategy": strategy, "every_steps": 2}
    job = jobs.run(tmp_path, world_size, steps=17, policy=policy, **order).all_ended_well()
    saved = job.of(0, "saved")
    assert [s["version"] for s in saved] == list(range(1, 9))
    for rank in range(1, world_size):
        shared = [s["digests"]["shared"] for s in job.of(rank, "saved")]
        assert shared == [s["digests"]["shared"] for s in saved], "the ranks have trained different models"
    for one in saved:
        assert restored_alone(tmp_path, order, one["version"]) == one["digests"]["shared"]
    with open_store(str(tmp_path / "store"), create=False) as store:
        assert verify_versions(store).good


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ddp-sparse", "ddp-dense", "fsdp"])
def test_rows_that_are_read_while_training_goes_on(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    """Baselines are not copied: each rank keeps the rows of its share as they were."""
    order = {**KINDS[kind], "frozen": True, "slow": 0.05}
    policy = {"strategy": "full", "every_steps": 3, "max_memory": 1 << 26}
    saved = jobs.run(tmp_path, 2, steps=13, policy=policy, **order).all_ended_well().of(0, "saved")
    assert len(saved) == 4
    for one in saved:
        assert restored_alone(tmp_path, order, one["version"]) == one["digests"]["shared"]


@pytest.mark.soak
@pytest.mark.parametrize("prioritize", ["mfu", "ssu", "scar"])
def test_prioritized_saves(jobs: Jobs, tmp_path: Path, prioritize: str) -> None:
    """They hold a part of the rows; the last one holds all, and so does one that is asked for."""
    policy = {"strategy": "incremental", "every_steps": 8, "prioritize": prioritize, "fraction": 0.25}
    job = jobs.run(tmp_path, 2, steps=21, policy=policy).all_ended_well()
    rows = job.one(0, "trained")["rows"]
    assert len(rows) == 11
    assert rows == job.one(1, "trained")["rows"]
    assert max(rows[1:]) < rows[0]
    resumed = jobs.run(tmp_path, 2, steps=21, policy=policy).all_ended_well()
    for rank in (0, 1):
        assert resumed.one(rank, "restored")["digests"] == job.one(rank, "trained")["digests"]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ddp-sparse", "fsdp"])
def test_quantized(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    """In 8 bits, whoever restores a version gets the same rows, and they are close to what was trained."""
    order = KINDS[kind]
    policy = {"quantize": 8, "every_steps": 4}
    saved = jobs.run(tmp_path, 2, steps=13, policy=policy, **order).all_ended_well().of(0, "saved")
    job = jobs.run(tmp_path, 3, steps=0, policy=policy, version=3, **order).all_ended_well()
    found = {job.one(rank, "restored")["digests"]["shared"] for rank in range(3)}
    assert found == {restored_alone(tmp_path, order, 3)}
    assert found != {saved[2]["digests"]["shared"]}, "it was not quantized"


@pytest.mark.soak
def test_a_version_of_ranks_is_exported(jobs: Jobs, tmp_path: Path) -> None:
    order = KINDS["ddp-sparse"]
    jobs.run(tmp_path, 2, steps=7, **order).all_ended_well()
    run = Run(order, 0, 1)
    with hf.Checkpointer(tmp_path / "store", run.objects) as ckpt:
        ckpt.restore()
    with open_store(str(tmp_path / "store"), create=False) as store:
        export_model(store, None, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    for name, value in run.model.state_dict().items():
        assert found[name].equal(value)
