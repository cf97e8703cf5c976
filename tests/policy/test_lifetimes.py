from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import DataError
from holdfast.policy.lifetimes import Lifetime, Name, fit, kaplan_meier, log_upper_gamma


@given(st.floats(1e-3, 600))
def test_the_incomplete_gamma_function_where_it_is_elementary(x: float) -> None:
    """Q(1, x) = exp(-x); Q(1/2, x) = erfc(sqrt x); Q(3, x) = exp(-x) (1 + x + x²/2)."""
    assert log_upper_gamma(1, x) == pytest.approx(-x, rel=1e-9)
    assert log_upper_gamma(3, x) == pytest.approx(-x + math.log(1 + x + x * x / 2), rel=1e-9, abs=1e-15)
    if x < 300:  # erfc underflows
        assert log_upper_gamma(0.5, x) == pytest.approx(math.log(math.erfc(math.sqrt(x))), rel=1e-9)


def draw(name: Name, count: int, seed: int) -> tuple[Lifetime, list[float]]:
    rng = np.random.default_rng(seed)
    if name == "gamma":
        return Lifetime("gamma", 30.0, 0.5), rng.gamma(0.5, 30.0, count).tolist()
    if name == "weibull":
        return Lifetime("weibull", 20.0, 2.0), (20.0 * rng.weibull(2.0, count)).tolist()
    return Lifetime("exponential", 15.0), rng.exponential(15.0, count).tolist()


@pytest.mark.parametrize("name", ["gamma", "weibull", "exponential"])
@pytest.mark.parametrize("seed", [1, 2])
def test_what_was_drawn_is_found(name: Name, seed: int) -> None:
    truth, hours = draw(name, 3000, seed)
    best = fit(hours)[0]
    if name != "exponential":  # which the others can be, too
        assert best.lifetime.name == name
    assert best.lifetime.shape == pytest.approx(truth.shape, rel=0.08)
    assert best.lifetime.mean_hours == pytest.approx(truth.mean_hours, rel=0.08)
    assert best.rmse < 0.02


@pytest.mark.parametrize("name", ["gamma", "weibull", "exponential"])
def test_times_without_a_failure_count(name: Name) -> None:
    """Observation ends after 12 hours; without those that had not failed, the MTBF would be far too short."""
    truth, hours = draw(name, 300, 1)
    failed = [t for t in hours if t < 12]
    unfailed = [12.0 for t in hours if t >= 12]
    found = next(one.lifetime for one in fit(failed, unfailed) if one.lifetime.name == name)
    assert found.mean_hours == pytest.approx(truth.mean_hours, rel=0.3)
    assert fit(failed)[0].lifetime.mean_hours < 0.6 * truth.mean_hours


def test_no_other_parameters_are_more_likely() -> None:
    _, hours = draw("gamma", 100, 4)
    failed, unfailed = [t for t in hours if t < 20], [20.0] * sum(t >= 20 for t in hours)
    for one in fit(failed, unfailed):
        life = one.lifetime
        for scale, shape in ((1.02, 1.0), (0.98, 1.0), (1.0, 1.02), (1.0, 0.98)):
            if life.name == "exponential" and shape != 1.0:
                continue
            other = Lifetime(life.name, life.scale_hours * scale, life.shape * shape)
            worse = sum(map(other.log_density, failed)) + sum(map(other.log_survival, unfailed))
            assert worse < one.log_likelihood


def test_the_observed_survival_function() -> None:
    """Kaplan and Meier's own kind of example: one leaves without a failure in between."""
    assert kaplan_meier([1, 3, 4], [2]) == [(1, 0.75), (3, pytest.approx(0.375)), (4, pytest.approx(0))]


def test_mean_and_median() -> None:
    assert Lifetime("exponential", 10).median_hours == pytest.approx(10 * math.log(2))
    assert Lifetime("weibull", 10, 1).mean_hours == pytest.approx(10)
    early = Lifetime("gamma", 30, 0.6)
    assert early.mean_hours == pytest.approx(18)
    assert early.survival(early.median_hours) == pytest.approx(0.5)


def test_too_few_are_refused() -> None:
    with pytest.raises(DataError, match="3 times between failures are too few"):
        fit([1.0, 2.0, 3.0])
