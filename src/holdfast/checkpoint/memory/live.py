"""The live memory of a group's tables: rows are copied out of it by a save and into it by a restore."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.background import Latch
from holdfast.checkpoint.codecs.quantize import RowCodec, from_float32
from holdfast.checkpoint.format.records import WEIGHT, Bytes2D, Field, Group, RowIds, Rows
from holdfast.checkpoint.memory.shares import Share, Shares
from holdfast.errors import ConfigError, CorruptCheckpoint
from holdfast.kernels import digests as digest_kernels
from holdfast.kernels import openmp
from holdfast.kernels.rows import (
    ALL,
    HELP,
    UNTIL_HELPED,
    gather_packed,
    gather_rows,
    scatter_rows,
)

FieldsOf = Callable[[str], Sequence[Bytes2D]]
"""The live fields of a table, as bytes [rows, bytes], in the order of its group's fields."""

_ALL = np.empty(0, np.int64)
_NO_DIGESTS = np.empty(0, np.uint64)
_CORES = os.cpu_count() or 1
_HELP_BYTES = 1 << 20  # below this, waking a thread costs more than it gains


@cache
def _helper() -> SimpleQueue[Callable[[], None]]:
    """A queue of work for a helper thread. Not a pool, which an interrupt can leave locked forever."""
    jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def work() -> None:
        while True:
            jobs.get()()

    threading.Thread(target=work, name="holdfast-copy", daemon=True).start()
    return jobs


# A forked process has the queue but not the thread.
os.register_at_fork(after_in_child=_helper.cache_clear)


