"""Fault injection: break or slow down links between real processes.

The injector (``holdfast chaos``) writes to a small file, a table of who hears whom, which every process
of the job maps into its memory: a break takes effect with the next message. Its path is part of the
assignment; a job without chaos has no such file, and no overhead.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Peer

MOST_SLOTS: Final = 64
"""Maximum number of slots per role."""
_FIRST: Final = {"supervisor": 0, "launcher": 1, "server": 2, "worker": 2 + MOST_SLOTS}
_NODES: Final = 2 + 2 * MOST_SLOTS
_CUT_UNTIL, _SLOW_UNTIL, _DELAY = range(3)


class Links:
    """The table; times are those of ``time.monotonic``, which all processes on a machine share."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        shape = (_NODES, _NODES, 3)
        self._table = np.memmap(path, np.float64, "w+" if create else "r+", shape=shape)

    def break_link(self, one: Peer, other: Peer, until: float, *, one_way: bool = False) -> None:
        """Break the link between two slots until then, for all their incarnations; if ``one_way``, only
        messages from the first to the other are lost."""
        for a, b in ((one, other),) if one_way else ((one, other), (other, one)):
            self._table[_index(a), _index(b), _CUT_UNTIL] = until

    def slow(self, one: Peer, until: float, delay_seconds: float) -> None:
        """Delay all messages from and to a node until then, each randomly up to ``delay_seconds``."""
        node = _index(one)
        for part in (self._table[node], self._table[:, node]):
            part[:, _SLOW_UNTIL] = until
            part[:, _DELAY] = delay_seconds

    def slow_link(self, source: Peer, target: Peer, until: float, delay_seconds: float) -> None:
        """Delay messages from one node to another until then, each randomly up to ``delay_seconds``."""
        self._table[_index(source), _index(target), _SLOW_UNTIL:] = until, delay_seconds

    def mend(self) -> None:
        """Restore all links."""
        self._table[:] = 0.0

    def state(self, source: Peer, target: Peer) -> tuple[float, float, float]:
        """Until when a link is broken, until when it is slow, and by how much."""
        broken, slow, delay = self._table[_index(source), _index(target)]
        return float(broken), float(slow), float(delay)


class Reception:
    """Applies the table to the messages that one node receives."""

    def __init__(self, me: Peer, links: Links) -> None:
        self.dropped = 0
        self._me, self._links = me, links
        self._late: list[tuple[float, int, Envelope]] = []
        self._numbers = itertools.count()

    def wait(self, timeout_seconds: float) -> float:
        """The timeout for the next poll, at most until the next delayed message is due."""
        if not self._late:
            return timeout_seconds
        return max(0.0, min(timeout_seconds, self._late[0][0] - time.monotonic()))

    def hear(self, envelopes: Sequence[Envelope]) -> list[Envelope]:
        """The messages to deliver now, of these and of delayed ones."""
        now = time.monotonic()
        heard = []
        for envelope in envelopes:
            broken, slow, delay = self._links.state(envelope.source, self._me)
            if now < broken:
                self.dropped += 1
            elif now < slow:
                due = now + random.uniform(0, delay)
                heapq.heappush(self._late, (due, next(self._numbers), envelope))
            else:
                heard.append(envelope)
        while self._late and self._late[0][0] <= now:
            heard.append(heapq.heappop(self._late)[2])
        return heard


def _index(peer: Peer) -> int:
    return _FIRST[peer.role] + min(max(peer.slot, 0), MOST_SLOTS - 1)
