"""Distributions of the time between failures, and how to fit them to observations.

CPR found gamma to fit best among these (section 3.1), with a shape below 1: most failures come early, from
mistakes. Times that ended without a failure count too: leaving them out makes failures look too frequent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import DataError

Name = Literal["exponential", "gamma", "weibull"]
_FEWEST = 5
_SHAPES = (0.02, 50.0)


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The distribution of the time to the next failure; an exponential has shape 1."""

    name: Name
    scale_hours: float
    shape: float = 1.0

    @property
    def mean_hours(self) -> float:
        """The MTBF."""
        if self.name == "weibull":
            return self.scale_hours * math.gamma(1 + 1 / self.shape)
        return self.scale_hours * self.shape

    @property
    def median_hours(self) -> float:
        """The median time."""
        return _root(lambda t: self.survival(t) - 0.5, 0.0, 50 * self.mean_hours)

    def survival(self, hours: float) -> float:
        """The probability of a longer time."""
        return math.exp(self.log_survival(hours))

    def log_survival(self, hours: float) -> float:
        """The logarithm of ``survival``."""
        x = max(hours, 0.0) / self.scale_hours
        if self.name == "gamma":
            return log_upper_gamma(self.shape, x)
        return -math.pow(x, self.shape)

    def log_density(self, hours: float) -> float:
        """The logarithm of the density, for hours above 0."""
        a, x = self.shape, hours / self.scale_hours
        if self.name == "gamma":
            return (a - 1) * math.log(x) - x - math.lgamma(a) - math.log(self.scale_hours)
        return math.log(a / self.scale_hours) + (a - 1) * math.log(x) - math.pow(x, a)


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted distribution with its goodness of fit."""

    lifetime: Lifetime
    log_likelihood: float
    rmse: float
    """Root mean square of the survival function's distance from the observed one, at the failures."""

    @property
    def aic(self) -> float:
        """Akaike's information criterion; lower is better."""
        return 2 * (1 if self.lifetime.name == "exponential" else 2) - 2 * self.log_likelihood


def fit(failed_hours: Sequence[float], unfailed_hours: Sequence[float] = ()) -> list[Fit]:
    """Fit all three distributions by maximum likelihood. Returns the best one first.

    Args:
        failed_hours: times that ended in a failure.
        unfailed_hours: times that ended without one.
    """
    failed = [hours for hours in failed_hours if hours > 0]
    if len(failed) < _FEWEST:
        raise DataError(
            f"{len(failed)} times between failures are too few to fit a distribution: expected {_FEWEST} or "
            "more; give the mean time between failures (--mtbf) instead"
        )
    unfailed = [hours for hours in unfailed_hours if hours > 0]
    candidates = [
        _fit_exponential(failed, unfailed),
        _fit_weibull(failed, unfailed),
        _fit_gamma(failed, unfailed),
    ]
    steps = kaplan_meier(failed, unfailed)
    fits = [
        Fit(lifetime, _log_likelihood(lifetime, failed, unfailed), _rmse(lifetime, steps))
        for lifetime in candidates
    ]
    return sorted(fits, key=lambda one: one.aic)


def kaplan_meier(failed: Sequence[float], unfailed: Sequence[float]) -> list[tuple[float, float]]:
    """The observed survival function: (hours, share that takes longer), for each time of a failure."""
    alive = len(failed) + len(unfailed)
    share, steps = 1.0, []
    for hours, is_failure in sorted([(t, 0) for t in failed] + [(t, 1) for t in unfailed]):
        if is_failure == 0:
            share *= 1 - 1 / alive
            steps.append((hours, share))
        alive -= 1
    return steps


def _rmse(lifetime: Lifetime, steps: Sequence[tuple[float, float]]) -> float:
    return math.sqrt(sum((lifetime.survival(t) - share) ** 2 for t, share in steps) / len(steps))


def _log_likelihood(lifetime: Lifetime, failed: Sequence[float], unfailed: Sequence[float]) -> float:
    return sum(map(lifetime.log_density, failed)) + sum(map(lifetime.log_survival, unfailed))


def _fit_exponential(failed: Sequence[float], unfailed: Sequence[float]) -> Lifetime:
    return Lifetime("exponential", (sum(failed) + sum(unfailed)) / len(failed))


def _fit_weibull(failed: Sequence[float], unfailed: Sequence[float]) -> Lifetime:
    """The shape solves sum(t^k ln t) / sum(t^k) - 1 / k = mean(ln t of failures); the scale follows."""
    unit = max(*failed, *unfailed)  # so that no power overflows
    times = [t / unit for t in (*failed, *unfailed)]
    mean_log = sum(math.log(t / unit) for t in failed) / len(failed)

    def slope(shape: float) -> float:
        powers = [math.pow(t, shape) for t in times]
        return (
            sum(p * math.log(t) for p, t in zip(powers, times, strict=True)) / sum(powers)
            - 1 / shape
            - mean_log
        )

    shape = _root(slope, *_SHAPES)
    scale = unit * math.pow(sum(math.pow(t, shape) for t in times) / len(failed), 1 / shape)
    return Lifetime("weibull", scale, shape)


def _fit_gamma(failed: Sequence[float], unfailed: Sequence[float]) -> Lifetime:
    """The best shape, each with its best scale: both by looking for where the likelihood is highest."""
    count, total, logs = len(failed), sum(failed), sum(map(math.log, failed))
    mean = (total + sum(unfailed)) / count
    ended = Counter(unfailed)  # often at one moment

    def likelihood(shape: float, scale: float) -> float:
        density = (shape - 1) * logs - total / scale - count * (math.lgamma(shape) + shape * math.log(scale))
        return density + sum(many * log_upper_gamma(shape, t / scale) for t, many in ended.items())

    def best_scale(shape: float) -> float:
        usual = mean / shape
        if not unfailed:
            return usual
        return usual * math.exp(_highest(lambda log: likelihood(shape, usual * math.exp(log)), -3.0, 3.0))

    def at_best_scale(log_shape: float) -> float:
        shape = math.exp(log_shape)
        return likelihood(shape, best_scale(shape))

    shape = math.exp(_highest(at_best_scale, *map(math.log, _SHAPES)))
    return Lifetime("gamma", best_scale(shape), shape)


def log_upper_gamma(a: float, x: float) -> float:
    """The logarithm of the regularised upper incomplete gamma function Q(a, x): a gamma's survival.

    A series for P = 1 - Q where x is small, else Lentz's continued fraction (Press et al., Numerical Recipes,
    section 6.2).
    """
    if x <= 0:
        return 0.0
    front = a * math.log(x) - x - math.lgamma(a)
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-16:
            n += 1
            term *= x / n
            total += term
        return math.log1p(-min(math.exp(front) * total, 1 - 1e-16))
    tiny = 1e-300
    b = x + 1 - a
    c, d = 1 / tiny, 1 / b
    result = d
    for i in range(1, 10_000):
        step = -i * (i - a)
        b += 2
        d = 1 / (step * d + b or tiny)
        c = b + step / c or tiny
        result *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front + math.log(result)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """The root of a monotone function, or the nearer end of the interval."""
    rising = function(high) > 0
    for _ in range(200):
        middle = (low + high) / 2
        if (function(middle) > 0) == rising:
            high = middle
        else:
            low = middle
    return (low + high) / 2


def _highest(function: Callable[[float], float], low: float, high: float) -> float:
    """The maximum of a unimodal function, by golden-section search."""
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > 1e-5:
        if at_left > at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = function(right)
    return (low + high) / 2
