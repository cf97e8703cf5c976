"""Checkpoints of a job: consistent, complete, and whole whatever dies (holes 21 to 24 and 26)."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.manifest import read_newest
from holdfast.checkpoint.format.records import Rows, join_rows
from holdfast.checkpoint.layout import baselines, bundles
from holdfast.checkpoint.layout.shard import Shard
from holdfast.checkpoint.memory import copy_on_write
from holdfast.checkpoint.saving.publisher import Publisher
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.store.local_files import Files
from holdfast.checkpoint.tools.verify import verify_versions
from holdfast.cluster.protocol.messages import Happening
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.report.progress import tell
from holdfast.cluster.report.result import count
from holdfast.cluster.runtime.transport.memory import CALM, Weather
from holdfast.cluster.saving import shard_saver
from holdfast.cluster.saving.layout import encoder_of
from holdfast.cluster.saving.resume import find_resume
from holdfast.cluster.saving.shard_saver import ShardSaver
from holdfast.coding.placement import Placement
from holdfast.errors import CorruptCheckpoint, ModelMismatch
from holdfast.sim.cluster import counting_plan
from holdfast.sim.saving import MortalFiles, QuickFiles, SavedCluster, saved_plan, wrong_versions
from holdfast.sim.schedule import plan_of, simulate
from holdfast.tables.shard import GroupShard
from holdfast.testing.faults import FaultyFiles, SmallDisk
from holdfast.training.saving import CheckpointConfig

BATCHES = 100
ROWS = 4000
"""So many that most batches leave most rows alone: what is missing in one version is missing in the next, and
after some versions it is worth while to rearrange files."""
STRATEGIES = ("chunked", "incremental", "differential", "full")


class Disk(SmallDisk, QuickFiles):
    """A small disk that is quick: it does not crash."""


def config(path: Path, strategy: Any = "chunked", **options: Any) -> CheckpointConfig:
    return CheckpointConfig(path=str(path / "store"), strategy=strategy, **{"every_steps": 4, **options})


def job(*, servers: int, workers: int, atomic: bool) -> JobPlan:
    return counting_plan(servers=servers, workers=workers, atomic=atomic, rows=ROWS)


def resumed(plan: JobPlan, **shape: int) -> JobPlan:
    """A job of another shape that goes on from the store."""
    other = msgspec.structs.replace(plan, job=f"{plan.job}'", resume=None, **shape)
    return msgspec.structs.replace(other, resume=find_resume(other))


def run(plan: JobPlan, seed: int = 0, weather: Weather = CALM, **options: Any) -> SavedCluster:
    """A job without failures, to its end."""
    cluster = SavedCluster(plan, seed, BATCHES, weather, **options)
    outcome = simulate(seed, batches=BATCHES, faults=0, cluster=cluster)
    cluster.close()
    assert outcome.finished, (seed, outcome.violations)
    assert outcome.violations == []
    return cluster


def check(plan: JobPlan, servers: int = 3) -> list[int]:
    """Every version of the store is right, and the store is whole; the versions."""
    versions, wrong = wrong_versions(plan, BATCHES, servers)
    assert wrong == []
    assert plan.saving is not None
    if versions:
        with open_store(plan.saving.config.path, create=False) as store:
            assert verify_versions(store).damaged == ()
    return versions


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are not copied at a cut but read later, as those of large tables are."""
    monkeypatch.setattr(copy_on_write, "COPIED_BYTES", 0)
    monkeypatch.setattr(copy_on_write, "BLOCK_BYTES", 500)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("k", "r"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("how", ["copied", "frozen"])
def test_every_version_is_a_consistent_cut(
    tmp_path: Path, request: pytest.FixtureRequest, strategy: str, k: int, r: int, how: str
) -> None:
    if how == "frozen":
        request.getfixturevalue("frozen")
    plan = job(servers=3, workers=2, atomic=True)
    plan = saved_plan(msgspec.structs.replace(plan, k=k, r=r), config(tmp_path, strategy))
    cluster = run(plan)
    versions = check(plan, servers=2)
    assert len(versions) >= 6
    assert cluster.keepers[0].saved == versions
    assert cluster.keepers[0].failures() == ()
    assert resumed(plan).resume is not None


def test_the_end_is_saved_and_nothing_is_left_to_do(tmp_path: Path) -> None:
    plan = saved_plan(job(servers=2, workers=2, atomic=False), config(tmp_path, every_steps=None))
    run(plan)
    assert check(plan) == [1]
    again = resumed(plan, workers=3)
    assert again.resume is not None
    assert again.resume.steps == again.resume.samples == BATCHES
    run(again)
    assert check(plan) == [1]  # nothing was trained, so nothing is saved


@pytest.mark.parametrize("every_steps", [1, 7, 99])
def test_the_last_step_is_saved_whatever_became_of_the_save_before(tmp_path: Path, every_steps: int) -> None:
    for when_busy in ("wait", "skip"):
        saving = config(tmp_path / when_busy, every_steps=every_steps, when_busy=when_busy)
        run(plan := saved_plan(job(servers=2, workers=2, atomic=False), saving))
        again = resumed(plan)
        assert again.resume is not None
        assert again.resume.steps == BATCHES
    made: list[FaultyFiles] = []
    options: dict[str, Any] = {"supervisor_files": faulty("create", 1, 1, made)}
    saving = config(tmp_path / "fail", every_steps=every_steps)
    run(plan := saved_plan(job(servers=2, workers=2, atomic=False), saving), **options)
    assert made[0].fired
    again = resumed(plan)
    assert again.resume is not None
    assert again.resume.steps == BATCHES


def test_the_end_is_not_saved_where_that_is_not_wanted(tmp_path: Path) -> None:
    saving = config(tmp_path, every_steps=None, save_last=False)
    run(plan := saved_plan(job(servers=2, workers=2, atomic=False), saving))
    assert check(plan) == []


def test_whatever_dies_every_version_is_right_and_a_job_goes_on_from_it(tmp_path: Path) -> None:
    """Hole 21, invariant 6: a version is what an oracle's replay of its batches gives."""
    faults = kill_and_resume(tmp_path, range(12))
    assert all(faults[kind] > 3 for kind in ("kill", "silence", "pause", "link", "supervisor")), faults


@pytest.mark.usefixtures("frozen")
def test_the_same_where_rows_are_read_after_the_cut(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, range(12, 20))


@pytest.mark.soak
def test_many_more_of_such_jobs(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, range(100, 150))


def kill_and_resume(tmp_path: Path, seeds: range) -> Counter[str]:
    """For each seed a job of three parts, each of another shape; the first two end by killing everything."""
    faults: Counter[str] = Counter()
    versions = unfinished = continued = 0
    for seed in seeds:
        weather = Weather(loss=0.02, duplication=0.05, delay_seconds=0.003, ordered=seed % 5 == 0)
        folder = tmp_path / str(seed)
        saving = config(folder, STRATEGIES[seed // 2 % 4], when_busy=("wait", "cancel")[seed % 2])
        plan = saved_plan(plan_of(seed, ROWS), saving)
        for part in range(3):
            cluster = SavedCluster(plan, 100 * part + seed, BATCHES, weather)
            most = (2.0 + seed % 7 / 3, 3.0, 600.0)[part]  # then everything dies at once
            outcome = simulate(seed, batches=BATCHES, faults=6, cluster=cluster, most_seconds=most)
            cluster.close()
            faults += outcome.faults
            unfinished += not outcome.finished
            assert outcome.finished or outcome.violations == ["the job did not end"], (seed, part)
            assert not outcome.finished or outcome.violations == [], (seed, part)
            keeper = cluster.keepers[-1]
            told = keeper.failures.unsaved, keeper.saved_steps
            assert not outcome.finished or told == (False, BATCHES), (seed, part)
            versions += len(check(plan, servers=1 + (seed + part) % 4))
            shape = {} if seed % 3 == part else {"servers": 1 + (seed + part) % 3, "workers": 1 + part}
            plan = resumed(plan, **shape)
            continued += plan.resume is not None and plan.resume.continues
    assert versions > 10 * len(seeds)
    assert unfinished > len(seeds)
    assert continued > len(seeds) // 2
    return faults


@pytest.mark.parametrize("strategy", ["chunked", "differential"])
def test_a_supervisor_that_dies_at_any_step_of_a_save(tmp_path: Path, strategy: str) -> None:
    """Before the cut, with a half-written file, before and after the manifest: hole 18 for versions."""
    fired = 0
    for at in range(1, 61, 6):
        deaths: list[MortalFiles] = []

        def files(deaths: list[MortalFiles] = deaths, at: int = at) -> Files:
            if deaths:
                return QuickFiles()
            deaths.append(MortalFiles(at))
            return deaths[0]

        plan = job(servers=2, workers=2, atomic=at % 4 == 1)
        plan = saved_plan(plan, config(tmp_path / str(at), strategy))
        run(plan, at, supervisor_files=files)
        check(plan)
        fired += deaths[0].died
        again = resumed(plan)
        assert again.resume is not None
        assert again.resume.steps == BATCHES  # the last one was saved, by whoever was there
    assert fired > 5


def faulty(
    operation: str, at: int, times: int, made: list[FaultyFiles], number: int = errno.ENOSPC
) -> Callable[[], Files]:
    def make() -> Files:
        made.append(FaultyFiles(operation, at, number, times))
        return made[-1]

    return make


@pytest.mark.parametrize("side", ["server", "supervisor"])
@pytest.mark.parametrize("operation", ["create", "writev", "fsync", "link", "fsync_dir"])
def test_a_save_that_fails_is_said_and_its_rows_are_in_the_next(
    tmp_path: Path, operation: str, side: str
) -> None:
    """Hole 23: marks are cleared when a manifest holds them, and not before."""
    made: list[FaultyFiles] = []
    plan = saved_plan(job(servers=2, workers=2, atomic=True), config(tmp_path, "incremental"))
    options: dict[str, Any] = {f"{side}_files": faulty(operation, 3 if side == "server" else 8, 3, made)}
    cluster = run(plan, **options)
    assert sum(files.fired for files in made) > 0
    versions = check(plan)
    keeper = cluster.keepers[0]
    failures = [*keeper.failures(), *keeper.untidy()]
    assert failures
    assert any(failure.why.startswith("no space left") for failure in failures)
    assert count(keeper.failures()) == cluster.events("checkpoint_failed")
    assert count(keeper.untidy()) == cluster.events("checkpoint_tidy_failed")
    assert len(versions) >= 4
    # What came later was saved, the state at the end, too.
    assert (keeper.failures.unsaved, keeper.last_version, keeper.saved_steps) == (
        False,
        versions[-1],
        BATCHES,
    )


@pytest.mark.parametrize("operation", ["create", "link"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("side", ["server", "supervisor"])
def test_when_every_save_fails_each_cause_is_said_once(
    tmp_path: Path, operation: str, number: int, side: str
) -> None:
    """Whether the store cannot be opened, servers cannot write, or no manifest can be published."""
    for at in (1, 8):  # for a supervisor: before it has taken the store over, and behind that
        made: list[FaultyFiles] = []
        plan = saved_plan(job(servers=3, workers=2, atomic=False), config(tmp_path / str(at), every_steps=10))
        options: dict[str, Any] = {f"{side}_files": faulty(operation, at, 10**9, made, number)}
        cluster = run(plan, **options)
        keeper = cluster.keepers[0]
        if at == 8 and check(plan):
            continue  # some were saved: see above
        failures = keeper.failures()
        assert count(failures) == cluster.events("checkpoint_failed") > 2
        assert keeper.failures.unsaved
        assert (keeper.last_version, keeper.saved_steps) == (0, 0)
        kinds = {errno.ENOSPC: "full", errno.EACCES: "denied", errno.EIO: ""}
        assert {failure.kind for failure in failures} == {kinds[number]}
        news = [tell(Happening(0.0, event, figures)) for event, figures in keeper.events]
        told = [text for text in news if text is not None and not text.startswith("saved version")]
        assert len(told) == len(set(told)) == len(failures), told
        for failure in failures:
            assert "keep" not in failure.why, "there is nothing to be deleted"
            assert "'" not in failure.why, "the names of files differ each time"


def test_on_a_full_disk_with_versions_to_spare_keeping_fewer_is_named(tmp_path: Path) -> None:
    made: list[FaultyFiles] = []
    plan = saved_plan(job(servers=2, workers=2, atomic=False), config(tmp_path, "full", every_steps=10))
    cluster = run(plan, server_files=faulty("create", 4, 10**9, made))
    keeper = cluster.keepers[0]
    assert len(keeper.saved) > 1
    assert keeper.failures.unsaved
    assert 0 < keeper.saved_steps < BATCHES
    (failure,) = keeper.failures()
    assert failure.why.endswith(f"(holdfast ckpt gc {tmp_path / 'store'} --keep N, or checkpoint.keep=N)")


def test_the_last_save_is_tried_again_once_there_is_room(tmp_path: Path) -> None:
    """A job that keeps fewer versions than are there deletes them when the disk turns out to be full."""
    saving = config(tmp_path, "full", every_steps=5)
    # More than there is in the store's reserve.
    plan = saved_plan(counting_plan(servers=2, workers=2, atomic=False, rows=60_000), saving)
    cluster = SavedCluster(plan, 2, BATCHES)
    # This seed ends between two saves; otherwise the files of half a version would make room.
    simulate(2, batches=BATCHES, faults=0, cluster=cluster, most_seconds=2.0)
    cluster.close()
    assert len(check(plan)) > 2
    few = msgspec.structs.replace(saving, every_steps=None, keep=1)
    again = resumed(saved_plan(plan, few))
    most = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file())
    keeper = run(
        again,
        server_files=lambda: Disk(most, 10**9),
        supervisor_files=lambda: Disk(most, 10**9),
    ).keepers[0]
    assert count(keeper.failures()) == 1
    assert (keeper.failures.unsaved, keeper.saved_steps) == (False, BATCHES)


def test_a_store_that_others_write_to_is_waited_for_and_given_up(tmp_path: Path) -> None:
    plan = saved_plan(job(servers=2, workers=2, atomic=False), config(tmp_path))
    with LocalStore(str(tmp_path / "store"), create=True) as store, store.lock_writer():
        keeper = run(plan).keepers[0]
    (failure,) = keeper.failures()
    assert (failure.kind, keeper.failures.unsaved) == ("locked", True)
    assert "stop it or choose another store" in failure.why
    waited = [figures for event, figures in keeper.events if event == "store_waited_for"]
    assert len(waited) == 1


def test_a_job_that_goes_on_with_the_same_servers_saves_only_what_changed(tmp_path: Path) -> None:
    """Hole 24: also of what changed between the full version and the restart."""
    for strategy in ("chunked", "incremental", "differential"):
        plan = saved_plan(
            job(servers=3, workers=2, atomic=True),
            config(tmp_path / strategy, strategy, every_steps=3),
        )
        cluster = SavedCluster(plan, 1, BATCHES)
        simulate(1, batches=BATCHES, faults=0, cluster=cluster, most_seconds=1.2)
        cluster.close()
        before = check(plan)
        again = resumed(plan, workers=1)
        assert again.resume is not None
        assert again.resume.continues
        run(again)
        after = check(plan)
        assert after[: len(before)] == before
        assert len(after) > len(before)
        with open_store(str(tmp_path / strategy / "store"), create=False) as store:
            first = next(v for v in read_newest(store).versions if v.version == after[len(before)])
        assert not first.baseline


def test_servers_tell_how_quickly_they_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Section 4.5 of IncrCP weighs reading against writing: together, they read as quickly as their sum."""
    monkeypatch.setattr(baselines, "_MEASURED_BYTES", 0)
    told: list[float] = []
    note = Publisher.note_read_speed

    def noted(self: Publisher, bytes_per_second: float) -> None:
        told.append(bytes_per_second)
        note(self, bytes_per_second)

    monkeypatch.setattr(Publisher, "note_read_speed", noted)
    monkeypatch.setattr(shard_saver, "measure_reading", lambda store, entries, groups: (1000, 0.5))
    plan = saved_plan(job(servers=3, workers=2, atomic=True), config(tmp_path))
    run(plan)
    check(plan)
    assert set(told) == {3 * 2000.0}
    with open_store(str(tmp_path / "store"), create=False) as store:
        first, *others = read_newest(store).versions
        assert first.read_speed == 0
        assert {version.read_speed for version in others} == {6000}


def test_a_damaged_file_begins_a_new_era(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a server that rearranges files: versions that need it cannot be restored."""
    real, damaged = Shard.tidy, [0]

    def tidy(self: Shard, store: Any, version: int, kept: Any) -> Any:
        if self.number == 1 and self.base and version > self.base and not damaged[0]:
            damaged[0] = version
            raise CorruptCheckpoint("a file is damaged")
        return real(self, store, version, kept)

    monkeypatch.setattr(Shard, "tidy", tidy)
    plan = saved_plan(job(servers=3, workers=2, atomic=True), config(tmp_path))
    cluster = run(plan)
    check(plan)
    assert "a file is damaged" in str(cluster.keepers[0].untidy())
    with open_store(str(tmp_path / "store"), create=False) as store:
        full = [version.version for version in read_newest(store).versions if version.baseline]
    assert damaged[0] + 1 in full


def test_damage_to_the_newest_version_costs_that_version(tmp_path: Path) -> None:
    plan = saved_plan(job(servers=2, workers=1, atomic=True), config(tmp_path, "full"))
    versions = (run(plan), check(plan))[1]
    newest = max((tmp_path / "store" / "chunks").iterdir(), key=lambda file: file.name)
    data = bytearray(newest.read_bytes())
    data[-3] ^= 1
    newest.write_bytes(data)
    again = resumed(plan)
    assert again.resume is not None
    assert again.resume.version == versions[-2]
    assert not again.resume.continues
    assert f"version {versions[-1]}" in again.resume.problems[0]
    run(again)
    for file in (tmp_path / "store" / "chunks").iterdir():
        file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(CorruptCheckpoint, match=r"no version of .* can be restored"):
        resumed(plan)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    plan = saved_plan(job(servers=2, workers=1, atomic=True), config(tmp_path))
    run(plan)
    first, second = plan.groups

    def with_first(**changes: Any) -> JobPlan:
        return msgspec.structs.replace(plan, groups=(msgspec.structs.replace(first, **changes), second))

    wider = with_first(dim=3)
    with pytest.raises(ModelMismatch, match=r"table model.a is 4000 rows of weight \(1 F32\) .* \(3 F32\)"):
        resumed(wider)
    renamed = with_first(tables=(msgspec.structs.replace(first.tables[0], name="c"),))
    with pytest.raises(ModelMismatch, match=r"table model.c of the job is not in the checkpoint"):
        resumed(renamed)
    other = with_first(optimizer=msgspec.structs.replace(first.optimizer, name="adagrad"))
    with pytest.raises(ModelMismatch, match=r"expected 4000 rows of weight \(1 F32\), optim.sum \(1 F32\)"):
        resumed(other)


def test_quantized_rows_of_all_servers_go_by_one_codec(tmp_path: Path) -> None:
    """Rows of equal numbers lose nothing, so every version must still be exact."""
    plan = job(servers=3, workers=2, atomic=True)
    wide = msgspec.structs.replace(plan.groups[0], dim=16)
    plan = msgspec.structs.replace(plan, groups=(wide, plan.groups[1]))
    plan = saved_plan(plan, config(tmp_path, quantize=4))
    run(plan)
    check(plan)
    again = resumed(plan)
    assert again.resume is not None
    assert again.resume.continues
    assert again.resume.restores == 1
    with open_store(str(tmp_path / "store"), create=False) as store:
        era = read_newest(store).eras[-1]
    assert era.decoded_groups() == encoder_of(plan).stored
    assert era.decoded_groups()[0].is_coded


def test_saves_that_come_too_soon_are_left_out_or_wait(tmp_path: Path) -> None:
    for when_busy in ("skip", "wait", "cancel"):
        saving = config(tmp_path / when_busy, every_steps=1, when_busy=when_busy)
        cluster = run(plan := saved_plan(job(servers=2, workers=2, atomic=False), saving))
        assert (cluster.events("checkpoint_skipped") > 0) == (when_busy == "skip")
        assert (cluster.events("checkpoint_cancelled") > 0) == (when_busy == "cancel")
        assert cluster.events("checkpoint_failed") == 0
        check(plan)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_saves_that_are_cancelled(tmp_path: Path, strategy: str) -> None:
    """Their rows are in the next version, their files are gone, and of two in a row one is saved."""
    for seed in range(3):
        saving = config(tmp_path / str(seed), strategy, every_steps=1, when_busy="cancel")
        cluster = run(plan := saved_plan(job(servers=3, workers=2, atomic=seed > 0), saving), seed)
        versions = check(plan, servers=2)
        cancelled = [
            f["version"] for k in cluster.keepers for e, f in k.events if e == "checkpoint_cancelled"
        ]
        assert len(cancelled) > 2
        assert not set(cancelled) & set(versions)
        assert all(number + 1 in versions for number in cancelled)
        with open_store(saving.path, create=False) as store:
            numbers = {manifests.version_of(i.name) for f in ("chunks/", "dense/") for i in store.list(f)}
        assert not numbers & set(cancelled)
        assert resumed(plan).resume is not None


def test_loops_for_large_tables_are_loaded_before_the_job_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []
    monkeypatch.setattr(shard_saver, "compile_loops", lambda: loaded.append(1))
    plan = saved_plan(job(servers=1, workers=1, atomic=False), config(tmp_path))
    shards = [GroupShard(group, Placement(1), 0, 0) for group in plan.groups]
    size = sum(shard.records.nbytes for shard in shards)
    with LocalStore(str(tmp_path / "store"), create=True, files=QuickFiles()) as store:
        for limit, expected in ((size, []), (size - 1, [1])):
            monkeypatch.setattr(copy_on_write, "COPIED_BYTES", limit)
            ShardSaver(plan, 0, shards, store, cast("Any", None))
            assert loaded == expected


def test_a_server_stops_writing_what_another_cut_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "FILE_BYTES", 4000)
    monkeypatch.setattr(bundles, "STRETCH_BYTES", 4000)
    plan = saved_plan(job(servers=1, workers=1, atomic=False), config(tmp_path, when_busy="cancel"))
    shards = [GroupShard(group, Placement(1), 0, 0) for group in plan.groups]
    jobs: list[Callable[[], None]] = []
    written: list[str] = []

    class Store(LocalStore):
        def put(self, name: str, parts: Any) -> int:
            written.append(name)
            if len(written) == 2:
                saver.cut(2, baseline=True)
            return super().put(name, parts)

    class Runs:
        def submit(self, job: Callable[[], None]) -> None:
            jobs.append(job)

    with Store(str(tmp_path / "store"), create=True, files=QuickFiles()) as store:
        saver = ShardSaver(plan, 0, shards, store, Runs())
        saver.cut(1, baseline=True)
        jobs.pop(0)()
        assert len(written) == 2
        assert saver.saved() == 0
        jobs.pop(0)()
        assert len(written) > 4
        assert {manifests.version_of(name) for name in written[2:]} == {2}
        assert saver.saved() == 2


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("placement", [Placement(3), Placement(5, 3, 2), Placement(7, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("baseline", [True, False])
def test_rows_that_change_after_the_cut_are_saved_as_they_were(
    tmp_path: Path, placement: Placement, baseline: bool
) -> None:
    """By every way in which records of a server change."""
    saving = config(tmp_path, "incremental", max_memory=1 if not baseline else None)
    plan = job(servers=placement.servers, workers=1, atomic=False)
    plan = msgspec.structs.replace(plan, k=placement.k, r=placement.r, rings=placement.groups)
    plan = saved_plan(plan, saving)
    shards = [GroupShard(g, p, 1, 7) for g, p in zip(plan.groups, plan.placements, strict=True)]
    jobs: list[Callable[[], None]] = []

    class Runs:
        def submit(self, job: Callable[[], None]) -> None:
            jobs.append(job)

    with LocalStore(str(tmp_path / "store"), create=True, files=QuickFiles()) as store:
        saver = ShardSaver(plan, 1, shards, store, Runs())
        shard = shards[0]
        real = np.flatnonzero(shard.rows_of(np.arange(len(shard.records))) < shard.plan.rows)
        some = real[::3]
        shard.push(some, np.ones((len(some), shard.plan.dim), np.float32))
        rows_here = shard.rows_of(real).tolist()
        right = {row: shard.records[at].tobytes() for at, row in zip(real, rows_here, strict=True)}
        if not baseline:
            right = {row: right[row] for row in shard.rows_of(some).tolist()}
            saver._shard = Shard(1, saver._encoder.stored, saver._strategy)
        written: list[Rows] = []
        saver.cut(1, baseline=baseline)
        assert shard.before_change is not None
        if baseline:
            shard.push(real[::2], np.ones((len(real[::2]), shard.plan.dim), np.float32))
            shard.write(real[1::2], np.zeros((len(real[1::2]), shard.plan.words), np.uint32))
        save = saver._save
        assert save is not None
        save.wanted.check()  # raises if it is void
        for rows in save.rows[0].parts(50):
            assert (np.diff(rows.ids) > 0).all()
            assert len(rows) <= 50
            written.append(rows)
        found = join_rows(written)
        assert (np.diff(found.ids) > 0).all()
        fields = [found.fields[n][i].tobytes() for i in range(len(found)) for n in range(len(found.fields))]
        width = len(found.fields)
        records = [b"".join(fields[i : i + width]) for i in range(0, len(fields), width)]
        assert dict(zip(found.ids.tolist(), records, strict=True)) == right
        saver.cut(2, baseline=True)  # the first one is given up


def test_old_versions_go_by_the_policy(tmp_path: Path) -> None:
    plan = saved_plan(job(servers=2, workers=2, atomic=False), config(tmp_path, keep=3))
    cluster = run(plan)
    assert check(plan) == cluster.keepers[0].saved[-3:]
