"""When which servers fail: endless streams of failures, the same for the same seed."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from holdfast.errors import ConfigError
from holdfast.policy.interval import failures_per_node_hour, mtbf_of_nodes
from holdfast.policy.lifetimes import Name

_BLOCK = 256
_SHAPES = (0.01, 1e6)
"""Of distributions: beyond them, most times between failures are zero, or numbers overflow."""


class Failure(NamedTuple):
    """Servers that go down at one moment."""

    hours: float
    servers: Sequence[int]


class FailureModel(Protocol):
    """How servers fail, by how many there are."""

    @property
    def title(self) -> str:
        """In a few words."""
        ...

    def mtbf_hours(self, servers: int) -> float:
        """Mean time between failures of any of so many servers."""
        ...

    def servers_per_failure(self, servers: int) -> float:
        """How many go down together, on average."""
        ...

    def failures(self, servers: int, rng: np.random.Generator) -> Iterator[Failure]:
        """In the order of time, without end unless it was recorded."""
        ...


@dataclass(frozen=True, slots=True)
class LinearMtbf:
    """The MTBF falls in proportion to the number of servers, as CPR observed it (section 3.1).

    Args:
        fewest: servers with ``first_hours``.
        most: servers with ``last_hours``; there may be no more than that.
    """

    fewest: int
    most: int
    first_hours: float
    last_hours: float

    @property
    def title(self) -> str:
        """In a few words."""
        return "MTBF falls linearly"

    def mtbf_hours(self, servers: int) -> float:
        """On the line between the two ends."""
        if self.most == self.fewest:
            return self.first_hours
        share = (servers - self.fewest) / (self.most - self.fewest)
        return self.first_hours + share * (self.last_hours - self.first_hours)

    def servers_per_failure(self, servers: int) -> float:
        """One."""
        return 1.0

    def failures(self, servers: int, rng: np.random.Generator) -> Iterator[Failure]:
        """Exponential times, a random server each."""
        now, mtbf = 0.0, self.mtbf_hours(servers)
        while True:
            gaps = rng.exponential(mtbf, _BLOCK).tolist()
            for gap, server in zip(gaps, rng.integers(0, servers, _BLOCK).tolist(), strict=True):
                now += gap
                yield Failure(now, (server,))


@dataclass(frozen=True, slots=True)
class HourlyChance:
    """Each server fails in an hour with the same probability; those of an hour go down together.

    That is CPR's second model (section 6.6), with an MTBF of 1 / (1 - (1 - p)^n) hours.
    """

    probability: float

    @classmethod
    def from_mtbf(cls, servers: int, mtbf_hours: float) -> HourlyChance:
        """The one at which so many servers have this MTBF."""
        if not mtbf_hours > 1:
            raise ConfigError(
                f"the mean time between failures is {mtbf_hours:g} hours: where servers fail by the hour it "
                "must be above 1; use another model of failures"
            )
        return cls(failures_per_node_hour(servers, mtbf_hours))

    @property
    def title(self) -> str:
        """In a few words."""
        return "servers fail independently"

    def mtbf_hours(self, servers: int) -> float:
        """Hours between those in which some fail."""
        return mtbf_of_nodes(servers, self.probability)

    def servers_per_failure(self, servers: int) -> float:
        """More than one where many fail in an hour."""
        return servers * self.probability * self.mtbf_hours(servers)

    def failures(self, servers: int, rng: np.random.Generator) -> Iterator[Failure]:
        """At a random moment of each hour in which some fail."""
        hour, some = 0, 1 / self.mtbf_hours(servers)
        chances = self._counts(servers)
        while True:
            gaps = rng.geometric(some, _BLOCK).tolist()
            counts = 1 + np.searchsorted(chances, rng.random(_BLOCK))
            drawn = iter(rng.integers(0, servers, int(counts.sum())).tolist())
            for gap, moment, count in zip(gaps, rng.random(_BLOCK).tolist(), counts.tolist(), strict=True):
                hour += gap
                down = set(islice(drawn, count))
                while len(down) < count:
                    down.add(int(rng.integers(servers)))
                yield Failure(hour - 1 + moment, tuple(down))

    def _counts(self, servers: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The chances that at most 1, 2, … servers fail in an hour in which some do."""
        p = self.probability
        none = servers * math.log1p(-p)
        term, total, chances = math.exp(none) * servers * p / (1 - p), 0.0, []
        for count in range(1, servers + 1):
            total += term
            chances.append(total / -math.expm1(none))
            if chances[-1] > 1 - 1e-12:
                break
            term *= (servers - count) / (count + 1) * p / (1 - p)
        return np.array(chances)


