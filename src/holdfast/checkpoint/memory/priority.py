"""Which rows to save first, if not all that changed can be saved at once (CPR, section 4.2).

Partial recovery puts rows back to the values that were last saved. What is lost is what they learned since;
so the rows that learn most are to be saved most often. With a fraction *r*, in place of everything after each
interval, *r* of the rows are saved after each *r*-th part of it: as many bytes, but the rows that matter are
younger. Three ways to tell them, each a ``Priority`` of one table:

    MostUsed        "mfu"   looked up most often since they were saved     4 bytes a row
    SubSampled      "ssu"   looked up lately, in every second batch        r times that
    LargestChange   "scar"  changed most since they were saved             a copy of the weights

Nothing here knows torch or a store: a ``Checkpointer`` uses it, and so may a parameter server. Call
``touched`` with the rows of each batch, ``choose`` when a save is due, and ``saved`` at the instant at which
the chosen rows are copied; ``failed`` if they did not get to the store after all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigError
from holdfast.kernels.priority import WAYS, change_sizes, count_rows, forget_rows, remember_rows
from holdfast.options import PRIORITIES, PriorityName

RowIds = NDArray[np.int64]
Floats = NDArray[np.float32]

LARGE_SHARE = 0.99
"""Share of all bytes in the tables whose rows are prioritized (CPR, section 5.1)."""
SAMPLING_PERIOD = 2
"""``SubSampled`` looks at one of this many batches (CPR, section 5.1)."""


class Priority(Protocol):
    """Ranks the rows of one table. Not thread-safe."""

    limit: int
    """Maximum number of chosen rows."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it uses."""
        ...

    def touched(self, ids: RowIds) -> None:
        """Record the lookups of one batch, repetitions included. Ids outside of the table are ignored.

        Call this once for each batch.
        """
        ...

    def choose(self) -> RowIds:
        """The rows to save now, ascending, at most ``limit``; only rows that were touched since their last
        save. Changes nothing."""
        ...

    def saved(self, ids: RowIds) -> None:
        """Record that these rows are being saved: earlier lookups and changes no longer count."""
        ...

    def failed(self, ids: RowIds) -> None:
        """Record that these rows were not saved after all. They are chosen first next time."""
        ...


