"""The CURVE keys of a job that talks over TCP: who a node is, and how it proves it.

Whoever starts a job makes a pair of keys for every node of it, in memory and for this run alone, and hands
each its own together with everybody's public ones through the pipe by which it is told what to be. Nothing
of it is ever in a file, in an environment or in a command line. A key stands for one role and slot: a worker
that claims to be the supervisor, or another worker, is not believed. All incarnations of a slot have the same
pair; which of them counts is the protocol's to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import zmq
from msgspec import Struct

from holdfast.cluster.protocol.messages import Peer, Role
from holdfast.errors import ConfigError

Name = tuple[Role, int]
"""A node by its role and slot."""


class KeyHolder(Struct, frozen=True, array_like=True):
    """A node's public key."""

    role: Role
    slot: int
    public: str


class Keys(Struct, frozen=True, dict=True):  # a dict for what is computed once
    """What one node holds: its own pair, and everybody's public key, each 40 letters of Z85."""

    public: str
    secret: str
    members: tuple[KeyHolder, ...]

    def __repr__(self) -> str:
        return f"Keys(public={self.public!r}, secret=…, members of {len(self.members)} nodes)"

    @cached_property
    def names(self) -> dict[str, Name]:
        """The node that a public key stands for."""
        return {member.public: (member.role, member.slot) for member in self.members}

    def public_of(self, role: Role, slot: int) -> str:
        """The key of a node; raises ConfigError if it is no member of the job."""
        for member in self.members:
            if (member.role, member.slot) == (role, slot):
                return member.public
        raise ConfigError(f"{role} {slot} has no key: expected a member of the job")


class JobKeys:
    """The keys of all nodes of one job, as whoever starts it has them.

    Args:
        servers: how many there are.
        workers: how many there are.
    """

    def __init__(self, servers: int, workers: int) -> None:
        if not zmq.has("curve"):
            raise ConfigError(
                "this build of ZeroMQ has no CURVE, which TCP takes: install pyzmq from its wheels, or use "
                'bind="ipc"'
            )
        self._pairs = {name: _pair() for name in _names(servers, workers)}
        self._members = tuple(KeyHolder(*name, public) for name, (public, _) in self._pairs.items())

    def of(self, peer: Peer) -> Keys:
        """What a node is to hold."""
        public, secret = self._pairs[peer.role, peer.slot]
        return Keys(public, secret, self._members)


def _names(servers: int, workers: int) -> Iterator[Name]:
    yield "launcher", 0
    yield "supervisor", 0
    yield from (("server", slot) for slot in range(servers))
    yield from (("worker", slot) for slot in range(workers))


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode("ascii"), secret.decode("ascii")
