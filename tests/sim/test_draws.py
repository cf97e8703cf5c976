from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import ConfigError
from holdfast.sim.draws import ChosenFailures, UniformFailures, parse_failures
from holdfast.sim.timeline import EmulatedCluster
from holdfast.sim.traces import Failure

CLUSTER = EmulatedCluster(failures=40.0, servers=4)


def draw(text: str, seed: int = 0) -> tuple[Failure, ...]:
    return parse_failures(CLUSTER, text).draw(CLUSTER, np.random.default_rng(seed))


@pytest.mark.parametrize("text", ["uniform", "exponential", "gamma=0.7", "weibull=1.5"])
def test_as_many_as_expected_and_the_same_for_a_seed(text: str) -> None:
    found = [draw(text, seed) for seed in range(30)]
    for failures in found:
        times = [failure.hours for failure in failures]
        assert times == sorted(times)
        assert all(0 <= hours < CLUSTER.hours for hours in times)
        assert all(0 <= server < 4 for failure in failures for server in failure.servers)
    assert 25 < np.mean([len(failures) for failures in found]) < 60
    assert draw(text) == found[0] != found[1]


def test_several_servers_at_once() -> None:
    cluster = EmulatedCluster(servers=8, servers_per_failure=4)
    for failure in UniformFailures(20).draw(cluster, np.random.default_rng(0)):
        assert len(set(failure.servers)) == 4


def test_chosen_ones() -> None:
    chosen = parse_failures(CLUSTER, "uniform", ["41h:3", "30m"])
    first, second = chosen.draw(CLUSTER, np.random.default_rng(0))
    assert first.hours == 0.5
    assert second == Failure(41.0, (3,))


def test_from_a_log(tmp_path: Path) -> None:
    log = tmp_path / "failures.csv"
    log.write_text("time,server\n3,0\n10,2\n30,1\n")
    found = parse_failures(CLUSTER, "uniform", log=log).draw(CLUSTER, np.random.default_rng(0))
    assert found
    assert {server for failure in found for server in failure.servers} <= {0, 1, 2}


@pytest.mark.parametrize(
    ("text", "chosen", "message"),
    [
        ("normal", [], "expected uniform, exponential, gamma=SHAPE or weibull=SHAPE"),
        ("gamma", [], "expected uniform"),
        ("gamma=x", [], "'x' is no number"),
        ("weibull=0.001", [], "shape 0.001: expected 0.01 to"),
        ("gamma=-1", [], "shape -1: expected 0.01 to"),
        ("uniform", ["20"], "the time of a failure is '20': expected a time"),
        ("uniform", ["20h:x"], "expected a time, or a time and a server"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, chosen: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_failures(CLUSTER, text, chosen)


def test_times_and_servers_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match="a failure after 60 hours: expected 0 to 56"):
        ChosenFailures([(60.0, None)]).draw(CLUSTER, rng)
    with pytest.raises(ConfigError, match="server 4: there are 4, expected 0 to 3"):
        ChosenFailures([(6.0, 4)]).draw(CLUSTER, rng)
    with pytest.raises(ConfigError, match=r"2\.5 failures at uniformly random times"):
        parse_failures(EmulatedCluster(failures=2.5), "uniform")
    with pytest.raises(ConfigError, match="of one server each"):
        parse_failures(EmulatedCluster(servers_per_failure=2), "exponential")
    jobs = tmp_path / "jobs.csv"
    jobs.write_text("hours,failed\n3,1\n")
    with pytest.raises(ConfigError, match="is one of jobs"):
        parse_failures(CLUSTER, "uniform", log=jobs)
    with pytest.raises(ConfigError, match="use one of the two"):
        parse_failures(CLUSTER, "uniform", ["3h"], jobs)
