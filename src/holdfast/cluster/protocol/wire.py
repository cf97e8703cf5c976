"""The wire format: a small header, followed by raw arrays (*frames*); and which role may send which message
to which role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from holdfast.cluster.protocol.messages import (
    AskKept,
    CanResend,
    Claim,
    Claimed,
    Collect,
    Commit,
    Denied,
    Deposit,
    Deposited,
    Hello,
    Install,
    Kept,
    Lacks,
    LauncherBeat,
    NoCopy,
    Peer,
    Pull,
    PulledRows,
    Push,
    Pushed,
    Refused,
    Relay,
    Role,
    Saved,
    ServerBeat,
    Status,
    View,
    WorkerBeat,
)
from holdfast.cluster.protocol.stripe_messages import (
    Agreed,
    Compare,
    Differences,
    Forget,
    ReadStripes,
    Recover,
    Syndromes,
    Taken,
    Values,
)

Message = (
    Pull
    | PulledRows
    | Install
    | Hello
    | Lacks
    | NoCopy
    | AskKept
    | CanResend
    | Push
    | Commit
    | Pushed
    | Kept
    | Refused
    | Relay
    | Differences
    | Values
    | Forget
    | Taken
    | ReadStripes
    | Recover
    | Syndromes
    | Compare
    | Agreed
    | ServerBeat
    | WorkerBeat
    | LauncherBeat
    | View
    | Collect
    | Saved
    | Status
    | Claim
    | Claimed
    | Deposit
    | Deposited
    | Denied
)

_Routes = frozenset[tuple[Role, Role]]
_TO_SERVER: Final[_Routes] = frozenset({("worker", "server")})
_TO_WORKER: Final[_Routes] = frozenset({("server", "worker")})
_TO_VAULT: Final[_Routes] = frozenset({("supervisor", "vault")})
_FROM_VAULT: Final[_Routes] = frozenset({("vault", "supervisor")})
_AMONG_SERVERS: Final[_Routes] = frozenset({("server", "server")})

ROUTES: Final[Mapping[type[Message], _Routes]] = {
    Pull: _TO_SERVER,
    PulledRows: _TO_WORKER,
    Install: _TO_SERVER,
    Hello: _TO_SERVER,
    Lacks: _TO_WORKER,
    NoCopy: _TO_SERVER,
    AskKept: _TO_WORKER,
    CanResend: _TO_SERVER,
    Push: _TO_SERVER,
    Commit: _TO_SERVER,
    Pushed: _TO_WORKER,
    Kept: _TO_WORKER,
    Refused: _TO_WORKER,
    Relay: _TO_SERVER | _TO_WORKER | _AMONG_SERVERS,
    Differences: _AMONG_SERVERS,
    Values: _AMONG_SERVERS,
    Forget: _AMONG_SERVERS,
    Taken: _AMONG_SERVERS,
    ReadStripes: _AMONG_SERVERS,
    Recover: _AMONG_SERVERS,
    Syndromes: _AMONG_SERVERS,
    Compare: _AMONG_SERVERS,
    Agreed: _AMONG_SERVERS,
    ServerBeat: frozenset({("server", "supervisor")}),
    WorkerBeat: frozenset({("worker", "supervisor")}),
    LauncherBeat: frozenset({("launcher", "supervisor")}),
    View: frozenset({("supervisor", "server"), ("supervisor", "worker"), ("supervisor", "launcher")}),
    Collect: frozenset({("supervisor", "server")}),
    Saved: frozenset({("server", "supervisor")}),
    Status: frozenset({("supervisor", "launcher")}),
    Claim: _TO_VAULT,
    Deposit: _TO_VAULT,
    Claimed: _FROM_VAULT,
    Deposited: _FROM_VAULT,
    Denied: _FROM_VAULT,
}
"""Senders and receivers of each message; from any other sender it is dropped (see ``admission``)."""


class Header(Struct, frozen=True, array_like=True):
    """The first frame of a message; the other frames are its arrays."""

    job: str
    """The job's random name: messages of other jobs are dropped."""
    source: Peer
    target: Peer
    message: Message
    sizes: tuple[int, ...] = ()
    """Size of each array in bytes."""
    places: tuple[int, ...] = ()
    """Where each array is in the memory that the sender shares; -1: in the next frame. Empty: all are in
    frames."""
    loan: int = 0
    """If not 0, the sender keeps these arrays until the receiver's transport returns this number."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode(header: Header) -> bytes:
    """Encode the first frame of a message."""
    return _encoder.encode(header)


def decode(frame: bytes | memoryview) -> Header:
    """Decode the first frame of a message. Raises ``msgspec.DecodeError`` if it is malformed."""
    return _decoder.decode(frame)