class LiveTables:
    """The memory of the rows of some groups.

    Args:
        groups: the tables and their fields.
        fields_of: called once, here. The arrays are kept alive; if they are replaced, make a new object.
        shares: tables of which only a share is here, by name.
    """

    def __init__(
        self, groups: Sequence[Group], fields_of: FieldsOf, shares: Mapping[str, Share] | None = None
    ) -> None:
        self.groups = tuple(groups)
        self.share_of = dict(shares or {})
        self.shares = Shares(self.groups, self.share_of)
        self._firsts = [np.array([t.first for t in g.tables] + [g.rows], np.int64) for g in groups]
        self._row_bytes = [np.array([f.live_bytes for f in g.fields], np.int64) for g in groups]
        # These references keep the memory alive: below, only addresses are used.
        self._live = [[tuple(fields_of(t.name)) for t in g.tables] for g in groups]
        self._addresses = [
            np.array([[f[i].ctypes.data for f in tables] for i in range(len(g.fields))], np.int64)
            for g, tables in zip(groups, self._live, strict=True)
        ]
        for group, tables in zip(groups, self._live, strict=True):
            for table, fields in zip(group.tables, tables, strict=True):
                for field, live in zip(group.fields, fields, strict=True):
                    if live.shape != (table.rows, field.live_bytes) or not live.flags.c_contiguous:
                        raise CorruptCheckpoint(
                            f"table {table.name}: {field.name} is not [rows, bytes] of the group"
                        )

    def weights(self, table: str) -> NDArray[np.float32]:
        """The live weights of a table, [rows, width]. Raises ConfigError if they are not float32."""
        for group, tables in zip(self.groups, self._live, strict=True):
            for one, fields in zip(group.tables, tables, strict=True):
                if one.name == table:
                    number, field = next((i, f) for i, f in enumerate(group.fields) if f.name == WEIGHT)
                    if field.dtype != "F32":
                        raise ConfigError(
                            f"the weights of {table} are {field.dtype}: prioritize='scar' takes F32 alone; "
                            "use 'mfu' or 'ssu'"
                        )
                    return fields[number].view(np.float32)
        raise KeyError(table)

    def fill(
        self,
        group: int,
        first: int,
        fields: Sequence[Bytes2D],
        digests: NDArray[np.uint64] | None = None,
    ) -> None:
        """Write contiguous rows, starting at the id ``first``, and their digests at their ids."""
        self._check(group, np.array([first, first + len(fields[0]) - 1]))
        firsts = self._firsts[group]
        row_bytes = self._row_bytes[group]
        values = np.array([[field.ctypes.data] for field in fields], np.int64)
        at, end = first, first + len(fields[0])
        while at < end:
            table = int(firsts.searchsorted(at, "right")) - 1
            begin, behind = firsts[table : table + 2].tolist()
            stop = min(end, behind)
            targets = self._addresses[group][:, table] + (at - begin) * row_bytes
            sources = values + ((at - first) * row_bytes)[:, None]
            noted = _NO_DIGESTS if digests is None else digests[at:stop]
            digest_kernels.fill_rows(targets, sources, row_bytes, stop - at, noted)
            at = stop

    def addresses(self, group: int, table: int) -> NDArray[np.int64]:
        """Where each field of a group's table begins in memory."""
        return np.ascontiguousarray(self._addresses[group][:, table])

    def copy_range(self, group: int, begin: int, end: int, out: Sequence[Bytes2D]) -> None:
        """Copy contiguous rows to ``out`` (for each field). They may change meanwhile: copies may be torn."""
        firsts = self._firsts[group]
        at = begin
        while at < end:
            table = int(firsts.searchsorted(at, "right")) - 1
            first, behind = firsts[table : table + 2].tolist()
            stop = min(end, behind)
            for live, copy in zip(self._live[group][table], out, strict=True):
                copy[at - begin : stop - begin] = live[at - first : stop - first]
            at = stop

    def start_gather(self, wanted: Sequence[RowIds], out: Sequence[Sequence[Bytes2D]]) -> Gather:
        """Start copying rows (ascending ids, for each group) to ``out`` (for each group and field).

        Call ``finish`` on the result. Nothing may write to the rows before that returns.
        """
        parts: list[_GatherPart] = []
        for group, (ids, copies) in enumerate(zip(wanted, out, strict=True)):
            if len(ids):
                self._check(group, ids)
                parts.append(_GatherPart(self._addresses[group], self._firsts[group], ids, copies))
        return Gather(parts)

    def mark_changed(
        self,
        group: int,
        begin: int,
        end: int,
        digests: NDArray[np.uint64],
        marked: NDArray[np.uint64],
    ) -> int:
        """Mark rows from ``begin`` to ``end`` of a group that differ from their digests, or have none (0).
        Returns their number. Rows that are already marked are skipped.
        """
        if not (0 <= begin <= end <= len(digests) == self._firsts[group][-1]):
            raise ValueError(f"rows {begin} to {end} of a group of {self._firsts[group][-1]}")
        addresses, firsts = self._addresses[group], self._firsts[group]
        row_bytes = self._row_bytes[group]
        shared = np.zeros(2, np.int64)
        large = (end - begin) * int(row_bytes.sum()) >= _HELP_BYTES
        if large and _CORES > 1 and openmp.threads() > 1:
            arrays = addresses, firsts, row_bytes, digests, marked, shared
            pointers = [array.ctypes.data for array in arrays]
            numbers = np.array([*addresses.shape, len(digests), begin, end, *pointers], np.int64)
            openmp.run_on_all(digest_kernels.mark_packed, numbers.ctypes.data)
        else:
            digest_kernels.mark_changed(addresses, firsts, row_bytes, begin, end, digests, marked, shared)
        return int(shared[1])

    def digest(self, group: int, ids: RowIds, digests: NDArray[np.uint64]) -> None:
        """Store the digests of some rows of a group (ascending ids) at their ids."""
        if len(ids):
            self._check(group, ids)
            row_bytes = self._row_bytes[group]
            digest_kernels.digest_live(self._addresses[group], self._firsts[group], row_bytes, ids, digests)

    def scatter(
        self,
        group: int,
        rows: Rows,
        positions: NDArray[np.int64] | None = None,
        codecs: Sequence[RowCodec | None] = (),
    ) -> None:
        """Write rows of a group to their tables; with ``positions``, only the rows at those positions.

        ``codecs``, one per field or None, decode the rows. Rows that are marked as raw are not written.
        """
        if not len(rows) or (positions is not None and not len(positions)):
            return
        self._check(group, rows.ids)
        some = _ALL if positions is None else positions
        addresses, firsts = self._addresses[group], self._firsts[group]
        if all(codec is None for codec in codecs):
            _scatter(addresses, firsts, rows.ids, rows.fields, some)
            return
        for number, (codec, values) in enumerate(zip(codecs, rows.fields, strict=True)):
            field = self.groups[group].fields[number]
            if codec is None:
                _scatter(addresses[number : number + 1], firsts, rows.ids, [values], some)
            elif field.dtype == "F32":
                codec.decode_into(addresses[number], firsts, field.width, rows.ids, values, some)
            else:
                self._scatter_halves(codec, field, addresses[number], firsts, rows.ids, values, some)

    def _scatter_halves(
        self,
        codec: RowCodec,
        field: Field,
        addresses: RowIds,
        firsts: RowIds,
        ids: RowIds,
        values: Bytes2D,
        positions: RowIds,
    ) -> None:
        """Decode to float32, then convert to a 16-bit type."""
        known = ~codec.is_raw(values)
        if len(positions):
            known &= np.isin(np.arange(len(ids)), positions)
        kept = np.flatnonzero(known)
        if len(kept):
            decoded = np.empty((len(kept), field.width), np.float32)
            codec.decode(np.ascontiguousarray(values[kept]), decoded)
            _scatter(addresses[None], firsts, ids[kept], [from_float32(decoded, field.dtype)], _ALL)

    def _check(self, group: int, ids: RowIds) -> None:
        """Check the range of ascending ids, which become addresses."""
        rows = self._firsts[group][-1]
        if not (ids[0] >= 0 and ids[-1] < rows):
            raise CorruptCheckpoint(f"rows {ids[0]} to {ids[-1]} of a group of {rows}")


