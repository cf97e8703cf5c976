"""Which server holds a row: arithmetic, so there is no directory to look up or to lose.

With ``n`` servers and a code of ``k`` data and ``r`` parity records, row ``g`` of a group is member ``m = g
% k`` of stripe ``s = g // k``. Parity ``t`` of the stripe is on server ``(s + t) % n``, member ``m`` on
server ``(s + r + m) % n``: neighbours fall on different servers, and no server has two records of a stripe.
A server meets every ``n`` stripes once in each role, so its rows have places without gaps: member ``m`` of
stripe ``s`` is its record ``s // n * k + m``, parity ``t`` its parity record ``s // n * r + t``.

Without protection ``k = 1`` and ``r = 0``: row ``g`` is record ``g // n`` of server ``g % n``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigError

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the rows of all groups lie."""

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

    def owner(self, ids: Ids) -> Ids:
        """The server of each row."""
        return (ids // self.k + self.r + ids % self.k) % self.servers

    def place(self, ids: Ids) -> Ids:
        """The record of each row at its owner."""
        return ids // self.k // self.servers * self.k + ids % self.k

    def parity_owner(self, stripes: Ids, parity: int) -> Ids:
        """The server of one of the stripes' parities."""
        return (stripes + parity) % self.servers

    def parity_place(self, stripes: Ids, parity: int) -> Ids:
        """The parity record of each stripe at that server."""
        return stripes // self.servers * self.r + parity

    def records(self, rows: int) -> int:
        """How many records a server keeps for so many rows: on all servers alike, a few of them unused."""
        return -(-self.stripes(rows) // self.servers) * self.k

    def row(self, server: int, places: Ids) -> Ids:
        """The row of each record of a server; records that stand for no row give one beyond the last."""
        member = places % self.k
        stripe = places // self.k * self.servers + (server - self.r - member) % self.servers
        return stripe * self.k + member
