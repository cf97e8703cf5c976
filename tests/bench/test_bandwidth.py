"""The bench on tables that take seconds: every figure that is claimed is there and makes sense."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from holdfast.bench.bandwidth import RESTORES, SETTINGS, Setting, Trace, measure, measure_slowdown
from holdfast.bench.harness import Report


@pytest.fixture
def report() -> Report:
    return Report("bandwidth", quick=True, console=Console(file=io.StringIO()))


def test_rows_are_touched_as_in_the_paper() -> None:
    unions = Trace(40_000, 12).unions()
    assert unions[0] == pytest.approx(0.25, abs=0.01)
    assert unions[9] == pytest.approx(0.525, abs=0.01)


def test_every_claimed_figure(report: Report) -> None:
    """Bytes do not depend on the machine; that each run's last version restores is checked on the way."""
    measure(report, rows=4000, settings=[SETTINGS[0], Setting("adagrad.", "adagrad", None, (1,))])
    figures = report.figures
    for strategy in ("differential", "chunked"):
        for kind in ("written_over", "stored_over", "listed_over", "moment_over"):
            values = [figures[f"{strategy}.{restores}.{kind}"] for restores in RESTORES]
            # Those with equal bits differ by a few bytes of the manifests, which say when.
            rounded = [round(value, 2) for value in values]
            assert rounded == sorted(rounded, reverse=True), "the more restores, the more bits"
            assert values[-1] > 1
        # Its state is 64 times as large, and stored as it is.
        assert figures[f"adagrad.{strategy}.1.written_over"] < figures[f"{strategy}.1.written_over"] / 2
    assert figures["differential.1.written_over"] > 15
    assert 0.1 < figures["metadata_share.2.dim64"] <= 1 / 3
    assert {report.raw[f"differential.{restores}"]["ours"].bits for restores in RESTORES} == {2, 3, 4, 8}
    report.to_json()


def test_what_is_stored_is_told_apart(report: Report) -> None:
    measure(report, rows=2000, checkpoints=4, settings=[Setting("", "rowwise", 16, (1,))])
    ours = report.raw["differential.1"]["ours"]
    rows = 2000 + 0.36 * 2000
    assert ours.profile["grid"] == ours.profile["state"] * 2  # two words of 16 bits a row, and one
    assert ours.profile["weights"] == 4 * ours.profile["grid"]
    assert ours.profile["grid"] == pytest.approx(4 * rows, rel=0.05)
    assert all(a <= b for a, b in zip(ours.needed, ours.listed, strict=True))
    assert max(ours.listed) <= ours.moment


def test_slowdown_is_measured(report: Report) -> None:
    measure_slowdown(report, rows=2000, seconds=0.05, rounds=1)
    for name in ("background", "background.share25"):
        assert 0 < report.figures[f"{name}.cpu_percent"] <= 101
        assert f"{name}.step_slowdown_over_cpu" in report.figures
