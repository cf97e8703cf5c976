"""What every transport does: it carries messages between nodes, and promises nothing.

A message may be lost, repeated, late or out of order; a transport may do better, the protocol does not
count on it. Nodes are machines that take a message or a tick with the time and put what they want to send
into their ``outbox``: they know no clock and no socket, so that the same code runs on virtual time and on
real machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.protocol.wire import Message

Frame = NDArray[Any] | memoryview | bytes | bytearray


class Envelope(Struct, frozen=True):
    """A message on its way, with its arrays."""

    source: Peer
    target: Peer
    message: Message
    frames: Sequence[Frame] = ()

    def nbytes(self) -> int:
        """Of the arrays."""
        return sum(memoryview(frame).nbytes for frame in self.frames)  # type: ignore[arg-type, misc]


@dataclass(slots=True)
class Counters:
    """What has gone through a transport, and what has not."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    malformed: int = 0
    """Came in and was no message, or above the limits."""
    damaged: int = 0
    """Came in with a checksum that does not match."""
    impostors: int = 0
    """Came in from a node that claimed to be another than its connection proves."""
    other_job: int = 0
    """Came in from another job."""
    misdirected: int = 0
    """Came in for another role or slot."""
    unroutable: int = 0
    """Not sent: nothing leads to that peer (any more)."""
    full: int = 0
    """Not sent: too much waits for that peer already."""
    refused: int = 0
    """Connections that failed the handshake: no key, a key that is not allowed, not ZeroMQ at all."""
    shed: int = 0
    """Connections that were closed since too many had not proved who they are."""

    @property
    def dropped(self) -> int:
        """Messages that came in and were not passed on."""
        return self.malformed + self.damaged + self.impostors + self.other_job + self.misdirected


class Node(Protocol):
    """A machine of the protocol."""

    me: Peer
    outbox: list[Envelope]
    """What it wants to send; whoever runs it takes it out after every call."""

    def receive(self, envelope: Envelope, now: float) -> None:
        """Take one message; ``now`` in seconds of a clock that only goes forward."""

    def tick(self, now: float) -> None:
        """Look after what has waited too long; called several times a second."""


def as_array(frame: Frame, dtype: np.dtype[Any] | type, shape: tuple[int, ...]) -> NDArray[Any]:
    """A frame as an array, without a copy; raises ValueError if its length is another.

    Nobody may write to it: some frames are read-only, and for a mixture of both kinds every loop would be
    compiled again, in the midst of a job.
    """
    array = np.frombuffer(frame, dtype).reshape(shape)
    array.flags.writeable = False
    return array
