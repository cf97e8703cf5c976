"""The CURVE keys of a job over TCP, by which nodes authenticate.

The launcher makes a key pair for every node, in memory and for this run only. It passes each node its own
pair and all public keys through the pipe with the node's assignment. Keys are never in a file, in an
environment variable or on a command line. A key belongs to one role and slot: a worker that claims to be the
supervisor, or another worker, is rejected. All incarnations of a slot share one pair; the protocol decides
which of them counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import zmq
from msgspec import Struct

from holdfast.cluster.protocol.messages import Peer, Role
from holdfast.errors import ConfigError

Name = tuple[Role, int]
"""A node's role and slot."""


class KeyHolder(Struct, frozen=True, array_like=True):
    """A node's public key."""

    role: Role
    slot: int
    public: str


class Keys(Struct, frozen=True, dict=True):  # dict: for cached properties
    """The keys of one node: its own pair, and all public keys, each 40 characters of Z85."""

    public: str
    secret: str
    members: tuple[KeyHolder, ...]

    def __repr__(self) -> str:
        return f"Keys(public={self.public!r}, secret=…, members of {len(self.members)} nodes)"

    @cached_property
    def names(self) -> dict[str, Name]:
        """The node of each public key."""
        return {member.public: (member.role, member.slot) for member in self.members}

    def public_of(self, role: Role, slot: int) -> str:
        """The public key of a node. Raises ConfigError if it is not a member of the job."""
        for member in self.members:
            if (member.role, member.slot) == (role, slot):
                return member.public
        raise ConfigError(f"{role} {slot} has no key: expected a member of the job")


class KeyPair(Struct, frozen=True, array_like=True):
    """A node's own keys."""

    role: Role
    slot: int
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair({self.role!r}, {self.slot}, {self.public!r}, secret=…)"


class JobKeys:
    """The keys of all nodes of one job, as the launcher has them.

    Args:
        servers: number of servers.
        workers: number of workers.
        vaults: number of vaults.
        pairs: those that another launcher of the same job has made.
    """

    def __init__(self, servers: int, workers: int, vaults: int = 0, pairs: Sequence[KeyPair] = ()) -> None:
        if not zmq.has("curve"):
            raise ConfigError(
                "this build of ZeroMQ has no CURVE, which TCP requires: install pyzmq from its wheels, or "
                'use bind="ipc"'
            )
        self.pairs = tuple(pairs) or tuple(
            KeyPair(*name, *_pair()) for name in _names(servers, workers, vaults)
        )
        self._by_name: dict[Name, KeyPair] = {(pair.role, pair.slot): pair for pair in self.pairs}
        self._members = tuple(KeyHolder(pair.role, pair.slot, pair.public) for pair in self.pairs)

    def of(self, peer: Peer) -> Keys:
        """The keys that a node needs."""
        pair = self._by_name[peer.role, peer.slot]
        return Keys(pair.public, pair.secret, self._members)


def _names(servers: int, workers: int, vaults: int) -> Iterator[Name]:
    yield "launcher", 0
    yield "supervisor", 0
    yield from (("server", slot) for slot in range(servers))
    yield from (("worker", slot) for slot in range(workers))
    yield from (("vault", slot) for slot in range(vaults))


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode("ascii"), secret.decode("ascii")
