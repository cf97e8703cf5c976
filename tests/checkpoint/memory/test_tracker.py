"""Which rows have changed: none is forgotten, whatever becomes of a save (hole 23)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.records import Field, make_groups
from holdfast.checkpoint.memory.tracker import RowSet, Tracker

NARROW, WIDE = (Field("weight", "F32", 2),), (Field("weight", "F32", 4),)
GROUPS = make_groups([("a", 70, NARROW), ("b", 5, WIDE), ("c", 64, NARROW), ("empty", 0, NARROW)])


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def test_tables_of_a_group_do_not_touch_each_other() -> None:
    tracker = Tracker(GROUPS)
    tracker.mark("a", ids(0, 69, 70, -1, 2**62, -(2**63)))  # ids outside are not of this table
    tracker.mark("c", ids(0, 63, 64))
    tracker.mark("b", ids(4, 5))
    tracker.mark("empty", ids(0))
    assert [found.tolist() for found in tracker.take()] == [[0, 69, 70, 133], [4]]


def test_a_table_as_a_whole() -> None:
    tracker = Tracker(GROUPS)
    tracker.suspect("c")
    tracker.suspect("empty")
    assert [found.tolist() for found in tracker.take()] == [list(range(70, 134)), []]


def test_marks_during_a_save_are_in_the_next() -> None:
    tracker = Tracker(GROUPS)
    tracker.mark("a", ids(1, 2))
    assert tracker.take()[0].tolist() == [1, 2]
    tracker.mark("a", ids(2, 3))
    with pytest.raises(RuntimeError, match="neither been confirmed nor given back"):
        tracker.take()
    tracker.confirm()
    assert tracker.take()[0].tolist() == [2, 3]
    tracker.confirm()
    assert tracker.take()[0].tolist() == []


def test_what_was_not_saved_is_marked_again() -> None:
    tracker = Tracker(GROUPS)
    tracker.mark("a", ids(1, 2))
    tracker.take()
    tracker.mark("a", ids(2, 3))
    tracker.give_back()
    tracker.give_back()  # a second time changes nothing
    assert tracker.take()[0].tolist() == [1, 2, 3]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("ac"), st.lists(st.integers(-3, 75), max_size=10)),
            st.tuples(st.sampled_from(["take", "confirm", "give back"]), st.just([])),
        ),
        max_size=60,
    )
)
def test_against_sets(events: list[tuple[str, list[int]]]) -> None:
    tracker = Tracker(GROUPS)
    marked: set[int] = set()
    taken: set[int] | None = None
    for event, rows in events:
        if event == "take":
            if taken is None:
                taken, marked = marked, set()
                assert tracker.take()[0].tolist() == sorted(taken)
        elif event == "confirm":
            tracker.confirm()
            taken = None
        elif event == "give back":
            tracker.give_back()
            marked |= taken or set()
            taken = None
        else:
            tracker.mark(event, np.array(rows, np.int64))
            first, size = (0, 70) if event == "a" else (70, 64)
            marked |= {first + row for row in rows if 0 <= row < size}
    if taken is None:
        assert tracker.take()[0].tolist() == sorted(marked)


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 128])
def test_sets_of_any_size(rows: int) -> None:
    chosen = RowSet(rows)
    assert len(chosen) == 0
    chosen.add_range(0, rows)
    assert len(chosen) == rows
    assert chosen.ids().tolist() == list(range(rows))


@given(st.sets(st.integers(0, 299)), st.integers(0, 300), st.integers(0, 300))
def test_neighbours_are_put_in_and_looked_for_word_by_word(ids: set[int], one: int, other: int) -> None:
    first, behind = sorted((one, other))
    rows = RowSet(300)
    rows.add(np.array(sorted(ids), np.int64))
    if first < behind:
        lacking = [i for i in range(first, behind) if i not in ids]
        assert rows.gaps(first, behind - first) == (
            (lacking[0], lacking[-1], len(lacking)) if lacking else (first, first, 0)
        )
    rows.add_range(first, behind - first)
    assert rows.ids().tolist() == sorted(ids | set(range(first, behind)))
    assert first == behind or rows.gaps(first, behind - first)[2] == 0
