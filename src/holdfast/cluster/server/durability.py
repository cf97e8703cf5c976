"""Tell workers which pushes are kept: with answers to later pushes, or unsolicited if none is due soon."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Kept, Peer, Pushed, View
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.redundancy.replicator import Replicator
from holdfast.cluster.server.ledger import PushLedger


class KeptPushes:
    """Reports kept pushes for one server.

    Args:
        me: the server.
        plan: the job's plan.
        ledger: knows which pushes are applied.
        replicator: knows what parity servers have; None: applied pushes count as kept.
        outbox: for outgoing messages.
    """

    def __init__(
        self,
        me: Peer,
        plan: JobPlan,
        ledger: PushLedger[Any],
        replicator: Replicator | None,
        outbox: list[Envelope],
    ) -> None:
        self._me, self._lanes, self._outbox = me, plan.lanes, outbox
        self._ledger, self._replicator = ledger, replicator
        self._told = [0] * plan.workers
        self._pushed_at = [0.0] * plan.workers

    def kept(self, worker: int) -> int:
        """The newest push of a worker that no failure covered by the code can undo."""
        return self._replicator.kept(worker) if self._replicator else self._ledger.applied(worker)

    def answer(self, answer: Pushed, worker: int, now: float) -> Pushed:
        """Add the newest kept push to the answer to a push."""
        self._pushed_at[worker] = now
        self._told[worker] = self.kept(worker)
        return replace(answer, kept=self._told[worker])

    def tell(self, view: View, now: float) -> None:
        """Tell workers which pushes are kept, unless an answer to a push will tell them soon."""
        holds = view.phase != "running"
        for worker in view.workers:
            slot, told = worker.slot, self._told[worker.slot]
            kept = self.kept(slot)
            if kept <= told or not worker.starts:
                continue
            waits = self._ledger.applied(slot) - told >= self._lanes.window
            if holds or waits or now - self._pushed_at[slot] >= self._lanes.idle_seconds:
                self._told[slot] = kept
                target = Peer("worker", slot, worker.incarnation)
                self._outbox.append(Envelope(self._me, target, Kept(kept)))
