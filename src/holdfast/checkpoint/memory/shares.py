"""Which rows of its tables a process saves, where it does not save all of them.

A process numbers the rows that it saves by itself: marks, digests and copies go by its own numbers. In the
store, rows go by their numbers in the whole tables. ``Shares`` translates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from holdfast.checkpoint.format.records import Group, RowIds, Rows, RowSource, Table


class Share(NamedTuple):
    """Contiguous rows of a table."""

    first: int
    """Number in the whole table of its first row."""
    rows: int
    of: int
    """Rows of the whole table."""


def even_share(rows: int, rank: int, world_size: int) -> Share:
    """A rank's share of a table that all ranks have: shares differ by one row at most."""
    first, behind = rows * rank // world_size, rows * (rank + 1) // world_size
    return Share(first, behind - first, rows)


class Shares:
    """The groups of which a process has a share.

    Args:
        groups: as the process numbers them: tables have the rows that it saves.
        shares: by table; a table without one is saved completely.

    Attributes:
        whole: the same groups with whole tables.
    """

    def __init__(self, groups: Sequence[Group], shares: Mapping[str, Share]) -> None:
        self._is_all = not shares
        self.whole = tuple(groups) if self._is_all else tuple(_whole(group, shares) for group in groups)
        self._firsts: list[RowIds] = []
        self._moved: list[RowIds] = []
        self._rows: list[RowIds] = []
        for group, whole in zip(groups, self.whole, strict=True):
            mine = np.array([table.first for table in group.tables], np.int64)
            begin = [w.first + (shares[w.name].first if w.name in shares else 0) for w in whole.tables]
            self._firsts.append(mine)
            self._moved.append(np.array(begin, np.int64) - mine)
            self._rows.append(np.array([table.rows for table in group.tables], np.int64))

    def to_whole(self, group: int, ids: RowIds) -> RowIds:
        """Numbers in the whole group of rows (ascending) with these numbers here."""
        if self._is_all:
            return ids
        # Of tables with the same first row, all but the last are empty.
        tables = np.searchsorted(self._firsts[group], ids, "right") - 1
        moved: RowIds = ids + self._moved[group][tables]
        return moved

    def from_whole(self, group: int, ids: RowIds) -> tuple[RowIds, RowIds]:
        """Of rows of the whole group, ascending: the positions of those that are here, and their numbers."""
        if self._is_all:
            return np.arange(len(ids)), ids
        positions: list[RowIds] = []
        numbers: list[RowIds] = []
        for first, moved, rows in zip(
            self._firsts[group].tolist(), self._moved[group].tolist(), self._rows[group].tolist(), strict=True
        ):
            begin, end = np.searchsorted(ids, [first + moved, first + moved + rows])
            positions.append(np.arange(begin, end))
            numbers.append(ids[begin:end] - moved)
        empty = np.empty(0, np.int64)
        return np.concatenate([empty, *positions]), np.concatenate([empty, *numbers])

    def has_some_of(self, group: int, first: int, last: int) -> bool:
        """Whether some of the rows of the whole group with these numbers are here."""
        begin = self._firsts[group] + self._moved[group]
        end = begin + self._rows[group]
        return bool((np.maximum(begin, first) < np.minimum(end, last + 1)).any())

    def numbered(self, rows: Sequence[RowSource]) -> Sequence[RowSource]:
        """Rows of each group, by their numbers in the whole group."""
        return rows if self._is_all else [_Numbered(self, n, source) for n, source in enumerate(rows)]


@dataclass(frozen=True, slots=True)
class _Numbered:
    """Rows of a group by their numbers in the whole group; implements ``RowSource``."""

    shares: Shares
    group: int
    rows: RowSource

    def parts(self, most_rows: int | None = None) -> Iterator[Rows]:
        """All records, in parts of at most so many."""
        for part in self.rows.parts(most_rows):
            yield Rows(self.shares.to_whole(self.group, part.ids), part.fields)


def _whole(group: Group, shares: Mapping[str, Share]) -> Group:
    tables: list[Table] = []
    first = 0
    for table in group.tables:
        rows = shares[table.name].of if table.name in shares else table.rows
        tables.append(Table(table.name, rows, first))
        first += rows
    return Group(group.fields, tuple(tables), group.raw_rows_of)
