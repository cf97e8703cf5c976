"""Which rows are saved first (CPR, section 4.2): each way against its obvious twin."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.memory.priority import (
    LargestChange,
    MostUsed,
    Priority,
    SubSampled,
    large_tables,
    make_priority,
)
from holdfast.errors import ConfigError
from holdfast.kernels.priority import WAYS
from holdfast.options import PRIORITIES, PriorityName


def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def zipf(rng: np.random.Generator, rows: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Rows of which the first are the most frequent."""
    chances = 1 / np.arange(1, rows + 1)
    return rng.choice(rows, count, p=chances / chances.sum())


def test_the_most_used_come_first_and_begin_anew_when_saved() -> None:
    priority = MostUsed(rows=10, fraction=0.2)
    priority.touched(ids(3, 3, 3, 7, 7, 1, -1, 10, 2**62))
    assert priority.choose().tolist() == [3, 7]
    assert priority.choose().tolist() == [3, 7]  # until they are saved
    priority.saved(ids(3, 7))
    assert priority.choose().tolist() == [1]
    priority.touched(ids(3, 7, 7))
    assert set(priority.choose()) > {7}
    priority.saved(ids(1, 3, 7))
    assert priority.choose().tolist() == []


def test_equals_take_turns() -> None:
    """Rows that all are looked up alike are all saved, in as many saves as that takes."""
    priority = MostUsed(rows=100, fraction=0.1)
    seen: list[int] = []
    for _ in range(10):
        priority.touched(np.arange(100))
        chosen = priority.choose()
        priority.saved(chosen)
        seen += chosen.tolist()
    assert sorted(seen) == list(range(100))


def test_counters_do_not_wrap_round() -> None:
    priority = MostUsed(rows=3, fraction=0.4)
    priority.failed(ids(1))
    priority.touched(ids(1, 2, 2))
    assert priority.choose().tolist() == [1]


@given(st.lists(st.lists(st.integers(-2, 22), max_size=30), max_size=20), st.integers(1, 20), st.data())
def test_most_used_against_a_counter(batches: list[list[int]], tenths: int, data: st.DataObject) -> None:
    priority = MostUsed(20, tenths / 20)
    twin: Counter[int] = Counter()
    for batch in batches:
        priority.touched(np.array(batch, np.int64))
        twin.update(row for row in batch if 0 <= row < 20)
        if data.draw(st.booleans()):
            chosen = priority.choose().tolist()
            assert chosen == sorted(set(chosen))
            assert len(chosen) == min(priority.limit, len(twin))
            left = [count for row, count in twin.items() if row not in chosen]
            assert min((twin[row] for row in chosen), default=0) >= max(left, default=0) or not chosen
            priority.saved(np.array(chosen, np.int64))
            for row in chosen:
                del twin[row]


def test_sub_sampled_holds_each_row_once_and_sees_every_second_batch() -> None:
    priority = SubSampled(rows=1000, fraction=0.1)
    priority.touched(ids(5, 5, 9, -1, 1000))
    priority.touched(ids(6, 7))
    priority.touched(ids(9, 11))
    assert priority.choose().tolist() == [5, 9, 11]
    priority.saved(ids(9, 400))
    assert priority.choose().tolist() == [5, 11]
    priority.failed(ids(9))
    assert priority.choose().tolist() == [5, 9, 11]


def test_a_full_list_keeps_frequent_rows() -> None:
    """Its size is bounded, and frequent rows are in it though most rows that come by are rare."""
    rng = np.random.default_rng(0)
    priority = SubSampled(rows=20_000, fraction=0.125, period=1)
    assert priority.nbytes == 2500 // WAYS * WAYS * 4
    for _ in range(40):
        priority.touched(zipf(rng, 20_000, 2000))
    chosen = priority.choose()
    assert len(chosen) == len(set(chosen.tolist())) == 2500 // WAYS * WAYS
    assert np.isin(np.arange(100), chosen).mean() > 0.9
    assert np.isin(np.arange(10_000, 20_000), chosen).mean() < 0.12


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 63), max_size=12)), max_size=40))
def test_a_list_with_room_against_a_set(events: list[tuple[bool, list[int]]]) -> None:
    """Five rows of a bucket's sixteen at most: nothing is displaced."""
    priority = SubSampled(rows=64, fraction=1.0, period=1)
    twin: set[int] = set()
    for saved, rows in events:
        some = [row for row in rows if row < 5]
        if saved:
            priority.saved(np.array(some, np.int64))
            twin -= set(some)
        else:
            priority.touched(np.array(some, np.int64))
            twin |= set(some)
        assert priority.choose().tolist() == sorted(twin)


def test_the_largest_change_is_taken_from_what_was_saved() -> None:
    weights = np.zeros((6, 2), np.float32)
    priority = LargestChange(lambda: weights, fraction=0.34)
    assert priority.choose().tolist() == []
    weights[1], weights[2], weights[4] = (3, 4), (0, 1), (-6, 0)
    assert priority.choose().tolist() == [1, 4]
    priority.saved(ids(1, 4))
    assert priority.choose().tolist() == [2]
    weights[4] += 0.5
    weights[5] = np.nan
    assert priority.choose().tolist() == [2, 5]
    priority.failed(ids(0))
    assert set(priority.choose().tolist()) == {0, 5}


@pytest.mark.parametrize("dim", [16, 128])
def test_memory_is_that_of_table_1(dim: int) -> None:
    """CPR, Table 1: rows of 64 and 512 bytes, r = 0.125."""
    rows = 16_000
    weights = np.zeros((rows, dim), np.float32)
    percent: dict[PriorityName, float] = {
        name: 100 * make_priority(name, rows, 0.125, lambda: weights).nbytes / weights.nbytes
        for name in PRIORITIES
    }
    table = {16: (6.25, 0.78125), 128: (0.78125, 0.09765625)}[dim]
    assert percent == {"mfu": table[0], "ssu": table[1], "scar": 100}


@pytest.mark.parametrize("name", PRIORITIES)
def test_frequent_rows_are_saved_by_all_three(name: PriorityName) -> None:
    """Section 4.2: lookups tell the size of changes, so that all three choose much the same rows."""
    rng = np.random.default_rng(1)
    weights = np.zeros((4000, 4), np.float32)
    priority: Priority = make_priority(name, 4000, 0.125, lambda: weights)
    for _ in range(50):
        batch = zipf(rng, 4000, 200)
        np.add.at(weights, batch, np.float32(0.01))
        priority.touched(batch)
    chosen = priority.choose()
    assert len(chosen) <= priority.limit == 500
    assert np.isin(np.arange(20), chosen).mean() > 0.8


def test_the_largest_tables_have_99_percent_of_the_bytes() -> None:
    assert large_tables([1, 500, 30, 469, 0]) == [1, 2, 3]
    assert large_tables([10, 10]) == [0, 1]
    assert large_tables([]) == []


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, float("nan")])
def test_a_fraction_is_one(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"fraction is .*: expected above 0, at most 1"):
        MostUsed(10, fraction)


def test_it_needs_no_torch() -> None:
    code = "import sys, holdfast.checkpoint.memory.priority; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
