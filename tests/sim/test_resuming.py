"""Going on from versions that other servers have saved: every row is found, wherever it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from holdfast.checkpoint.format.manifest import encode, name_of, read_newest
from holdfast.checkpoint.store.local import LocalStore
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.saving.resume import find_resume, restore_rows, roll_back
from holdfast.errors import CorruptCheckpoint
from holdfast.sim.cluster import counting_plan, counts
from holdfast.sim.saving import SavedCluster, saved_plan
from holdfast.tables.shard import GroupShard
from holdfast.training.saving import CheckpointConfig


def plan_in(folder: Path, job: str, rows: int = 60, **options: Any) -> JobPlan:
    """A job that goes on from what is in the folder, if there is anything."""
    plan = replace(counting_plan(workers=2, atomic=False, rows=rows, **options), job=job)
    plan = saved_plan(plan, CheckpointConfig(path=str(folder), strategy="incremental"))
    return replace(plan, resume=find_resume(plan))


def finish(plan: JobPlan, batches: int) -> SavedCluster:
    cluster = SavedCluster(plan, 1, batches)
    assert cluster.network.run(lambda: cluster.supervisor.finished, 100)
    cluster.close()
    return cluster


def shards_of(plan: JobPlan, server: int) -> list[GroupShard]:
    groups = zip(plan.groups, plan.placements, strict=True)
    return [GroupShard(group, placement, server, 0, empty=True) for group, placement in groups]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
def test_rings_may_change(tmp_path: Path, before: int, after: int) -> None:
    servers = {"servers": 6, "k": 2, "r": 1}
    finish(replace(plan_in(tmp_path, "a", **servers), rings=before), 40)
    plan = replace(plan_in(tmp_path, "b", **servers), rings=after, resume=None)
    plan = replace(plan, resume=find_resume(plan))
    assert plan.resume is not None
    assert plan.resume.same_servers == (before == after)
    assert finish(plan, 40).violations() == []


def test_a_version_without_a_servers_rows_is_not_taken_for_whole(tmp_path: Path) -> None:
    plan = plan_in(tmp_path, "a", servers=3)
    finish(plan, 20)
    shards = shards_of(replace(plan, servers=2), 1)
    with (
        LocalStore(str(tmp_path), create=False) as store,
        pytest.raises(CorruptCheckpoint, match=r"lacks .* of the 30 rows that server 1 needs of group"),
    ):
        restore_rows(plan, shards, store, 1)


def test_an_older_version_may_be_of_other_servers(tmp_path: Path) -> None:
    """The newest has been damaged since the job began, and a server goes back to what two servers saved."""
    finish(plan_in(tmp_path, "a", servers=2, dense="workers"), 20)
    finish(plan_in(tmp_path, "b", servers=3, dense="workers"), 40)
    plan = replace(plan_in(tmp_path, "c", servers=3, dense="workers"), partial="partial")
    assert plan.resume is not None
    assert plan.resume.same_servers
    shards = shards_of(plan, 1)
    with LocalStore(str(tmp_path), create=False) as store:
        manifest = read_newest(store)
        files = manifest.era(manifest.versions[-1].era).files
        damaged = tmp_path / next(entry.name for entry in files if entry.shard == 1)
        data = bytearray(damaged.read_bytes())
        data[-3] ^= 1
        damaged.write_bytes(data)
        assert roll_back(plan, shards, store).version == 1
    rows = shards[0].rows_of(np.arange(len(shards[0].records)))
    real = rows < 60
    found = shards[0].field("weight")[real, 0]
    np.testing.assert_array_equal(found, counts(plan, range(20))[0][rows[real]])


def test_a_version_that_lacks_rows_is_passed_over(tmp_path: Path) -> None:
    """A file of one server is not named: no job goes on from the version, no server goes back to it."""
    finish(plan_in(tmp_path, "a", servers=3, dense="workers"), 20)
    finish(plan_in(tmp_path, "b", servers=3, dense="workers"), 40)
    plan = replace(plan_in(tmp_path, "c", servers=3, dense="workers"), partial="partial")
    with LocalStore(str(tmp_path), create=False) as store:
        manifest = read_newest(store)
        newest = manifest.versions[-1]
        era = manifest.era(newest.era)
        lost = next(f for f in era.files if f.shard == 1 and f.first_born == newest.version and f.rows)
        assert lost.kind == "increment"
        era = replace(era, files=[f for f in era.files if f.name != lost.name])
        others = [e for e in manifest.eras if e.number != era.number]
        (tmp_path / name_of(manifest.number)).write_bytes(encode(replace(manifest, eras=[*others, era])))
        resume = find_resume(plan)
        assert resume is not None
        assert resume.version < newest.version
        assert any(f"version {newest.version} " in p and "missing" in p for p in resume.problems)
        later = replace(plan, resume=replace(resume, version=newest.version + 1))
        assert roll_back(later, shards_of(plan, 1), store).version == resume.version
