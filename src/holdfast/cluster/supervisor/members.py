"""The supervisor's knowledge of nodes, and of a cut in progress."""

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
    """The supervisor's knowledge of a slot."""

    role: Role
    slot: int
    incarnation: int
    since: float = 0.0
    """When this incarnation was requested."""
    heard: float | None = None
    beat: ServerBeat | WorkerBeat | None = None
    stage: Literal["fencing", "settling", "started"] = "fencing"
    since_view: ViewNumber = ViewNumber()  # noqa: RUF009 (frozen)
    """The view in which it reached its stage: others must have seen it before the next stage."""
    deaths: int = 0

    @property
    def peer(self) -> Peer:
        """The node in the slot."""
        return Peer(self.role, self.slot, self.incarnation)

    def follows(self, number: ViewNumber) -> bool:
        """Whether it has seen this view."""
        return self.beat is not None and self.beat.view >= number

    def event(self, name: str, **figures: Any) -> tuple[str, dict[str, Any]]:
        """An event about it for the run log."""
        return name, {"slot": self.slot, "incarnation": self.incarnation, **figures}


@dataclass
class ServerMember(Member):
    """The supervisor's knowledge of a server's slot."""

    beat: ServerBeat | None = None
    lost_at: float | None = None
    """When this supervisor requested the incarnation; None: an earlier one did, and it may have started."""
    recovering: bool = False
    samples_then: int = 0
    """The job's samples when it was lost."""
    recovered: bool = False
    """Whether it has reported all rows once: beats may arrive out of order, but rows stay."""
    wrong: tuple[int, int] = (0, 0)
    """Parities that did not match their members, and how many of those were repaired."""
    updates_lost: int = 0
    """Pushes that its network lacks for good."""

    @property
    def marks(self) -> tuple[WorkerMark, ...]:
        """The workers' marks at this server; empty if unknown."""
        return self.beat.marks if self.beat is not None and self.beat.started.epoch else ()

    @property
    def ready(self) -> bool:
        """Whether it is running, and has finished reading from a checkpoint."""
        return self.beat is not None and self.beat.state != "restoring"

    @property
    def whole(self) -> bool:
        """Whether it has all of its rows."""
        whole = self.beat is not None and not self.beat.redundancy.not_installed
        return whole and self.stage == "started" and bool(self.marks) and not self.recovering

    @property
    def ahead(self) -> int:
        """The number of pushes that its network contains and that do not count yet."""
        return self.beat.redundancy.updates_ahead if self.beat is not None else 0

    @property
    def sound(self) -> bool:
        """Whether it has all of its rows and parities, so that another server may die."""
        return self.whole and self.beat is not None and not self.beat.redundancy.parities

    @property
    def makes_wait(self) -> bool:
        """Whether workers may have to wait for it although they reach it: it has not started, or lacks rows
        that do not come from workers. Reading a checkpoint may take minutes."""
        if self.stage != "started" or self.beat is None:
            return True
        lacking = self.beat.redundancy.rows - self.beat.redundancy.not_installed
        return self.recovering and lacking > 0


@dataclass
class WorkerMember(Member):
    """The supervisor's knowledge of a worker's slot."""

    beat: WorkerBeat | None = None
    died_at: int = -1
    """The last batch that counted when it last died."""

    def holds(self, since: ViewNumber) -> bool:
        """Whether it has seen this view, finished its batch and started no other."""
        holds = self.beat is not None and self.beat.state in ("held", "done")
        return holds and self.stage == "started" and self.follows(since)


@dataclass
class Cut:
    """A consistent cut in progress."""

    version: int
    view: ViewNumber
    positions: tuple[Position, ...] = ()
    """The last batch of each worker in the cut; empty while workers are still finishing theirs."""
    steps: int = 0
    """Batches in the cut, and their samples."""
    samples: int = 0


@dataclass
class JobFailure:
    """Why the job ends early."""

    kind: Literal["server", "worker", "lost", "network", "stalled", "error"]
    peer: Peer
    text: str


class Tally:
    """Counts completed batches and samples.

    Args:
        plan: the job's plan.
        servers: the servers' members, whose beats say what was applied.
        workers: the workers' members.
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
        """Batches that count so far, of all workers and of the runs that this one resumes."""
        return self._steps_before + sum(self.sequence(worker) for worker in self._workers)

    def samples(self) -> int:
        """Samples of those batches."""
        marks = [s.marks for s in self._servers if s.marks]
        counted = (min((m[w.slot].samples for m in marks), default=0) for w in self._workers)
        return self._samples_before + sum(counted)

    def sequence(self, worker: WorkerMember) -> int:
        """The last batch of a worker that all servers have applied."""
        marks = [s.marks[worker.slot].sequence for s in self._servers if s.marks]
        said = worker.beat.sequence if worker.beat is not None else 0  # often earlier than the servers' beats
        # A replaced server may report less: its missing pushes are being sent again.
        most = max(min(marks, default=0), said, self._sequences[worker.slot])
        self._sequences[worker.slot] = most
        return most

    def done(self) -> float | None:
        """The completed part of the run, as workers report it; None: unknown."""
        parts = [w.beat.figures.progress for w in self._workers if w.beat is not None]
        by_steps = self.steps() / self._most_steps if self._most_steps else 0.0
        return max(max(parts, default=0.0), by_steps) or None
