"""Rows of some tables as they are at one instant, read while training changes them.

A baseline holds every row. Copying all of them first would stall training and take the memory of a second
model. Instead, every row is *pending* at first, and a background thread reads one block after the other:

1. It copies the block. A step may change rows meanwhile, so the copy may be torn.
2. Under the lock it lays the block's rows of the *side log* over the copy; no row of it is pending any more.

Before training changes rows, it copies those that are still pending to the side log, once each, under the
same lock (``about_to_change``). So a row that changed before its block was done is in the side log as it was
at the instant, and every other row of the copy has not changed since.

The side log has a limit. If it is full, training waits until a block is done, which frees the slots of its
rows. What was changed without ``about_to_change`` cannot be undone: ``changed_unannounced`` notes it, and the
writer drops the version or flags it.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.records import Bytes2D, Group, RowIds, Rows
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.kernels import openmp
from holdfast.kernels.ids import mark_rows, unmark_rows
from holdfast.kernels.machine import LINE
from holdfast.kernels.side_log import (
    END,
    FREE,
    NONE,
    PEAK,
    SHARED_NUMBERS,
    STATE_NUMBERS,
    USED,
    lay_over,
    log_packed,
    log_rows,
)

COPIED_BYTES = 16 << 20
"""Tables up to this size are copied at once instead: that takes a few milliseconds."""
BLOCK_BYTES = 4 << 20
"""Rows that are read at a time."""
OnRead = Callable[[int, Rows, NDArray[np.bool_]], None]
_SLOT_BYTES = 16  # beside the record: its row, the next slot of its block, and its entry among the free ones
_RANGE_ROWS = 1 << 16
_POLL_SECONDS = 0.0005
_ALL_THREADS_BYTES = 1 << 17  # rows of fewer bytes are copied to the side log by one thread


def default_max_memory(tables_bytes: int) -> int:
    """Bytes that a snapshot may take unless the policy says otherwise: 5 % of the tables plus 256 MB."""
    return tables_bytes // 20 + (256 << 20)


class CopyOnWrite:
    """Use it as follows:

    1. The trainer's thread makes it: this is the instant.
    2. Before rows change, the changing thread calls ``about_to_change``.
    3. The writing thread reads each group once (``groups[n].parts``), in any order; then ``release``.
       ``groups[n].take`` works only before that.

    Args:
        live: the memory of the tables.
        max_bytes: limit of the side log.
        wanted: the rows to read, ascending, for each group; by default all rows.
        row_multiple: blocks of rows begin at multiples of this.
        max_wait_seconds: how long at a time a thread that changes rows may wait for room in the side log;
            then the snapshot is void. None: as long as it takes.
        idle_seconds: after so long without a change the writing thread need not rest; None: it must.
        on_read: called in the writing thread for each block with its group, its rows, and which of them were
            in the side log.
    """

    def __init__(
        self,
        live: LiveTables,
        max_bytes: int,
        *,
        wanted: Sequence[RowIds] | None = None,
        row_multiple: int = 1,
        max_wait_seconds: float | None = None,
        idle_seconds: float | None = None,
        on_read: OnRead = lambda group, rows, logged: None,
    ) -> None:
        self.live = live
        self._places = {
            t.name: (g, n) for g, group in enumerate(live.groups) for n, t in enumerate(group.tables)
        }
        self._on_read = on_read
        self._idle_seconds = math.inf if idle_seconds is None else idle_seconds
        self._changed_at = time.monotonic()
        self._max_wait_seconds = math.inf if max_wait_seconds is None else max_wait_seconds
        self._lock = threading.Lock()
        self._waited_seconds = 0.0
        self._waiting: list[float] = []
        """Since when threads wait for room."""
        self._buffers: list[NDArray[np.uint8]] = []
        self._wanted = wanted
        counts = [g.rows for g in live.groups] if wanted is None else [len(ids) for ids in wanted]
        sizes = [c * (g.record_bytes + _SLOT_BYTES) for c, g in zip(counts, live.groups, strict=True)]
        shares = _shares(sizes, max_bytes)
        self._logs = [
            _SideLog(group, share, row_multiple, None if wanted is None else wanted[n])
            for n, (group, share) in enumerate(zip(live.groups, shares, strict=True))
        ]
        self.groups: Sequence[FrozenRows] = [FrozenRows(self, n, count) for n, count in enumerate(counts)]
        self._unread = {n for n, count in enumerate(counts) if count}
        self._released = False
        self.unchecked = set(self._places)
        """Tables that may have changed unannounced without anybody having noticed yet."""
        self.unannounced: dict[str, str] = {}
        """Tables that have changed without ``about_to_change``, and how."""
        for table in list(self._places)[:1]:
            self.about_to_change(table, np.empty(0, np.int64))  # compile the loops now, not in the next step
            if openmp.threads() > 1:
                openmp.prepare(log_packed)

    def is_over(self) -> bool:
        """Whether rows may change freely: all are read, or nobody reads them any more."""
        return self._released or not self._unread

    @property
    def is_waited_for(self) -> bool:
        """Whether training waits for a block: the writing thread should not rest."""
        return bool(self._waiting)

    @property
    def waited_seconds(self) -> float:
        """How long training has waited for room in the side log; also if it has not noticed yet that there is
        some."""
        now = time.perf_counter()
        return self._waited_seconds + sum(now - since for since in self._waiting.copy())

    @property
    def is_idle(self) -> bool:
        """Whether no row has changed for a while: nobody needs the processor."""
        return time.monotonic() - self._changed_at > self._idle_seconds

    @property
    def fullness(self) -> float:
        """Which share of the side log is in use, in the group with the largest; 0 if none can get full."""
        return max((log.fullness for log in self._logs), default=0.0)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the side log held at a time."""
        return sum(log.peak_bytes for log in self._logs)

    # Threads that change rows

    def about_to_change(self, table: str, ids: NDArray[np.int64]) -> None:
        """Call before these rows of a table change; ids outside of the table are ignored.

        Waits for blocks to be read if the side log is full.
        """
        if self.is_over():
            return
        self._changed_at = time.monotonic()
        group, number = self._places[table]
        log, addresses = self._logs[group], self.live.addresses(group, number)
        place = self.live.groups[group].tables[number]
        done = 0
        while True:
            with self._lock:
                if self.is_over():
                    return
                done = log.add(addresses, place.first, place.rows, ids, done)
            if done == len(ids):
                return
            if not self._wait_for_room(log):
                self.changed_unannounced(table, "copies of changed rows exceeded max_memory for too long")
                return

    def all_about_to_change(self, table: str) -> None:
        """Call before any row of a table may change."""
        group, number = self._places[table]
        rows = self.live.groups[group].tables[number].rows
        for begin in range(0, rows, _RANGE_ROWS):
            if self.is_over():
                return
            self.about_to_change(table, np.arange(begin, min(begin + _RANGE_ROWS, rows)))
        self.unchecked.discard(table)

    def changed_unannounced(self, table: str, why: str) -> None:
        """Rows of a table have changed without ``about_to_change``, since it was last known that none had."""
        if table in self.unchecked:
            self.unannounced.setdefault(table, why)

    def has_not_changed_unannounced(self, tables: Collection[str]) -> None:
        """As far as can be known, no row of these tables has changed without ``about_to_change`` so far."""
        if self.is_over():
            self.unchecked -= set(tables)

    def _wait_for_room(self, log: _SideLog) -> bool:
        """Wait for room in the side log; False: there is none yet, and nobody should wait any longer."""
        # No condition variable: an interrupt could leave its lock acquired forever.
        started = time.perf_counter()
        self._waiting.append(started)
        try:
            while not (self.is_over() or log.has_room):
                if self.unannounced or time.perf_counter() - started > self._max_wait_seconds:
                    return False
                time.sleep(_POLL_SECONDS)
            return True
        finally:
            self._waited_seconds += time.perf_counter() - started  # first: a report may be made in between
            self._waiting.remove(started)

    # The thread that writes

    def release(self) -> None:
        """Nobody reads any more: rows may change freely, and the memory is free."""
        with self._lock:
            self._released = True
            for log in self._logs:
                log.free()

    def read(self, group: int) -> Iterator[Rows]:
        """The wanted rows of a group, block by block, as they were at the instant. Only once."""
        log, rows = self._logs[group], self.live.groups[group].rows
        for block, begin in enumerate(range(0, rows, log.block_rows)):
            end = min(begin + log.block_rows, rows)
            ids = self._ids(group, begin, end)
            copies = self._copies(group, len(ids))
            if len(ids) == end - begin:
                self.live.copy_range(group, begin, end, copies)
            elif len(ids):
                self._gather(group, ids, copies)
            with self._lock:
                if self._released:
                    raise RuntimeError("a snapshot was released while it was read")
                logged = log.lay_over(block, ids, copies)
            found = Rows(ids, copies)
            if len(ids):
                self._on_read(group, found, logged)
            if end == rows:
                with self._lock:
                    self._unread.discard(group)
                    log.free()
                self._buffers.clear()
            if len(ids):
                yield found

    def _ids(self, group: int, begin: int, end: int) -> RowIds:
        if self._wanted is None:
            return np.arange(begin, end)
        wanted = self._wanted[group]
        first, behind = np.searchsorted(wanted, [begin, end])
        return wanted[first:behind]

    def _copies(self, group: int, rows: int) -> tuple[Bytes2D, ...]:
        """Memory for so many rows of a group."""
        fields = self.live.groups[group].fields
        space = self._space(rows * sum(field.live_bytes for field in fields))
        copies, at = [], 0
        for field in fields:
            end = at + rows * field.live_bytes
            copies.append(space[at:end].reshape(rows, field.live_bytes))
            at = end
        return tuple(copies)

    def _space(self, size: int) -> NDArray[np.uint8]:
        """Memory that no block uses any more: fresh memory would cost a page fault for every 4 KiB."""
        for buffer in self._buffers:
            # Arrays of a block refer to their buffer as long as they exist. Three references are ours: the
            # list, the variable and the argument.
            if sys.getrefcount(buffer) == 3 and len(buffer) >= size:
                return buffer
        buffer = np.empty(size, np.uint8)
        self._buffers.append(buffer)
        return buffer

    def _gather(self, group: int, ids: RowIds, copies: Sequence[Bytes2D]) -> None:
        groups = range(len(self._logs))
        wanted = [ids if g == group else ids[:0] for g in groups]
        self.live.start_gather(wanted, [copies if g == group else () for g in groups]).finish()

    def take(self, group: int, positions: RowIds) -> Rows:
        """Wanted rows by position (ascending), as they were at the instant; before any block is read."""
        ids = positions if self._wanted is None else self._wanted[group][positions]
        copies = self._copies(group, len(ids))
        if not len(ids):
            return Rows(ids, copies)
        with self._lock:
            self._gather(group, ids, copies)
            rows, logged = self._logs[group].logged()
            at = np.searchsorted(ids, rows)
            known = np.flatnonzero((at < len(ids)) & (ids[np.minimum(at, len(ids) - 1)] == rows))
            begin = 0
            for copy in copies:
                end = begin + copy.shape[1]
                copy[at[known]] = logged[known, begin:end]
                begin = end
        return Rows(ids, copies)


