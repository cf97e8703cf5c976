"""Lanes: an owner's messages to one parity server, in order, each exactly once.

Messages are numbered. The receiver processes the next one, buffers early ones, and acknowledges up to the
last one in order. The sender keeps unacknowledged messages and resends the oldest, with exponential backoff:
if only that one was lost, all others count with it, and a slow receiver is not given more work. Each end is
one incarnation: a replaced server has new lanes. Flushes have their own numbers, the same in all lanes of an
owner, so that parity servers can agree on how much of a dead owner's work counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from holdfast.cluster.protocol.envelope import Envelope, Frame
from holdfast.cluster.protocol.messages import Instant, Peer
from holdfast.cluster.protocol.retry import Retry
from holdfast.cluster.protocol.stripe_messages import Differences, LaneMessage, StripePart


@dataclass
class OutLane:
    """The owner's end of a lane."""

    source: Peer
    target: Peer
    began: int
    """The owner's last flush before the lane began, which the lane does not contain."""
    flush: int
    """The newest flush that has been acknowledged or was before the lane."""
    since: float
    """Since when the oldest message has waited for its acknowledgement."""
    retry: Retry
    """When to send it again."""
    _number: int = 0
    _waiting: deque[Envelope] = field(default_factory=deque)

    @property
    def next_number(self) -> int:
        """The number of the next message."""
        return self._number + 1

    @property
    def waiting(self) -> int:
        """The number of unacknowledged messages."""
        return len(self._waiting)

    def send(self, message: LaneMessage, frames: Sequence[Frame], now: float) -> Envelope:
        """Put a message, numbered ``next_number``, into the lane."""
        assert message.number == self.next_number
        self._number += 1
        envelope = Envelope(self.source, self.target, message, frames)
        if not self._waiting:
            self.since = now
            self.retry.begin(now)
        self._waiting.append(envelope)
        return envelope

    def acknowledge(self, number: int, now: float) -> None:
        """Process an acknowledgement of everything up to this number."""
        taken = False
        while self._waiting and _number_of(self._waiting[0]) <= number:
            message = self._waiting.popleft().message
            taken = True
            if isinstance(message, Differences) and not message.more:
                self.flush = message.instant.flush
        if taken:
            self.since = now
            self.retry.ease(now)

    def overdue(self, now: float) -> Envelope | None:
        """The message to resend, if it is time: the oldest one."""
        if not self._waiting or not self.retry.is_due(now):
            return None
        self.retry.again(now)
        return self._waiting[0]


def _number_of(envelope: Envelope) -> int:
    assert isinstance(envelope.message, LaneMessage)
    return envelope.message.number


@dataclass
class LoggedChange:
    """A flush that may have to be undone."""

    instant: Instant
    parts: tuple[StripePart, ...]
    frames: Sequence[Frame]


@dataclass
class InLane:
    """The parity server's end of a lane."""

    source: Peer
    known: bool
    """Whether the owner's progress is known: from the lane's first message on, or since the owner started."""
    now: Instant
    first: Instant
    """The value of ``now`` without the flushes in the log."""
    number: int = 0
    """Number of the newest message processed."""
    log: deque[LoggedChange] = field(default_factory=deque)
    """Flushes that other parity servers may lack, and that may have to be undone."""
    _begun: list[tuple[Differences, Sequence[Frame]]] = field(default_factory=list)
    _early: dict[int, Envelope] = field(default_factory=dict)
    early_bytes: int = 0
    """Size of the buffered messages."""

    def lay_aside(self, number: int, envelope: Envelope, most_bytes: int) -> None:
        """Buffer an early message, unless the buffer is full."""
        if number not in self._early and self.early_bytes + envelope.nbytes() <= most_bytes:
            self._early[number] = envelope
            self.early_bytes += envelope.nbytes()

    def next_early(self) -> Envelope | None:
        """The next message, if it is in the buffer."""
        envelope = self._early.pop(self.number + 1, None)
        if envelope is not None:
            self.early_bytes -= envelope.nbytes()
        return envelope

    def begin(self, message: Differences, frames: Sequence[Frame]) -> None:
        """Process the beginning of a flush, which counts only when the flush is complete."""
        self.number = message.number
        self._begun.append((message, frames))

    def whole(self, message: Differences, frames: Sequence[Frame]) -> tuple[Differences, Sequence[Frame]]:
        """Combine the last message of a flush with the earlier ones."""
        if not self._begun:
            return message, frames
        parts = [part for begun, _ in self._begun for part in begun.parts]
        before = [frame for _, begun in self._begun for frame in begun]
        return replace(message, parts=(*parts, *message.parts)), [*before, *frames]

    def take(self, message: LaneMessage, frames: Sequence[Frame]) -> None:
        """Process the next message; it counts."""
        self.number = message.number
        if not self.known:
            self.known = True
            # Before its first change the workers' marks are unknown, and will never be needed.
            before = (
                Instant(message.instant.flush - 1) if isinstance(message, Differences) else message.instant
            )
            self.now = self.first = before
        if isinstance(message, Differences):
            self._begun.clear()
            self.now = message.instant
            self.log.append(LoggedChange(message.instant, message.parts, frames))
            while self.log and self.log[0].instant.flush <= message.stable:
                self.first = self.log.popleft().instant

    def undo(self, until: Instant) -> list[LoggedChange]:
        """Go back to an instant, for good. Returns the flushes to undo, newest first."""
        undone = []
        self._begun.clear()
        self._early.clear()
        self.early_bytes = 0
        while self.log and self.log[-1].instant.flush > until.flush:
            undone.append(self.log.pop())
        self.now = self.log[-1].instant if self.log else self.first
        self.log.clear()  # views of later incarnations do not concern this lane
        if self.now.flush == until.flush:
            self.now = until
        self.first = self.now
        return undone
