"""Which rows have changed: one bit per row, cleared only when the saved row is durable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.records import Group, RowIds, Table
from holdfast.checkpoint.memory.copy_on_write import CopyOnWrite
from holdfast.checkpoint.memory.priority import Priority
from holdfast.checkpoint.memory.shares import Share
from holdfast.kernels.ids import count_marked, mark_rows, marked_rows, unmark_rows

FindChanged = Callable[[int, int, int, NDArray[np.uint64]], int]
"""Called with a group, its first row, the row behind its last, and its bitmap: marks the rows that have
changed there, and says how many it marked."""


class RowSet:
    """A set of rows of one group, as a bitmap."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.bits = np.zeros((rows + 63) // 64, np.uint64)

    def add(self, ids: NDArray[np.int64], first: int = 0, rows: int | None = None) -> None:
        """Add rows ``first + ids`` of a table with this many rows; ids outside of it are ignored."""
        mark_rows(self.bits, ids, first, self.rows if rows is None else rows)

    def add_range(self, first: int, rows: int) -> None:
        """Add contiguous rows, a word at a time."""
        behind = first + rows
        begin, end = -(-first // 64), behind // 64
        if begin > end:  # all of them in one word
            begin, end = behind // 64 + 1, behind // 64
        mark_rows(self.bits, np.arange(first, min(behind, 64 * begin), dtype=np.int64), 0, self.rows)
        self.bits[begin:end] = ~np.uint64(0)
        mark_rows(self.bits, np.arange(max(first, 64 * end), behind, dtype=np.int64), 0, self.rows)

    def gaps(self, first: int, rows: int) -> tuple[int, int, int]:
        """The first and the last row of a range that is not in the set, and how many are not."""
        begin, end = first // 64, (first + rows + 63) // 64
        left = ~self.bits[begin:end]
        left[:1] &= ~np.uint64(0) << np.uint64(first - 64 * begin)
        left[-1:] &= ~np.uint64(0) >> np.uint64(64 * end - first - rows)
        some = np.flatnonzero(left)
        if not len(some):
            return first, first, 0
        low, high = int(left[some[0]]), int(left[some[-1]])
        lowest = 64 * (begin + int(some[0])) + (low & -low).bit_length() - 1
        highest = 64 * (begin + int(some[-1])) + high.bit_length() - 1
        return lowest, highest, int(count_marked(left))

    def discard(self, ids: NDArray[np.int64]) -> None:
        """Remove rows, if they are in the set."""
        unmark_rows(self.bits, ids)

    def contains(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these rows are in the set."""
        found: NDArray[np.bool_] = (self.bits[ids >> 6] >> (ids & 63).astype(np.uint64)) & np.uint64(1) != 0
        return found

    def ids(self) -> RowIds:
        """The rows in the set, ascending."""
        space = np.empty(len(self) + 64, np.int64)
        found, _ = marked_rows(self.bits, space, False)
        return space[:found]

    def ids_in(self, space: RowIds) -> RowIds:
        """The rows in the set, written to ``space`` if it has room for 64 more."""
        found, words = marked_rows(self.bits, space, False)
        return space[:found] if words == len(self.bits) else self.ids()

    def __len__(self) -> int:
        return int(count_marked(self.bits))


class Tracker:
    """The rows that have changed since the last durable version.

    The calls: ``mark`` and ``suspect`` as training goes on; ``take`` at a snapshot, which starts a new
    generation and keeps the old one; then ``confirm`` when the snapshot is durable, or ``give_back`` when it
    failed. Between those, rows may be marked in both generations: that is what makes the next version whole.
    Any thread may call any of them.

    Args:
        groups: the tables.
        priorities: of tables of which not all changed rows need be saved at once, by name.
        shares: tables of which only a share is tracked, by name. Rows are named by their numbers in the whole
            table; those outside of the share are ignored.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        priorities: Mapping[str, Priority] | None = None,
        shares: Mapping[str, Share] | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self._shares = dict(shares or {})
        self._places = {t.name: (g, t) for g, group in enumerate(groups) for t in group.tables}
        self._changed = [RowSet(group.rows) for group in groups]
        self.snapshot: CopyOnWrite | None = None
        """The snapshot that must hear of rows before they change."""
        self._marked_before: set[str] = set()
        """Tables of which marked rows have not been announced to the snapshot."""
        self._priorities = dict(priorities or {})
        self._spaces = [np.empty(1024, np.int64) for _ in groups]
        self._taken: list[RowIds] | None = None
        self._last_taken: list[RowIds] = [np.empty(0, np.int64) for _ in groups]
        self._suspects: set[str] = set()
        self._taken_suspects: set[str] = set()
        # Marking releases the GIL, and bits share words: without a lock, threads would lose marks.
        self._lock = threading.RLock()

    @property
    def tables(self) -> Collection[str]:
        """The names of all tables."""
        return self._places.keys()

    def mark(
        self,
        table: str,
        ids: NDArray[np.int64],
        *,
        counts: bool = True,
        late: str | None = None,
        again: bool = False,
    ) -> None:
        """These rows of a table are about to change; or have changed, for the reason ``late``.

        Priorities go by how often that is said, unless it ``counts`` not. ``again``: those that really change
        will be named again before they do.
        """
        group, place = self._places[table]
        ids = self._mine(table, ids)
        if again:
            self._marked_before.add(table)
        elif self.snapshot is not None:
            if late is None:
                self.snapshot.about_to_change(table, ids)
            elif table in self._marked_before or not self._are_marked(group, place, ids):
                # Otherwise they were announced when they were marked.
                self.snapshot.changed_unannounced(table, late)
        with self._lock:
            self._changed[group].add(ids, place.first, place.rows)
            if counts and table in self._priorities:
                self._priorities[table].touched(ids)

    def _mine(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of the share that is tracked, by their numbers in it."""
        share = self._shares.get(table)
        if share is None:
            return ids
        ids = ids - share.first
        return ids[(ids >= 0) & (ids < share.rows)]

    def _are_marked(self, group: int, place: Table, ids: NDArray[np.int64]) -> bool:
        inside = ids[(ids >= 0) & (ids < place.rows)] + place.first
        with self._lock:
            return bool(self._changed[group].contains(inside).all())

    def suspect(self, table: str, *, late: str | None = None) -> None:
        """Any row of the table may change now, or may have changed, for the reason ``late``.

        ``take`` finds out which ones have.
        """
        if self.snapshot is not None:
            if late is None:
                self.snapshot.all_about_to_change(table)
            else:
                self.snapshot.changed_unannounced(table, late)
        with self._lock:
            self._suspects.add(table)

    @property
    def suspects(self) -> Collection[str]:
        """Tables in which any row may have changed."""
        return self._suspects

    def is_suspect(self, table: str) -> bool:
        """Whether any row of the table may have changed."""
        return table in self._suspects

    def find_changed(self, table: str, find: FindChanged) -> int:
        """Let ``find`` mark the changed rows of a table. Returns their number."""
        group, place = self._places[table]
        with self._lock:
            return find(group, place.first, place.first + place.rows, self._changed[group].bits)

    def explains(self, table: str, ids: NDArray[np.int64]) -> bool:
        """Whether all of these rows of a table are marked, or were marked at the last ``take``."""
        group, place = self._places[table]
        ids = self._mine(table, ids)
        with self._lock:
            missing = ids[~self._changed[group].contains(ids + place.first)] + place.first
            known = self._last_taken[group]
            at = np.searchsorted(known, missing)
            return bool((at < len(known)).all() and (known[at] == missing).all())

    def take(self, *, whole: bool = True, find: FindChanged | None = None) -> list[RowIds]:
        """The changed rows of each group. Later marks belong to the next snapshot.

        Not ``whole``: of tables that have priorities, those that come first. The others stay marked. ``find``
        marks the rows of suspected tables that have changed; without it all of them are taken to have.
        """
        with self._lock:
            if self._taken is not None:
                raise RuntimeError("the last snapshot has neither been confirmed nor given back")
            self._mark_suspects(find)
            found = [c.ids_in(space) for c, space in zip(self._changed, self._spaces, strict=True)]
            # This comes first, so that an interrupt loses no mark.
            self._taken, self._taken_suspects = found, set(self._suspects)
            self._suspects.clear()
            self._last_taken = found
            for changed, ids in zip(self._changed, found, strict=True):
                changed.discard(ids)
            # Fresh memory costs a page fault for every 4 KiB, so the buffer is reused.
            for number, ids in enumerate(found):
                if not 0.125 * len(self._spaces[number]) <= len(ids) + 1024 <= len(self._spaces[number]):
                    self._spaces[number] = np.empty(len(ids) + len(ids) // 4 + 1024, np.int64)
            if self._priorities and not whole:
                self._taken = [self._first_of(number, ids) for number, ids in enumerate(found)]
            for table, priority in self._priorities.items():
                priority.saved(self._taken_of(table))
            return self._taken

    def _mark_suspects(self, find: FindChanged | None) -> None:
        for table in self._suspects:
            group, place = self._places[table]
            if find is None:
                self._changed[group].add_range(place.first, place.rows)
            else:
                self.find_changed(table, find)
            if table in self._priorities:
                ids = self._changed[group].ids()
                begin, end = np.searchsorted(ids, [place.first, place.first + place.rows])
                self._priorities[table].touched(ids[begin:end] - place.first)

    def _first_of(self, number: int, ids: RowIds) -> RowIds:
        now = np.ones(len(ids), bool)
        for table in self.groups[number].tables:
            if table.name in self._priorities:
                begin, end = np.searchsorted(ids, [table.first, table.first + table.rows])
                chosen = self._priorities[table.name].choose() + table.first
                now[begin:end] = np.isin(ids[begin:end], chosen, assume_unique=True)
        self._changed[number].add(ids[~now])
        return ids[now]

    def _taken_of(self, table: str) -> RowIds:
        """The rows of a table that were taken, numbered within the table."""
        assert self._taken is not None
        group, place = self._places[table]
        ids = self._taken[group]
        begin, end = np.searchsorted(ids, [place.first, place.first + place.rows])
        return ids[begin:end] - place.first

    def taken_rows(self) -> list[RowSet]:
        """The rows of each group that the last ``take`` gave."""
        sets = [RowSet(group.rows) for group in self.groups]
        for rows, ids in zip(sets, self._taken or (), strict=False):
            rows.add(ids)
        return sets

    def taken_suspects(self) -> Collection[str]:
        """The tables that were suspected at the last ``take``."""
        return frozenset(self._taken_suspects)

    def confirm(self) -> None:
        """The last snapshot is durable."""
        with self._lock:
            self._taken = None

    def give_back(self) -> None:
        """Mark the rows of the last snapshot as changed again: it was not saved."""
        with self._lock:
            if self._taken is not None:
                for table, priority in self._priorities.items():
                    priority.failed(self._taken_of(table))
                for changed, ids in zip(self._changed, self._taken, strict=True):
                    changed.add(ids)
                self._suspects |= self._taken_suspects
                self._taken = None
