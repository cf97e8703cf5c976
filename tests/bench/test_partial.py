"""The bench on trainings of a second: all figures are there, and those that need no size are right."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from holdfast.bench.harness import Report
from holdfast.bench.partial import Size, measure, random_run
from holdfast.sim.student import Lesson

TINY = Lesson(scale=2000.0, samples=10_000, batch_size=64, test_samples=5000)


def test_every_figure_of_a_small_run() -> None:
    report = Report("partial", quick=True, console=Console(file=io.StringIO()))
    measure(report, Size(TINY, seeds=2, random_runs=4, patterns=2000, rounds=1, max_rows=2000), processes=1)
    assert set(report.figures) == {
        "overhead.full.percent", "overhead.partial.percent", "overhead.cpr.percent",
        "overhead.cpr-mfu.percent", "auc_loss.vanilla", "auc_loss.mfu", "auc_loss.ssu", "auc_loss.scar",
        "auc_loss.mfu.eighth", "auc_loss.ssu.eighth",
        "pls_correlation", "access_change_correlation",
        "tracking.mfu.percent", "tracking.ssu.percent", "memory.mfu.percent", "memory.ssu.percent",
    }  # fmt: skip
    assert report.figures["overhead.full.percent"] == pytest.approx(8.5, rel=0.1)
    assert report.figures["overhead.cpr.percent"] == pytest.approx(0.5, rel=0.1)
    assert report.figures["memory.mfu.percent"] < 7
    assert -1 <= report.figures["pls_correlation"] <= 1
    assert len(report.raw["pls_and_loss"]) == 4
    assert len(report.raw["auc_loss.mfu.by_seed"]) == 2
    report.to_json()


def test_random_runs_are_those_of_section_6_5() -> None:
    runs = [random_run(number, TINY) for number in range(200)]
    assert {len(run.failures) for run in runs} == {1, 2, 4, 8, 16, 32}
    portions = {len(failure.servers) / 16 for run in runs for failure in run.failures}
    assert portions == {1 / 16, 1 / 8, 1 / 4, 1 / 2}
    assert {run.lesson for run in runs} == {TINY}
    assert all(run.way is not None and run.way.prioritize is None for run in runs)
    assert all(run.way is not None and run.way.interval_hours <= run.cluster.hours / 2 for run in runs)
    assert runs[:5] == [random_run(number, TINY) for number in range(5)]
