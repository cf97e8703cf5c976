"""The bench on tables that take no time: every figure that is claimed is there and makes sense."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from holdfast.bench import recovery
from holdfast.bench.harness import BENCHES, Report

CLAIMED = {
    "recovery.resume_seconds", "recovery.drop_percent", "recovery.k2.full_seconds",
    "recovery.checkpoint_average_over_ec", "recovery.decode_megabytes_per_second", "recovery.bit_exact",
    "recovery.shared.resume_seconds", "recovery.shared.drop_percent", "recovery.shared.k2.full_seconds",
    "recovery.shared.checkpoint_average_over_ec", "recovery.shared.idle.full_over_unthrottled",
    "recovery.shared.busy.drop_percent", "recovery.shared.busy.unthrottled.drop_percent",
    "recovery.k2.rows2000.seconds_per_gigabyte",
}  # fmt: skip


def test_a_death_is_measured() -> None:
    scale = replace(recovery.QUICK, ks=(2,))
    with recovery.Victims(recovery._config(scale, 2000, 2)) as victims:
        death = victims.death(0.3)
        idle = victims.idle()
    assert 0 < death.rows_seconds <= death.full_seconds
    assert death.resume_seconds > 0
    assert death.before > 0
    assert idle.full_seconds > 0
    assert idle.megabytes_per_second > 0
    assert idle.megabytes_per_cpu_second > 0


def test_how_much_slower_training_was() -> None:
    assert recovery.Death(0.1, 1.0, 2.0, before=10.0, meanwhile=8.0).drop_percent == pytest.approx(20)


@pytest.mark.soak
def test_every_claimed_figure() -> None:
    report = Report("recovery", quick=True, console=Console(file=io.StringIO()))
    recovery.measure(report, recovery.Scale(
        max_rows=(2000,), ks=(2,), servers=None, kills=1, seconds=0.3, workers=1, exact=((2, 1),),
        chunks=("usual",), chunk_k=2,
    ))  # fmt: skip
    figures = report.figures
    assert figures.keys() >= CLAIMED
    assert figures["recovery.bit_exact"] == 1
    assert 0 < figures["recovery.k2.rows_seconds"] <= figures["recovery.k2.full_seconds"]
    assert figures["recovery.resume_seconds"] > 0
    assert figures["recovery.decode_megabytes_per_second"] > 0
    ratios = [figures[f"recovery.k2.checkpoint{minutes}_average_over_ec"] for minutes in (30, 60)]
    assert 0 < ratios[0] < ratios[1] == figures["recovery.checkpoint_average_over_ec"]
    report.to_json()


def test_the_bench_is_listed() -> None:
    assert "recovery" in BENCHES


def test_batches_in_part() -> None:
    begun = np.array([1.0, 2.0, 4.0, 5.0])
    assert recovery.batches_between(begun, 1.0, 4.0) == 2
    assert recovery.batches_between(begun, 1.5, 3.0) == pytest.approx(0.5 + 0.5)
