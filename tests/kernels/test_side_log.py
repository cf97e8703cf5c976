"""The side log's loops against slow, obvious twins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from ctypes import CFUNCTYPE, c_void_p
from functools import cache
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba import cfunc, types
from numpy.typing import NDArray

from holdfast.kernels.side_log import (
    END,
    FREE,
    LOG_NUMBERS,
    NONE,
    PEAK,
    SHARED_NUMBERS,
    STATE_NUMBERS,
    USED,
    lay_over,
    log_packed,
    log_rows,
)

BLOCK = 7


def aligned(size: int) -> NDArray[np.uint8]:
    """Memory that begins with a cache line, so that rows of whole lines are streamed."""
    space = np.zeros(size + 64, np.uint8)
    begin = -space.ctypes.data % 64
    return space[begin : begin + size]


@cache
def compiled() -> Any:
    return cfunc(types.void(types.voidptr), cache=True)(log_packed)


class Log:
    """A side log of one table with two fields, rows ``first`` and on of the numbering."""

    def __init__(
        self, rows: int, first: int, slots: int, fields: tuple[int, ...] = (8, 3), threads: int = 0
    ) -> None:
        rng = np.random.default_rng(rows)
        self.threads = threads
        self.fields = fields
        self.rows, self.first = rows, first
        self.table = [aligned(rows * size).reshape(rows, size) for size in fields]
        for field in self.table:
            field[:] = rng.integers(0, 256, field.shape, np.uint8)
        self.row_bytes = np.array(fields, np.int64)
        total = first + rows
        self.pending = np.full(-(-total // 64), ~np.uint64(0))
        self.heads = np.full(-(-total // BLOCK), NONE, np.int32)
        self.nexts, self.free = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        self.row_of = np.zeros(slots, np.int64)
        self.state = np.zeros(STATE_NUMBERS, np.int64)
        self.slab = aligned(slots * sum(fields))

    def log(self, ids: NDArray[Any], begin: int = 0) -> int:
        addresses = np.array([field.ctypes.data for field in self.table], np.int64)
        taken = np.zeros(len(ids), np.int32)
        arrays = self.heads, self.nexts, self.row_of, self.free, self.state, self.slab, taken
        if not self.threads:
            stopped = log_rows(
                addresses, self.row_bytes, self.first, self.rows, ids, begin, self.pending, BLOCK, *arrays
            )
            return int(stopped)
        shared = np.zeros(SHARED_NUMBERS, np.int64)
        pointers = [a.ctypes.data for a in (addresses, self.row_bytes, ids, self.pending, *arrays, shared)]
        sizes = len(self.pending), len(self.heads), len(self.nexts)
        numbers = np.array(
            [len(addresses), self.first, self.rows, len(ids), begin, BLOCK, *sizes, *pointers], np.int64
        )
        assert len(numbers) == LOG_NUMBERS
        call = CFUNCTYPE(None, c_void_p)(compiled().address)
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(lambda _: call(numbers.ctypes.data), range(self.threads)))
        return int(shared[END])

    def lay(self, block: int, ids: NDArray[np.int64]) -> tuple[list[NDArray[np.uint8]], NDArray[np.bool_]]:
        copies = [np.zeros((len(ids), size), np.uint8) for size in self.fields]
        logged = np.zeros(len(ids), np.bool_)
        targets = np.array([copy.ctypes.data for copy in copies], np.int64)
        lay_over(
            block, ids, targets, logged, self.row_bytes,
            self.heads, self.nexts, self.row_of, self.free, self.state, self.slab,
        )  # fmt: skip
        return copies, logged


@given(
    rows=st.integers(1, 40),
    first=st.integers(0, 70),
    slots=st.integers(1, 40),
    batches=st.lists(st.lists(st.integers(-3, 45), max_size=12), max_size=6),
    how=st.sampled_from([(np.int64, 0), (np.uint32, 0), (np.int64, 1), (np.int64, 3)]),
    fields=st.sampled_from([(8, 3), (64, 128), (64, 4)]),
)
def test_rows_are_logged_once_until_there_is_no_slot(
    rows: int, first: int, slots: int, batches: list[list[int]], how: tuple[Any, int], fields: tuple[int, ...]
) -> None:
    dtype, threads = how
    log = Log(rows, first, slots, fields, threads)
    right: dict[int, bytes] = {}
    for batch in batches:
        ids = np.array(batch, np.int64).astype(dtype)
        stop = len(ids)
        for at, row in enumerate(ids.astype(np.int64).tolist()):
            if 0 <= row < rows and row not in right:
                if len(right) == slots:
                    stop = at
                    break
                right[row] = b"".join(field[row].tobytes() for field in log.table)
        assert log.log(ids) == stop
        for number in range(len(fields)):
            log.table[number] += 1  # what is logged later is of later
    found: dict[int, bytes] = {}
    for block in range(len(log.heads)):
        everything = np.arange(max(block * BLOCK, first), max(min((block + 1) * BLOCK, first + rows), first))
        copies, logged = log.lay(block, everything)
        for i in np.flatnonzero(logged).tolist():
            found[int(everything[i]) - first] = b"".join(copy[i].tobytes() for copy in copies)
    assert found == right
    assert (log.heads == NONE).all()
    assert log.state[USED] == log.state[FREE] == log.state[PEAK] == len(right)


def test_slots_of_a_block_that_is_done_are_used_again() -> None:
    log = Log(28, 0, 2)
    log.pending[:] = sum(1 << row for row in (1, 2, 5, 7, 8, 9))  # only some rows are wanted
    assert log.log(np.arange(10)) == 5
    copies, logged = log.lay(0, np.array([1, 2, 5]))
    assert logged.tolist() == [True, True, False]
    assert copies[0][0].tobytes() == log.table[0][1].tobytes()
    log.pending[0] &= ~np.uint64(1 << 5)
    assert log.log(np.arange(10), 5) == 9
    assert log.state[PEAK] == 2
