"""Everything that can go over the wire, as bytes: a small header, and raw arrays (*frames*) behind it."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from holdfast.cluster.messages import (
    Beat,
    Collect,
    Commit,
    Install,
    Kept,
    Lacks,
    Peer,
    Pull,
    Push,
    Pushed,
    Refused,
    Relay,
    Rows,
    Saved,
    Status,
    View,
)
from holdfast.cluster.stripe_messages import (
    Change,
    Forget,
    ReadStripes,
    Recover,
    Syndromes,
    Taken,
    Values,
)

Message = (
    Pull
    | Rows
    | Install
    | Lacks
    | Push
    | Commit
    | Pushed
    | Kept
    | Refused
    | Relay
    | Change
    | Values
    | Forget
    | Taken
    | ReadStripes
    | Recover
    | Syndromes
    | Beat
    | View
    | Collect
    | Saved
    | Status
)


class Header(Struct, frozen=True, array_like=True):
    """What the first frame of a message says; the other frames are its arrays."""

    job: str
    """A random name: what was meant for another job is dropped."""
    source: Peer
    target: Peer
    message: Message


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode(header: Header) -> bytes:
    """The first frame."""
    return _encoder.encode(header)


def decode(frame: bytes | memoryview) -> Header:
    """The header of a message; raises ``msgspec.DecodeError`` if it is none."""
    return _decoder.decode(frame)
