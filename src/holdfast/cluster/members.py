"""What a supervisor knows: of nodes, of a cut that is being made, and what it must know after a crash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from msgspec import Struct

from holdfast.cluster.messages import Beat, Peer, Position, Role, ServerInView, ViewNumber, WorkerMark


class Durable(Struct, frozen=True, kw_only=True):
    """What a supervisor must know again after a crash."""

    epoch: int = 0
    servers: tuple[int, ...] = ()
    """The incarnation of each slot."""
    workers: tuple[int, ...] = ()
    endpoint: str = ""
    began: bool = False
    """Whether servers have begun: from then on what they hold is more than first values."""
    started: tuple[ServerInView, ...] = ()
    """Replacements that have taken over: who has heard of one has forgotten how far the dead server came."""


class Storage(Protocol):
    """Keeps the durable state."""

    def load(self) -> Durable | None:
        """What was saved last; None the first time."""

    def save(self, state: Durable) -> None:
        """Keep it: when this returns, a crash no longer loses it."""


@dataclass
class Member:
    """What is known of a slot."""

    role: Role
    slot: int
    incarnation: int
    since: float = 0.0
    """When this incarnation was asked for."""
    heard: float | None = None
    beat: Beat | None = None

    @property
    def peer(self) -> Peer:
        """The node that fills the slot."""
        return Peer(self.role, self.slot, self.incarnation)

    def follows(self, number: ViewNumber) -> bool:
        """Whether it has seen this view."""
        return self.beat is not None and self.beat.view >= number


@dataclass
class ServerMember(Member):
    """Of a server's slot."""

    stage: Literal["fencing", "settling", "started"] = "fencing"
    since_view: ViewNumber = ViewNumber()  # noqa: RUF009 (frozen)
    deaths: int = 0
    lost_at: float | None = None
    """When this supervisor asked for the incarnation; None: one before it did, and it may have started."""
    recovering: bool = False
    samples_then: int = 0
    """Of the job when it was lost."""
    recovered: bool = False
    """Whether it has said that it has all rows: beats may overtake each other, but rows stay."""
    wrong: tuple[int, int] = (0, 0)
    """Parities that did not agree with their members, and how many of those were made anew."""

    @property
    def marks(self) -> tuple[WorkerMark, ...]:
        """Where workers stand there; empty if nothing can be said."""
        return self.beat.marks if self.beat is not None and self.beat.started.epoch else ()


@dataclass
class WorkerMember(Member):
    """Of a worker's slot."""

    stage: Literal["fencing", "settling", "started"] = "fencing"
    since_view: ViewNumber = ViewNumber()  # noqa: RUF009 (frozen)
    deaths: int = 0
    died_at: int = -1


@dataclass
class Cut:
    """A consistent cut that is being made."""

    version: int
    view: ViewNumber
    positions: tuple[Position, ...] = ()
    """The last batch of each worker that is in it; empty while workers are still finishing theirs."""
    steps: int = 0
    """Batches that are in it, and their samples."""
    samples: int = 0


@dataclass
class Failure:
    """Why the job ends early."""

    kind: Literal["server", "worker", "lost", "network", "error"]
    peer: Peer
    text: str
