"""A supervisor's office: how it claims it, keeps it, and knows that it has lost it (see ``vault``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Ballot, Claim, Claimed, Denied, Deposit, Deposited, Peer
from holdfast.cluster.protocol.vault import LEASE_SECONDS

_ROUNDS_A_LEASE = 4
"""The lease is renewed so many times before it expires."""
_MARGIN = 0.1
"""Share of the lease by which clocks may run at different speeds."""
_CLAIM_SECONDS = 0.25


class Tenure:
    """The state machine of a holder, from its claim to its end.

    Args:
        me: the supervisor.
        vaults: all vaults of the job.
        holder: a random number: no other process may use it.
        lease_seconds: that of the vaults.
    """

    def __init__(
        self, me: Peer, vaults: Sequence[Peer], holder: int, lease_seconds: float = LEASE_SECONDS
    ) -> None:
        self.stage: Literal["claiming", "holding", "over"] = "claiming"
        self.found = b""
        """What the former holder stored last; b"" if there was none. Known once ``stage`` is "holding"."""
        self.outbox: list[Envelope] = []
        self._me, self._vaults = me, tuple(vaults)
        self._lease_seconds = lease_seconds
        self._ballot = Ballot(1, holder)
        self._claims: dict[Peer, Claimed] = {}
        self._due = float("-inf")
        self._not_before = float("-inf")
        self._number = 0
        self._state = b""
        self._round = 0
        self._sent: dict[int, float] = {}
        """When each round was sent."""
        self._renewed: dict[Peer, float] = {}
        """When the newest message that a vault has answered was sent."""
        self._stored: dict[Peer, int] = {}

    def deposit(self, state: bytes, now: float) -> int:
        """Deposit a state. Returns its number: see ``is_stored``."""
        assert self.stage == "holding"
        self._number += 1
        self._state = state
        self._send_round(now)
        return self._number

    def is_stored(self, number: int) -> bool:
        """Whether a majority has this state, or a later one: it is durable."""
        return self._is_majority(sum(stored >= number for stored in self._stored.values()))

    def may_act(self, now: float) -> bool:
        """Whether nobody else can have the office now."""
        if self.stage != "holding":
            return False
        newest = sorted(self._renewed.values(), reverse=True)
        needed = len(self._vaults) // 2 + 1
        return len(newest) >= needed and now < newest[needed - 1] + self._lease_seconds * (1 - _MARGIN)

    def tick(self, now: float) -> None:
        """Claim the office, or renew the lease, if it is time."""
        if self.stage == "claiming" and now >= max(self._due, self._not_before):
            self._due = now + _CLAIM_SECONDS
            for vault in self._vaults:
                if vault not in self._claims:
                    self.outbox.append(Envelope(self._me, vault, Claim(self._ballot)))
        elif self.stage == "holding" and now >= self._due:
            self._send_round(now)

    def receive(self, envelope: Envelope, now: float) -> None:
        """Process a vault's answer."""
        source, message = envelope.source, envelope.message
        if source not in self._vaults or not isinstance(message, Claimed | Deposited | Denied):
            return
        if message.ballot != self._ballot:
            return  # the answer to an earlier claim
        if isinstance(message, Denied):
            self._denied(message, now)
        elif isinstance(message, Claimed) and self.stage == "claiming":
            self._claims[source] = message
            if self._is_majority(len(self._claims)):
                last = max(self._claims.values(), key=lambda claimed: (claimed.by, claimed.number))
                self.stage, self.found = "holding", last.state
                self._due = now
        elif isinstance(message, Deposited) and message.round in self._sent:
            sent = self._sent[message.round]
            self._renewed[source] = max(self._renewed.get(source, sent), sent)
            self._stored[source] = max(self._stored.get(source, 0), message.number)

    def _denied(self, message: Denied, now: float) -> None:
        if self.stage == "claiming":
            self._not_before = now + message.wait_seconds
            if message.highest > self._ballot:
                self._ballot = Ballot(message.highest.number + 1, self._ballot.holder)
                self._claims.clear()
        elif message.highest > self._ballot:
            self.stage = "over"

    def _send_round(self, now: float) -> None:
        self._due = now + self._lease_seconds / _ROUNDS_A_LEASE
        self._round += 1
        self._sent[self._round] = now
        self._sent.pop(self._round - 8 * _ROUNDS_A_LEASE, None)
        for vault in self._vaults:
            number = self._number if self._stored.get(vault, 0) < self._number else 0
            state = self._state if number else b""
            self.outbox.append(Envelope(self._me, vault, Deposit(self._ballot, self._round, number, state)))

    def _is_majority(self, count: int) -> bool:
        return 2 * count > len(self._vaults)
