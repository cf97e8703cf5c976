"""A digest of every row's last saved state: a safety net for tracking, and a way to track any optimizer.

Which rows change is known from lookups and gradients (``torch/watch.py``). Digests serve where that is not
enough. A table of which any row may have changed (Adam on dense gradients, a hook that writes) is compared
with its digests at a save, and only the rows that differ are saved. And a little at a time, all rows that are
*not* marked are compared too: one that differs has changed unseen.

A digest takes 8 bytes a row. It is noted when a snapshot of the row is taken, so whatever is not marked must
match.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.records import Bytes2D, Group, RowIds, Rows, Table
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.checkpoint.memory.tracker import Tracker
from holdfast.kernels.digests import UNKNOWN, digest_rows

LONGEST_CHECK_SECONDS = 0.02
"""Seconds per call: unused time accumulates up to this limit."""
_FIRST_GUESS_BYTES_PER_SECOND = 1e9
_SLICE_BYTES = 1 << 19
_LARGEST_SLICE_ROWS = 4096
_ALL = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class UnseenChange:
    """Unmarked rows of a table that had changed.

    Attributes:
        table: its name.
        rows: how many.
        verified: the last version that is known to have these rows as they were at the time.
    """

    table: str
    rows: int
    verified: int


@dataclass(slots=True)
class _Checked:
    """A table's position, and for each slice of rows the last version that is known to be correct."""

    table: Table
    group: int
    record_bytes: int
    slice_rows: int
    verified: NDArray[np.int64]

    @classmethod
    def of(cls, table: Table, number: int, group: Group) -> _Checked:
        slice_rows = max(1, min(_LARGEST_SLICE_ROWS, _SLICE_BYTES // group.record_bytes))
        verified = np.zeros(-(-table.rows // slice_rows), np.int64)
        return cls(table, number, group.record_bytes, slice_rows, verified)


class RowDigests:
    """The digests of some groups' rows, and when rows last matched them.

    Digests are noted by the thread that writes, or by those that restore; everything else is called by the
    trainer's, and never while rows that were taken have yet to be noted.

    Args:
        groups: as they are in memory.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        self._digests = [np.zeros(group.rows, np.uint64) for group in groups]
        self._tables = {
            table.name: _Checked.of(table, number, group)
            for number, group in enumerate(groups)
            for table in group.tables
            if table.rows
        }
        self._order = list(self._tables)
        self._next = (0, 0)
        self._bytes_per_second = _FIRST_GUESS_BYTES_PER_SECOND
        self._balance = 0.0

    @classmethod
    def of(cls, live: LiveTables) -> RowDigests:
        """The digests of all rows as they are in memory."""
        digests = cls(live.groups)
        for number, group in enumerate(live.groups):
            for begin in range(0, group.rows, _LARGEST_SLICE_ROWS):
                end = min(begin + _LARGEST_SLICE_ROWS, group.rows)
                digests.note_live(live, number, np.arange(begin, end))
        return digests

    def note(self, group: int, rows: Rows, positions: RowIds | None = None) -> None:
        """Record the digests of rows of a group that a version holds, or of those at some positions."""
        if positions is not None and not len(positions):
            return
        addresses = np.array([[field.ctypes.data] for field in rows.fields], np.int64)
        row_bytes = np.array([field.shape[1] for field in rows.fields], np.int64)
        some = _ALL if positions is None else positions
        digest_rows(addresses, row_bytes, rows.ids, some, self._digests[group])

    def fill(self, live: LiveTables, group: int, first: int, fields: Sequence[Bytes2D]) -> None:
        """Write contiguous rows to memory, starting at the id ``first``, and record their digests."""
        live.fill(group, first, fields, self._digests[group])

    def note_live(self, live: LiveTables, group: int, ids: RowIds) -> None:
        """The same for rows as they are in memory."""
        live.digest(group, ids, self._digests[group])

    def note_unchanged(self, group: int, rows: Rows, unchanged: NDArray[np.bool_]) -> dict[str, int]:
        """The same, where some rows should be unchanged: in which tables they are not, and how many.

        Rows whose digest was not known before are not counted.
        """
        before = self._digests[group][rows.ids]
        self.note(group, rows)
        differ = unchanged & (before != UNKNOWN) & (before != self._digests[group][rows.ids])
        found: dict[str, int] = {}
        if differ.any():
            ids = rows.ids[differ]
            for name, checked in self._tables.items():
                first = checked.table.first
                count = int(((ids >= first) & (ids < first + checked.table.rows)).sum())
                if checked.group == group and count:
                    found[name] = count
        return found

    def last_verified(self, table: str) -> int:
        """The last version that is known to miss no change of any row of a table."""
        return int(self._tables[table].verified.min())

    def verified(self, tables: Iterable[str] | None, version: int) -> None:
        """Record that this version misses no change of these tables; None: of any."""
        for name in self._tables if tables is None else tables:
            if name in self._tables:
                self._tables[name].verified[:] = version

    def find_changed(
        self, live: LiveTables, group: int, begin: int, end: int, marked: NDArray[np.uint64]
    ) -> int:
        """Mark the rows that differ from their digests. Returns their number."""
        return live.mark_changed(group, begin, end, self._digests[group], marked)

    def check_table(
        self, live: LiveTables, table: str, tracker: Tracker, version: int
    ) -> UnseenChange | None:
        """Compare all unmarked rows of a table with their digests, and mark those that differ.

        ``version`` is the last one that was taken.
        """
        checked = self._tables.get(table)
        if checked is None:
            return None
        return self._check(live, checked, 0, checked.table.rows, tracker, version)

    def check_some(
        self,
        live: LiveTables,
        tracker: Tracker,
        version: int,
        seconds: float,
        may_check: Callable[[str], bool],
    ) -> list[UnseenChange]:
        """Continue comparing unmarked rows, for about ``seconds`` and the time left over from earlier calls.

        Tables for which ``may_check`` returns False are skipped.
        """
        self._balance = min(self._balance + seconds, LONGEST_CHECK_SECONDS)
        found: list[UnseenChange] = []
        for _ in self._order:  # at most one cycle
            at, begin = self._next
            checked = self._tables[self._order[at]]
            if may_check(checked.table.name):
                end = self._affordable(checked, begin)
                if end == begin:
                    break
                started = time.perf_counter()
                change = self._check(live, checked, begin, end, tracker, version)
                taken = time.perf_counter() - started
                self._balance -= taken
                speed = (end - begin) * checked.record_bytes / max(taken, 1e-9)
                self._bytes_per_second += 0.2 * (speed - self._bytes_per_second)
                found += [change] if change is not None else []
                if end < checked.table.rows:
                    self._next = at, end
                    break
            self._next = (at + 1) % len(self._order), 0
        return found

    def _affordable(self, checked: _Checked, begin: int) -> int:
        """The last row that can be compared in the time: the table's last, or the end of a slice."""
        rows = int(max(self._balance, 0.0) * self._bytes_per_second / checked.record_bytes)
        if rows >= checked.table.rows - begin:
            return checked.table.rows
        return begin + rows // checked.slice_rows * checked.slice_rows

    def _check(
        self, live: LiveTables, checked: _Checked, begin: int, end: int, tracker: Tracker, version: int
    ) -> UnseenChange | None:
        def find(group: int, first: int, behind: int, marked: NDArray[np.uint64]) -> int:
            return live.mark_changed(group, first + begin, first + end, self._digests[group], marked)

        rows = tracker.find_changed(checked.table.name, find)
        slices = checked.verified[begin // checked.slice_rows : -(-end // checked.slice_rows)]
        verified = int(slices.min())
        slices[:] = version
        return UnseenChange(checked.table.name, rows, verified) if rows else None
