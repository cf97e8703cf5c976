"""The bench on tables that take no time: every figure that is claimed is there and makes sense."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from holdfast.bench.harness import BENCHES, Report
from holdfast.bench.overhead import CODED, FULL, KS, OTHERS, QUICK, Case, Mode, Scale, measure
from holdfast.bench.proportion import interval_seconds


def measured(*sides: tuple[Mode, int]) -> Report:
    report = Report("overhead", quick=True, console=Console(file=io.StringIO()))
    measure(report, Scale(2000, 0.3, 1, (Case("kaggle", "momentum", sides, rounds=1, servers=3),)))
    return report


@pytest.mark.soak
def test_checkpoints_are_measured() -> None:
    report = measured(("none", 0), ("checkpointer", 0))
    figures = report.figures
    for k in KS:
        assert f"overhead.kaggle.momentum.checkpointer.k{k}.percent" in figures
    assert figures["overhead.kaggle.momentum.pause_seconds"] > 0
    (raw,) = (value for name, value in report.raw.items() if name.startswith("overhead."))
    assert raw["checkpointer"]["versions"] == [1]  # a window begins with a save, and has no other
    assert raw["none"]["versions"] == [0, 0]  # one before it, one after


@pytest.mark.soak
def test_every_figure_of_a_code() -> None:
    report = measured(("none", 0), ("ecrm", 2))
    figures = report.figures
    names = ["ecrm.k2"]
    assert {f"overhead.kaggle.momentum.{name}.percent" for name in names} <= figures.keys()
    assert figures["overhead.ecrm.percent"] == figures["overhead.kaggle.momentum.ecrm.k2.percent"]
    for name in ("none", *names):
        for place in ("server", "worker"):
            assert figures[f"overhead.kaggle.momentum.{name}.cpu_ms.{place}"] > 0
    # Counts do not depend on the machine. The network, which ECRM copies to nobody, is large beside such
    # small tables.
    assert figures["memory.replication.k2.percent"] == pytest.approx(100, abs=1)
    assert figures["memory.ecrm.k4.percent"] < 25 < figures["memory.ecrec.k4.percent"]
    assert figures["memory.ecrm.k4.percent"] < figures["memory.ecrm.k2.percent"] < 50
    for mode in CODED:
        for k in KS:
            assert 1 <= figures[f"load_max_over_min.{mode}.k{k}"] < 1.1
    report.to_json()


@pytest.mark.parametrize("scale", [FULL, QUICK], ids=["full", "quick"])
def test_nothing_is_left_out(scale: Scale) -> None:
    cases = scale.cases
    assert {case.preset for case in cases} == {"kaggle", "terabyte"}
    assert {case.optimizer for case in cases} == {"momentum", "adagrad"}
    assert {side for case in cases for side in case.sides} >= {(mode, 0) for mode in OTHERS}
    assert {mode for case in cases for mode, _ in case.sides} == {*CODED, *OTHERS}
    assert all(case.sides[0] == ("none", 0) for case in cases)


def test_the_papers_minutes() -> None:
    """ECRM §4.3: a checkpoint of 2.7 minutes every 30 takes 9.0 %."""
    assert interval_seconds(2.7 * 60, 30) == pytest.approx(30 * 60)
    assert interval_seconds(2.7 * 60, 60) == pytest.approx(60 * 60)


def test_the_bench_is_listed() -> None:
    assert "overhead" in BENCHES
