"""What a checkpoint is made of: tables whose rows are fixed-size records of bits.

A table has fields (its weights, each optimizer state that has one entry a row); a row's record is its
fields side by side. Here a field is a C-contiguous uint8 array [rows, bytes]: nothing below knows floats,
so nothing can be rounded or forgotten. Where the policy says so, a codec turns a field's floats into fewer
bytes on their way to the store (``encoding.py``) and back (``reading/``); what lies between moves bytes.

Tables whose records look alike form a *group* and share one numbering: row ``i`` of a table is row
``table.first + i`` of its group. So a model of hundreds of small tables is saved in a few large pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.codecs.quantize import CODED_DTYPES, RowCodec, codec_from_json
from holdfast.errors import CorruptCheckpoint

# Bytes of one element, by the names that safetensors gives to types.
ELEMENT_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip

MOST_ROWS = 1 << 48
"""Of a group: no id is as large."""

Bytes2D = NDArray[np.uint8]
RowIds = NDArray[np.int64]

WEIGHT = "weight"
"""The name of the field that holds a table's weights."""


@dataclass(frozen=True, slots=True)
class Field:
    """One part of a record: ``width`` elements of ``dtype``, stored as they are or by a codec."""

    name: str
    dtype: str
    width: int
    codec: RowCodec | None = None

    @property
    def live_bytes(self) -> int:
        """Bytes of a row in memory."""
        return ELEMENT_BYTES[self.dtype] * self.width

    @property
    def bytes(self) -> int:
        """Bytes of a stored record that it takes."""
        return self.live_bytes if self.codec is None else self.codec.stored_bytes(self.width)

    def to_json(self) -> list[Any]:
        """As the manifest keeps it."""
        return [self.name, self.dtype, self.width, *([self.codec.to_json()] if self.codec else [])]

    @classmethod
    def from_json(cls, value: Any) -> Field:
        """What ``to_json`` gave."""
        name, dtype, width, *codec = value
        if len(codec) > 1:
            raise ValueError("a field has one codec at most")
        return cls(str(name), str(dtype), int(width), codec_from_json(codec[0]) if codec else None)


@dataclass(frozen=True, slots=True)
class Table:
    """A table as a checkpoint sees it: its name in the model, its rows, and its place in its group."""

    name: str
    rows: int
    first: int


@dataclass(frozen=True, slots=True)
class Group:
    """Tables with equal records, numbered through."""

    fields: tuple[Field, ...]
    tables: tuple[Table, ...]
    raw_rows_of: int | None = None
    """The number of the group with codecs whose rows are here, raw, where their codec cannot hold them."""

    @property
    def is_coded(self) -> bool:
        """Whether a codec stores some field of it."""
        return any(field.codec is not None for field in self.fields)

    def live(self) -> Group:
        """The same tables as they are in memory."""
        return Group(tuple(replace(field, codec=None) for field in self.fields), self.tables)

    @property
    def rows(self) -> int:
        """Rows of all its tables together."""
        return sum(table.rows for table in self.tables)

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return sum(field.bytes for field in self.fields)

    def to_json(self) -> dict[str, Any]:
        """As the manifest keeps it."""
        value: dict[str, Any] = {
            "fields": [f.to_json() for f in self.fields],
            "tables": [[t.name, t.rows] for t in self.tables],
        }
        return value if self.raw_rows_of is None else value | {"raw_rows_of": self.raw_rows_of}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Group:
        """What ``to_json`` gave; every number is checked before anything is allocated by it."""
        try:
            fields = tuple(Field.from_json(field) for field in value["fields"])
            sizes = [(str(name), int(rows)) for name, rows in value["tables"]]
            raw_rows_of = None if value.get("raw_rows_of") is None else int(value["raw_rows_of"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CorruptCheckpoint(f"a manifest has an invalid group of tables: {error!r}") from None
        if not fields or any(f.dtype not in ELEMENT_BYTES or not 0 < f.width <= 1 << 20 for f in fields):
            raise CorruptCheckpoint("a manifest has an invalid field")
        if any(f.codec is not None and f.dtype not in CODED_DTYPES for f in fields):
            raise CorruptCheckpoint("a manifest has a codec for a field that is not floating point")
        tables: list[Table] = []
        first = 0
        for name, rows in sizes:
            if not 0 <= rows < MOST_ROWS - first:
                raise CorruptCheckpoint(f"a manifest says that table {name} has {rows} rows")
            tables.append(Table(name, rows, first))
            first += rows
        return cls(fields, tuple(tables), raw_rows_of)


def make_groups(
    tables: Sequence[tuple[str, int, tuple[Field, ...]]], kind_of: Callable[[str], object] = lambda name: None
) -> tuple[Group, ...]:
    """Groups of all tables (name, rows, fields) with equal fields, in order of first appearance.

    Tables of which ``kind_of`` says different things are kept apart.
    """
    by_kind: dict[tuple[tuple[Field, ...], object], list[Table]] = {}
    for name, rows, fields in tables:
        members = by_kind.setdefault((fields, kind_of(name)), [])
        first = members[-1].first + members[-1].rows if members else 0
        members.append(Table(name, rows, first))
    return tuple(Group(fields, tuple(members)) for (fields, _), members in by_kind.items())


@dataclass(frozen=True, slots=True)
class Rows:
    """Some records of a group: row ids, ascending, and each field's bytes in that order.

    An id stands once, except among records of several versions, where a row may have lived twice.
    """

    ids: RowIds
    fields: tuple[Bytes2D, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def parts(self, most_rows: int | None = None) -> Iterator[Rows]:
        """The same records, in parts of at most so many; None: in one."""
        most_rows = most_rows or max(len(self), 1)
        for begin in range(0, len(self), most_rows):
            end = begin + most_rows
            yield Rows(self.ids[begin:end], tuple(field[begin:end] for field in self.fields))

    def take(self, positions: NDArray[np.int64]) -> Rows:
        """The records at these positions."""
        # mode="clip" skips a check of all positions first, and copies each row as one block.
        return Rows(self.ids[positions], tuple(np.take(f, positions, 0, mode="clip") for f in self.fields))


class RowSource(Protocol):
    """Records of a group, in ascending order of ids, that a version is written from: ``Rows``, or rows that
    are still in the tables' memory (``memory/copy_on_write.py``), which can be read only once."""

    def parts(self, most_rows: int | None = None) -> Iterator[Rows]:
        """All records, in parts of at most so many; None: in parts of any size."""


class SampledRows(RowSource, Protocol):
    """Records of which some can be looked at before they are written."""

    def __len__(self) -> int: ...

    def take(self, positions: NDArray[np.int64], /) -> Rows:
        """The records at these positions; only before ``parts``."""


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Records of one group one after the other; at least one part."""
    if len(parts) == 1:
        return parts[0]
    return Rows(
        np.concatenate([p.ids for p in parts]),
        tuple(np.concatenate(fields) for fields in zip(*(p.fields for p in parts), strict=True)),
    )
