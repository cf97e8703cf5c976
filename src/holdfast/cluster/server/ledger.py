"""A server's memory of what each worker has pushed: every batch counts exactly once, or not at all.

A worker numbers its pushes 1, 2, 3, … and sends the next one only when all servers have applied the last.
So a server needs to remember one number for each worker: what it has, and that alone, is a repetition.
Gradients, not values, are kept between the two phases of an atomic push, and they are applied to the rows
as they are then: two workers that staged the same row both count. Nothing is locked in between.

There is no clock and no socket here, and no rows: ``apply`` says when gradients count.
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
    """What is known of one worker."""

    slot: int
    incarnation: int = 0
    sequence: int = 0
    batch: Position = START
    samples: int = 0
    staged: _Staged[Gradients] | None = None
    settled: bool = True
    """Whether what an older incarnation left staged has been decided on."""


class PushLedger(Generic[Gradients]):
    """The pushes of all workers at one server.

    Args:
        workers: how many there are.
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
        """Take a push; the answer, or None where it must wait for a view that says who the sender is."""
        account = self._account(source, sequence)
        if not isinstance(account, _Account):
            return account
        if sequence <= account.sequence:
            return Pushed(sequence, applied=True)  # a repetition
        if sequence != account.sequence + 1:
            return Refused("gap", sequence)
        staged = _Staged(sequence, batch, samples, gradients)
        if stage:
            account.staged = staged
            return Pushed(sequence, applied=False)
        self._count(account, staged)
        return Pushed(sequence, applied=True)

    def commit(self, source: Peer, sequence: int) -> Pushed | Refused | None:
        """Apply what was staged; the answer as in ``push``."""
        account = self._account(source, sequence)
        if not isinstance(account, _Account):
            return account
        if sequence > account.sequence:
            if account.staged is None or account.staged.sequence != sequence:
                return Refused("not staged", sequence)
            self._count(account, account.staged)
        return Pushed(sequence, applied=True)

    def adopt(self, workers: Sequence[WorkerInView]) -> None:
        """Follow a view: refuse older incarnations from now on, and settle what they left staged.

        The supervisor reads ``marks`` after that: nothing of an older incarnation can change them any more.
        """
        for worker in workers:
            account = self._accounts[worker.slot]
            if worker.incarnation > account.incarnation:
                account.settled = account.incarnation == 0
                account.incarnation = worker.incarnation
            # Once only: a view that says so again must not drop what the new incarnation has staged since.
            if worker.incarnation == account.incarnation and worker.settle >= 0 and not account.settled:
                account.settled = True
                staged, account.staged = account.staged, None
                if staged is not None and staged.sequence <= worker.settle:
                    self._count(account, staged)

    def restore(self, marks: Sequence[WorkerMark]) -> None:
        """Take over from a server that had these pushes applied; nothing has come before."""
        for mark in marks:
            account = self._accounts[mark.slot]
            account.sequence, account.batch, account.samples = mark.sequence, mark.batch, mark.samples

    def knows(self, source: Peer) -> bool:
        """Whether a worker's pushes count: no other has taken its place, and a view has named it."""
        return isinstance(self._account(source, 0), _Account)

    def applied(self, worker: int) -> int:
        """The last push of a worker that was applied."""
        return self._accounts[worker].sequence

    def marks(self) -> tuple[WorkerMark, ...]:
        """Where every worker stands; what is kept is for others to say."""
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
        """The sender's account; a refusal if it has been replaced; None if no view has named it yet."""
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