def _scatter(
    addresses: RowIds, firsts: RowIds, ids: RowIds, fields: Sequence[Bytes2D], positions: RowIds
) -> None:
    """Copy rows of several fields to the tables at these addresses, [field, table]."""
    fields = [np.ascontiguousarray(field) for field in fields]
    values = np.array([field.ctypes.data for field in fields], np.int64)
    row_bytes = np.array([field.shape[1] for field in fields], np.int64)
    scatter_rows(addresses, firsts, ids, values, row_bytes, positions)


class _GatherPart:
    """Rows of one group to copy. Any number of threads may share the work."""

    def __init__(self, addresses: RowIds, firsts: RowIds, ids: RowIds, copies: Sequence[Bytes2D]) -> None:
        row_bytes = [copy.shape[1] for copy in copies]
        self.bytes = len(ids) * sum(row_bytes)
        self._kept_alive = copies
        targets = np.array([*(copy.ctypes.data for copy in copies), *row_bytes], np.int64)
        self._arguments = addresses, firsts, ids, targets, np.zeros(2, np.int64)

    def run(self, how: int) -> None:
        """Copy the rows that no thread has copied yet."""
        addresses, firsts, ids, targets, shared = self._arguments
        fields = len(addresses)
        gather_rows(addresses, firsts, ids, targets[:fields], targets[fields:], shared, how)

    def run_on_all(self) -> None:
        """Copy all rows on PyTorch's threads."""
        arrays = self._arguments
        pointers = [array.ctypes.data for array in arrays]
        numbers = np.array([*arrays[0].shape, len(arrays[2]), *pointers], np.int64)
        openmp.run_on_all(gather_packed, numbers.ctypes.data)


class Gather:
    """Rows that are being copied: by all threads that torch computes with; or by another thread, if they are
    many, and by the one that waits for it.

    Each row is a wait for memory, of which a core can have only so many under way: two copy more than one.
    """

    def __init__(self, parts: Sequence[_GatherPart]) -> None:
        self._parts = parts
        self._helped: Latch | None = None
        if _CORES == 1 or sum(part.bytes for part in parts) < _HELP_BYTES:
            return
        if openmp.threads() > 1:
            for part in parts:
                part.run_on_all()
            self._parts = ()
        else:
            # The caller can do other things meanwhile.
            try:
                helper = _helper()
            except RuntimeError:  # no thread available: ``finish`` copies everything
                return
            self._helped = Latch()
            helper.put(self._help)
            # A thread takes a while to wake up, and then needs the interpreter, which this one has, to begin:
            # copying here until it has begun loses no time.
            self._run(UNTIL_HELPED)

    def finish(self) -> None:
        """Wait until everything is copied."""
        self._run(ALL)
        if self._helped is not None:
            self._helped.wait()

    def _help(self) -> None:
        assert self._helped is not None
        try:
            self._run(HELP)
        finally:
            self._helped.open()

    def _run(self, how: int) -> None:
        for part in self._parts:
            part.run(how)
