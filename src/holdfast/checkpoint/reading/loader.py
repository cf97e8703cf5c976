"""Sinks for the rows of a version: a callback, or live tables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np

from holdfast.checkpoint.codecs.quantize import Flags, RowCodec
from holdfast.checkpoint.format.encoding import decode_rows
from holdfast.checkpoint.format.ids import decode_ids, encode_ids
from holdfast.checkpoint.format.records import Bytes2D, Field, Group, RowIds, Rows, make_groups
from holdfast.checkpoint.memory.digests import RowDigests
from holdfast.checkpoint.memory.live import FieldsOf, LiveTables
from holdfast.checkpoint.memory.parts import GroupPart, LiveParts
from holdfast.checkpoint.memory.shares import Share
from holdfast.checkpoint.memory.tracker import RowSet

Sink = Callable[[int, Rows], None]
"""Takes rows of a group; called from one thread, in the order in which rows override each other."""


class _RawRows:
    """Which rows of coded groups were last seen with a mark that says: kept raw, in a group of their own.

    Such a row's newest raw record is the one that belongs to the mark, so raw records are handed on after
    all others, to rows that are marked at the end. They are few: a row with NaN in it, or far off zero.
    """

    def __init__(self) -> None:
        self._marked: dict[int, RowSet] = {}
        self._found: dict[int, RowSet] = {}
        self._lock = threading.Lock()

    def note(self, number: int, group: Group, rows: Rows, positions: RowIds | None) -> Flags | None:
        """Rows of a coded group have been read: which of them are raw; None if none is."""
        raw = np.zeros(len(rows), np.bool_)
        for field, values in zip(group.fields, rows.fields, strict=True):
            if field.codec is not None:
                raw |= field.codec.is_raw(values)
        if positions is not None:
            chosen = np.zeros(len(rows), np.bool_)
            chosen[positions] = True
            raw &= chosen
        any_raw = bool(raw.any())
        with self._lock:
            if any_raw and number not in self._marked:
                self._marked[number] = RowSet(group.rows)
            if number in self._marked:
                self._marked[number].discard(rows.ids if positions is None else rows.ids[positions])
                self._marked[number].add(rows.ids[raw])
        return raw if any_raw else None

    def wanted(self, group: int, rows: Rows, positions: RowIds | None) -> RowIds:
        """Positions of those raw records whose rows are marked."""
        if group not in self._marked:
            return np.empty(0, np.int64)
        where = np.arange(len(rows)) if positions is None else positions
        where = where[self._marked[group].contains(rows.ids[where])]
        with self._lock:
            if group not in self._found:
                self._found[group] = RowSet(self._marked[group].rows)
            self._found[group].add(rows.ids[where])
        return where

    def missing(self) -> dict[int, RowIds]:
        """By group, rows that are marked and have no raw record, now that all have been handed on."""
        lacking: dict[int, RowIds] = {}
        for group, marked in self._marked.items():
            ids = marked.ids()
            found = self._found.get(group)
            lacking[group] = ids if found is None else ids[~found.contains(ids)]
        return {group: ids for group, ids in lacking.items() if len(ids)}


class Decoder:
    """Decodes rows and passes them to a sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._raw = _RawRows()

    def load(self, group: Group, number: int, rows: Rows, positions: RowIds | None) -> None:
        """Hand on stored rows, of a stored group with this number, or those at some positions."""
        if group.raw_rows_of is not None:
            wanted = self._raw.wanted(group.raw_rows_of, rows, positions)
            if len(wanted):
                self._sink(group.raw_rows_of, rows.take(wanted))
            return
        if group.is_coded:
            raw = self._raw.note(number, group, rows, positions)
            if raw is not None:
                where = np.arange(len(rows)) if positions is None else positions
                positions = where[~raw[where]]
        rows = rows if positions is None else rows.take(positions)
        if len(rows):
            self._sink(number, decode_rows(group, rows) if group.is_coded else rows)

    def missing_raw(self) -> dict[int, RowIds]:
        """By group, rows that are kept raw and have not come, now that all have been handed on."""
        return self._raw.missing()


