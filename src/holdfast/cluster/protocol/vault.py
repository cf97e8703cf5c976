"""Where the supervisor's durable state lies if machines may be lost: in *vaults*, one on each machine, in
memory.

A supervisor holds an *office*. It claims the office with a *ballot* that is higher than any before, and has
it when a majority of vaults has answered. What it stores then is durable when a majority has it: the next
holder's majority has a vault in common with that one, and so it finds what was stored last (Paxos, with one
value after the other). Vaults refuse older ballots, so a former holder cannot store anything any more.

A holder also needs a *lease*, so that there are never two who act, even if the former one has not heard of
the other. Every deposit renews it. A vault that has accepted a deposit denies the office to others for
``lease_seconds`` after that, by its own clock. The holder counts them from before it sent the message, by
its own clock, and without a majority it acts no longer (``tenure``). No two clocks are compared; they must
only run equally fast.

A vault that is restarted has forgotten what it promised: it must not come back under its number. It comes
with a new number instead, and the holder makes it a member of the **board**, the vaults of which a majority
decides. The board is stored with the state. While it changes, a majority of the old board and one of the new
are needed for everything; once that is stored, the new board decides alone (joint consensus, as in Raft). So
whoever asks a majority of any board that ever decided learns of the next one.
"""

from __future__ import annotations

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import (
    Ballot,
    Board,
    Claim,
    Claimed,
    Denied,
    Deposit,
    Deposited,
    Peer,
)

LEASE_SECONDS = 2.0
"""How long a deposit keeps others out of the office: for so long, at most, a job waits for the lease of a
supervisor that was lost."""


class Vault:
    """The state machine of a vault.

    Args:
        me: this vault.
        lease_seconds: how long a deposit keeps others out of the office.
    """

    def __init__(self, me: Peer, lease_seconds: float = LEASE_SECONDS) -> None:
        self.me = me
        self.outbox: list[Envelope] = []
        self._lease_seconds = lease_seconds
        self._highest = Ballot()
        self._until = float("-inf")
        self._by, self._number, self._state = Ballot(), 0, b""
        self._boards: tuple[Board, ...] = ()

    def receive(self, envelope: Envelope, now: float) -> None:
        """Process a claim or a deposit; anything else is ignored."""
        message = envelope.message
        if envelope.source.role != "supervisor" or not isinstance(message, Claim | Deposit):
            return
        answer = self._claim(message, now) if isinstance(message, Claim) else self._deposit(message, now)
        self.outbox.append(Envelope(self.me, envelope.source, answer))

    def tick(self, now: float) -> None:
        """Nothing happens by itself."""

    def _claim(self, claim: Claim, now: float) -> Claimed | Denied:
        if claim.ballot < self._highest:
            return Denied(claim.ballot, self._highest)
        if claim.ballot > self._highest and now < self._until:
            return Denied(claim.ballot, self._highest, self._until - now)
        self._highest = claim.ballot
        return Claimed(claim.ballot, self._by, self._number, self._state, self._boards)

    def _deposit(self, deposit: Deposit, now: float) -> Deposited | Denied:
        if deposit.ballot < self._highest:
            return Denied(deposit.ballot, self._highest)
        # A higher ballot than the highest here has a majority without this vault.
        self._highest = deposit.ballot
        self._until = now + self._lease_seconds
        if deposit.number and (deposit.ballot, deposit.number) > (self._by, self._number):
            self._by, self._number, self._state = deposit.ballot, deposit.number, deposit.state
            self._boards = deposit.boards
        return Deposited(deposit.ballot, deposit.round, self._number if self._by == deposit.ballot else 0)
