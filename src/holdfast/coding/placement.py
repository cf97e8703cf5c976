"""Which server holds a row: arithmetic, so there is no directory to look up or to lose.

With ``n`` servers and a code of ``k`` data and ``r`` parity records, row ``g`` of a group is member ``m = g
% k`` of stripe ``s = g // k``. Parity ``t`` of the stripe is on server ``(s + t) % n``, member ``m`` on
server ``(s + r + m) % n``: neighbours fall on different servers, and no server has two records of a stripe.
A server meets every ``n`` stripes once in each role, so its rows have places without gaps: member ``m`` of
stripe ``s`` is its record ``s // n * k + m``, parity ``t`` its parity record ``s // n * r + t``.

Without protection ``k = 1`` and ``r = 0``: row ``g`` is record ``g // n`` of server ``g % n``.

Here any ``r + 1`` servers among ``k + r`` neighbours, going round, have stripes in common, which are lost if
they fail at once. ``GroupedPlacement`` keeps each stripe within one group of servers, so that groups fail and
recover independently of each other: of the pairs that r = 1 does not survive, half are left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigError

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Stripes:
    """What all placements have in common: which records a server keeps, whichever stripes they are of."""

    servers: int
    k: int = 1
    r: int = 0

    def __post_init__(self) -> None:
        if self.servers < 1 or self.k < 1 or self.r < 0:
            raise ConfigError(
                f"{self.servers} servers with {self.k} data and {self.r} parity records a stripe: "
                "expected at least one server, one data record and no negative number"
            )
        if self.r and self.servers < self.k + self.r:
            raise ConfigError(
                f"{self.servers} servers cannot hold stripes of {self.k} + {self.r} records, each on its "
                f"own server: use {self.k + self.r} servers or more, or a smaller code"
            )

    def stripes(self, rows: int) -> int:
        """How many stripes so many rows make; members that the last one lacks count as zero bits."""
        return -(-rows // self.k)

    def place(self, ids: Ids) -> Ids:
        """The record of each row at its owner."""
        return ids // self.k // self.servers * self.k + ids % self.k

    def parity_place(self, stripes: Ids, parity: int) -> Ids:
        """The parity record of each stripe at that server."""
        return stripes // self.servers * self.r + parity

    def records(self, rows: int) -> int:
        """How many records a server keeps for so many rows: on all servers alike, a few of them unused."""
        return -(-self.stripes(rows) // self.servers) * self.k


@dataclass(frozen=True, slots=True)
class Placement(_Stripes):
    """Where the rows of all groups lie."""

    def owner(self, ids: Ids) -> Ids:
        """The server of each row."""
        return (ids // self.k + self.r + ids % self.k) % self.servers

    def parity_owner(self, stripes: Ids, parity: int) -> Ids:
        """The server of one of the stripes' parities."""
        return (stripes + parity) % self.servers

    def row(self, server: int, places: Ids) -> Ids:
        """The row of each record of a server; records that stand for no row give one beyond the last."""
        member = places % self.k
        stripe = places // self.k * self.servers + (server - self.r - member) % self.servers
        return stripe * self.k + member


@dataclass(frozen=True, slots=True)
class GroupedPlacement(_Stripes):
    """Where rows lie if every stripe stays within one group of servers: of ``k + r``, and of what is left
    over, too, in the last.

    ``G = n // (k + r)`` groups are servers ``j (k + r)`` and following; the last has up to ``2 (k + r) - 1``.
    Data are lost only if more than ``r`` servers of *one* group are gone at once, whatever else has failed,
    and a server is rebuilt by its own group alone. Every ``n`` stripes, a group gets as many as it has
    servers, and rotates them as ``Placement`` does; neighbouring stripes go to different groups. So servers
    hold equally much whatever their group's size, and a row's place is the same as without groups: only its
    server differs. With fewer than ``2 (k + r)`` servers there is one group, and all is as without.

    The loops in ``kernels.placing`` and ``kernels.update`` do not know groups: a shard or a lookup must not
    be given this.
    """

    def __post_init__(self) -> None:
        _Stripes.__post_init__(self)
        if self.servers < self.k + self.r:  # without parities, too
            raise ConfigError(
                f"{self.servers} servers: expected {self.k + self.r} or more, which make up one group"
            )

    @property
    def groups(self) -> int:
        """How many there are."""
        return self.servers // (self.k + self.r)

    def members(self, group: int) -> range:
        """The servers of a group."""
        size = self.k + self.r
        return range(group * size, self.servers if group == self.groups - 1 else (group + 1) * size)

    def group_of(self, server: int) -> int:
        """The group of a server."""
        return min(server // (self.k + self.r), self.groups - 1)

    def owner(self, ids: Ids) -> Ids:
        """The server of each row."""
        return self._server(ids // self.k, self.r + ids % self.k)

    def parity_owner(self, stripes: Ids, parity: int) -> Ids:
        """The server of one of the stripes' parities."""
        return self._server(stripes, parity)

    def row(self, server: int, places: Ids) -> Ids:
        """The row of each record of a server; records that stand for no row give one beyond the last."""
        member = places % self.k
        group = self.group_of(server)
        servers = self.members(group)
        turn = (server - servers.start - self.r - member) % len(servers)
        size = self.k + self.r
        # The turns that only the last group has come behind those that all have.
        position = np.where(turn < size, turn * self.groups + group, (self.groups - 1) * size + turn)
        return (places // self.k * self.servers + position) * self.k + member

    def _server(self, stripes: Ids, record: Ids | int) -> Ids:
        """The server of one of the stripes' records: parities first, then members."""
        size = self.k + self.r
        position = stripes % self.servers
        shared = position < self.groups * size
        last = self.groups - 1
        group = np.where(shared, position % self.groups, last)
        turn = np.where(shared, position // self.groups, position - last * size)
        count = size + self.servers % size * (group == last)
        servers: Ids = group * size + (turn + record) % count
        return servers