class RowLoader:
    """A sink that writes rows into live tables.

    Args:
        groups: as the version has them.
        fields_of: the live fields of a table, as bytes [rows, bytes], in the order of its group's fields.
        digests: of these groups; gets the digests of the rows that are written.
    """

    def __init__(
        self, groups: Sequence[Group], fields_of: FieldsOf, digests: RowDigests | None = None
    ) -> None:
        self._tables: LiveTables = LiveTables(groups, fields_of)
        self._digests = digests
        self._raw = _RawRows()

    @classmethod
    def of_parts(cls, parts: Sequence[GroupPart], fields_of: FieldsOf) -> RowLoader:
        """One that writes the rows of parts of a version's groups, and drops all others."""
        loader = cls((), fields_of)
        loader._tables = LiveParts(parts, fields_of)
        return loader

    def __call__(self, group: int, rows: Rows) -> None:
        """Write rows of a group to their tables."""
        self._write(group, rows, None)

    def fill(self, group: int, first: int, fields: Sequence[Bytes2D]) -> None:
        """Write contiguous rows of a group, starting at the id ``first``."""
        if self._digests is None:
            self._tables.fill(group, first, fields)
        else:
            self._digests.fill(self._tables, group, first, fields)

    def load(self, group: Group, number: int, rows: Rows, positions: RowIds | None) -> None:
        """Write stored rows, of a stored group with this number, or those at some positions."""
        if group.raw_rows_of is not None:
            wanted = self._raw.wanted(group.raw_rows_of, rows, positions)
            self._write(group.raw_rows_of, rows, wanted)
        elif group.is_coded:
            self._raw.note(number, group, rows, positions)
            self._tables.scatter(number, rows, positions, [field.codec for field in group.fields])
            if self._digests is not None:
                written = rows.ids if positions is None else rows.ids[positions]
                self._digests.note_live(self._tables, number, written)
        else:
            self._write(number, rows, positions)

    def _write(self, group: int, rows: Rows, positions: RowIds | None) -> None:
        self._tables.scatter(group, rows, positions)
        if self._digests is not None:
            self._digests.note(group, rows, positions)

    def missing_raw(self) -> dict[int, RowIds]:
        """By group, rows that are kept raw and have not come, now that all have been written."""
        return self._raw.missing()


class ShareLoader(RowLoader):
    """A loader of a process that has some rows only of some tables; it leaves out all others.

    Args:
        groups: as the version has them.
        fields_of: the live fields of a table, of the rows that are here.
        shares: of which tables, and which rows.
    """

    def __init__(self, groups: Sequence[Group], fields_of: FieldsOf, shares: Mapping[str, Share]) -> None:
        here = [
            make_groups(
                [(t.name, shares[t.name].rows if t.name in shares else t.rows, g.fields) for t in g.tables]
            )
            for g in groups
        ]
        live = [parts[0] if parts else group for parts, group in zip(here, groups, strict=True)]
        self._tables = LiveTables(live, fields_of, shares)
        self._digests = None
        self._raw = _RawRows()

    def wants(self, group: Group, number: int, first: int, last: int) -> bool:
        """Whether rows of a stored group with these numbers may be here."""
        return group.raw_rows_of is not None or self._tables.shares.has_some_of(number, first, last)

    def fill(self, group: int, first: int, fields: Sequence[Bytes2D]) -> None:
        """Write those of some contiguous rows of a group that are here."""
        self._write(group, Rows(np.arange(first, first + len(fields[0])), tuple(fields)), None)

    def load(self, group: Group, number: int, rows: Rows, positions: RowIds | None) -> None:
        """Write stored rows that are here, of a stored group with this number."""
        if group.raw_rows_of is not None:
            self._write(group.raw_rows_of, rows, self._raw.wanted(group.raw_rows_of, rows, positions))
        elif group.is_coded:
            self._raw.note(number, group, rows, positions)
            self._write(number, rows, positions, [field.codec for field in group.fields])
        else:
            self._write(number, rows, positions)

    def _write(
        self,
        group: int,
        rows: Rows,
        positions: RowIds | None,
        codecs: Sequence[RowCodec | None] = (),
    ) -> None:
        if positions is not None:
            rows = rows.take(positions)
        here, ids = self._tables.shares.from_whole(group, rows.ids)
        if len(here):
            self._tables.scatter(group, Rows(ids, rows.take(here).fields), None, codecs)


@cache
def compile_loops() -> None:
    """Compile the loops that a restore runs, or load them; once in a process. A restore would wait for it."""
    groups = make_groups([("table", 4, (Field("weight", "F32", 1),))])
    weights = np.zeros((4, 4), np.uint8)
    loader = RowLoader(groups, lambda table: [weights], RowDigests(groups))
    ids = np.array([0, 2, 3], np.int64)
    encoding, data = encode_ids(ids)
    loader.fill(0, 0, [np.zeros((4, 4), np.uint8)])
    decoded = decode_ids(encoding, data, len(data), 3, 0, 3, "these")
    loader(0, Rows(decoded, (np.zeros((3, 4), np.uint8),)))
