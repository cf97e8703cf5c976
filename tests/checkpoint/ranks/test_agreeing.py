"""Ranks agree, or all of them get an error that says what is wrong, in bounded time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpoint.format.manifest import read_newest
from holdfast.checkpoint.store import open_store
from tests.checkpoint.ranks.jobs import Jobs, Outcome
from tests.checkpoint.ranks.trainer import Run


def soak(*arguments: Any) -> Any:
    return pytest.param(*arguments, marks=pytest.mark.soak)


def errors(job: Outcome) -> list[str]:
    assert set(job.codes.values()) == {1}, job.said
    return [job.one(rank, "error")["kind"] + ": " + job.one(rank, "error")["error"] for rank in (0, 1)]


def test_several_processes_without_a_process_group(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(hf.ConfigError, match=r"rank 1 of 4 .* call\s+torch.distributed.init_process_group"):
        hf.Checkpointer(tmp_path / "store", Run({}, 0, 1).objects)
    assert not (tmp_path / "store").exists()


def test_one_process_of_a_launcher_needs_no_group(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with hf.Checkpointer(tmp_path / "store", Run({}, 0, 1).objects) as ckpt:
        assert ckpt.restore() == 0


@pytest.mark.soak
def test_a_checkpointer_on_one_rank_alone(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.run(tmp_path, 2, role="lonely", timeout=0.3, sleep=8)
    assert job.one(0, "error")["kind"] == "RankLost"
    assert "rank 1 has made no Checkpointer" in job.one(0, "error")["error"]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"save_at": 2}, "rank 1 called save.. for step 2, rank 0 step.. for step 2"),
        soak({"policy": {"every_steps": 4}}, "ConfigError: .* have different policies"),
        soak({"kind": "max-norm"}, "(UnsupportedState|ConfigError): .*max_norm"),
        soak({"die": {"rank": 1, "point": "full", "version": 1}}, "SaveFailed: .* failed: .*no space"),
    ],
    ids=["calls", "policy", "max_norm", "full"],
)
def test_what_one_rank_does_wrong_all_hear_of(
    jobs: Jobs, tmp_path: Path, change: dict[str, Any], wanted: str
) -> None:
    job = jobs.run(tmp_path, 2, steps=8, of_rank_1=change, timeout=5.0)
    assert any(re.search(wanted, error) for error in errors(job)), errors(job)


@pytest.mark.parametrize("sparse", [soak(True), False], ids=["sparse", "dense"])
def test_ranks_that_train_different_models(jobs: Jobs, tmp_path: Path, sparse: bool) -> None:
    """Nobody has averaged the gradients: a version would have rows of two models."""
    job = jobs.run(tmp_path, 2, steps=8, kind="forgotten", sparse=sparse)
    assert all("wrap the model in DistributedDataParallel" in error for error in errors(job)), errors(job)
    with open_store(str(tmp_path / "store"), create=False) as store:
        assert not read_newest(store).versions


@pytest.mark.soak
def test_a_failed_version_is_made_up_for(jobs: Jobs, tmp_path: Path) -> None:
    """Rank 1 cannot write version 2: no rank has it, and version 3 has all rows."""
    fails = {"die": {"rank": 1, "point": "full", "version": 2}}
    job = jobs.run(tmp_path, 2, steps=13, of_rank_1=fails, goes_on=True, wait=True).all_ended_well()
    for rank in (0, 1):
        assert [s["kind"] for s in job.of(rank, "failed")] == ["SaveFailed"]
    with open_store(str(tmp_path / "store"), create=False) as store:
        assert 2 not in [v.version for v in read_newest(store).versions]
    last = job.of(0, "saved")[-1]
    run = Run({}, 0, 1)
    with hf.Checkpointer(tmp_path / "store", run.objects) as ckpt:
        ckpt.restore(last["version"])
        assert run.digests()["shared"] == last["digests"]["shared"]


@pytest.mark.soak
def test_saves_by_time(jobs: Jobs, tmp_path: Path) -> None:
    """Rank 0's clock decides, and all ranks save in the same steps."""
    policy = {"every_steps": None, "every_seconds": 0.2}
    job = jobs.run(tmp_path, 2, steps=60, policy=policy, pause=0.02).all_ended_well()
    first, second = ([(s["version"], s["step"]) for s in job.of(rank, "saved")] for rank in (0, 1))
    assert first == second
    assert 2 <= len(first) <= 12


