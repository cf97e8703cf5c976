"""How far a job has come: batches and samples that count, by what its nodes say."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.supervisor.members import ServerMember, WorkerMember


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
