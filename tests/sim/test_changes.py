"""Lookups of rows, and how far they move."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.checkpoint.memory.priority import large_tables
from holdfast.sim.changes import RowChanges, correlation
from holdfast.sim.student import Lesson, Student

LESSON = Lesson(scale=2000.0, samples=10_000, batch_size=64, test_samples=5000)


def test_lookups_and_changes_are_of_the_same_rows() -> None:
    student = Student(LESSON)
    start = student.weights.copy()
    moved = RowChanges(student)
    counts = np.zeros(len(start), np.int64)
    large = large_tables(LESSON.table_rows)
    for step in range(20):
        ids, changed = student.train(step)
        moved.note(ids, changed)
        for table in large:
            np.add.at(counts, ids[table] + student.firsts[table], 1)
    rows = np.concatenate([np.arange(student.firsts[t], student.firsts[t + 1]) for t in large])
    assert (moved.lookups == counts[rows]).all()
    assert moved.lookups.sum() == 20 * LESSON.batch_size * len(large)
    assert np.allclose(moved.changes, np.linalg.norm((student.weights - start)[rows], axis=1))
    assert ((moved.lookups > 0) == (moved.changes > 0)).mean() > 0.99
    assert (moved.updates >= moved.changes * 0.999).all()  # the way is no shorter than where it leads


def test_correlation() -> None:
    assert correlation([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]) == pytest.approx(1)
    assert correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)
    assert correlation([1.0, 2.0, 3.0], [5.0, 5.0, 5.0]) == 0
