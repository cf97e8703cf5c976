"""A worker's copies of the network, where workers are the only ones who have any (``dense="workers"``).

Servers send the network's rows all the time, to pulls and with answers to pushes. What comes last is kept
here, server by server, with marks that say which pushes it contains. See ``installing`` for what becomes of
it when a server dies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.protocol.plan import JobPlan


@dataclass(frozen=True, slots=True)
class Copy:
    """A server's part of the network, as it was at one instant."""

    incarnation: int
    places: NDArray[np.uint32]
    weights: NDArray[np.float32]
    marks: tuple[int, ...]
    """The newest push of each worker that it contains; …"""
    pushed: int = 0
    """… the worker's own one, which the server had only staged."""


class Copies:
    """Of one worker.

    Args:
        me: the worker.
        plan: the job's.
    """

    def __init__(self, me: Peer, plan: JobPlan) -> None:
        self._me = me
        rows = np.arange(plan.groups[-1].rows)
        owners = np.unique(plan.placements[-1].owner(rows)) if plan.dense == "workers" else ()
        self.holders = frozenset(int(server) for server in owners)
        """Servers with rows of the network; none if there are other copies of it."""
        self._copies: dict[int, Copy] = {}

    def take(self, server: int, copy: Copy) -> None:
        """Keep a copy, unless it is older than the one that is here."""
        old = self._copies.get(server)
        if old is None or (copy.incarnation, sum(copy.marks)) >= (old.incarnation, sum(old.marks)):
            self._copies[server] = copy

    def get(self, server: int) -> Copy | None:
        """The newest one."""
        return self._copies.get(server)

    @property
    def contain(self) -> int:
        """The worker's own newest push that is in all of them, and was applied when they were made."""
        if len(self._copies) < len(self.holders):
            return 0
        return min(copy.marks[self._me.slot] for copy in self._copies.values())
