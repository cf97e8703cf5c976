"""Values that only workers have: a server asks for them until it has them.

Those are the network's first values, and if a server takes over its rows where workers are the only copies of
it. Nobody needs to pull for that: workers that hold, or are done, answer as well.

A copy of the network comes with marks: the newest push of each worker that it contains. What a server sends
to workers it sends at one instant after the other, so of two copies the newer one contains all that the older
one does. A worker sends a push again until its own copy contains it. So the newest copy of all workers lacks
nothing that nobody could send again, unless a worker died: then what only its copy contained is lost to the
network, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import (
    AskKept,
    CanResend,
    Install,
    Lacks,
    NoCopy,
    Peer,
    View,
    WorkerInView,
)
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.protocol.retry import Retry
from holdfast.cluster.server.ledger import PushLedger
from holdfast.cluster.server.requests import Update
from holdfast.tables.shard import GroupShard


@dataclass(frozen=True, slots=True)
class Offer:
    """A worker's copy of the network."""

    source: Peer
    message: Install
    update: Update

    def contains(self, marks: Sequence[int]) -> bool:
        """Whether these pushes of each worker are in it."""
        return all(mine >= mark for mine, mark in zip(self.message.marks, marks, strict=True))


class Installing:
    """The asking of one server.

    Args:
        me: the server.
        plan: the job's.
        shards: its rows, of each group.
        outbox: where questions go.
        doubt: called with a worker that has not answered (see ``routes``).
    """

    def __init__(
        self,
        me: Peer,
        plan: JobPlan,
        shards: Sequence[GroupShard],
        outbox: list[Envelope],
        doubt: Callable[[Peer, float], None] = lambda target, now: None,
    ) -> None:
        self._me, self._plan, self._shards, self._outbox = me, plan, shards, outbox
        self._lacking = tuple(range(len(shards)))
        self.network = len(shards) - 1
        """The network's group."""
        self._retry, self._began = Retry(plan.timing.retry_seconds), -1.0
        self._doubt = doubt
        self._without: set[Peer] = set()
        """Workers that have none: none can come to have any, since that takes rows of this server."""
        self._offers: dict[Peer, Offer] = {}
        self._kept: dict[Peer, int] = {}
        """What workers have said of their newest push that they cannot send again."""
        self.lost = False
        """Whether nobody has them."""

    @property
    def groups(self) -> tuple[int, ...]:
        """Those that are lacking. What is there stays there."""
        if self._lacking:
            self._lacking = tuple(g for g in self._lacking if not self._shards[g].installed)
        return self._lacking

    def look_again(self) -> None:
        """The server has taken its slot over: what it had before says nothing."""
        self._lacking = tuple(range(len(self._shards)))

    @property
    def rows(self) -> int:
        """How many rows they have."""
        return sum(self._shards[group].rows for group in self.groups)

    def answered(self, source: Peer, message: Install | NoCopy | CanResend) -> None:
        """Note what a worker can send again, and that it has no values if so."""
        self._kept[source] = max(message.kept, self._kept.get(source, 0))
        if isinstance(message, NoCopy):
            self._without.add(source)

    def offer(self, source: Peer, message: Install, update: Update) -> None:
        """Note a worker's copy of the network."""
        if len(message.marks) != self._plan.workers:
            raise ValueError(f"a copy with {len(message.marks)} marks, of {self._plan.workers} workers")
        self._offers.setdefault(source, Offer(source, message, update))

    def choose(self, view: View, marks: Sequence[int]) -> Offer | None:
        """The newest copy, once it is certain that no worker has a newer one that is needed.

        Args:
            view: names those who may have one.
            marks: up to here workers may be unable to push again.
        """
        workers = [Peer("worker", w.slot, w.incarnation) for w in view.workers]
        offers = [self._offers[peer] for peer in workers if peer in self._offers]
        if not offers:
            return None
        newest = max(offers, key=lambda offer: sum(offer.message.marks))
        if newest.contains(marks) or all(p in self._offers or p in self._without for p in workers):
            return newest
        return None

    def kept(self, worker: WorkerInView) -> int:
        """The newest push of a worker that it cannot send again, as far as it has said so.

        That it started behind a push says nothing: a supervisor that came back starts those again that are
        at work, and have all that is not kept.
        """
        return self._kept.get(Peer("worker", worker.slot, worker.incarnation), 0)

    def tick(self, view: View, now: float, unsure: Sequence[Peer] = ()) -> None:
        """Ask those who may have them, when it is time; find out that nobody has.

        Workers of which it is ``unsure`` whether they will send again what is lacking are asked that.
        """
        groups = self.groups
        if not (groups or unsure) or self.lost or not self._retry.is_due(now):
            return
        self._retry.again(now)
        if not groups:
            for peer in unsure:
                self._doubt(peer, now)
                self._outbox.append(Envelope(self._me, peer, AskKept()))
            return
        # Those that have not started, too: a supervisor that came back may not know that they have.
        workers = [Peer("worker", w.slot, w.incarnation) for w in view.workers]
        asked = [peer for peer in workers if peer not in self._without]
        self.lost = bool(workers) and not asked
        self._began = now if self._began < 0 else self._began
        long = now - self._began > self._plan.timing.stuck_seconds  # its process may not be there yet
        for peer in asked:
            if long and peer not in self._offers:
                self._doubt(peer, now)
            self._outbox.append(Envelope(self._me, peer, Lacks(groups)))


class Contents:
    """Which pushes the network's rows of one server contain, where workers have the only copies of it.

    Usually those that were applied. A server that took over knows from its predecessor's parities how many
    pushes count, but got the network from a worker, whose copy may contain more or fewer of them. What it
    contains already is skipped; what it lacks is applied when the worker sends it again, in order; what
    nobody can send again is lost to the network, and counted.

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
