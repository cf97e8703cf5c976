"""Which of a server's rows are saved first (see ``checkpoint.priority``).

A server ranks the rows of all large tables of a group together: those that make up most of the bytes of the
job. Rows of other tables are saved whenever they have changed. It sees a row once a batch, however often the
batch looks it up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.priority import large_tables, make_priority
from holdfast.options import PriorityName
from holdfast.tables.shard import GroupShard


def rankings(shards: Sequence[GroupShard], name: PriorityName | None, fraction: float) -> list[Ranking]:
    """One for each group of tables; none if all rows are alike."""
    if name is None:
        return []
    sizes = [table.rows * shard.plan.words for shard in shards for table in shard.plan.tables]
    large, first, found = set(large_tables(sizes)), 0, []
    for shard in shards:
        count = len(shard.plan.tables)
        found.append(Ranking(shard, name, fraction, [first + t in large for t in range(count)]))
        first += count
    return found


class Ranking:
    """Of the rows of one group at a server.

    Args:
        shard: the group.
        name: how they are ranked.
        fraction: of them that is saved at a time.
        large: which tables' rows are ranked; those of others are always chosen.
    """

    def __init__(self, shard: GroupShard, name: PriorityName, fraction: float, large: Sequence[bool]) -> None:
        self._shard = shard
        self._large = np.array(large, np.bool_)
        self._ends = np.cumsum([table.rows for table in shard.plan.tables])
        weights = shard.records[:, : shard.plan.dim].view(np.float32)
        self._priority = make_priority(name, len(shard.records), fraction, lambda: weights, seed=shard.server)

    @property
    def nbytes(self) -> int:
        """Memory that it holds."""
        return self._priority.nbytes

    def touched(self, places: NDArray[np.uint32]) -> None:
        """A push updates these records."""
        self._priority.touched(places.astype(np.int64))

    def chosen(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these rows, all that have changed, are to be saved now."""
        first = np.zeros(len(self._shard.records), np.bool_)
        first[self._priority.choose()] = True
        chosen: NDArray[np.bool_] = first[self._places(rows)] | ~self._ranked(rows)
        return chosen

    def saved(self, rows: NDArray[np.int64]) -> None:
        """These rows are copied as they are now."""
        self._priority.saved(self._places(rows))

    def failed(self, rows: NDArray[np.int64]) -> None:
        """They did not get to the store."""
        self._priority.failed(self._places(rows[self._ranked(rows)]))

    def _ranked(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        ranked: NDArray[np.bool_] = self._large[np.searchsorted(self._ends, rows, "right")]
        return ranked

    def _places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._shard.placement.place(rows)
