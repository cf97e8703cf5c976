"""The rows of a version: copied at once, or read from the tables' memory while the version is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from holdfast.checkpoint.format.records import (
    Bytes2D,
    Field,
    Group,
    RowIds,
    Rows,
    SampledRows,
    make_groups,
)
from holdfast.checkpoint.layout import bundles
from holdfast.checkpoint.memory import copy_on_write
from holdfast.checkpoint.memory.copy_on_write import CopyOnWrite, OnRead, default_max_memory
from holdfast.checkpoint.memory.digests import RowDigests
from holdfast.checkpoint.memory.live import Gather, LiveTables
from holdfast.options import Policy


@dataclass(frozen=True, slots=True)
class RowCopy:
    """The rows of each group. Call ``gather.finish`` before any of them may change."""

    rows: Sequence[SampledRows]
    gather: Gather
    frozen: CopyOnWrite | None = None
    """The snapshot that they are read from while the version is written."""


class RowCopies:
    """Copies the rows of versions, within the policy's ``max_memory``.

    Args:
        policy: of the store.
        groups: the tables.
    """

    def __init__(self, policy: Policy, groups: Sequence[Group]) -> None:
        self._groups = tuple(groups)
        self._bytes = sum(group.rows * group.record_bytes for group in groups)
        self.max_memory = policy.max_memory or default_max_memory(self._bytes)
        self._arena: list[list[Bytes2D]] = [[] for _ in groups]
        if groups and not self.copies_baselines:
            compile_loops()

    @property
    def copies_baselines(self) -> bool:
        """Whether tables are so small that all of their rows are copied at once."""
        return self._bytes <= copy_on_write.COPIED_BYTES

    def copy(self, tables: LiveTables, wanted: Sequence[RowIds] | None, on_read: OnRead) -> RowCopy:
        """Begin to copy rows, all or the wanted ones (ascending, for each group).

        Many are not copied, but read later: ``on_read`` is told.
        """
        if wanted is None and self.copies_baselines:
            wanted = [np.arange(group.rows, dtype=np.int64) for group in self._groups]
        if wanted is None or self._bytes_of(wanted) > max(self.max_memory, copy_on_write.COPIED_BYTES):
            limit = self.max_memory - 2 * file_bytes(self.max_memory)
            frozen = CopyOnWrite(tables, limit, wanted=wanted, on_read=on_read)
            return RowCopy(frozen.groups, Gather(()), frozen)
        copies = [self._space(number, len(ids)) for number, ids in enumerate(wanted)]
        rows = [Rows(ids, tuple(fields)) for ids, fields in zip(wanted, copies, strict=True)]
        return RowCopy(rows, tables.start_gather(wanted, copies))

    def _bytes_of(self, wanted: Sequence[RowIds]) -> int:
        return sum(len(ids) * group.record_bytes for ids, group in zip(wanted, self._groups, strict=True))

    def _space(self, number: int, rows: int) -> list[Bytes2D]:
        """Memory for copies: reuses the last one's if it is large enough and not much too large.

        Saves never overlap, so the last copy is no longer needed. Fresh memory would cost a page fault for
        every 4 KiB while training waits.
        """
        arena = self._arena[number]
        if not arena or len(arena[0]) < rows or len(arena[0]) > 8 * max(rows, 1024):
            space = rows + rows // 4
            arena = [np.empty((space, f.live_bytes), np.uint8) for f in self._groups[number].fields]
            self._arena[number] = arena
        return [field[:rows] for field in arena]

    def give_back(self) -> None:
        """Free the memory of the last copy if it is large: a version has been written."""
        if 4 * sum(field.nbytes for fields in self._arena for field in fields) > self.max_memory:
            self._arena = [[] for _ in self._groups]


@cache
def compile_loops() -> None:
    """Compile the loops with which rows are read while training goes on, or load them; once in a process.

    In the first save a training step would wait for that.
    """
    groups = make_groups([("table", 1, (Field("weight", "F32", 1),))])
    weights, digests = np.zeros((1, 4), np.uint8), RowDigests(groups)
    row = np.zeros(1, np.int64)
    frozen = CopyOnWrite(LiveTables(groups, lambda table: [weights]), 4096)
    frozen.about_to_change("table", row)
    for rows in frozen.groups[0].parts():
        digests.note_unchanged(0, rows, np.ones(1, np.bool_))
    CopyOnWrite(frozen.live, 4096, wanted=[row]).groups[0].take(row)


def file_bytes(max_memory: int) -> int:
    """The size of files: their rows are in memory until they are written."""
    return min(bundles.FILE_BYTES, max_memory // 4)
