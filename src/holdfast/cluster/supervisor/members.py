"""What a supervisor knows of nodes, and of a cut that is being made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.cluster.protocol.messages import (
    Peer,
    Position,
    Role,
    ServerBeat,
    ViewNumber,
    WorkerBeat,
    WorkerMark,
)
from holdfast.cluster.protocol.plan import JobPlan


@dataclass
class Member:
    """What is known of a slot."""

    role: Role
    slot: int
    incarnation: int
    since: float = 0.0
    """When this incarnation was asked for."""
    heard: float | None = None
    beat: ServerBeat | WorkerBeat | None = None
    stage: Literal["fencing", "settling", "started"] = "fencing"
    since_view: ViewNumber = ViewNumber()  # noqa: RUF009 (frozen)
    """In which it came to its stage: others must know of that before it gets to the next."""
    deaths: int = 0

    @property
    def peer(self) -> Peer:
        """The node that fills the slot."""
        return Peer(self.role, self.slot, self.incarnation)

    def follows(self, number: ViewNumber) -> bool:
        """Whether it has seen this view."""
        return self.beat is not None and self.beat.view >= number

    def event(self, name: str, **figures: Any) -> tuple[str, dict[str, Any]]:
        """Something that the run's log says of it."""
        return name, {"slot": self.slot, "incarnation": self.incarnation, **figures}


@dataclass
class ServerMember(Member):
    """Of a server's slot."""

    beat: ServerBeat | None = None
    lost_at: float | None = None
    """When this supervisor asked for the incarnation; None: one before it did, and it may have started."""
    recovering: bool = False
    samples_then: int = 0
    """Of the job when it was lost."""
    recovered: bool = False
    """Whether it has said that it has all rows: beats may overtake each other, but rows stay."""
    wrong: tuple[int, int] = (0, 0)
    """Parities that did not agree with their members, and how many of those were made anew."""
    updates_lost: int = 0
    """Pushes that its network lacks for good."""

    @property
    def marks(self) -> tuple[WorkerMark, ...]:
        """Where workers stand there; empty if nothing can be said."""
        return self.beat.marks if self.beat is not None and self.beat.started.epoch else ()

    @property
    def ready(self) -> bool:
        """Whether it is there, and reads nothing from a checkpoint any more."""
        return self.beat is not None and self.beat.state != "restoring"

    @property
    def whole(self) -> bool:
        """Whether it has all of its rows."""
        whole = self.beat is not None and not self.beat.redundancy.not_installed
        return whole and self.stage == "started" and bool(self.marks) and not self.recovering

    @property
    def ahead(self) -> int:
        """Pushes that its network contains and that do not count yet."""
        return self.beat.redundancy.updates_ahead if self.beat is not None else 0

    @property
    def sound(self) -> bool:
        """Whether it has all of its rows and parities: another may be lost."""
        return self.whole and self.beat is not None and not self.beat.redundancy.parities

    @property
    def makes_wait(self) -> bool:
        """Whether workers may well wait for it though they reach it: it is not there yet, or lacks rows that
        do not come from them. A checkpoint may take minutes to read."""
        if self.stage != "started" or self.beat is None:
            return True
        lacking = self.beat.redundancy.rows - self.beat.redundancy.not_installed
        return self.recovering and lacking > 0


@dataclass
class WorkerMember(Member):
    """Of a worker's slot."""

    beat: WorkerBeat | None = None
    died_at: int = -1
    """The last batch that counted when it last died."""

    def holds(self, since: ViewNumber) -> bool:
        """Whether it has finished its batch and goes on with no other, knowing of this view."""
        holds = self.beat is not None and self.beat.state in ("held", "done")
        return holds and self.stage == "started" and self.follows(since)


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
class JobFailure:
    """Why the job ends early."""

    kind: Literal["server", "worker", "lost", "network", "stalled", "error"]
    peer: Peer
    text: str


class Tally:
    """Counts what has been done.

    Args:
        plan: the job's.
        servers: what is known of them; they say what was applied.
        workers: what is known of them.
    """

    def __init__(
        self, plan: JobPlan, servers: Sequence[ServerMember], workers: Sequence[WorkerMember]
    ) -> None:
        self._servers, self._workers = servers, workers
        self._steps_before = plan.resume.steps if plan.resume else 0
        self._samples_before = plan.resume.samples if plan.resume else 0
        self._most_steps = plan.training.get("max_steps")
        self._sequences = [0] * plan.workers

    def steps(self) -> int:
        """Batches that count so far, of all workers together and of the runs that this one goes on from."""
        return self._steps_before + sum(self.sequence(worker) for worker in self._workers)

    def samples(self) -> int:
        """Samples of those batches."""
        marks = [s.marks for s in self._servers if s.marks]
        counted = (min((m[w.slot].samples for m in marks), default=0) for w in self._workers)
        return self._samples_before + sum(counted)

    def sequence(self, worker: WorkerMember) -> int:
        """The last batch of a worker that all servers have applied."""
        marks = [s.marks[worker.slot].sequence for s in self._servers if s.marks]
        said = worker.beat.sequence if worker.beat is not None else 0  # often before servers say it
        # A server that was replaced may say less: what it lacks is being pushed again.
        most = max(min(marks, default=0), said, self._sequences[worker.slot])
        self._sequences[worker.slot] = most
        return most

    def done(self) -> float | None:
        """How much of the whole run is done, by what workers say; None: they do not know."""
        parts = [w.beat.figures.progress for w in self._workers if w.beat is not None]
        by_steps = self.steps() / self._most_steps if self._most_steps else 0.0
        return max(max(parts, default=0.0), by_steps) or None
