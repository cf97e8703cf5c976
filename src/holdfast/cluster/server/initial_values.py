"""Values that only workers have: a server asks for them until it has them.

These are the network's initial values and, if workers have the only copies of the network, the replacement's
rows of it. This does not depend on pulls: workers that hold, or are done, answer as well.

A copy of the network has marks: each worker's newest push that it contains. A server sends its rows to
workers one instant after the other, so of two copies the newer one contains every push of the older
one. A worker resends a push until its own copy contains it. So the newest copy of all workers lacks
only pushes that can be resent, unless a worker died: pushes that only its copy contained are lost to the
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
        """Whether it contains these pushes of each worker."""
        return all(mine >= mark for mine, mark in zip(self.message.marks, marks, strict=True))


class Installing:
    """Requests values from workers for one server.

    Args:
        me: the server.
        plan: the job's plan.
        shards: its rows, by group.
        outbox: for outgoing requests.
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
        """The index of the network's group."""
        self._retry, self._began = Retry(plan.timing.retry_seconds), -1.0
        self._doubt = doubt
        self._without: set[Peer] = set()
        """Workers without values: they cannot get any later, since that takes rows of this server."""
        self._offers: dict[Peer, Offer] = {}
        self._kept: dict[Peer, int] = {}
        """Each worker's newest push that it cannot resend, as far as it has said so."""
        self.lost = False
        """Whether no worker has the values."""

    @property
    def groups(self) -> tuple[int, ...]:
        """Groups without values. A group that has them is never checked again."""
        if self._lacking:
            self._lacking = tuple(g for g in self._lacking if not self._shards[g].installed)
        return self._lacking

    def look_again(self) -> None:
        """Check all groups again: this server has taken over its slot, which may change their state."""
        self._lacking = tuple(range(len(self._shards)))

    @property
    def rows(self) -> int:
        """The number of rows without values."""
        return sum(self._shards[group].rows for group in self.groups)

    def answered(self, source: Peer, message: Install | NoCopy | CanResend) -> None:
        """Note which pushes a worker can resend, and whether it has values."""
        self._kept[source] = max(message.kept, self._kept.get(source, 0))
        if isinstance(message, NoCopy):
            self._without.add(source)

    def offer(self, source: Peer, message: Install, update: Update) -> None:
        """Note a worker's copy of the network."""
        if len(message.marks) != self._plan.workers:
            raise ValueError(f"a copy has {len(message.marks)} marks: expected {self._plan.workers}")
        self._offers.setdefault(source, Offer(source, message, update))

    def choose(self, view: View, marks: Sequence[int]) -> Offer | None:
        """The newest copy, once it is certain that no worker has a newer one that is needed.

        Args:
            view: contains the workers that may have one.
            marks: workers may be unable to resend pushes up to these.
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
        """The newest push of a worker that it cannot resend, as far as it has said so.

        The push that it started after is no evidence: a restarted supervisor starts workers again that are
        already working and still have all pushes that are not kept.
        """
        return self._kept.get(Peer("worker", worker.slot, worker.incarnation), 0)

    def tick(self, view: View, now: float, unsure: Sequence[Peer] = ()) -> None:
        """Ask workers that may have values, when it is time; detect that none has.

        ``unsure``: workers to ask whether they can resend missing pushes.
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
        # Also workers that have not started: a restarted supervisor may not know that they have.
        workers = [Peer("worker", w.slot, w.incarnation) for w in view.workers]
        asked = [peer for peer in workers if peer not in self._without]
        self.lost = bool(workers) and not asked
        self._began = now if self._began < 0 else self._began
        long = now - self._began > self._plan.timing.stuck_seconds  # its process may still be starting
        for peer in asked:
            if long and peer not in self._offers:
                self._doubt(peer, now)
            self._outbox.append(Envelope(self._me, peer, Lacks(groups)))


class Contents:
    """Which pushes the network's rows at one server contain, if workers have the only copies of it.

    Usually the applied ones. A replacement knows from its predecessor's parities how many pushes count, but
    got the network from a worker, whose copy may contain more or fewer of them. Pushes that it contains
    already are skipped; missing ones are applied when the worker resends them, in order; those that
    nobody can resend are lost to the network, and counted.

    Args:
        shard: the network's rows.
        ledger: knows which pushes are applied.
        installing: collects workers' copies.
        touched: called with the places of changed rows.
    """

    def __init__(
        self,
        shard: GroupShard,
        ledger: PushLedger[list[Update]],
        installing: Installing,
        touched: Callable[[Update], None],
    ) -> None:
        self.marks = [mark.sequence for mark in ledger.marks()]
        """Each worker's newest push in the rows; all earlier ones are contained, or lost."""
        self.lost = 0
        """Pushes that nobody could resend."""
        self._shard, self._ledger, self._installing, self._touched = shard, ledger, installing, touched

    def has(self, worker: int, sequence: int) -> bool:
        """Whether the rows contain a push."""
        return sequence <= self.marks[worker]

    def note(self, worker: int, sequence: int) -> None:
        """Note that a push was applied."""
        self.marks[worker] = max(sequence, self.marks[worker])

    def lacks(self, source: Peer, sequence: int) -> bool:
        """Whether a push that counts is missing from the rows."""
        known = self._ledger.knows(source)
        return known and self.marks[source.slot] < sequence <= self._ledger.applied(source.slot)

    def complete(self, source: Peer, sequence: int, updates: Sequence[Update]) -> bool:
        """Apply the missing part of a push that counts; False: an earlier missing push must come first."""
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
        """Note a worker's copy of the network."""
        self._installing.offer(source, message, update)

    @property
    def ahead(self) -> int:
        """The number of pushes that the rows contain and that are not applied yet."""
        return sum(max(0, mark - self._ledger.applied(worker)) for worker, mark in enumerate(self.marks))

    @property
    def is_behind(self) -> bool:
        """Whether pushes that count are missing: their workers will resend them, or say that they cannot."""
        return any(mark < self._ledger.applied(worker) for worker, mark in enumerate(self.marks))

    def unsure(self, view: View) -> list[Peer]:
        """Workers that may be unable to resend missing pushes."""
        return [
            Peer("worker", worker.slot, worker.incarnation)
            for worker in view.workers
            if worker.starts and self.marks[worker.slot] < self._ledger.applied(worker.slot)
        ]

    def advance(self, view: View) -> Update | None:
        """Choose a copy when it is certain which is the newest; give up pushes that nobody can resend."""
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
