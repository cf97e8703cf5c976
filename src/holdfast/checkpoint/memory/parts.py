"""Parts of groups in memory: some of the tables, and some of the fields of their records.

A version's groups hold whatever was trained together. Who loads a model without its optimizer, or one model
of two, wants a part of each record, or of the rows; the rest is read with it, and dropped here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.codecs.quantize import RowCodec
from holdfast.checkpoint.format.records import Bytes2D, Group, Rows, Table
from holdfast.checkpoint.memory.live import FieldsOf, LiveTables


@dataclass(frozen=True, slots=True)
class GroupPart:
    """Some tables of a group with some of its fields.

    Attributes:
        group: the part as a group of its own, with its rows numbered anew.
        fields: which fields of the whole group it has, by number.
        ranges: (first, end, first in the part) of its rows in the whole group, ascending.
    """

    group: Group
    fields: tuple[int, ...]
    ranges: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, group: Group, tables: Collection[str], fields: Collection[str]) -> GroupPart:
        """Take these tables and fields of a group, as far as it has them."""
        chosen: list[Table] = []
        ranges: list[tuple[int, int, int]] = []
        rows = 0
        for table in group.tables:
            if table.name not in tables:
                continue
            chosen.append(Table(table.name, table.rows, rows))
            if not table.rows:
                continue
            if ranges and ranges[-1][1] == table.first:  # its neighbour is chosen, too
                first, _, to = ranges.pop()
            else:
                first, to = table.first, rows
            ranges.append((first, table.first + table.rows, to))
            rows += table.rows
        numbers = tuple(number for number, field in enumerate(group.fields) if field.name in fields)
        part = Group(tuple(group.fields[number] for number in numbers), tuple(chosen))
        return cls(part, numbers, tuple(ranges))

    def overlaps(self, first: int, last: int) -> bool:
        """Whether some of these rows of the whole group are in the part."""
        return any(begin <= last and first < end for begin, end, _ in self.ranges)


class LiveParts(LiveTables):
    """The memory of parts of groups, written to by those who have rows of the whole groups.

    Args:
        parts: one for each group.
        fields_of: as `LiveTables` takes it, for the parts' tables and fields.
    """

    def __init__(self, parts: Sequence[GroupPart], fields_of: FieldsOf) -> None:
        super().__init__([part.group for part in parts], fields_of)
        self._parts = tuple(parts)

    def fill(
        self,
        group: int,
        first: int,
        fields: Sequence[Bytes2D],
        digests: NDArray[np.uint64] | None = None,
    ) -> None:
        """Write those of some contiguous rows of the whole group that are in the part."""
        part = self._parts[group]
        chosen = [fields[number] for number in part.fields]
        for begin, end, to in part.ranges:
            a, b = max(begin, first), min(end, first + len(fields[0]))
            if a < b:
                super().fill(
                    group, a - begin + to, [field[a - first : b - first] for field in chosen], digests
                )

    def scatter(
        self,
        group: int,
        rows: Rows,
        positions: NDArray[np.int64] | None = None,
        codecs: Sequence[RowCodec | None] = (),
    ) -> None:
        """Write those of some rows of the whole group that are in the part."""
        part = self._parts[group]
        codecs = [codecs[number] for number in part.fields] if codecs else ()
        for cut, where in _in_ranges(part, rows, positions):
            super().scatter(group, cut, where, codecs)


def _in_ranges(
    part: GroupPart, rows: Rows, positions: NDArray[np.int64] | None
) -> Iterator[tuple[Rows, NDArray[np.int64] | None]]:
    """The rows of each range as rows of the part, and which of them are wanted; positions ascend."""
    chosen = [rows.fields[number] for number in part.fields]
    for begin, end, to in part.ranges:
        a, b = np.searchsorted(rows.ids, [begin, end]).tolist()
        where = positions
        if positions is not None:
            low, high = np.searchsorted(positions, [a, b]).tolist()
            where = positions[low:high] - a
        if a < b:
            yield Rows(rows.ids[a:b] + (to - begin), tuple(field[a:b] for field in chosen)), where
