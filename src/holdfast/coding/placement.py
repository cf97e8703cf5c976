"""Which server holds a row: arithmetic, so there is no directory to look up or to lose.

With ``n`` servers and a code of ``k`` data and ``r`` parity records, row ``g`` of a group of tables is member
``m = g % k`` of stripe ``s = g // k``. Parity ``t`` of the stripe is on server ``(s + t) % n``, member ``m``
on server ``(s + r + m) % n``: neighbours fall on different servers, and no server has two records of a
stripe. A server meets every ``n`` stripes once in each role, so its rows have places without gaps: member
``m`` of stripe ``s`` is its record ``s // n * k + m``, parity ``t`` its parity record ``s // n * r + t``.

Without protection ``k = 1`` and ``r = 0``: row ``g`` is record ``g // n`` of server ``g % n``.

So any ``r + 1`` servers among ``k + r`` neighbours, going round, have stripes in common, which are lost if
they fail at once. Large clusters are cut into ``G`` *rings* of ``k + r`` servers or more, which fail and
recover independently of each other: data are lost only if more than ``r`` servers of *one* ring are gone at
once. Ring ``j`` has every ``G``-th server from ``j`` on, ``c`` of them, so that servers which are neighbours,
on one machine perhaps, are in different rings. Of every ``n`` stripes, ring ``j`` gets numbers ``j, j + G,
j + 2 G, …``, as many as it has servers, and rotates them as above: record ``i`` of stripe ``s``, parities
first, is on server ``j + (p // G + i) % c * G`` with ``p = s % n``, ``j = p % G``. A row's place is the same
as without rings; only its server differs.

What a server keeps of the stripes ``b n`` to ``(b + 1) n - 1`` is its *block* ``b``: ``k`` records and ``r``
parity records, from places ``b k`` and ``b r`` on. The records of a stripe are in the same block of each of
its servers, and which servers these are does not depend on the block. So parity ``t`` of all rows that a
server holds as member ``m`` is on one server, block for block: no stripe has to be named between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigError

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of rows and parities on servers. ``groups`` is the number of rings."""

    servers: int
    k: int = 1
    r: int = 0
    groups: int = 1

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
        if not 1 <= self.groups <= _most_groups(self.servers, self.k, self.r):
            raise ConfigError(
                f"{self.servers} servers in {self.groups} groups: expected 1 to "
                f"{_most_groups(self.servers, self.k, self.r)}, so that each has {self.k + self.r} or more"
            )

    @classmethod
    def grouped(cls, servers: int, k: int = 1, r: int = 0) -> Placement:
        """A placement with the maximum number of rings."""
        return cls(servers, k, r, _most_groups(servers, k, r))

    def stripes(self, rows: int) -> int:
        """The number of stripes of so many rows; missing members of the last one count as zero bits."""
        return -(-rows // self.k)

    def blocks(self, rows: int) -> int:
        """How many blocks a server keeps for so many rows: on all servers alike, some records unused."""
        return -(-self.stripes(rows) // self.servers)

    def records(self, rows: int) -> int:
        """How many records a server keeps for so many rows: on all servers alike, a few of them unused."""
        return self.blocks(rows) * self.k

    def owner(self, ids: Ids) -> Ids:
        """The server of each row."""
        return self._server(ids // self.k, self.r + ids % self.k)

    def place(self, ids: Ids) -> Ids:
        """The record number of each row at its owner."""
        return ids // self.k // self.servers * self.k + ids % self.k

    def row(self, server: int, places: Ids) -> Ids:
        """The row of each record of a server; records that stand for no row give one beyond the last."""
        member = places % self.k
        return self._stripe(server, self.r + member, places // self.k) * self.k + member

    def parity_owner(self, stripes: Ids, parity: int) -> Ids:
        """The server of a given parity of each stripe."""
        return self._server(stripes, parity)

    def parity_place(self, stripes: Ids, parity: int) -> Ids:
        """The parity record of each stripe at that server."""
        return stripes // self.servers * self.r + parity

    def stripe_rows(self, parity_server: int, parity: int, member: int, blocks: Ids) -> Ids:
        """The rows that are member ``member`` of the stripes whose parity ``parity`` is in these blocks of
        that server; beyond the last for those that do not exist."""
        return self._stripe(parity_server, parity, blocks) * self.k + member

    def ring(self, server: int) -> range:
        """The servers of its ring: no others share a stripe with it."""
        return range(server % self.groups, self.servers, self.groups)

    def neighbours(self, server: int) -> tuple[int, ...]:
        """All other servers that share a stripe with it, ascending."""
        width = self.k + self.r
        near = {self._further(server, distance) for distance in range(1 - width, width)}
        return tuple(sorted(near - {server}))

    def parity_server(self, owner: int, member: int, parity: int) -> int:
        """The server of parity ``parity`` of the stripes whose member ``member`` is on ``owner``."""
        return self._further(owner, parity - self.r - member)

    def member_server(self, parity_server: int, parity: int, member: int) -> int:
        """The owner of member ``member`` of the stripes whose parity ``parity`` is on ``parity_server``."""
        return self._further(parity_server, self.r + member - parity)

    def _further(self, server: int, distance: int) -> int:
        """The server so many further in its ring."""
        ring = self.ring(server)
        return ring[(server // self.groups + distance) % len(ring)]

    def _server(self, stripes: Ids, record: Ids | int) -> Ids:
        """The server of one of each stripe's records: parities first, then members."""
        turn, group = np.divmod(stripes % self.servers, self.groups)
        count = (self.servers - group + self.groups - 1) // self.groups
        servers: Ids = group + (turn + record) % count * self.groups
        return servers

    def _stripe(self, server: int, record: Ids | int, blocks: Ids) -> Ids:
        """The stripe that a server has as this record, parities first, in each of these blocks."""
        ring = self.ring(server)
        turn = (server // self.groups - record) % len(ring)
        return blocks * self.servers + ring.start + turn * self.groups


def _most_groups(servers: int, k: int, r: int) -> int:
    return max(servers // max(k + r, 1), 1)