class MostUsed:
    """CPR-MFU: the rows with most lookups since they were last saved, by a counter for each.

    Args:
        rows: of the table.
        fraction: of them that may be chosen.
    """

    def __init__(self, rows: int, fraction: float) -> None:
        self.limit = limit_of(rows, fraction)
        self._counters = np.zeros(rows, np.uint32)
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Four bytes per row."""
        return self._counters.nbytes

    @property
    def counters(self) -> NDArray[np.uint32]:
        """Lookups of each row since it was last saved."""
        return self._counters

    def touched(self, ids: RowIds) -> None:
        """Count the lookups."""
        count_rows(self._counters, ids)

    def choose(self) -> RowIds:
        """The rows with the highest counts; among equal counts, in turns."""
        chosen, self._next = _highest(self._counters, self.limit, self._next)
        return chosen

    def saved(self, ids: RowIds) -> None:
        """Reset the counts of these rows."""
        self._counters[ids] = 0

    def failed(self, ids: RowIds) -> None:
        """Give these rows the highest possible count."""
        self._counters[ids] = np.iinfo(np.uint32).max


class SubSampled:
    """CPR-SSU: rows that were seen in every ``period``-th batch, in a list with room for ``limit``.

    Frequent rows are likely to be seen. When the list is full, a random row makes room for another. It is
    kept as a hash table without room to spare, in buckets of one cache line: which rows a new one may
    displace depends on its hash, and up to a few percent of the room stays unused when it is just about full.

    Args:
        rows: of the table, below 2**32 - 1.
        fraction: of them that the list has room for.
        period: of how many batches one is looked at.
        seed: of the chance by which rows are displaced.
    """

    def __init__(self, rows: int, fraction: float, *, period: int = SAMPLING_PERIOD, seed: int = 0) -> None:
        if rows >= 2**32 - 1:
            raise ConfigError(f"a table of {rows:,} rows: ssu takes those below 2**32 - 1; use mfu")
        self.limit = limit_of(rows, fraction)
        self._rows = rows
        self._period = period
        self._batch = 0
        self._slots = np.zeros((max(1, self.limit // WAYS), WAYS), np.uint32)
        self._chance = np.array([seed], np.uint64)

    @property
    def nbytes(self) -> int:
        """Four bytes for each row that the list can hold."""
        return self._slots.nbytes

    def touched(self, ids: RowIds) -> None:
        """Add the rows to the list, if this batch is sampled."""
        if self._batch % self._period == 0:
            remember_rows(self._slots, ids, self._rows, self._chance)
        self._batch += 1

    def choose(self) -> RowIds:
        """All rows in the list."""
        found = np.sort(self._slots[self._slots != 0].astype(np.int64) - 1)
        return found[: self.limit]

    def saved(self, ids: RowIds) -> None:
        """Remove the rows from the list."""
        forget_rows(self._slots, ids)

    def failed(self, ids: RowIds) -> None:
        """Add the rows to the list again."""
        remember_rows(self._slots, ids, self._rows, self._chance)


class LargestChange:
    """SCAR: the rows whose weights are farthest, in Euclidean norm, from what was last saved of them.

    Args:
        values: gives the table's live weights, [rows, width].
        fraction: of the rows that may be chosen.
    """

    def __init__(self, values: Callable[[], Floats], fraction: float) -> None:
        self._values = values
        self._saved = values().copy()
        self.limit = limit_of(len(self._saved), fraction)
        self._next = 0

    @property
    def nbytes(self) -> int:
        """As many bytes as the weights."""
        return self._saved.nbytes

    def touched(self, ids: RowIds) -> None:
        """Do nothing: changes are found by comparing the weights."""

    def choose(self) -> RowIds:
        """The rows with the largest changes above zero."""
        sizes = np.empty(len(self._saved), np.float32)
        change_sizes(self._values(), self._saved, sizes)
        chosen, self._next = _highest(sizes, self.limit, self._next)
        return chosen

    def saved(self, ids: RowIds) -> None:
        """Remember the current weights of these rows."""
        self._saved[ids] = self._values()[ids]

    def failed(self, ids: RowIds) -> None:
        """Set the remembered weights so that these rows count as changed most."""
        self._saved[ids] = np.nan


def make_priority(
    name: PriorityName, rows: int, fraction: float, values: Callable[[], Floats], *, seed: int = 0
) -> Priority:
    """Create a priority by name. ``values`` returns the table's live weights; only "scar" needs it."""
    if name == "mfu":
        return MostUsed(rows, fraction)
    if name == "ssu":
        return SubSampled(rows, fraction, seed=seed)
    if name == "scar":
        return LargestChange(values, fraction)
    raise ConfigError(f"prioritize is {name!r}: expected one of {', '.join(PRIORITIES)}")


def limit_of(rows: int, fraction: float) -> int:
    """The number of rows of this fraction, at least one."""
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction is {fraction!r}: expected above 0, at most 1")
    return max(1, int(rows * fraction))


def large_tables(sizes: Sequence[int], share: float = LARGE_SHARE) -> list[int]:
    """The indices of the fewest largest tables that together have this share of all bytes, ascending.

    Only their rows are ranked: of the others all changed rows are saved.
    """
    order = sorted(range(len(sizes)), key=lambda table: (-sizes[table], table))
    found: list[int] = []
    held = 0
    for table in order:
        if held >= share * sum(sizes):
            break
        found.append(table)
        held += sizes[table]
    return sorted(found)


def _highest(scores: NDArray[np.uint32] | NDArray[np.float32], limit: int, turn: int) -> tuple[RowIds, int]:
    """The rows with the highest scores above zero, ascending, at most ``limit``.

    Of rows that score equal, those come first that follow row ``turn``; returned is whose turn is next. Else
    the first rows of a table were saved again and again, and the last ones never.
    """
    used = np.flatnonzero(scores)
    if len(used) <= limit:
        return used, turn
    lowest = np.partition(scores[used], len(used) - limit)[len(used) - limit]
    above = np.flatnonzero(scores > lowest)
    equal = np.flatnonzero(scores == lowest)
    equal = np.roll(equal, -int(np.searchsorted(equal, turn)))[: limit - len(above)]
    return np.sort(np.concatenate([above, equal])), int(equal[-1]) + 1
