from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest

from holdfast.errors import ConfigError
from holdfast.sim.traces import Failure, FailureModel, HourlyChance, LinearMtbf, Recorded, Renewals

MODELS: list[FailureModel] = [
    LinearMtbf(10, 1000, 30.0, 14.0),
    HourlyChance(0.002),
    HourlyChance(1e-6),
    Renewals("exponential", 5000.0),
    Renewals("gamma", 5000.0, 2.0),
    Renewals("weibull", 5000.0, 1.5),
]


def take(model: FailureModel, servers: int, count: int, seed: int = 0) -> list[Failure]:
    return list(islice(model.failures(servers, np.random.default_rng(seed)), count))


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_mean_times_are_as_promised(model: FailureModel) -> None:
    for servers in (10, 1000):
        failures = take(model, servers, 6000)
        times = [failure.hours for failure in failures]
        assert times == sorted(times)
        # Clusters of servers that wear out begin without failures: the first ones are left out.
        gap = (times[-1] - times[2000]) / (len(times) - 2001)
        assert gap == pytest.approx(model.mtbf_hours(servers), rel=0.05)
        together = sum(len(failure.servers) for failure in failures) / len(failures)
        assert together == pytest.approx(model.servers_per_failure(servers), rel=0.05)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_all_servers_fail_alike_and_none_twice_at_once(model: FailureModel) -> None:
    failures = take(model, 10, 4000)
    counts = np.bincount([server for failure in failures for server in failure.servers], minlength=10)
    assert len(counts) == 10
    assert counts.min() > 0.75 * counts.mean()
    assert all(len(set(failure.servers)) == len(failure.servers) for failure in failures)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_seed_gives_the_same_failures(model: FailureModel) -> None:
    assert take(model, 100, 500, seed=3) == take(model, 100, 500, seed=3)
    assert take(model, 100, 500, seed=3) != take(model, 100, 500, seed=4)


def test_early_failures_come_early() -> None:
    """CPR, Figure 3b: with a shape below 1 there are most failures at the beginning."""
    early = take(Renewals("gamma", 5000.0, 0.5), 100, 1000)
    even = take(Renewals("exponential", 5000.0), 100, 1000)
    assert early[10].hours < 0.4 * even[10].hours


def test_recorded_failures_come_again() -> None:
    model = Recorded([(0.0, 3), (10.0, None), (40.0, 12)])
    assert model.mtbf_hours(5) == 20
    failures = take(model, 20, 9)
    gaps = [round(b.hours - a.hours) for a, b in pairwise(failures)]
    assert sorted(gaps[:3]) == [10, 20, 30]  # 20 from the last to the first
    assert gaps[:3] == gaps[3:6]
    assert {server for failure in take(model, 5, 20) for server in failure.servers} <= set(range(5))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"mean time between failures is 0\.5 hours: where servers fail by the hour"
    ):
        HourlyChance.from_mtbf(10, 0.5)
    with pytest.raises(ConfigError, match="a gamma of shape -1"):
        Renewals("gamma", 10.0, -1.0)
    with pytest.raises(ConfigError, match="1 recorded failures say nothing"):
        Recorded([(0.0, None)]).mtbf_hours(4)
