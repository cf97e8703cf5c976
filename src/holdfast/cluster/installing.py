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

from holdfast.cluster.messages import Install, Lacks, Peer, View, WorkerInView
from holdfast.cluster.plan import JobPlan
from holdfast.cluster.transport.base import Envelope
from holdfast.cluster.updates import Update
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
        self._ask_again, self._began = 0.0, -1.0
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

    def answered(self, source: Peer, message: Install) -> None:
        """Note what a worker can send again, and that it has no values if so."""
        self._kept[source] = max(message.kept, self._kept.get(source, 0))
        if not message.parts:
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
        if not (groups or unsure) or self.lost or now < self._ask_again:
            return
        self._ask_again = now + self._plan.timing.retry_seconds
        if not groups:
            for peer in unsure:
                self._doubt(peer, now)
                self._outbox.append(Envelope(self._me, peer, Lacks(())))
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
