"""A supervisor's office: how it claims it, keeps it, and knows that it has lost it (see ``vault``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

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
    VaultAt,
)
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
        board: the vaults of the job: a board that decided once, as recently as possible.
        holder: a random number: no other process may use it.
        lease_seconds: that of the vaults.
    """

    def __init__(self, me: Peer, board: Board, holder: int, lease_seconds: float = LEASE_SECONDS) -> None:
        self.stage: Literal["claiming", "holding", "over"] = "claiming"
        self.found = b""
        """What the former holder stored last; b"" if there was none. Known once ``stage`` is "holding"."""
        self.board = board
        """The newest board that is known to decide alone: the next holder may begin with it."""
        self.outbox: list[Envelope] = []
        self._me, self._first = me, board
        self._boards: tuple[Board, ...] = (board,)
        """A majority of each is needed for everything."""
        self._wanted = board
        self._lease_seconds = lease_seconds
        self._ballot = Ballot(1, holder)
        self._claims: dict[int, Claimed] = {}
        """By the vault's slot, as the next two."""
        self._renewed: dict[int, float] = {}
        """When the newest message that a vault has answered was sent."""
        self._stored: dict[int, int] = {}
        self._due = float("-inf")
        self._not_before = float("-inf")
        self._number = 0
        self._state = b""
        self._round = 0
        self._sent: dict[int, float] = {}
        """When each round was sent."""

    @property
    def vaults(self) -> frozenset[VaultAt]:
        """Those that it sends messages to."""
        return frozenset(self._first).union(self._wanted, *self._boards)

    def deposit(self, state: bytes, now: float) -> int:
        """Deposit a state. Returns its number: see ``is_stored``."""
        assert self.stage == "holding"
        self._number += 1
        self._state = state
        self._send_round(now)
        return self._number

    def is_stored(self, number: int) -> bool:
        """Whether a majority has this state, or a later one: it is durable."""
        return self._has_majority(lambda vault: self._stored.get(vault.slot, 0) >= number)

    def may_act(self, now: float) -> bool:
        """Whether nobody else can have the office now."""
        return self.stage == "holding" and self._has_majority(lambda vault: self._has_lease(vault, now))

    def replace(self, board: Board) -> None:
        """Let these vaults decide from now on, as soon as most of them answer."""
        self._wanted = board

    def tick(self, now: float) -> None:
        """Claim the office, or renew the lease, if it is time."""
        if self.stage == "claiming" and now >= max(self._due, self._not_before):
            self._due = now + _CLAIM_SECONDS
            for vault in self.vaults:
                if vault.slot not in self._claims:
                    self.outbox.append(Envelope(self._me, _peer(vault), Claim(self._ballot)))
        elif self.stage == "holding" and now >= self._due:
            self._send_round(now)

    def receive(self, envelope: Envelope, now: float) -> None:
        """Process a vault's answer."""
        source, message = envelope.source, envelope.message
        if source not in map(_peer, self.vaults) or not isinstance(message, Claimed | Deposited | Denied):
            return
        if message.ballot != self._ballot:
            return  # the answer to an earlier claim
        if isinstance(message, Denied):
            self._denied(message, now)
        elif isinstance(message, Claimed) and self.stage == "claiming":
            self._claims[source.slot] = message
            self._take_office(now)
        elif isinstance(message, Deposited) and self.stage == "holding" and message.round in self._sent:
            sent = self._sent[message.round]
            self._renewed[source.slot] = max(self._renewed.get(source.slot, sent), sent)
            self._stored[source.slot] = max(self._stored.get(source.slot, 0), message.number)
            self._change_boards(now)

    def _take_office(self, now: float) -> None:
        """Hold the office if majorities of the boards that decide have answered."""
        last = max(self._claims.values(), key=lambda claimed: (claimed.by, claimed.number))
        boards = last.boards if last.number else (self._first,)
        if boards != self._boards:
            self._boards, self._wanted = boards, boards[-1]
            self._due = now  # there may be vaults that have not been asked
        # Of the first board, too: without its majority, what was stored last may not be among the answers.
        if self._has_majority(lambda vault: vault.slot in self._claims, self._first):
            self.stage, self.found = "holding", last.state
            self._due = now

    def _change_boards(self, now: float) -> None:
        """Go one step on with replacing the board, if what was deposited last is stored."""
        if not self._number or not self.is_stored(self._number):
            return
        if len(self._boards) > 1:
            self._boards = self._boards[-1:]
            self.deposit(self._state, now)
            return
        self.board = self._boards[-1]
        # From the next message on, majorities of both are needed, so there must be one.
        is_there = _is_majority(self._wanted, lambda vault: self._has_lease(vault, now))
        if set(self._wanted) != set(self.board) and is_there:
            self._boards = self.board, self._wanted
            self.deposit(self._state, now)

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
        decide = frozenset[VaultAt]().union(*self._boards)
        for vault in self.vaults:
            lacks = vault in decide and self._stored.get(vault.slot, 0) < self._number
            content = (self._number, self._state, self._boards) if lacks else ()
            self.outbox.append(Envelope(self._me, _peer(vault), Deposit(self._ballot, self._round, *content)))

    def _has_lease(self, vault: VaultAt, now: float) -> bool:
        """Whether a vault denies the office to others now."""
        renewed = self._renewed.get(vault.slot, float("-inf"))
        return now < renewed + self._lease_seconds * (1 - _MARGIN)

    def _has_majority(self, is_met: Callable[[VaultAt], bool], *more: Board) -> bool:
        return all(_is_majority(board, is_met) for board in (*self._boards, *more))


def _is_majority(board: Board, is_met: Callable[[VaultAt], bool]) -> bool:
    return 2 * sum(map(is_met, board)) > len(board)


def _peer(vault: VaultAt) -> Peer:
    return Peer("vault", vault.slot)
