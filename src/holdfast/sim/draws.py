"""The failures of an emulated run: random, from a model or a log, or chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np

from holdfast.errors import ConfigError
from holdfast.policy.failure_log import read_failures
from holdfast.policy.lifetimes import Name
from holdfast.policy.units import parse_hours
from holdfast.sim.timeline import EmulatedCluster
from holdfast.sim.traces import Failure, FailureModel, Recorded, Renewals


@dataclass(frozen=True, slots=True)
class UniformFailures:
    """So many failures at uniformly random times, each of so many random servers (CPR, section 5.1)."""

    count: int

    def draw(self, cluster: EmulatedCluster, rng: np.random.Generator) -> tuple[Failure, ...]:
        """Draw the failures of one run."""
        times = np.sort(rng.uniform(0, cluster.hours, self.count)).tolist()
        return tuple(Failure(hours, _servers(cluster, rng)) for hours in times)


@dataclass(frozen=True, slots=True)
class ModelledFailures:
    """Failures from a model of ``sim.traces``: as many as come in the time."""

    model: FailureModel

    def draw(self, cluster: EmulatedCluster, rng: np.random.Generator) -> tuple[Failure, ...]:
        """Draw the failures of one run."""
        stream = self.model.failures(cluster.servers, rng)
        return tuple(takewhile(lambda failure: failure.hours < cluster.hours, stream))


@dataclass(frozen=True, slots=True)
class ChosenFailures:
    """Failures at given hours, of given servers or, where that is None, of random ones."""

    chosen: Sequence[tuple[float, int | None]]

    def draw(self, cluster: EmulatedCluster, rng: np.random.Generator) -> tuple[Failure, ...]:
        """Draw the failures of one run."""
        for hours, server in self.chosen:
            if not 0 <= hours < cluster.hours:
                raise ConfigError(f"a failure after {hours:g} hours: expected 0 to {cluster.hours:g}")
            if server is not None and not 0 <= server < cluster.servers:
                raise ConfigError(
                    f"a failure of server {server}: there are {cluster.servers}, expected 0 to "
                    f"{cluster.servers - 1}"
                )
        return tuple(
            Failure(hours, _servers(cluster, rng) if server is None else (server,))
            for hours, server in sorted(self.chosen, key=lambda failure: failure[0])
        )


Failures = UniformFailures | ModelledFailures | ChosenFailures


def _servers(cluster: EmulatedCluster, rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(rng.choice(cluster.servers, cluster.servers_per_failure, replace=False).tolist())


def parse_failures(
    cluster: EmulatedCluster, distribution: str, chosen: Sequence[str] = (), log: Path | None = None
) -> Failures:
    """The failures that ``holdfast emulate`` is given. Raises ConfigError if they are invalid.

    Args:
        cluster: whose ``failures`` are expected.
        distribution: "uniform", "exponential", "gamma=SHAPE" or "weibull=SHAPE".
        chosen: "20h" or "20h:3", each a failure: of a random server, or of number 3. They count, not the
            distribution.
        log: a file of failures, which counts if there is one.
    """
    if chosen and log is not None:
        raise ConfigError("failures are given both by --at and by a log: use one of the two")
    if chosen:
        return ChosenFailures([_parse_chosen(text) for text in chosen])
    if log is not None:
        trace = read_failures(log).trace
        if not trace:
            raise ConfigError(f"the failure log {log} is one of jobs: expected the columns 'time,server'")
        return ModelledFailures(Recorded(trace))
    name, equals, shape = distribution.partition("=")
    if distribution == "uniform":
        if cluster.failures != int(cluster.failures):
            raise ConfigError(
                f"{cluster.failures:g} failures at uniformly random times: expected a whole number"
            )
        return UniformFailures(int(cluster.failures))
    names: dict[str, Name] = {"exponential": "exponential", "gamma": "gamma", "weibull": "weibull"}
    if name not in names or (name == "exponential") == bool(equals):
        raise ConfigError(
            f"failures are {distribution!r}: expected uniform, exponential, gamma=SHAPE or weibull=SHAPE"
        )
    if cluster.servers_per_failure > 1:
        raise ConfigError(f"{name} failures are of one server each: use uniform for more at once")
    try:
        return ModelledFailures(
            Renewals(names[name], cluster.mtbf_hours * cluster.servers, float(shape) if equals else 1.0)
        )
    except ValueError:
        raise ConfigError(f"failures are {distribution!r}: {shape!r} is no number") from None


def _parse_chosen(text: str) -> tuple[float, int | None]:
    hours, colon, server = text.partition(":")
    if colon and not server.isdecimal():
        raise ConfigError(f"the failure {text!r}: expected a time, or a time and a server, such as 20h:3")
    return parse_hours(hours, "the time of a failure"), int(server) if colon else None
