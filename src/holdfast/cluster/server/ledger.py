"""A server's record of each worker's pushes: every batch counts exactly once, or not at all.

A worker numbers its pushes 1, 2, 3, … and sends the next one only when all servers have applied the last.
So a server needs to remember only one number per worker to recognize duplicates.
Between the two phases of an atomic push, the server keeps gradients, not values, and applies them to the rows
as they are at commit: if two workers staged the same row, both count. Nothing is locked in between.

There is no clock and no socket here, and no rows: ``apply`` is called when gradients count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from holdfast.cluster.protocol.messages import (
    START,
    Peer,
    Position,
    Pushed,
    Refused,
    WorkerInView,
    WorkerMark,
)

Gradients = TypeVar("Gradients")


@dataclass
class _Staged(Generic[Gradients]):
    sequence: int
    batch: Position
    samples: int
    gradients: Gradients


@dataclass
class _Account(Generic[Gradients]):
    """The state of one worker's pushes."""

    slot: int
    incarnation: int = 0
    sequence: int = 0
    batch: Position = START
    samples: int = 0
    staged: _Staged[Gradients] | None = None
    settled: bool = True
    """Whether the push that an older incarnation left staged has been settled."""


class PushLedger(Generic[Gradients]):
    """The pushes of all workers at one server.

    Args:
        workers: number of workers.
        apply: called once for each push that counts, in the order in which they count, with the worker and
            the push's number.
    """

    def __init__(self, workers: int, apply: Callable[[int, int, Gradients], None]) -> None:
        self._accounts = [_Account[Gradients](slot) for slot in range(workers)]
        self._apply = apply

    def push(
        self,
        source: Peer,
        sequence: int,
        batch: Position,
        gradients: Gradients,
        *,
        samples: int = 0,
        stage: bool,
    ) -> Pushed | Refused | None:
        """Process a push. Returns the answer, or None if it must wait for a view that contains the sender."""
        account = self._account(source, sequence)
        if not isinstance(account, _Account):
            return account
        if sequence <= account.sequence:
            return Pushed(sequence, applied=True)  # a duplicate
        if sequence != account.sequence + 1:
            return Refused("gap", sequence)
        staged = _Staged(sequence, batch, samples, gradients)
        if stage:
            account.staged = staged
            return Pushed(sequence, applied=False)
        self._count(account, staged)
        return Pushed(sequence, applied=True)

    def commit(self, source: Peer, sequence: int) -> Pushed | Refused | None:
        """Apply a staged push. Returns the answer, as ``push`` does."""
        account = self._account(source, sequence)
        if not isinstance(account, _Account):
            return account
        if sequence > account.sequence:
            if account.staged is None or account.staged.sequence != sequence:
                return Refused("not staged", sequence)
            self._count(account, account.staged)
        return Pushed(sequence, applied=True)

    def adopt(self, workers: Sequence[WorkerInView]) -> None:
        """Follow a view: refuse older incarnations from now on, and settle the pushes they left staged.

        The supervisor reads ``marks`` after that: no message of an older incarnation can change them then.
        """
        for worker in workers:
            account = self._accounts[worker.slot]
            if worker.incarnation > account.incarnation:
                account.settled = account.incarnation == 0
                account.incarnation = worker.incarnation
            # Only once: the same view again must not drop a push that the new incarnation has staged since.
            if worker.incarnation == account.incarnation and worker.settle >= 0 and not account.settled:
                account.settled = True
                staged, account.staged = account.staged, None
                if staged is not None and staged.sequence <= worker.settle:
                    self._count(account, staged)

    def restore(self, marks: Sequence[WorkerMark]) -> None:
        """Take over from a server that had applied these pushes; call before any other message."""
        for mark in marks:
            account = self._accounts[mark.slot]
            account.sequence, account.batch, account.samples = mark.sequence, mark.batch, mark.samples

    def knows(self, source: Peer) -> bool:
        """Whether a worker's pushes count: a view contains it, and it has not been replaced."""
        return isinstance(self._account(source, 0), _Account)

    def applied(self, worker: int) -> int:
        """The last applied push of a worker."""
        return self._accounts[worker].sequence

    def marks(self) -> tuple[WorkerMark, ...]:
        """The mark of every worker, without ``kept``, which the ledger does not know."""
        return tuple(
            WorkerMark(
                slot=slot,
                incarnation=account.incarnation,
                sequence=account.sequence,
                batch=account.batch,
                samples=account.samples,
                staged=account.staged.sequence if account.staged else 0,
            )
            for slot, account in enumerate(self._accounts)
        )

    def _account(self, source: Peer, sequence: int) -> _Account[Gradients] | Refused | None:
        """The sender's account; a refusal if it has been replaced; None if no view contains it yet."""
        if source.role != "worker" or not 0 <= source.slot < len(self._accounts):
            return None
        account = self._accounts[source.slot]
        if source.incarnation < account.incarnation:
            return Refused("stale", sequence)
        if source.incarnation > account.incarnation or not account.settled:
            return None
        return account

    def _count(self, account: _Account[Gradients], staged: _Staged[Gradients]) -> None:
        self._apply(account.slot, staged.sequence, staged.gradients)
        account.sequence = staged.sequence
        account.batch = staged.batch
        account.samples += staged.samples
        account.staged = None
