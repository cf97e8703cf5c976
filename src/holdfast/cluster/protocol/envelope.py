"""The contract of every transport: it carries messages between nodes, and guarantees nothing.

A message may be lost, duplicated, late or out of order; a transport may do better, but the protocol does not
rely on it. Nodes are state machines: they process a message or a tick with the time, and put outgoing
messages into their ``outbox``. They know no clock and no socket, so that the same code runs on virtual time
and on real machines.
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
    """A message in transit, with its arrays."""

    source: Peer
    target: Peer
    message: Message
    frames: Sequence[Frame] = ()

    def nbytes(self) -> int:
        """Total size of the arrays in bytes."""
        return sum(memoryview(frame).nbytes for frame in self.frames)  # type: ignore[arg-type, misc]


@dataclass(slots=True)
class Counters:
    """Messages that a transport has carried and dropped."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    malformed: int = 0
    """Received, but not a message, or above the limits."""
    damaged: int = 0
    """Received with a checksum mismatch."""
    impostors: int = 0
    """Received from a node that claimed another identity than its connection proves."""
    other_job: int = 0
    """Received from another job."""
    misdirected: int = 0
    """Received, but addressed to another role or slot."""
    unroutable: int = 0
    """Not sent: there is no connection to that peer (any more)."""
    full: int = 0
    """Not sent: the queue for that peer is full."""
    refused: int = 0
    """Connections that failed the handshake: no key, a key that is not allowed, or not ZeroMQ at all."""
    shed: int = 0
    """Connections closed because too many had not authenticated yet."""

    @property
    def dropped(self) -> int:
        """Messages received and not passed on."""
        return self.malformed + self.damaged + self.impostors + self.other_job + self.misdirected


class Node(Protocol):
    """A state machine of the protocol."""

    me: Peer
    outbox: list[Envelope]
    """Outgoing messages; the caller takes them out after every call."""

    def receive(self, envelope: Envelope, now: float) -> None:
        """Process one message; ``now`` is in seconds of a monotonic clock."""

    def tick(self, now: float) -> None:
        """Handle timeouts and retries; called several times a second."""


def as_array(frame: Frame, dtype: np.dtype[Any] | type, shape: tuple[int, ...]) -> NDArray[Any]:
    """View a frame as an array, without a copy. Raises ValueError if its length does not match.

    The array is read-only: some frames are, and for a mixture of both kinds Numba would compile every loop
    a second time, in the middle of a job.
    """
    array = np.frombuffer(frame, dtype).reshape(shape)
    array.flags.writeable = False
    return array
