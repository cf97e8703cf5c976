"""A worker's lookups: which rows a batch needs, where they lie, their values and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.kernels import placing
from holdfast.tables.plan import GroupPlan, RowPlacement

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_LEAST_SLOTS = 1 << 10
_ONE_EACH: Ids = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Placed:
    """The different rows that a batch looks up in a group, server after server.

    ``offsets`` are those of bags, table after table: ``gather`` makes one sum of each bag, ``sum_gradients``
    gives each id of a bag the bag's gradient. None: each id is a bag of its own.
    """

    places: NDArray[np.uint32]
    """[unique]: the record of each at its server."""
    starts: Ids
    """[servers + 1]: server s has places[starts[s]:starts[s + 1]]."""
    inverse: NDArray[np.int32]
    """[ids]: which of the rows each id is, table after table."""
    offsets: Ids | None = None
    """[bags + 1]"""

    @property
    def unique(self) -> int:
        """How many rows there are."""
        return len(self.places)

    @property
    def bags(self) -> int:
        """How many sums the lookup makes: samples times tables."""
        return len(self.inverse) if self.offsets is None else len(self.offsets) - 1

    def gather(self, rows: Floats, out: Floats | None = None) -> Floats:
        """The sums of all bags, [bags, dim], of the rows' weights [unique, dim]; table after table."""
        rows = _floats(rows, self.unique, "rows")
        if out is None:
            out = np.empty((self.bags, rows.shape[1]), np.float32)
        _check_out(out, (self.bags, rows.shape[1]))
        placing.gather_bags(rows, self.inverse, _ONE_EACH if self.offsets is None else self.offsets, out)
        return out

    def sum_gradients(self, gradients: Floats, out: Floats | None = None) -> Floats:
        """The rows' gradients, [unique, dim], of the bags' [bags, dim]: added up in the order of the ids, so
        equal inputs give equal bits."""
        gradients = _floats(gradients, self.bags, "gradients")
        if out is None:
            out = np.empty((self.unique, gradients.shape[1]), np.float32)
        _check_out(out, (self.unique, gradients.shape[1]))
        offsets = _ONE_EACH if self.offsets is None else self.offsets
        placing.sum_gradients(gradients, self.inverse, offsets, out)
        return out


class Placer:
    """Finds the rows of batches. One for each group and thread: it keeps its hash table between calls."""

    def __init__(self, plan: GroupPlan, placement: RowPlacement) -> None:
        if placement.records(plan.rows) > 2**32:
            raise ValueError(
                f"group {plan.name}: {placement.records(plan.rows):,} records on a server, but places are "
                "32 bits: use more servers"
            )
        self.plan = plan
        self._firsts = np.array(plan.firsts, np.int64)
        self._layout = (placement.servers, placement.k, placement.r, placement.groups)
        self._slots = np.zeros(_LEAST_SLOTS, np.uint32)
        self._base = 1  # slots below it count as empty
        self._uniques = np.empty(0, np.int64)

    def place(self, ids: Sequence[Ids], offsets: Sequence[Ids] | None = None) -> Placed:
        """Where the rows of these ids lie; ids and offsets for each table of the group, as in ``Batch``.

        Raises ``ValueError`` that names the table and the id for an id that the table does not have.
        """
        if len(ids) != len(self.plan.tables):
            raise ValueError(
                f"group {self.plan.name}: ids for {len(ids)} tables, expected {len(self.plan.tables)}"
            )
        bounds = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([len(part) for part in ids], out=bounds[1:])
        flat = np.concatenate(ids, dtype=np.int64, casting="safe") if ids else np.zeros(0, np.int64)
        bags = None if offsets is None else self._bags(offsets, bounds)
        self._make_room(len(flat))
        places = np.empty(len(flat), np.uint32)
        starts = np.empty(self._layout[0] + 1, np.int64)
        inverse = np.empty(len(flat), np.int32)
        found = placing.place_ids(
            flat,
            bounds,
            self._firsts,
            *self._layout,
            self._slots,
            self._base,
            self._uniques,
            places,
            starts,
            inverse,
        )
        self._base += len(flat)
        if found < 0:
            table = int(np.searchsorted(bounds, -1 - found, "right")) - 1
            raise ValueError(
                f"table {self.plan.tables[table].name}: id {flat[-1 - found]}, "
                f"but it has {self.plan.tables[table].rows:,} rows"
            )
        return Placed(places[:found], starts, inverse, bags)

    def _bags(self, offsets: Sequence[Ids], bounds: Ids) -> Ids:
        """Where bags start, numbered through over all tables, and where the last one ends."""
        parts = []
        for table, part, first, end in zip(self.plan.tables, offsets, bounds[:-1], bounds[1:], strict=True):
            ends = np.append(part, end - first)
            if ends[0] != 0 or (np.diff(ends) < 0).any():
                raise ValueError(f"table {table.name}: offsets do not ascend from 0 to its {end - first} ids")
            parts.append(part + first)
        return np.append(np.concatenate(parts), bounds[-1]) if parts else bounds

    def _make_room(self, count: int) -> None:
        if count >= 2**31:
            raise ValueError(f"group {self.plan.name}: {count:,} ids in a batch, expected less than 2**31")
        if len(self._slots) < 2 * count:
            self._slots = np.zeros(1 << (2 * count - 1).bit_length(), np.uint32)
            self._base = 1
        elif self._base + count > 2**32:
            self._slots[:] = 0
            self._base = 1
        if len(self._uniques) < count:
            self._uniques = np.empty(2 * count, np.int64)


def _floats(values: Floats, count: int, what: str) -> Floats:
    if values.ndim != 2 or len(values) != count or values.dtype != np.float32:
        raise ValueError(f"{what} are {values.dtype} {list(values.shape)}, expected float32 [{count}, dim]")
    return np.require(values, requirements=["C", "A"])


def _check_out(out: Floats, shape: tuple[int, int]) -> None:
    if out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, expected float32 {list(shape)} without gaps")
