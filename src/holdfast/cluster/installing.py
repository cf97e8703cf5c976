"""Values that only workers have: a server asks for them until it has them.

Those are the network's first values, and if a server takes over its rows where workers are the only copies of
it. Nobody needs to pull for that: workers that hold, or are done, answer as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cluster.messages import Install, Lacks, Peer, View
from holdfast.cluster.plan import JobPlan
from holdfast.cluster.transport.base import Envelope
from holdfast.tables.shard import GroupShard


class Installing:
    """The asking of one server.

    Args:
        me: the server.
        plan: the job's.
        shards: its rows, of each group.
        outbox: where questions go.
    """

    def __init__(self, me: Peer, plan: JobPlan, shards: Sequence[GroupShard], outbox: list[Envelope]) -> None:
        self._me, self._plan, self._shards, self._outbox = me, plan, shards, outbox
        self._ask_again = 0.0
        self._without: set[Peer] = set()
        """Workers that have none: none can come to have any, since that takes rows of this server."""
        self.lost = False
        """Whether nobody has them."""

    @property
    def groups(self) -> tuple[int, ...]:
        """Those that are lacking."""
        return tuple(g for g, shard in enumerate(self._shards) if not shard.installed)

    @property
    def rows(self) -> int:
        """How many rows they have."""
        return sum(self._shards[group].rows for group in self.groups)

    def answered(self, source: Peer, message: Install) -> None:
        """Note that a worker has no values."""
        if not message.parts:
            self._without.add(source)

    def tick(self, view: View, now: float) -> None:
        """Ask those who may have them, when it is time; find out that nobody has."""
        groups = self.groups
        if not groups or self.lost or now < self._ask_again:
            return
        self._ask_again = now + self._plan.timing.retry_seconds
        # Those that have not started, too: a supervisor that came back may not know that they have.
        workers = [Peer("worker", w.slot, w.incarnation) for w in view.workers]
        asked = [peer for peer in workers if peer not in self._without]
        self.lost = bool(workers) and not asked
        for peer in asked:
            self._outbox.append(Envelope(self._me, peer, Lacks(groups)))
