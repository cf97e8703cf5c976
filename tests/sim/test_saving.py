"""Supervisors that die between what they did and what they say, while a job is saved (holes 18 and 21)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.checkpoint.format.manifest import read_newest
from holdfast.checkpoint.store.local import LocalStore
from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Exit, Peer
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.runtime.transport.memory import Network
from holdfast.cluster.saving.coordinator import SaveCoordinator
from holdfast.cluster.saving.layout import saving_of
from holdfast.cluster.saving.shard_saver import ShardSaver
from holdfast.cluster.supervisor.machine import Supervisor
from holdfast.errors import CorruptCheckpoint
from holdfast.sim.cluster import counting_plan
from holdfast.sim.saving import Died, SavedCluster, saved_plan, wrong_versions
from holdfast.sim.schedule import simulate
from holdfast.training.saving import CheckpointConfig

BATCHES = 100


def plan_in(folder: Path, rows: int, **options: Any) -> JobPlan:
    plan = counting_plan(servers=2, workers=2, atomic=True, rows=rows)
    return saved_plan(plan, CheckpointConfig(path=str(folder / "store"), **options))


def problems(cluster: SavedCluster, batches: int = BATCHES) -> list[str]:
    """Whatever goes wrong with a job or with one of its versions."""
    outcome = simulate(1, batches=batches, faults=0, cluster=cluster)
    cluster.close()
    assert len(cluster.keepers) == 2, "one has died"
    errors = [one.why for keeper in cluster.keepers for one in (*keeper.failures(), *keeper.untidy())]
    try:
        versions, wrong = wrong_versions(cluster.plan, batches, servers=3)
        assert len(versions) > 2
    except CorruptCheckpoint as error:
        wrong = [str(error)]
    return outcome.violations + errors + wrong


def rearranged_and_unsaid(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """It dies when a manifest has files that servers have rearranged: they do not know that they are in it.

    So many rows that most are not saved again before it is worth while to rearrange files.
    """
    replaced: list[int] = []
    rearrange = SaveCoordinator._replace

    def replace_and_die(self: Any, save: Any) -> None:
        rearrange(self, save)
        replaced.append(save.version)
        if len(replaced) == 1:
            raise Died

    monkeypatch.setattr(SaveCoordinator, "_replace", replace_and_die)
    batches = 3 * BATCHES  # when that is depends on how long writing takes: time for several times
    found = problems(SavedCluster(plan_in(folder, rows=6000, every_steps=2), 1, batches), batches)
    assert len(replaced) > 1, "files were rearranged again"
    return found


def asked_and_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """It dies when one server has copied its rows for a version, and late beats tell its successor of a time
    before that."""
    cut, send = ShardSaver.cut, Network._send

    def send_late(self: Any, envelope: Envelope) -> None:
        if (envelope.source.role, envelope.target.role) == ("server", "supervisor"):
            self.at(self.now + 1.0, lambda: self._deliver(envelope))
        else:
            send(self, envelope)

    def cut_and_die(self: Any, version: int, *, baseline: bool, whole: bool) -> None:
        cut(self, version, baseline=baseline, whole=whole)
        if version == 3 and len(cluster.keepers) == 1 and cluster.supervisor.me in cluster.network.nodes:
            cluster._end_supervisor()

    monkeypatch.setattr(Network, "_send", send_late)
    monkeypatch.setattr(ShardSaver, "cut", cut_and_die)
    plan = plan_in(folder, rows=400, every_steps=4, strategy="incremental")
    cluster = SavedCluster(plan, 1, BATCHES)
    return problems(cluster)


def shards_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server goes on with what it knows of its files, though it is in doubt whether that is so."""
    shard_for = ShardSaver._shard_for

    def careless(self: Any, save: Any) -> Any:
        save.in_doubt = False
        return shard_for(self, save)

    monkeypatch.setattr(ShardSaver, "_shard_for", careless)


def first_beats_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version gets its number from beats that may be older than the last supervisor's cut."""

    def may_cut(self: Any) -> bool:
        return self.view.phase in ("running", "ending") and self.cut is None

    monkeypatch.setattr(Supervisor, "may_cut", may_cut)


Schedule = Callable[[Path, pytest.MonkeyPatch], list[str]]
GUARDS: dict[Schedule, Callable[[pytest.MonkeyPatch], None]] = {
    rearranged_and_unsaid: shards_are_not_read_again,
    asked_and_forgotten: first_beats_are_believed,
}