@dataclass(frozen=True, slots=True)
class Renewals:
    """Each server fails again and again, with times between its failures from one distribution.

    All are new at the start; ``server_mtbf_hours`` is one server's.
    """

    name: Name
    server_mtbf_hours: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.server_mtbf_hours < math.inf:
            raise ConfigError(f"the MTBF of a server is {self.server_mtbf_hours:g} hours: expected above 0")
        if not _SHAPES[0] <= self.shape <= _SHAPES[1]:
            raise ConfigError(
                f"a {self.name} of shape {self.shape:g}: expected {_SHAPES[0]:g} to {_SHAPES[1]:g}"
            )

    @property
    def title(self) -> str:
        """In a few words."""
        shape = "" if self.name == "exponential" else f", shape {self.shape:g}"
        return f"servers' times are {self.name}{shape}"

    def mtbf_hours(self, servers: int) -> float:
        """Of all together, in the long run."""
        return self.server_mtbf_hours / servers

    def servers_per_failure(self, servers: int) -> float:
        """One."""
        return 1.0

    def failures(self, servers: int, rng: np.random.Generator) -> Iterator[Failure]:
        """One server after the other."""
        upcoming = list(zip(self._draw(servers, rng), range(servers), strict=True))
        heapq.heapify(upcoming)
        gaps: Iterator[float] = iter(())
        while True:
            now, server = upcoming[0]
            yield Failure(now, (server,))
            gap = next(gaps, None)
            if gap is None:
                gaps = iter(self._draw(_BLOCK, rng))
                gap = next(gaps)
            heapq.heapreplace(upcoming, (now + gap, server))

    def _draw(self, count: int, rng: np.random.Generator) -> list[float]:
        mean, shape = self.server_mtbf_hours, self.shape
        if self.name == "gamma":
            drawn = rng.gamma(shape, mean / shape, count)
        elif self.name == "weibull":
            drawn = mean / math.gamma(1 + 1 / shape) * rng.weibull(shape, count)
        else:
            drawn = rng.exponential(mean, count)
        values: list[float] = drawn.tolist()
        return values


@dataclass(frozen=True, slots=True)
class Recorded:
    """Failures that happened: (hours, server) each, a random server where it is None."""

    trace: Sequence[tuple[float, int | None]]

    @property
    def title(self) -> str:
        """In a few words."""
        return f"{len(self.trace)} recorded failures"

    def mtbf_hours(self, servers: int) -> float:
        """Of the recording, whatever the number of servers."""
        if len(self.trace) < 2 or self.trace[-1][0] <= self.trace[0][0]:
            raise ConfigError(f"{self.title} say nothing about the time between them: expected two or more")
        return (self.trace[-1][0] - self.trace[0][0]) / (len(self.trace) - 1)

    def servers_per_failure(self, servers: int) -> float:
        """One."""
        return 1.0

    def failures(self, servers: int, rng: np.random.Generator) -> Iterator[Failure]:
        """As they were, again and again from the start, which is a random one of them."""
        mtbf = self.mtbf_hours(servers)
        begin = int(rng.integers(len(self.trace)))
        length = self.trace[-1][0] - self.trace[0][0] + mtbf
        for turn in range(10**9):
            for i in range(len(self.trace)):
                at = begin + i
                hours, server = self.trace[at % len(self.trace)]
                passed = hours - self.trace[begin][0] + (at // len(self.trace) + turn) * length
                if server is not None and server >= servers:
                    continue  # one that this cluster does not have
                yield Failure(passed + mtbf, (int(rng.integers(servers)) if server is None else server,))
