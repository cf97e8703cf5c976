from __future__ import annotations

import math

import pytest

from holdfast.policy.interval import (
    exact_full_recovery_overhead,
    failures_per_node_hour,
    full_recovery_overhead,
    mtbf_of_nodes,
    optimal_interval,
    partial_recovery_overhead,
    unprotected_overhead,
)

TIMES = {"save_hours": 0.1, "load_hours": 0.05, "reschedule_hours": 0.04}


def test_no_other_interval_costs_less() -> None:
    best = optimal_interval(save_hours=0.1, mtbf_hours=28)
    at_best = full_recovery_overhead(**TIMES, interval_hours=best, mtbf_hours=28)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2):
        assert full_recovery_overhead(**TIMES, interval_hours=best * factor, mtbf_hours=28) > at_best


def test_equations_1_and_2_differ_by_the_lost_work() -> None:
    full = full_recovery_overhead(**TIMES, interval_hours=2, mtbf_hours=28)
    assert full - partial_recovery_overhead(**TIMES, interval_hours=2, mtbf_hours=28) == pytest.approx(1 / 28)


def test_the_exact_overhead_is_equation_1_where_failures_are_rare() -> None:
    times = {**TIMES, "interval_hours": 2.0, "mtbf_hours": 1e5}
    exact, first_order = exact_full_recovery_overhead(**times), full_recovery_overhead(**times)
    assert exact == pytest.approx(first_order, rel=1e-4)
    often = {**times, "mtbf_hours": 2.0}
    assert exact_full_recovery_overhead(**often) > 1.2 * full_recovery_overhead(**often)


def test_what_never_ends_is_infinite() -> None:
    assert unprotected_overhead(total_hours=1e6, reschedule_hours=0, mtbf_hours=1) == math.inf


def test_an_unprotected_run_takes_what_the_textbook_says() -> None:
    """The mean time to see T hours without a failure: (exp(T / M) - 1) M."""
    assert unprotected_overhead(total_hours=10, reschedule_hours=0, mtbf_hours=10) == pytest.approx(
        math.e - 2
    )


def test_mtbf_of_independent_nodes() -> None:
    assert mtbf_of_nodes(1, 0.01) == pytest.approx(100)
    assert mtbf_of_nodes(100, 0.0001) == pytest.approx(1 / (1 - 0.9999**100))
    assert mtbf_of_nodes(10**6, 0.01) == pytest.approx(1)
    assert mtbf_of_nodes(38, failures_per_node_hour(38, 20.0)) == pytest.approx(20)