class FrozenRows:
    """The rows of one group at the instant; like ``Rows``, for a writer that needs them in order and once."""

    def __init__(self, snapshot: CopyOnWrite, number: int, rows: int) -> None:
        self._snapshot, self._number, self._rows = snapshot, number, rows

    def __len__(self) -> int:
        return self._rows

    def take(self, positions: RowIds) -> Rows:
        """The rows at these positions, ascending; only before ``parts``."""
        return self._snapshot.take(self._number, positions)

    def parts(self, most_rows: int | None = None) -> Iterator[Rows]:
        """All rows, ascending, in parts of at most so many. Only once."""
        for block in self._snapshot.read(self._number):
            yield from block.parts(most_rows)


class _SideLog:
    """The side log of one group. Every call but ``has_room`` and ``fullness`` is made under the snapshot's
    lock."""

    def __init__(self, group: Group, max_bytes: int, row_multiple: int, wanted: RowIds | None) -> None:
        self._row_bytes = np.array([field.live_bytes for field in group.fields], np.int64)
        record = int(self._row_bytes.sum())
        count = group.rows if wanted is None else len(wanted)
        ids_per_row = group.rows / max(count, 1)
        self.block_rows = max(1, int(BLOCK_BYTES / record * ids_per_row) // row_multiple) * row_multiple
        if wanted is None:
            self._pending = np.full(-(-group.rows // 64), ~np.uint64(0))
        else:
            self._pending = np.zeros(-(-group.rows // 64), np.uint64)
            mark_rows(self._pending, wanted, 0, group.rows)
        slots = max(1, min(count, max_bytes // (record + _SLOT_BYTES)))
        # Fresh memory is taken page by page, as slots are used.
        space = np.empty(slots * record + LINE, np.uint8)
        skipped = -space.ctypes.data % LINE
        self._slab = space[skipped : skipped + slots * record]
        self._heads = np.full(-(-group.rows // self.block_rows), NONE, np.int32)
        self._nexts = np.empty(slots, np.int32)
        self._row_of = np.empty(slots, np.int64)
        self._free = np.empty(slots, np.int32)
        self._taken = np.empty(0, np.int32)
        self._state = np.zeros(STATE_NUMBERS, np.int64)
        self._limit = slots if slots < count else 0
        """How many rows fit; 0: all do."""
        self._is_freed = False

    @property
    def has_room(self) -> bool:
        """Whether a row can be added, or none needs to be any more."""
        return self._is_freed or bool(self._state[USED] - self._state[FREE] < len(self._nexts))

    @property
    def fullness(self) -> float:
        """Which share of the slots is in use; 0 if there is one for every row."""
        if self._is_freed or not self._limit:
            return 0.0
        return float(self._state[USED] - self._state[FREE]) / self._limit

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were used at a time."""
        return int(self._state[PEAK]) * (int(self._row_bytes.sum()) + _SLOT_BYTES)

    def add(self, addresses: RowIds, first: int, rows: int, ids: NDArray[np.int64], begin: int) -> int:
        """Add the pending rows of a table from ids[begin] on; the position of the first without a slot."""
        if self._is_freed:
            return len(ids)
        if len(self._taken) < len(ids):
            self._taken = np.empty(len(ids), np.int32)
        arrays = (
            self._heads, self._nexts, self._row_of, self._free, self._state, self._slab, self._taken,
        )  # fmt: skip
        many = (len(ids) - begin) * len(self._slab) >= _ALL_THREADS_BYTES * len(self._nexts)
        if not many or openmp.threads() == 1 or ids.dtype != np.int64 or not ids.flags.c_contiguous:
            stopped = log_rows(
                addresses, self._row_bytes, first, rows, ids, begin, self._pending, self.block_rows, *arrays
            )
            return int(stopped)
        shared = np.zeros(SHARED_NUMBERS, np.int64)
        pointers = [
            array.ctypes.data for array in (addresses, self._row_bytes, ids, self._pending, *arrays, shared)
        ]
        sizes = len(self._pending), len(self._heads), len(self._nexts)
        numbers = np.array(
            [len(addresses), first, rows, len(ids), begin, self.block_rows, *sizes, *pointers], np.int64
        )
        openmp.run_on_all(log_packed, numbers.ctypes.data)
        return int(shared[END])

    def lay_over(self, block: int, ids: RowIds, copies: Sequence[Bytes2D]) -> NDArray[np.bool_]:
        """Complete the copy of a block's rows; they are no longer pending. Returns which were in the log."""
        targets = np.array([copy.ctypes.data for copy in copies], np.int64)
        logged = np.zeros(len(ids), np.bool_)
        lay_over(
            block, ids, targets, logged, self._row_bytes,
            self._heads, self._nexts, self._row_of, self._free, self._state, self._slab,
        )  # fmt: skip
        unmark_rows(self._pending, ids)
        return logged

    def logged(self) -> tuple[RowIds, NDArray[np.uint8]]:
        """The rows in the log and their records; before any slot was freed."""
        used = int(self._state[USED])
        return self._row_of[:used], self._slab.reshape(-1, int(self._row_bytes.sum()))[:used]

    def free(self) -> None:
        """Give the memory back: no row is pending any more, or nobody reads them."""
        self._is_freed = True
        self._slab = np.empty(0, np.uint8)
        self._taken = np.empty(0, np.int32)
        self._pending = np.empty(0, np.uint64)
        self._heads = self._nexts = self._free = np.empty(0, np.int32)
        self._row_of = np.empty(0, np.int64)


def _shares(bytes_: Sequence[int], most: int) -> list[int]:
    """Divide a limit among groups: small ones get all they may need, the others equal parts of the rest."""
    shares = [0] * len(bytes_)
    order = sorted(range(len(bytes_)), key=lambda n: bytes_[n])
    for count, n in enumerate(order):
        shares[n] = min(bytes_[n], most // (len(order) - count))
        most -= shares[n]
    return shares
