"""``holdfast emulate``: real training, in one process, that loses rows as if servers had failed.

Training of a small model stands for the hours of a cluster. Saves are copies in memory; a failure of some
servers puts their rows back to what was last saved of them (partial recovery), or everything back, to be
trained again (full recovery). What that takes in hours is counted by ``timeline``. All ways of a seed have
the same samples, the same start and the same failures: differences of AUC are the failures' doing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from holdfast.checkpoint.memory.priority import Priority, large_tables, make_priority
from holdfast.coding.placement import Placement
from holdfast.errors import TrainingDiverged
from holdfast.kernels.priority import count_rows
from holdfast.sim.changes import RowChanges, correlation
from holdfast.sim.draws import Failures
from holdfast.sim.student import Lesson, Student
from holdfast.sim.timeline import (
    EmulatedCluster,
    RecoveryCosts,
    Save,
    TimelineCosts,
    Way,
    WayName,
    costs,
    timeline,
    way_of,
)
from holdfast.sim.traces import Failure
from holdfast.training.parallel import run_all


class Run(NamedTuple):
    """One training run; without a way there are no failures."""

    lesson: Lesson
    cluster: EmulatedCluster
    way: Way | None
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class EmulationOutcome:
    """The result of a run."""

    auc: float
    updates_lost: float = 0.0
    """Of all updates of rows, the share that was undone and not done again."""
    saved_share: float = 0.0
    """Bytes saved, over those of all tables."""
    tracking_bytes: int = 0
    """Memory of the priorities."""
    access_change: float = 0.0
    """Correlation of how often a row is looked up and how far it moves, without failures."""
    access_update: float = 0.0
    """The same with the sizes of all its updates added up."""


@dataclass(frozen=True, slots=True)
class Emulation:
    """The result of one way with one seed."""

    way: Way
    seed: int
    failures: tuple[Failure, ...]
    costs: TimelineCosts
    outcome: EmulationOutcome
    plain: EmulationOutcome
    """Of the same training without failures."""

    @property
    def auc_loss(self) -> float:
        """The AUC lost by failures."""
        return self.plain.auc - self.outcome.auc


def emulate(
    lesson: Lesson,
    cluster: EmulatedCluster,
    failures: Failures,
    *,
    ways: Sequence[WayName],
    seeds: Sequence[int],
    processes: int | None = None,
    on_done: Callable[[int, int], None] = lambda done, of: None,
) -> list[Emulation]:
    """Each way with each seed, seed after seed; trainings run side by side on so many processes."""
    cluster = replace(cluster, share=large_share(lesson))
    lessons = {seed: replace(lesson, seed=seed) for seed in seeds}
    drawn = {seed: failures.draw(cluster, np.random.default_rng([seed, 7])) for seed in seeds}
    chosen = [way_of(name, cluster) for name in ways]
    plain = {seed: Run(lessons[seed], cluster, None, ()) for seed in seeds}
    runs = {(seed, way): Run(lessons[seed], cluster, way, drawn[seed]) for seed in seeds for way in chosen}
    # Runs of a seed one after the other: they share batches.
    tasks = [task for s in seeds for task in (plain[s], *(runs[s, way] for way in chosen))]
    outcomes: dict[Run, EmulationOutcome] = {}
    for run, outcome in run_all(train, tasks, processes):
        outcomes[run] = outcome
        on_done(len(outcomes), len(tasks))
    return [
        Emulation(
            way,
            seed,
            drawn[seed],
            costs(way, drawn[seed], cluster),
            outcomes[run],
            outcomes[plain[seed]],
        )
        for (seed, way), run in runs.items()
    ]


def large_share(lesson: Lesson) -> float:
    """Of all bytes, that the tables have whose rows are prioritised."""
    rows = lesson.table_rows
    return sum(rows[table] for table in large_tables(rows)) / sum(rows)


def train(run: Run) -> EmulationOutcome:
    """Train one run to its end."""
    return _Training(run).run()


class _Training:
    """A student, what is saved of it, and what was learned since."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._student = student = Student(run.lesson)
        self._rows = len(student.records)
        # The start is saved, as it were: it can be made again from its seed.
        self._image = student.records.copy()
        self._network_image = student.network.copy()
        self._since = np.zeros(self._rows, np.uint32)
        self._updates = self._lost = self._saved = 0
        self._changes = RowChanges(student) if run.way is None else None
        self._owner = Placement(run.cluster.servers).owner(np.arange(self._rows))
        self._priorities = dict(self._make_priorities())
        self._small = np.ones(self._rows, bool)
        for table in self._priorities:
            self._small[student.firsts[table] : student.firsts[table + 1]] = False

    def _make_priorities(self) -> Iterator[tuple[int, Priority]]:
        way, student = self._run.way, self._student
        if way is None or way.prioritize is None:
            return
        for table in large_tables(self._run.lesson.table_rows):
            first, end = student.firsts[table], student.firsts[table + 1]
            weights = student.weights[first:end]
            yield (
                table,
                make_priority(
                    way.prioritize,
                    end - first,
                    self._run.cluster.fraction,
                    lambda weights=weights: weights,  # type: ignore[misc]
                    seed=self._run.lesson.seed,
                ),
            )

    def run(self) -> EmulationOutcome:
        way, cluster, steps = self._run.way, self._run.cluster, self._run.lesson.steps
        step = 0
        for event in () if way is None else timeline(way, self._run.failures, cluster):
            at = math.ceil(event.hours / cluster.hours * steps)
            self._learn(step, at)
            step = at
            if isinstance(event, Save):
                self._save()
            elif way is not None and way.partial:
                self._recover(event)
            else:
                step = math.ceil(event.back_to / cluster.hours * steps)
                self._go_back()
        self._learn(step, steps)
        score = self._student.test()
        if math.isnan(score):
            raise TrainingDiverged(f"the scores are no numbers: lower lr (it is {self._run.lesson.lr:g})")
        outcome = EmulationOutcome(
            score,
            self._lost / max(1, self._updates),
            self._saved / self._rows,
            sum(priority.nbytes for priority in self._priorities.values()),
        )
        if (moved := self._changes) is None:
            return outcome
        return replace(
            outcome,
            access_change=correlation(moved.lookups, moved.changes),
            access_update=correlation(moved.lookups, moved.updates),
        )

    def _learn(self, first: int, end: int) -> None:
        for step in range(first, end):
            ids, changed = self._student.train(step)
            self._updates += len(changed)
            count_rows(self._since, changed)
            for table, priority in self._priorities.items():
                priority.touched(ids[table])
            if self._changes is not None:
                self._changes.note(ids, changed)

    def _save(self) -> None:
        student = self._student
        if not self._priorities:
            self._keep(slice(None))
            self._network_image[:] = student.network
            return
        self._keep(np.flatnonzero(self._small))
        for table, priority in self._priorities.items():
            chosen = priority.choose()
            self._keep(chosen + student.firsts[table])
            priority.saved(chosen)

    def _keep(self, rows: slice | np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        self._image[rows] = self._student.records[rows]
        self._since[rows] = 0
        self._saved += self._rows if isinstance(rows, slice) else len(rows)

    def _recover(self, event: RecoveryCosts) -> None:
        """Revert only the failed servers' rows, each to its last save."""
        student = self._student
        gone = np.isin(self._owner, event.servers)
        self._lost += int(self._since[gone].sum())
        student.records[gone] = self._image[gone]
        self._since[gone] = 0
        for table, priority in self._priorities.items():
            priority.saved(np.flatnonzero(gone[student.firsts[table] : student.firsts[table + 1]]))

    def _go_back(self) -> None:
        """Revert everything, including the network."""
        self._student.records[:] = self._image
        self._student.network[:] = self._network_image
        self._student.load_network()
        self._since[:] = 0
