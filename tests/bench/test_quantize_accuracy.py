"""The bench on a run of seconds: paired runs are paired, and the statistics are right."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.bench import quantize_accuracy
from holdfast.bench.accuracy_runs import PLAIN, Cell, Run, Scores, Size, results
from holdfast.bench.harness import Report, Spread
from holdfast.bench.quantize_accuracy import (
    CONTROL,
    DIAGONAL,
    RunPart,
    mean_with_interval,
    measure,
    report_losses,
    verdict,
)

TINY = Size(steps=30, batch=64, test_samples=4000, tables=3, rows=200, dim=8)


@pytest.fixture
def report() -> Report:
    return Report("quantize-accuracy", quick=True, console=Console(file=io.StringIO()))


def test_auto_picks_the_bits_that_were_shown_to_suffice() -> None:
    assert DIAGONAL == ((2, 1), (3, 3), (4, 10), (8, 20), (8, 100))


def test_raw_restores_change_nothing_and_rounded_ones_do(report: Report) -> None:
    cells = (Cell(2, 1), Cell(8, 3))
    measure(report, [RunPart("", TINY, {0: (CONTROL, *cells), 1: cells})], workers=1)
    assert report.figures["raw.restores3.auc_loss_percent"] == 0
    assert report.figures["raw.restores3.lifetime_auc_loss_percent"] == 0
    assert report.figures["bits2.restores1.auc_loss_percent"] != 0
    assert report.figures["auto.1.auc_loss_percent"] == report.figures["bits2.restores1.auc_loss_percent"]
    spread = report.spreads["bits8.restores3.auc_loss_percent"]
    assert spread.low <= spread.median <= spread.high
    assert 0.4 < report.figures["auc.without_restores"] < 1
    report.to_json()


@pytest.mark.soak
def test_processes_give_the_same_scores() -> None:
    runs = RunPart("", TINY, {0: (Cell(4, 3),)}).runs()
    assert dict(results(runs, workers=2)) == dict(results(runs, workers=1))


def test_losses_are_relative_and_paired(report: Report) -> None:
    part = RunPart("", TINY, {0: (Cell(2, 1),), 1: (Cell(2, 1),)})
    scores = {
        Run("", TINY, seed, cell).name: Scores(test, 0.5)
        for seed, cell, test in [(0, PLAIN, 0.8), (0, (2, 1), 0.796), (1, PLAIN, 0.5), (1, (2, 1), 0.505)]
        for cell in [Cell(*cell)]
    }
    report_losses(report, part, scores)
    assert report.raw["bits2.restores1.auc_loss_percent.by_seed"] == pytest.approx([0.5, -1.0])
    assert report.figures["auto.1.auc_loss_percent"] == pytest.approx(-0.25)
    assert report.figures["auto.1.lifetime_auc_loss_percent"] == 0


def test_an_interrupted_bench_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    def some(runs: Sequence[Run], workers: int | None) -> Iterator[tuple[Run, Scores]]:
        for run in runs:
            if len(trained) == stop_after:
                raise KeyboardInterrupt
            trained.append(run.name)
            yield run, Scores(0.8, 0.7)

    def start(parts: Sequence[RunPart]) -> None:
        report = Report(
            "quantize-accuracy", False, Console(file=io.StringIO()), json_path=tmp_path / "f.json"
        )
        measure(report, parts)
        report.save()

    monkeypatch.setattr(quantize_accuracy, "results", some)
    parts = [RunPart("", TINY, {0: DIAGONAL, 1: DIAGONAL})]
    runs = 2 * (1 + len(DIAGONAL))
    stop_after = 7
    with pytest.raises(KeyboardInterrupt):
        start(parts)
    stop_after = -1
    start(parts)
    assert len(trained) == len(set(trained)) == runs
    start(parts)  # what is finished is measured anew
    assert len(trained) == 2 * runs

    stop_after = 2 * runs + 3
    with pytest.raises(KeyboardInterrupt):
        start(parts)
    stop_after = -1
    start([RunPart("", replace(TINY, steps=31), {0: DIAGONAL, 1: DIAGONAL})])  # so is what is another bench
    assert len(trained) == 2 * runs + 3 + runs


def test_interval_is_students() -> None:
    spread = mean_with_interval([1.0, 2.0, 3.0])
    half = 4.303 / math.sqrt(3)
    assert (spread.low, spread.median, spread.high) == pytest.approx((2 - half, 2, 2 + half))
    assert mean_with_interval([0.0]) == Spread(0, 0, 0)


def test_verdicts() -> None:
    assert verdict(Spread(0, -0.005, 0.009)).endswith("% shown")
    assert verdict(Spread(0, -0.005, 0.02)).endswith("not shown")
    assert verdict(Spread(0.03, 0.02, 0.04)).endswith("refuted")
