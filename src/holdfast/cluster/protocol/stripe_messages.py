"""Messages between servers about stripes.

In a *lane* (an owner's messages to one parity server, in order, each exactly once): ``Differences``,
``Values``, ``Forget`` (→ ``Taken``). Outside of lanes, and retried until answered: ``ReadStripes`` asks an
owner for ``Values``, ``Recover`` asks a parity server for ``Syndromes``, ``Compare`` asks it for ``Agreed``.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.cluster.protocol.messages import Instant, LaneState


class StripePart(Struct, frozen=True, array_like=True):
    """Rows of one group that are the same member of their stripes; frames: blocks (uint32), records."""

    group: int
    parity: int
    member: int
    rows: int


class Differences(Struct, frozen=True, array_like=True, tag="change"):
    """Owner → parity server, in their lane: old XOR new of records, for one or more pushes.

    All lanes of an owner use the same flush numbers.
    """

    number: int
    """Position in the lane, from 1."""
    instant: Instant
    stable: int
    """The newest flush that all parity servers have."""
    parts: tuple[StripePart, ...]
    more: bool = False
    """Whether the next message continues this flush, which is too large for one; all count together."""


class Values(Struct, frozen=True, array_like=True, tag="values"):
    """Owner → parity server, in their lane: records as of this flush.

    Frames: the requested records that the owner has, and the indices of those it lacks (uint32).
    """

    number: int
    instant: Instant
    job: int
    member: int
    rows: int
    absent: int = 0


class Forget(Struct, frozen=True, array_like=True, tag="forget"):
    """Owner → parity server, in their lane: the parities of these stripes do not contain these records.

    Frames: for each part blocks (uint32).
    """

    number: int
    instant: Instant
    parts: tuple[StripePart, ...]


LaneMessage = Differences | Values | Forget


class Taken(Struct, frozen=True, array_like=True, tag="taken"):
    """Parity server → owner: acknowledges everything in the lane up to this number."""

    number: int


class ReadStripes(Struct, frozen=True, array_like=True, tag="read"):
    """Parity server → owner: send these records in our lane. Frame: blocks (uint32), ascending."""

    job: int
    group: int
    member: int
    rows: int


class Recover(Struct, frozen=True, array_like=True, tag="recover"):
    """Replacement → parity server: request the syndromes of these stripes without these members.

    Frame: blocks (uint32), ascending.
    """

    request: int
    group: int
    parity: int
    without: tuple[int, ...]
    rows: int


class Compare(Struct, frozen=True, array_like=True, tag="compare"):
    """Parity server → another parity server of the same stripes: do your parities match their members?

    Frame: blocks (uint32), ascending.
    """

    request: int
    group: int
    parity: int
    rows: int


class Agreed(Struct, frozen=True, array_like=True, tag="agreed"):
    """The answer to ``Compare``. Frame: which of the requested stripes match (uint32), ascending."""

    request: int
    parity: int
    rows: int


class Lacking(Struct, frozen=True, array_like=True):
    """Stripes of a request that cannot be answered; frame: which of them (uint32)."""

    member: int
    """The member that its owner lacks; -1: the parity is missing."""
    rows: int


class Syndromes(Struct, frozen=True, array_like=True, tag="syndromes"):
    """The answer to ``Recover``: for each stripe, the missing members' contributions to this parity.

    Frames: which of the requested stripes (uint32), syndromes, then one frame for each ``lacking``.
    """

    request: int
    parity: int
    rows: int
    without: tuple[LaneState, ...]
    """The state of the missing members' lanes that the syndromes correspond to."""
    lacking: tuple[Lacking, ...] = ()
