"""Check that a version's files have every row of its tables, and every record that was written for it.

Two counts, each of which finds what the other does not:

- *Rows.* Every row of every table has at least one record. A full version that was never whole fails this.
- *Records.* The writer keeps count, in the manifest, of the records that each version reads
  (``Version.records``): what a save adds, what a round finds to have been replaced. A file, a piece or a row
  that is left out of a later manifest makes that number wrong, though an older record of the row is there.

The headers of files say most of it. A restore checks them before it overwrites anything (``Coverage.check``)
and counts the rest while it reads (``note``, ``finish``). Runs of neighbouring rows, which a trainer's full
versions are made of, cost nothing; other rows take one bit each.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.chunk import OPEN, Index, Piece
from holdfast.checkpoint.format.dense import TablePlace, map_tree
from holdfast.checkpoint.format.manifest import FileEntry, Version
from holdfast.checkpoint.format.records import Group, RowIds
from holdfast.checkpoint.memory.tracker import RowSet
from holdfast.errors import CorruptCheckpoint

_MOST_NAMED = 5
Ranges = list[tuple[int, int]]
"""First and last row of each, ascending, none of them next to another."""


class Coverage:
    """Counts the rows and records of one version.

    Call ``check`` once; then ``note``, from any thread, for each piece of which ``wants`` says so; then
    ``finish``.

    Args:
        version: which.
        groups: of its era, as they are stored.
        pieces: all that it reads.
        where: names the version in errors.
        counted: the numbers of the groups that are read; None: all are.
    """

    def __init__(
        self,
        version: Version,
        groups: Sequence[Group],
        pieces: Iterable[Piece],
        where: str,
        counted: Collection[int] | None = None,
    ) -> None:
        self._version = version
        self._counted = range(len(groups)) if counted is None else counted
        self._groups = tuple(groups)
        self._pieces = [piece for piece in pieces if piece.rows]
        self._where = where
        self._records = [0] * len(self._groups)
        self._rows: list[RowSet | None] = [None] * len(self._groups)
        self._lock = threading.Lock()

    def check(self, *, at_most: int = 0) -> None:
        """Raise CorruptCheckpoint if the headers alone show that something is missing.

        Groups of up to ``at_most`` rows are left to ``finish``, which tells exactly which rows they are.
        """
        by_group: list[list[Piece]] = [[] for _ in self._groups]
        for piece in self._pieces:
            by_group[piece.group].append(piece)
        for number, (group, pieces) in enumerate(zip(self._groups, by_group, strict=True)):
            if group.raw_rows_of is None and number in self._counted:
                self._rows[number] = self._check_ranges(group, pieces, at_most)
        most = [0] * len(self._groups)
        for piece in self._pieces:
            most[piece.group] += piece.rows
            if self._is_sure(piece):
                self._records[piece.group] += piece.rows
        for number, expected in enumerate(self._version.records):
            group = self._groups[number]
            if number not in self._counted:
                continue
            if not self._records[number] <= expected <= most[number] and group.rows > at_most:
                found = most[number] if most[number] < expected else self._records[number]
                raise CorruptCheckpoint(f"{self._where} {lacking_records(group, found, expected)}")

    def wants(self, piece: Piece) -> bool:
        """Whether ``note`` must be called for a piece, because its header is not sufficient."""
        return not piece.is_run and (self._rows[piece.group] is not None or not self._is_sure(piece))

    def note(self, piece: Piece, ids: RowIds, positions: RowIds | None) -> None:
        """The rows of a piece that belong to the version: all, or those at some positions."""
        rows = self._rows[piece.group]
        with self._lock:
            if not self._is_sure(piece):
                self._records[piece.group] += len(ids) if positions is None else len(positions)
            if rows is not None:
                rows.add(ids if positions is None else ids[positions])

    def finish(self) -> None:
        """Raise CorruptCheckpoint if something is missing now that all pieces have been noted."""
        for group, rows in zip(self._groups, self._rows, strict=True):
            if rows is not None:
                gaps = [gap for gap in _gaps_of_tables(group, rows) if gap[2]]
                if gaps:
                    raise CorruptCheckpoint(f"{self._where} {lacking_rows(group, gaps)}")
        for number, expected in enumerate(self._version.records):
            group, found = self._groups[number], self._records[number]
            if found != expected and number in self._counted:
                raise CorruptCheckpoint(f"{self._where} {lacking_records(group, found, expected)}")

    def _is_sure(self, piece: Piece) -> bool:
        """Whether all records of the piece belong to the version."""
        return piece.last_born <= self._version.version < piece.first_died

    def _check_ranges(self, group: Group, pieces: Sequence[Piece], at_most: int) -> RowSet | None:
        """The rows of which headers do not tell that they are there; None if they tell it of all."""
        runs = [(piece.first_id, piece.last_id) for piece in pieces if piece.is_run]
        gaps = uncovered(runs, group.rows)
        if not gaps:
            return None
        others = [piece for piece in pieces if not piece.is_run]
        if group.rows > at_most:
            outside = uncovered(runs + [(piece.first_id, piece.last_id) for piece in others], group.rows)
            lacking = sum(last - first + 1 for first, last in gaps) - sum(piece.rows for piece in others)
            if outside or lacking > 0:
                split = _split_at_tables(group, outside or gaps)
                total = max(lacking, sum(last - first + 1 for first, last in outside))
                raise CorruptCheckpoint(f"{self._where} {lacking_rows(group, split, at_least=total)}")
        # Only now: each row that is counted here takes bytes of a file, so a forged number of rows does not
        # get this far.
        rows = RowSet(group.rows)
        for first, last in runs:
            rows.add_range(first, last - first + 1)
        return rows


def uncovered(ranges: Iterable[tuple[int, int]], rows: int) -> Ranges:
    """Which of the rows from 0 on are in none of the ranges (first, last)."""
    gaps: Ranges = []
    at = 0
    for first, last in sorted(ranges):
        if first > at:
            gaps.append((at, first - 1))
        at = max(at, last + 1)
    if at < rows:
        gaps.append((at, rows - 1))
    return gaps


def lacking_rows(group: Group, gaps: Sequence[tuple[int, int, int]], at_least: int | None = None) -> str:
    """What to say of missing rows: first, last and how many there are between them, each of one table.

    ``at_least`` is how many are missing at least, if not all of these need be.
    """
    by_table: dict[str, list[tuple[int, int, int]]] = {}
    tables = iter(group.tables)
    table = next(tables)
    for first, last, count in gaps:
        while table.first + table.rows <= first:
            table = next(tables)
        by_table.setdefault(table.name, []).append((first - table.first, last - table.first, count))
    sizes = {table.name: table.rows for table in group.tables}
    named = []
    for name, found in by_table.items():
        some = "some" if at_least is not None else f"{sum(count for _, _, count in found):,}"
        where = f"between rows {found[0][0]} and {found[-1][1]}"
        named.append(f"{some} of the {sizes[name]:,} rows of table {name} ({where})")
    total = sum(count for _, _, count in gaps)
    number = f"{total:,}" if at_least is None else f"at least {at_least:,}"
    return f"is incomplete: {number} rows are missing: {_some(named)}"


def lacking_records(group: Group, found: int, expected: int) -> str:
    """What to say of a number of records that is not what the writer counted."""
    tables = _some([table.name for table in group.tables])
    kind = "raw rows" if group.raw_rows_of is not None else "records"
    if found > expected:
        return (
            f"is not what was saved: its files hold {found:,} {kind} of table {tables}, expected {expected:,}"
        )
    return (
        f"is incomplete: {expected - found:,} {kind} are missing: its files hold {found:,} of {expected:,} "
        f"of table {tables}"
    )


def check_places(tree: object, groups: Sequence[Group], where: str) -> None:
    """Raise CorruptCheckpoint if a version's dense part has rows of a table in it that its era lacks.

    Args:
        tree: the dense part.
        groups: the era's.
        where: names the file of the dense part in errors.
    """
    known = {(t.name, f.name): t.rows * f.width for g in groups for t in g.tables for f in g.fields}

    def leaf(value: object, path: str) -> None:
        if isinstance(value, TablePlace):
            size = known.get((value.table, value.field))
            expected = int(np.prod(value.shape, dtype=object))
            if size != expected:
                found = "is missing" if size is None else f"has {size:,}"
                raise CorruptCheckpoint(
                    f"{where}: {path} is {value.field} of table {value.table}, {expected:,} numbers, which "
                    f"{found} in the manifest"
                )

    map_tree(tree, leaf)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _split_at_tables(group: Group, gaps: Ranges) -> list[tuple[int, int, int]]:
    """The same with how many rows each has, none across the end of a table."""
    found: list[tuple[int, int, int]] = []
    tables = iter(group.tables)
    table = next(tables)
    for first, last in gaps:
        at = first
        while at <= last:
            while table.first + table.rows <= at:
                table = next(tables)
            end = min(last, table.first + table.rows - 1)
            found.append((at, end, end - at + 1))
            at = end + 1
    return found


def _gaps_of_tables(group: Group, rows: RowSet) -> Iterable[tuple[int, int, int]]:
    """For each table with rows: the first and the last row that is not in the set, and how many there are."""
    return (rows.gaps(table.first, table.rows) for table in group.tables if table.rows)


class EraCount:
    """Counts the records of all versions of an era, each file once, and the rows of its full version.

    A full version is never moved, and each version of the era reads it. If it has all rows, no version lacks
    one. Memory: one bit for each row of groups that are not stored in runs, until the full version is
    counted; and for each piece one number for each version in which records of it were born or died.

    Args:
        groups: of the era, as they are stored.
        versions: those to count for, ascending.
        full_files: how many files its full version has: ``full_file_done`` is called for each.
        largest: rows that files of their size can hold. A group with more is taken to be incomplete.

    Attributes:
        has_all_rows: whether the full version has all rows; known when all of its files are done.
    """

    def __init__(
        self, groups: Sequence[Group], versions: Sequence[int], full_files: int, largest: int
    ) -> None:
        self.groups = tuple(groups)
        self.versions = np.asarray(versions, np.int64)
        self.has_all_rows = all(group.rows == 0 for group in groups)
        self._files_left = full_files
        self._largest = largest
        self._changes: dict[str, dict[int, list[tuple[int, int, int]]]] = {}
        self._runs: list[Ranges] = [[] for _ in groups]
        self._rows: dict[int, RowSet] = {}
        self._lock = threading.Lock()

    def note(self, file: FileEntry, number: int, piece: Piece, index: Index) -> None:
        """The rows of a piece, the ``number``-th of a file; from any thread."""
        born, died = (_counted(v.least, v.above, piece.rows) for v in (index.born, index.died))
        steps = [(piece.group, self._first_from(version), count) for version, count in born]
        steps += [(piece.group, self._first_from(version), -count) for version, count in died]
        with self._lock:
            mine = self._changes.setdefault(file.name, {})
            mine[number] = [step for step in steps if step[1] < len(self.versions)]
            if file.kind == "baseline" and self._is_always_read(piece):
                self._note_rows(piece, index.ids)

    def full_file_done(self) -> None:
        """A file of the full version has been noted, or cannot be. After the last, memory is freed."""
        with self._lock:
            self._files_left -= 1
            if self._files_left:
                return
            self.has_all_rows = all(
                self._has_all(number, group)
                for number, group in enumerate(self.groups)
                if group.raw_rows_of is None
            )
            self._rows.clear()

    def records(self, files: Mapping[str, Sequence[int]]) -> NDArray[np.int64]:
        """How many records each version reads of each group: [groups, versions].

        ``files`` are those of the era, with the numbers of their pieces that are dead.
        """
        found = np.zeros((len(self.groups), len(self.versions)), np.int64)
        for name, dead in files.items():
            gone = set(dead)
            for number, steps in self._changes.get(name, {}).items():
                if number not in gone:
                    for group, at, count in steps:
                        found[group, at] += count
        return np.cumsum(found, axis=1, out=found)

    def _first_from(self, version: int) -> int:
        return int(np.searchsorted(self.versions, version))

    def _is_always_read(self, piece: Piece) -> bool:
        is_raw = self.groups[piece.group].raw_rows_of is not None
        return not is_raw and piece.last_born <= self.versions[0] and piece.first_died == OPEN

    def _note_rows(self, piece: Piece, ids: RowIds) -> None:
        if piece.is_run:
            self._runs[piece.group].append((piece.first_id, piece.last_id))
            return
        rows = self.groups[piece.group].rows
        if rows <= self._largest:
            if piece.group not in self._rows:
                self._rows[piece.group] = RowSet(rows)
            self._rows[piece.group].add(ids)

    def _has_all(self, number: int, group: Group) -> bool:
        rows = self._rows.get(number)
        if rows is None:
            return not uncovered(self._runs[number], group.rows)
        for first, last in self._runs[number]:
            rows.add_range(first, last - first + 1)
        return len(rows) == group.rows


def _counted(least: int, above: NDArray[np.unsignedinteger], rows: int) -> list[tuple[int, int]]:
    """Versions of rows as pairs: which, and of how many."""
    if not len(above):
        return [(least, rows)]
    values, counts = np.unique(above, return_counts=True)
    return [(least + value, count) for value, count in zip(values.tolist(), counts.tolist(), strict=True)]
