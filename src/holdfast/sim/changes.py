"""How often rows are looked up in a training, and how far that moves them (CPR, section 4.2, Figure 6)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.memory.priority import large_tables
from holdfast.kernels.priority import count_rows
from holdfast.sim.student import Student

Floats = NDArray[np.float64]


class RowChanges:
    """Of the rows of a student's large tables, from now on; call ``note`` after each of its steps."""

    def __init__(self, student: Student) -> None:
        self._student = student
        firsts = student.firsts
        self._large = large_tables([end - first for first, end in itertools.pairwise(firsts)])
        self._rows = np.concatenate([np.arange(firsts[t], firsts[t + 1]) for t in self._large])
        self._lookups = np.zeros(firsts[-1], np.uint32)
        self._start = student.weights.copy()
        self._last = self._start.copy()
        self._updates = np.zeros(firsts[-1])

    def note(self, ids: Sequence[NDArray[np.int64]], changed: NDArray[np.uint32]) -> None:
        """Record the result of a training step."""
        for table in self._large:
            count_rows(self._lookups, ids[table] + self._student.firsts[table])
        now = self._student.weights[changed]
        self._updates[changed] += _norms(now - self._last[changed])
        self._last[changed] = now

    @property
    def lookups(self) -> Floats:
        """The number of lookups of each row."""
        return np.asarray(self._lookups[self._rows], np.float64)

    @property
    def changes(self) -> Floats:
        """The norm of what each row is now less what it was at the start: what SCAR goes by."""
        return _norms(self._student.weights[self._rows] - self._start[self._rows])

    @property
    def updates(self) -> Floats:
        """The sum of the norms of all updates of each row, whether or not they cancel out."""
        return np.asarray(self._updates[self._rows])


def _norms(rows: NDArray[np.float32]) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):  # training that diverges is told of by its scores
        return np.asarray(np.linalg.norm(rows, axis=1), np.float64)


def correlation(some: Sequence[float] | Floats, others: Sequence[float] | Floats) -> float:
    """Pearson's correlation; 0 if one of the two is constant."""
    if np.ptp(some) == 0 or np.ptp(others) == 0:
        return 0.0
    return float(np.corrcoef(some, others)[0, 1])
