"""What servers tell each other of stripes.

In a *lane*, which is an owner's messages to one parity server in order, each once: ``Differences``,
``Values``, ``Forget`` (→ ``Taken``). Outside of it ``ReadStripes`` asks an owner for ``Values``, ``Recover``
asks a parity server for ``Syndromes``, and ``Compare`` for ``Agreed``, again until the answer is there.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.cluster.protocol.messages import Instant, LaneState


class StripePart(Struct, frozen=True, array_like=True):
    """Some rows of one group that are the same member of their stripes; frames: blocks (uint32), records."""

    group: int
    parity: int
    member: int
    rows: int


class Differences(Struct, frozen=True, array_like=True, tag="change"):
    """Owner → parity server, in their lane: old XOR new of records, of one or many pushes.

    Flushes are numbered alike in all lanes of an owner.
    """

    number: int
    """In the lane, from 1."""
    instant: Instant
    stable: int
    """The newest flush that all parity servers have."""
    parts: tuple[StripePart, ...]
    more: bool = False
    """Whether the next one is of the same flush, which was too large for one message: all count together."""


class Values(Struct, frozen=True, array_like=True, tag="values"):
    """Owner → parity server, in their lane: records as they were after this flush.

    Frames: the records that the owner has, and which of those that were asked for it lacks (uint32).
    """

    number: int
    instant: Instant
    job: int
    member: int
    rows: int
    absent: int = 0


class Forget(Struct, frozen=True, array_like=True, tag="forget"):
    """Owner → parity server, in their lane: these records are not what the parities of their stripes contain.

    Frames: for each part blocks (uint32).
    """

    number: int
    instant: Instant
    parts: tuple[StripePart, ...]


LaneMessage = Differences | Values | Forget


class Taken(Struct, frozen=True, array_like=True, tag="taken"):
    """Parity server → owner: everything in the lane up to this number has arrived and counts."""

    number: int


class ReadStripes(Struct, frozen=True, array_like=True, tag="read"):
    """Parity server → owner: put these records into our lane. Frame: blocks (uint32), ascending."""

    job: int
    group: int
    member: int
    rows: int


class Recover(Struct, frozen=True, array_like=True, tag="recover"):
    """Replacement → parity server: what is left of these stripes without these members?

    Frame: blocks (uint32), ascending.
    """

    request: int
    group: int
    parity: int
    without: tuple[int, ...]
    rows: int


class Compare(Struct, frozen=True, array_like=True, tag="compare"):
    """Parity server → parity server of the same stripes: do your parities agree with their members?

    Frame: blocks (uint32), ascending.
    """

    request: int
    group: int
    parity: int
    rows: int


class Agreed(Struct, frozen=True, array_like=True, tag="agreed"):
    """The answer. Frame: which of the stripes asked for agree (uint32), ascending."""

    request: int
    parity: int
    rows: int


class Lacking(Struct, frozen=True, array_like=True):
    """Stripes of a request that have no answer; the frame says which of them (uint32)."""

    member: int
    """That the owner lacks; -1: the parity is not there."""
    rows: int


class Syndromes(Struct, frozen=True, array_like=True, tag="syndromes"):
    """The answer: of each stripe the sum of the parts that the missing members have in this parity.

    Frames: which of the stripes asked for (uint32), syndromes, then one for each ``lacking``.
    """

    request: int
    parity: int
    rows: int
    without: tuple[LaneState, ...]
    """Up to where the missing members' owners had come."""
    lacking: tuple[Lacking, ...] = ()
