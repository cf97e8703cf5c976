"""Trainings that lose rows: what is lost, what is not, and that nothing else differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdfast.data.criteo import Criteo
from holdfast.errors import ConfigError, DataError, TrainingDiverged
from holdfast.sim.draws import ChosenFailures, UniformFailures
from holdfast.sim.emulator import Emulation, Run, emulate, large_share, train
from holdfast.sim.student import Lesson, Student, lesson_of
from holdfast.sim.timeline import WAYS, EmulatedCluster, Way, way_of
from holdfast.sim.traces import Failure
from tests.data.test_criteo import text_of, write

LESSON = Lesson(scale=1000.0, samples=30_000, batch_size=128, test_samples=5000)
CLUSTER = EmulatedCluster(share=large_share(LESSON))
LATE = (Failure(30.2, (3,)), Failure(50.2, (1,)))


def run(way: Way | None, failures: tuple[Failure, ...] = LATE) -> Run:
    return Run(LESSON, CLUSTER, way, failures)


def test_full_recovery_changes_no_bit() -> None:
    """What is lost is trained again: the same network, the same rows."""
    plain = train(run(None, ()))
    full = train(run(way_of("full", CLUSTER)))
    assert full.auc == plain.auc
    assert full.updates_lost == 0
    assert full.saved_share == 24


def test_partial_recovery_loses_what_was_learned_since() -> None:
    plain = train(run(None, ()))
    often = train(run(Way("partial", True, 0.5)))
    seldom = train(run(Way("cpr", True, 44.8)))
    assert 0 < often.updates_lost < 0.003
    # Hours 0 to 30.2 of an eighth, and 44.8 to 50.2.
    assert seldom.updates_lost == pytest.approx((30.2 + 5.4) / 56 / 8, rel=0.15)
    assert seldom.auc != plain.auc
    without_failures = train(run(Way("cpr", True, 44.8), ()))
    assert without_failures.auc == plain.auc


def test_only_the_failed_servers_rows_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the very end of a training, nothing is learned again: the others' rows are those of no failure."""
    weights: dict[str, np.ndarray[tuple[int, int], np.dtype[np.float32]]] = {}
    test = Student.test

    def keep(student: Student) -> float:
        weights[name] = student.weights.copy()
        return test(student)

    monkeypatch.setattr(Student, "test", keep)
    name = "plain"
    train(run(None, ()))
    name = "failed"
    train(run(Way("cpr", True, 28.0), (Failure(55.9999, (3,)),)))
    changed = np.flatnonzero((weights["plain"] != weights["failed"]).any(1))
    assert len(changed) > 100
    assert set((changed % CLUSTER.servers).tolist()) == {3}


@pytest.mark.parametrize("name", ["cpr-mfu", "cpr-ssu", "cpr-scar"])
def test_prioritised_saving_loses_fewer_updates_for_as_many_bytes(name: str) -> None:
    vanilla = train(run(way_of("cpr", CLUSTER)))
    way = next(way_of(one, CLUSTER) for one in WAYS if one == name)
    prioritised = train(run(way))
    assert prioritised.updates_lost < 0.6 * vanilla.updates_lost
    # Nineteen saves of a sixteenth of the large tables and all of the small ones.
    assert prioritised.saved_share <= 19 * (CLUSTER.share / 16 + (1 - CLUSTER.share)) + 1e-9
    weights = 4 * LESSON.dim * sum(LESSON.table_rows)
    most = {"cpr-mfu": 0.0625, "cpr-ssu": 0.0079, "cpr-scar": 1.0}[name]
    assert 0 < prioritised.tracking_bytes <= most * weights


def test_ways_of_a_seed_have_the_same_failures_and_seeds_have_not() -> None:
    def both(processes: int) -> list[Emulation]:
        return emulate(
            LESSON, CLUSTER, UniformFailures(2), ways=["full", "cpr"], seeds=[0, 1], processes=processes
        )

    found = both(1)
    assert [(one.way.name, one.seed) for one in found] == [("full", 0), ("cpr", 0), ("full", 1), ("cpr", 1)]
    assert found[0].failures == found[1].failures != found[2].failures
    assert [one.auc_loss for one in found if one.way.name == "full"] == [0, 0]
    assert found[1].outcome.auc != found[3].outcome.auc
    assert found == both(2)


def test_a_failure_where_everything_is_just_saved_loses_nothing() -> None:
    failures = ChosenFailures([(28.0, 0)])
    (one,) = emulate(
        LESSON, replace(CLUSTER, target_pls=0.0625), failures, ways=["cpr"], seeds=[0], processes=1
    )
    assert one.way.interval_hours == 28.0
    assert one.costs.pls == 0
    assert one.outcome.updates_lost == 0
    assert one.auc_loss == 0


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match="lr is 0: expected above 0"):
        Lesson(lr=0)
    with pytest.raises(ConfigError, match=r"lr is 1e\+300: expected at most"):
        Lesson(lr=1e300)
    with pytest.raises(ConfigError, match=r"samples is 0: expected 256 \(batch_size\) to"):
        Lesson(samples=0)
    with pytest.raises(ConfigError, match=r"scale is 1e-300: expected 0\.001 to"):
        Lesson(scale=1e-300)
    with pytest.raises(ConfigError, match="leaves no batch of 256 samples"):
        Lesson(scale=1e9)
    with pytest.raises(ConfigError, match="shape is 'avazu': expected one of kaggle, terabyte"):
        lesson_of("avazu")
    assert lesson_of("kaggle", lr=2.0, scale=None) == Lesson(lr=2.0)
    with pytest.raises(TrainingDiverged, match="lower lr"):
        train(Run(replace(LESSON, lr=1e6), CLUSTER, None, ()))


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """3,000 lines: 2,571 to train with and the last seventh, by bytes, to test with."""
    (path,) = write(tmp_path_factory.mktemp("criteo"), [text_of(3000)])
    return str(path)


def test_trainings_on_files_of_clicks(clicks: str) -> None:
    lesson = replace(LESSON, criteo=(clicks,), samples=2432, test_samples=400, lr=0.01)
    batches = list(lesson.batches())
    whole = Criteo(clicks, batch_size=128, table_rows=lesson.table_rows, part="train")
    assert len(batches) == lesson.steps == 19
    for mine, read in zip(batches, whole, strict=False):
        assert (np.stack(mine.ids) == np.stack(read.ids)).all()
        assert (mine.labels == read.labels).all()
    full, cpr = emulate(
        lesson, CLUSTER, ChosenFailures([(30.2, 3)]), ways=["full", "cpr"], seeds=[0], processes=1
    )
    assert full.auc_loss == 0  # what was lost was read again
    assert cpr.outcome.updates_lost > 0
    assert full.plain == cpr.plain
    assert 0 < cpr.plain.access_change < 1
    assert 0 < cpr.plain.access_update < 1


def test_too_few_clicks_are_told(clicks: str, tmp_path: Path) -> None:
    lesson = replace(LESSON, criteo=(clicks,), samples=3000, test_samples=400)
    with pytest.raises(DataError, match=r"2,\d\d\d samples to train with, expected 2,944: ask for fewer"):
        train(Run(lesson, CLUSTER, None, ()))
    (short,) = write(tmp_path, [text_of(3)])
    with pytest.raises(DataError, match="no sample in the last seventh to test with"):
        train(Run(replace(lesson, criteo=(str(short),), samples=2, batch_size=2), CLUSTER, None, ()))
