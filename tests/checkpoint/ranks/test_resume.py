"""A job of several ranks is killed and resumed, by as many ranks and by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from tests.checkpoint.ranks.jobs import Jobs, Outcome
from tests.checkpoint.ranks.trainer import DIM, ROWS, Run


def soak(*arguments: Any) -> Any:
    return pytest.param(*arguments, marks=pytest.mark.soak)


def ends(job: Outcome, world_size: int) -> list[Any]:
    return [job.one(rank, "trained")["digests"] for rank in range(world_size)]


@pytest.mark.parametrize(
    "sparse", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["sparse", "dense"]
)
def test_two_ranks_go_on_bit_for_bit_after_sigkill(jobs: Jobs, tmp_path: Path, sparse: bool) -> None:
    straight = jobs.run(tmp_path / "a", 2, steps=16, sparse=sparse).all_ended_well()
    killed = jobs.run(tmp_path / "b", 2, steps=16, sparse=sparse, kill_after=9)
    assert set(killed.codes.values()) == {-9}
    resumed = jobs.run(tmp_path / "b", 2, steps=16, sparse=sparse).all_ended_well()
    for rank in (0, 1):
        assert resumed.one(rank, "restored")["step"] == 9
    assert ends(resumed, 2) == ends(straight, 2)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("ddp", [2, 1, 2]), *(soak(kind, [2, 3, 2, 1, 3]) for kind in ("ddp", "fsdp", "dtensor"))],
)
def test_other_numbers_of_ranks(jobs: Jobs, tmp_path: Path, kind: str, ranks: list[int]) -> None:
    """Tables, optimizers and the network are the same whoever restores them."""
    last, steps = "", 0
    for number, world_size in enumerate(ranks):
        order: dict[str, Any] = {"kind": kind, "dropout": 0.0 if kind == "dtensor" else 0.2}
        job = jobs.run(tmp_path, world_size, steps=steps + 5, **order).all_ended_well()
        for rank in range(world_size):
            restored = job.one(rank, "restored")
            assert restored["step"] == steps
            if number:
                assert restored["digests"]["shared"] == last
        shared = {digests["shared"] for digests in ends(job, world_size)}
        assert len(shared) == 1
        last, steps = shared.pop(), steps + 5


def test_one_process_loads_what_it_needs_of_a_version_of_ranks(jobs: Jobs, tmp_path: Path) -> None:
    """As for serving: the bare model and its optimizers, without the loaders of ranks."""
    job = jobs.run(tmp_path, 2, steps=6).all_ended_well()
    run = Run({}, 0, 1)
    wanted = {name: thing for name, thing in run.objects.items() if name != "loader"}
    loaded = hf.load(tmp_path / "store", wanted)
    assert loaded.step == 5
    assert run.digests()["shared"] == job.one(0, "trained")["digests"]["shared"]
    assert hf.saved_shapes(tmp_path / "store").tables["model.users.weight"].shape == (ROWS, DIM)


@pytest.mark.soak
def test_some_ranks_of_a_job(jobs: Jobs, tmp_path: Path) -> None:
    """Ranks 0 and 2 of three are a group of their own, then rank 1 is one that saves alone."""
    both = jobs.run(tmp_path, 3, steps=7, group=[0, 2]).all_ended_well()
    pair = jobs.run(tmp_path / "pair", 2, steps=7).all_ended_well()
    assert [both.one(rank, "trained")["digests"] for rank in (0, 2)] == ends(pair, 2)
    alone = jobs.run(tmp_path, 2, steps=7, group=[1]).all_ended_well()
    assert alone.one(1, "restored")["step"] == 7
    assert alone.one(1, "restored")["digests"]["shared"] == both.one(0, "trained")["digests"]["shared"]
