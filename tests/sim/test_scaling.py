"""The closed forms against simulated runs; seeds are fixed, so that nothing here is left to chance."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from holdfast.errors import ConfigError
from holdfast.policy.erasure import CodeModel
from holdfast.policy.failure_log import FailureLog
from holdfast.policy.increments import RowSize
from holdfast.policy.mechanisms import Parities, Rollback, Saves
from holdfast.policy.protections import Wishes
from holdfast.policy.situation import Situation
from holdfast.sim.plots import check_plot
from holdfast.sim.printing import show_points
from holdfast.sim.recovery import simulate
from holdfast.sim.scaling import FIGURE_13, parse_models, parse_nodes, scale, scaled
from holdfast.sim.traces import HourlyChance, LinearMtbf, Recorded, Renewals

CLUSTER = Situation(
    table_bytes=4e12, row=RowSize(128, 512), servers=100, workers=300, hours=1000, mtbf_hours=20,
    write_rate=20e9, read_rate=20e9,
)  # fmt: skip


def test_closed_forms_are_what_happens() -> None:
    """Within four standard errors and a tenth of a percent of the run's time, from 10 to 1,000 servers."""
    model = Renewals("exponential", 20.0 * 100)
    points = scale(CLUSTER, [model], [10, 100, 1000], runs=8)
    assert {point.kind for point in points} >= {"full", "full-stop", "partial", "chunked", "ecrm", "ecrec"}
    for point in points:
        assert abs(point.expected - point.simulated) < 4 * point.error + 0.003 * (1 + point.simulated), point
        if point.kind == "partial":
            assert point.simulated_pls == pytest.approx(point.expected_pls, rel=0.2)


def test_full_recovery_and_partial_recovery_scale_as_in_figure_13() -> None:
    """CPR, section 6.6."""
    nodes = [10, 100, 1000]
    models = parse_models("linear,hourly", FIGURE_13, nodes, None)
    situation = replace(FIGURE_13, hours=6000.0)
    points = scale(
        situation, models, nodes, wishes=Wishes(target_pls=0.1), among=["full-stop", "partial"], runs=3,
        one_each=True,
    )  # fmt: skip
    for model in models:
        full = [p.simulated for p in points if (p.failures, p.kind) == (model.title, "full-stop")]
        partial = [p.simulated for p in points if (p.failures, p.kind) == (model.title, "partial")]
        assert full[0] < full[-1]
        assert partial[0] > partial[1] > partial[2]
        assert all(a > 10 * b for a, b in zip(full, partial, strict=True))


def test_equation_4_counts_servers_that_fail_in_the_same_hour_once() -> None:
    """With many servers, several fail in an hour: CPR's interval then loses more than its target."""
    model = HourlyChance.from_mtbf(10, 30.0)
    by_the_paper, by_us = (
        scale(
            replace(FIGURE_13, hours=3000.0), [model], [1000], wishes=Wishes(target_pls=0.1),
            among=["partial"], runs=3, one_each=one_each,
        )[0]
        for one_each in (True, False)
    )  # fmt: skip
    assert by_the_paper.expected_pls == pytest.approx(0.1)
    assert by_the_paper.simulated_pls > 0.3
    assert by_us.simulated_pls == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize(("k", "r", "mtbf"), [(4, 1, 100.0), (4, 2, 20.0), (1, 1, 50.0)])
def test_more_failures_than_a_code_bears_come_as_often_as_expected(k: int, r: int, mtbf: float) -> None:
    code = CodeModel(12, k, r)
    nothing = Rollback(saves=Saves(interval_hours=1.0, stall_hours=0.0), load_hours=0.0, reschedule_hours=0.0)
    mechanism = Parities(code=code, pause_hours=0.0, rebuild_hours=0.5, rebuild_drop=0.0, behind=nothing)
    hours = 60_000.0
    ended = simulate(
        mechanism, step_share=0.0, total_hours=hours, servers=12,
        failures=Renewals("exponential", mtbf).failures(12, np.random.default_rng(5)),
    )  # fmt: skip
    expected = hours * code.losses_per_hour(1 / mtbf, 0.5)
    assert expected > 100
    assert ended.losses == pytest.approx(expected, abs=4 * expected**0.5 + 0.1 * expected)


def test_a_larger_cluster_holds_and_does_as_much_more() -> None:
    model = LinearMtbf(10, 1000, 30.0, 14.0)
    large = scaled(CLUSTER, 1000, model)
    assert large.server_bytes == CLUSTER.server_bytes
    assert large.write_rate == 10 * CLUSTER.write_rate
    assert (large.workers, large.mtbf_hours) == (3000, 14.0)


def test_names_of_failure_models() -> None:
    nodes = [10, 1000]
    log = FailureLog((5.0,), trace=((0.0, 1), (5.0, 2)))
    models = parse_models("linear, hourly,exponential,gamma=0.6,weibull=2,log", CLUSTER, nodes, log)
    assert models == [
        LinearMtbf(10, 1000, 20.0, 20.0 * 14 / 30),
        HourlyChance.from_mtbf(100, 20.0),
        Renewals("exponential", 2000.0),
        Renewals("gamma", 2000.0, 0.6),
        Renewals("weibull", 2000.0, 2.0),
        Recorded(log.trace),
    ]
    for text in ("poisson", "gamma", "weibull=soft", ""):
        with pytest.raises(ConfigError, match=r"expected linear, hourly, exponential, log"):
            parse_models(text, CLUSTER, nodes, None)
    with pytest.raises(ConfigError, match="--failures log: give --failure-log"):
        parse_models("log", CLUSTER, nodes, None)


def test_numbers_of_servers() -> None:
    assert parse_nodes("1000,10,10,10_000") == [10, 1000, 10000]
    for text, message in (("10,many", "expected numbers of servers"), ("0,5", "at least one server")):
        with pytest.raises(ConfigError, match=message):
            parse_nodes(text)
    with pytest.raises(ConfigError, match="0 runs: expected at least one"):
        scale(CLUSTER, [Renewals("exponential", 100.0)], [10], runs=0)


def test_a_picture_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a name that ends in \.png, \.svg or \.pdf"):
        check_plot(tmp_path / "overhead.doc")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_plot(tmp_path / "no" / "overhead.png")


def test_a_narrow_screen_cuts_no_number() -> None:
    points = scale(CLUSTER, [Renewals("exponential", 2000.0)], [10, 100, 1000, 10_000], runs=1)
    shown = {}
    for width in (60, 140):
        console = Console(file=io.StringIO(), width=width)
        show_points(points, console)
        assert isinstance(console.file, io.StringIO)
        shown[width] = console.file.getvalue()
        assert "…" not in shown[width]
    figures = set(re.findall(r"\S+ \| \S+", shown[140].partition("The closed forms")[0]))
    assert len(figures) > 10
    assert figures <= set(re.findall(r"\S+ \| \S+", shown[60]))
