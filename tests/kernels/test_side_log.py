"""The side log's loops against slow, obvious twins."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.kernels.side_log import FREE, NONE, PEAK, USED, lay_over, log_rows

FIELDS = (8, 3)
BLOCK = 7


class Log:
    """A side log of one table with two fields, rows ``first`` and on of the numbering."""

    def __init__(self, rows: int, first: int, slots: int) -> None:
        rng = np.random.default_rng(rows)
        self.rows, self.first = rows, first
        self.table = [rng.integers(0, 256, (rows, size), np.uint8) for size in FIELDS]
        self.row_bytes = np.array(FIELDS, np.int64)
        total = first + rows
        self.pending = np.full(-(-total // 64), ~np.uint64(0))
        self.heads = np.full(-(-total // BLOCK), NONE, np.int32)
        self.nexts, self.free = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        self.row_of = np.zeros(slots, np.int64)
        self.state = np.zeros(3, np.int64)
        self.slab = np.zeros(slots * sum(FIELDS), np.uint8)

    def log(self, ids: NDArray[Any], begin: int = 0) -> int:
        addresses = np.array([field.ctypes.data for field in self.table], np.int64)
        return int(
            log_rows(
                addresses, self.row_bytes, self.first, self.rows, ids, begin, self.pending, BLOCK,
                self.heads, self.nexts, self.row_of, self.free, self.state, self.slab,
            )
        )  # fmt: skip

    def lay(self, block: int, ids: NDArray[np.int64]) -> tuple[list[NDArray[np.uint8]], NDArray[np.bool_]]:
        copies = [np.zeros((len(ids), size), np.uint8) for size in FIELDS]
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
    dtype=st.sampled_from([np.int64, np.uint32]),
)
def test_rows_are_logged_once_until_there_is_no_slot(
    rows: int, first: int, slots: int, batches: list[list[int]], dtype: Any
) -> None:
    log = Log(rows, first, slots)
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
        for number in range(len(FIELDS)):
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
