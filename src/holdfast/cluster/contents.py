"""Which pushes the network's rows of a server contain, where workers have the only copies of it.

Usually those that were applied. A server that took over knows from its predecessor's parities how many pushes
count, but got the network from a worker, whose copy may contain more or fewer of them. What it contains
already is skipped; what it lacks is applied when the worker sends it again, in order; what nobody can send
again is lost to the network, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.cluster.installing import Installing
from holdfast.cluster.messages import Install, Peer, View
from holdfast.cluster.transaction import PushLedger
from holdfast.cluster.updates import Update
from holdfast.tables.shard import GroupShard


class Contents:
    """The network's rows of one server.

    Args:
        shard: the rows.
        ledger: knows what was applied.
        installing: gathers workers' copies.
        touched: called with places of rows that have changed.
    """

    def __init__(
        self,
        shard: GroupShard,
        ledger: PushLedger[list[Update]],
        installing: Installing,
        touched: Callable[[Update], None],
    ) -> None:
        self.marks = [mark.sequence for mark in ledger.marks()]
        """The newest push of each worker; all before it are there, or lost."""
        self.lost = 0
        """Pushes that nobody could send again."""
        self._shard, self._ledger, self._installing, self._touched = shard, ledger, installing, touched

    def has(self, worker: int, sequence: int) -> bool:
        """Whether a push is in the rows."""
        return sequence <= self.marks[worker]

    def note(self, worker: int, sequence: int) -> None:
        """A push was applied."""
        self.marks[worker] = max(sequence, self.marks[worker])

    def lacks(self, source: Peer, sequence: int) -> bool:
        """Whether a push that counts is not in the rows."""
        known = self._ledger.knows(source)
        return known and self.marks[source.slot] < sequence <= self._ledger.applied(source.slot)

    def complete(self, source: Peer, sequence: int, updates: Sequence[Update]) -> bool:
        """Apply what is lacking of a push that counts; False: another that is lacking must come before."""
        if not self._ledger.knows(source):
            return True
        if self.marks[source.slot] >= min(sequence, self._ledger.applied(source.slot)):
            return True
        if sequence != self.marks[source.slot] + 1:
            return False
        for update in updates:
            if update[0] == self._installing.network:
                self._shard.push(*update[1:])
                self._touched(update)
        self.marks[source.slot] = sequence
        return True

    def offer(self, source: Peer, message: Install, update: Update) -> None:
        """Take a worker's copy into account."""
        self._installing.offer(source, message, update)

    @property
    def ahead(self) -> int:
        """Pushes that the rows contain and that were not applied yet."""
        return sum(max(0, mark - self._ledger.applied(worker)) for worker, mark in enumerate(self.marks))

    @property
    def is_behind(self) -> bool:
        """Whether pushes that count are lacking: a worker will send them again, or say that it cannot."""
        return any(mark < self._ledger.applied(worker) for worker, mark in enumerate(self.marks))

    def unsure(self, view: View) -> list[Peer]:
        """Workers that may be unable to send again what is lacking."""
        return [
            Peer("worker", worker.slot, worker.incarnation)
            for worker in view.workers
            if worker.starts and self.marks[worker.slot] < self._ledger.applied(worker.slot)
        ]

    def advance(self, view: View) -> Update | None:
        """Choose a copy when it is clear which is the newest; do without what nobody can send again."""
        chosen = None
        if not self._shard.installed:
            applied = [self._ledger.applied(worker) for worker in range(len(self.marks))]
            newest = self._installing.choose(view, applied)
            if newest is None:
                return None
            chosen, self.marks = newest.update, list(newest.message.marks)
            self.note(newest.source.slot, newest.message.pushed)
        for worker in view.workers:
            slot = worker.slot
            last = min(self._installing.kept(worker), self._ledger.applied(slot))
            self.lost += max(0, last - self.marks[slot])
            self.note(slot, last)
        return chosen