@pytest.mark.soak
@pytest.mark.parametrize("busy", ["skip", "cancel", "wait"])
def test_saves_that_follow_too_soon(jobs: Jobs, tmp_path: Path, busy: str) -> None:
    policy = {"every_steps": 1, "when_busy": busy}
    job = jobs.run(tmp_path, 2, steps=20, policy=policy, slow=0.1).all_ended_well()
    first, second = ([(s["version"], s["step"]) for s in job.of(rank, "saved")] for rank in (0, 1))
    assert first == second
    assert len(first) == 20 if busy != "skip" else len(first) < 20
    digests = {s["version"]: s["digests"]["shared"] for s in job.of(0, "saved")}
    run = Run({}, 0, 1)
    with hf.Checkpointer(tmp_path / "store", run.objects) as ckpt:
        versions = [v.version for v in ckpt.versions()]
        assert len(versions) < 20 if busy != "wait" else len(versions) == 20
        for version in versions[::4]:
            ckpt.restore(version)
            if version in digests:
                assert run.digests()["shared"] == digests[version]


@pytest.mark.soak
def test_the_last_step_is_saved(jobs: Jobs, tmp_path: Path) -> None:
    ended = jobs.run(tmp_path, 2, steps=5).all_ended_well()
    resumed = jobs.run(tmp_path, 2, steps=5).all_ended_well()
    for rank in (0, 1):
        assert resumed.one(rank, "restored")["step"] == 5
        assert resumed.one(rank, "restored")["digests"] == ended.one(rank, "trained")["digests"]


@pytest.mark.soak
def test_a_damaged_version_is_passed_over_by_all(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.run(tmp_path, 2, steps=9, policy={"strategy": "incremental"}).all_ended_well()
    newest = sorted((tmp_path / "store" / "chunks").glob("00000003-0001-*"))
    assert newest, "rank 1 has written a part of version 3"
    data = bytearray(newest[0].read_bytes())
    data[-5] ^= 1
    newest[0].write_bytes(data)
    resumed = jobs.run(tmp_path, 2, steps=9, policy={"strategy": "incremental"}).all_ended_well()
    before = job.of(0, "saved")[1]
    for rank in (0, 1):
        assert resumed.one(rank, "restored")["step"] == before["step"] + 1
        assert resumed.one(rank, "restored")["digests"]["shared"] == before["digests"]["shared"]


@pytest.mark.soak
def test_random_states_go_on_for_as_many_ranks_and_differ_for_others(jobs: Jobs, tmp_path: Path) -> None:
    jobs.run(tmp_path, 2, steps=4).all_ended_well()
    more = [jobs.run(tmp_path, 3, steps=0).all_ended_well() for _ in range(2)]
    states = [[job.one(rank, "restored")["digests"]["all"] for rank in range(3)] for job in more]
    assert states[0] == states[1], "they follow from what was saved"
    assert len(set(states[0])) == 3


@pytest.mark.soak
def test_another_model_on_one_rank(jobs: Jobs, tmp_path: Path) -> None:
    """No rank restores what another one cannot."""
    jobs.run(tmp_path, 2, steps=4).all_ended_well()
    job = jobs.run(tmp_path, 2, steps=8, kind="forgotten", of_rank_1={"small": 5})
    found = errors(job)
    assert all(error.startswith("ModelMismatch") and "model.items.weight" in error for error in found), found
    assert found[0].startswith("ModelMismatch: rank 1: ")
