"""The bench on a run of seconds: paired runs are paired, and the statistics are right."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from holdfast.bench.harness import Report, Spread
from holdfast.bench.quantize_accuracy import (
    DIAGONAL,
    Size,
    mean_with_interval,
    measure,
    report_losses,
    verdict,
)

TINY = Size(steps=30, batch=64, test_samples=4000, tables=3, rows=200, dim=8)


@pytest.fixture
def report() -> Report:
    return Report("quantize-accuracy", quick=True, console=Console(file=io.StringIO()))


def test_auto_picks_the_papers_bits() -> None:
    assert DIAGONAL == ((2, 1), (3, 3), (4, 20), (8, 100))


def test_raw_restores_change_nothing_and_rounded_ones_do(report: Report) -> None:
    measure(report, TINY, {0: [(2, 1), (8, 3)], 1: [(2, 1), (8, 3)]})
    assert report.figures["raw.restores3.auc_loss_percent"] == 0
    assert report.figures["bits2.restores1.auc_loss_percent"] != 0
    assert report.figures["auto.1.auc_loss_percent"] == report.figures["bits2.restores1.auc_loss_percent"]
    spread = report.spreads["bits8.restores3.auc_loss_percent"]
    assert spread.low <= spread.median <= spread.high
    assert 0.4 < report.figures["auc.without_restores"] < 1
    report.to_json()


def test_losses_are_relative_and_paired(report: Report) -> None:
    aucs = {0: {(None, 0): 0.8, (2, 1): 0.796}, 1: {(None, 0): 0.5, (2, 1): 0.505}}
    report_losses(report, aucs)
    assert report.raw["bits2.restores1.auc_loss_percent.by_seed"] == pytest.approx([0.5, -1.0])
    assert report.figures["auto.1.auc_loss_percent"] == pytest.approx(-0.25)


def test_interval_is_students() -> None:
    spread = mean_with_interval([1.0, 2.0, 3.0])
    half = 4.303 / math.sqrt(3)
    assert (spread.low, spread.median, spread.high) == pytest.approx((2 - half, 2, 2 + half))
    assert mean_with_interval([0.0]) == Spread(0, 0, 0)


def test_verdicts() -> None:
    assert verdict(Spread(0, -0.005, 0.009)).endswith("% shown")
    assert verdict(Spread(0, -0.005, 0.02)).endswith("not shown")
    assert verdict(Spread(0.03, 0.02, 0.04)).endswith("refuted")
