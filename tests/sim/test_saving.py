"""Supervisors that die between what they did and what they say, while a job is saved (holes 18 and 21)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.membership import Supervisor
from holdfast.cluster.plan import JobPlan
from holdfast.cluster.saving import ShardSaver
from holdfast.cluster.transport.base import Envelope
from holdfast.cluster.transport.memory import Network
from holdfast.cluster.versions import Versions
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
    errors = [error for keeper in cluster.keepers for error in keeper.errors]
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
    replace = Versions._replace

    def replace_and_die(self: Any, save: Any) -> None:
        replace(self, save)
        replaced.append(save.version)
        if len(replaced) == 1:
            raise Died

    monkeypatch.setattr(Versions, "_replace", replace_and_die)
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