@pytest.mark.parametrize("schedule", GUARDS, ids=lambda schedule: schedule.__name__)
def test_a_successor_goes_on(tmp_path: Path, schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    assert schedule(tmp_path, monkeypatch) == []


@pytest.mark.parametrize("schedule", GUARDS, ids=lambda schedule: GUARDS[schedule].__name__)
def test_each_guard_is_needed(tmp_path: Path, schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a guard taken out, the schedule goes wrong."""
    GUARDS[schedule](monkeypatch)
    assert schedule(tmp_path, monkeypatch) != []


def run_until_final(folder: Path, stage: str) -> SavedCluster:
    """A protected job whose last version has come to a stage."""
    plan = counting_plan(servers=3, workers=2, atomic=True, k=2, r=1, rows=60)
    plan = saved_plan(plan, CheckpointConfig(path=str(folder / "store"), strategy="incremental"))
    cluster = SavedCluster(plan, 1, BATCHES)
    keeper = cluster.keepers[0]
    assert cluster.network.run(lambda: keeper._save is not None and keeper._save.stage == stage, 60)
    assert keeper._final is not None
    return cluster


def finish(cluster: SavedCluster) -> list[str]:
    """What is wrong when it has ended, with its last version among others."""
    assert cluster.network.run(lambda: cluster.supervisor.finished, 60)
    cluster.close()
    versions, wrong = wrong_versions(cluster.plan, BATCHES, servers=2)
    with LocalStore(saving_of(cluster.plan).config.path, create=False) as store:
        last = read_newest(store).versions[-1]
    if last.step + 1 != BATCHES:
        wrong.append(f"the last version has {last.step + 1} batches")
    if cluster.keepers[-1].saved != versions:
        wrong.append(f"said to be saved: {cluster.keepers[-1].saved}, and {versions} are")
    return cluster.violations() + wrong


@pytest.mark.parametrize("stage", ["cutting", "collecting"])
def test_a_server_that_dies_during_the_last_save_has_it_made_again(tmp_path: Path, stage: str) -> None:
    cluster = run_until_final(tmp_path, stage)
    cluster.kill("server", 1, noticed=True)
    assert finish(cluster) == []


@pytest.mark.parametrize("stage", ["committing", "tidying"])
def test_a_version_stands_whose_servers_die_when_they_have_written_it(tmp_path: Path, stage: str) -> None:
    cluster = run_until_final(tmp_path, stage)
    supervisor, keeper = cluster.supervisor, cluster.keepers[0]
    cluster.kill("server", 1, noticed=True)
    supervisor._note_exit(Exit(Peer("server", 1, 1), -9), cluster.network.now)  # at once
    supervisor.advance(cluster.network.now)
    cluster.network.send_outbox(supervisor)
    assert finish(cluster) == []
    assert (keeper.failures(), keeper.untidy()) == ((), ())
    assert keeper.saved == [1]


def test_a_job_that_is_stopped_during_the_last_save_has_it_made_again(tmp_path: Path) -> None:
    cluster = run_until_final(tmp_path, "cutting")
    cluster.supervisor.request_stop()
    assert finish(cluster) == []


@pytest.mark.parametrize("dies", [False, True])
def test_the_last_version_of_prioritized_rows_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Though a version of the last step, with few rows, is there already."""

    def is_due(self: Any, supervisor: Supervisor, now: float) -> bool:
        steps = supervisor.steps()
        first = not self.saved and steps >= 20
        return self._final is None and self._schedule.step < steps and (first or steps == BATCHES)

    monkeypatch.setattr(SaveCoordinator, "_is_due", is_due)
    plan = counting_plan(servers=2, workers=2, atomic=False, rows=60, dense="workers")
    config = CheckpointConfig(path=str(tmp_path), strategy="incremental", prioritize="mfu", fraction=0.125)
    cluster = SavedCluster(saved_plan(replace(plan, partial="partial"), config), 1, BATCHES)
    keeper = cluster.keepers[0]
    if dies:
        assert cluster.network.run(lambda: len(keeper.saved) == 2, 60)
        cluster._end_supervisor()
        assert cluster.network.run(lambda: len(cluster.keepers) == 2, 60)
    assert cluster.network.run(lambda: cluster.supervisor.finished, 60)
    cluster.close()
    versions, wrong = wrong_versions(cluster.plan, BATCHES, servers=2)
    assert len(versions) == 3
    assert [text for text in wrong if text.startswith(f"version {versions[-1]}:")] == []
