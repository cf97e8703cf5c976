"""Redundancy in servers' memory: its size, the duration of a rebuild, and the probability of a loss.

``servers`` are cut into groups, each of ``k + r`` or a few more, and every stripe lies within one of them, on
neighbours as one goes round. Copies are the same with k = 1 and r = copies - 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from holdfast.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CodeModel:
    """An erasure code over a number of servers."""

    servers: int
    k: int
    r: int

    def __post_init__(self) -> None:
        if self.k < 1 or self.r < 1:
            raise ConfigError(f"a code of {self.k} + {self.r} records: expected at least 1 + 1")
        if self.servers < self.k + self.r:
            raise ConfigError(
                f"k is {self.k} and r is {self.r} but there are {self.servers} servers: each record of a "
                f"stripe needs a server of its own, so k + r must be at most {self.servers}"
            )

    @property
    def memory_share(self) -> float:
        """Size of the parities relative to the tables: r / k."""
        return self.r / self.k

    @property
    def groups(self) -> int:
        """Number of groups of servers; server s belongs to group s % groups."""
        return self.servers // (self.k + self.r)

    def group_size(self, group: int) -> int:
        """Number of servers of a group; sizes differ by at most one."""
        size, larger = divmod(self.servers, self.groups)
        return size + (group < larger)

    def rebuild_hours(self, server_bytes: float, bytes_per_second: float) -> float:
        """Time to rebuild a server; k bytes are read for each of its bytes."""
        return self.k * server_bytes / bytes_per_second / 3600

    @property
    def fatal_share(self) -> float:
        """The share of all sets of r + 1 servers that share a stripe, which is lost if all of them fail."""
        size, larger = divmod(self.servers, self.groups)
        fatal = sum(
            count * fatal_sets(of, self.k + self.r, self.r + 1)
            for count, of in ((larger, size + 1), (self.groups - larger, size))
        )
        return fatal / math.comb(self.servers, self.r + 1)

    def chance_while_rebuilding(self, failures_per_server_hour: float, rebuild_hours: float) -> float:
        """The chance that a failure becomes a loss: that r more servers, with a stripe in common, follow in
        time.

        The n - 1 others fail at the rate (n - 1) a, so at least r of them do so before it is rebuilt with a
        Poisson's tail; ``fatal_share`` of the sets that they make have a stripe in common. Where more than r
        follow, there are more sets: it is a little more likely than this.
        """
        others = (self.servers - 1) * failures_per_server_hour * rebuild_hours
        return at_least(self.r, others) * self.fatal_share

    def losses_per_hour(self, failures_per_server_hour: float, rebuild_hours: float) -> float:
        """Rate at which more than r servers that share a stripe are gone at once."""
        chance = self.chance_while_rebuilding(failures_per_server_hour, rebuild_hours)
        return self.servers * failures_per_server_hour * chance


def at_least(count: int, mean: float) -> float:
    """The probability of at least ``count`` events of a Poisson distribution with this mean."""
    # Summed from the small end where the chance is small: 1 - (the rest) would lose all digits.
    if mean < 1:
        terms = (mean**i / math.factorial(i) for i in range(count, count + 20))
        return math.exp(-mean) * sum(terms)
    return 1 - math.exp(-mean) * sum(mean**i / math.factorial(i) for i in range(count))


def sets_of_a_failure(servers: float, members: int) -> float:
    """How many sets of so many servers there are among those that go down together, on average.

    ``servers`` is how many do: always as many if it is a whole number, else the mean of a Poisson's that is
    not zero.
    """
    if servers == int(servers):
        return float(math.comb(int(servers), members))
    mean = servers
    for _ in range(100):  # mean / (1 - exp(-mean)) = servers
        mean = servers * -math.expm1(-mean)
    return math.pow(mean, members) / math.factorial(members) / -math.expm1(-mean)


@cache
def fatal_sets(ring: int, width: int, members: int) -> int:
    """How many sets of so many servers of a ring lie within ``width`` neighbours."""
    if ring >= 2 * width - 1:
        # Then only one member of such a set has all others within ``width - 1`` places behind it.
        return ring * math.comb(width - 1, members - 1)
    with_first = sum(
        lie_close((0, *others), ring, width, members) for others in combinations(range(1, ring), members - 1)
    )
    return with_first * ring // members  # each set is counted once for each of its members


def lie_close(servers: Sequence[int], ring: int, width: int, members: int) -> bool:
    """Whether so many of these servers of a ring, given in order, lie within ``width`` neighbours."""
    count = len(servers)
    around = [*servers, *(server + ring for server in servers)]
    return any(around[i + members - 1] - around[i] < width for i in range(count))


def difference_bytes(*, rows: float, record_bytes: float, r: int) -> float:
    """What servers send each other for the updates of one batch: every touched record to r parities.

    A record is weights and optimizer state: for an optimizer with a state as large as the weights that is
    twice the gradients (ECRec, section 3.3: 200 %).
    """
    return rows * record_bytes * r
