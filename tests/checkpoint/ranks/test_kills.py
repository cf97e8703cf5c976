"""A rank is killed at a named point of a save: earlier versions stay whole, the others get an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint.format.manifest import read_newest
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.tools.verify import verify_versions
from tests.checkpoint.ranks.jobs import Jobs

POINTS = {
    "snapshot": (0, 1),
    "before-files": (0, 1),
    "after-files": (0, 1),
    "reported": (1,),
    "before-manifest": (0,),
    "after-manifest": (0,),
    "verdict": (0,),
    "tidying": (0, 1),
}
ALL = [(point, rank) for point, ranks in POINTS.items() for rank in ranks]
SLICE = [("after-files", 1)]
EXISTS_AFTER = {"reported", "after-manifest", "verdict", "tidying"}


@pytest.mark.parametrize(
    ("point", "rank"),
    [pytest.param(*one, marks=[] if one in SLICE else pytest.mark.soak) for one in ALL],
)
def test_a_killed_rank_costs_one_version_at_most(jobs: Jobs, tmp_path: Path, point: str, rank: int) -> None:
    straight = jobs.run(tmp_path / "a", 2, steps=14).all_ended_well()
    die = {"rank": rank, "version": 3, "point": point}
    killed = jobs.run(tmp_path / "b", 2, steps=14, die=die, timeout=3.0, wait=True, most_seconds=90)
    assert killed.codes[rank] == -9
    assert killed.codes[1 - rank] == 1
    error = killed.one(1 - rank, "error")
    assert error["kind"] in ("SaveFailed", "RankLost", "RuntimeError"), error
    with open_store(str(tmp_path / "b" / "store"), create=False) as store:
        versions = [v.version for v in read_newest(store).versions]
        assert versions == ([1, 2, 3] if point in EXISTS_AFTER else [1, 2])
        assert verify_versions(store).good
    resumed = jobs.run(tmp_path / "b", 2, steps=14, tcp=True).all_ended_well()
    for one in (0, 1):
        assert resumed.one(one, "restored")["step"] == 3 * len(versions)
        assert resumed.one(one, "trained")["digests"] == straight.one(one, "trained")["digests"]


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_dies_that_may_have_the_process_groups_store(jobs: Jobs, tmp_path: Path, rank: int) -> None:
    """If rank 0 has it, its death is noticed at once; the time-out here would be too long."""
    die = {"rank": rank, "version": 2, "point": "after-files"}
    timeout = 600.0 if rank == 0 else 3.0
    killed = jobs.run(tmp_path, 2, steps=14, die=die, timeout=timeout, wait=True, tcp=True, most_seconds=60)
    assert killed.codes == {rank: -9, 1 - rank: 1}
    with open_store(str(tmp_path / "store"), create=False) as store:
        assert [v.version for v in read_newest(store).versions] == [1]
    resumed = jobs.run(tmp_path, 2, steps=14, tcp=True).all_ended_well()
    assert resumed.one(0, "restored")["step"] == 3
