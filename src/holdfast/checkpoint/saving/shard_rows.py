"""One shard's part in a version: which rows it holds, and writing them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

from holdfast.checkpoint.format.encoding import Encoder
from holdfast.checkpoint.format.records import RowIds, Rows
from holdfast.checkpoint.layout.bundles import ShardChange
from holdfast.checkpoint.layout.shard import Shard
from holdfast.checkpoint.memory.tracker import RowSet
from holdfast.checkpoint.store import Store
from holdfast.options import Differential, Policy


class SaveCancelled(Exception):
    """Another save has taken the place of this one."""


@dataclass
class Cancellation:
    """Whether a save is still wanted. One thread cancels, the one that writes looks."""

    cancelled: bool = False

    def check(self) -> None:
        """Between two files or blocks: raise SaveCancelled unless the save is still wanted."""
        if self.cancelled:
            raise SaveCancelled


class IncrementRows:
    """Which rows an increment holds: those that changed since the last version, or since the baseline.

    Args:
        policy: its strategy decides.
        rows: how many each group has.
    """

    def __init__(self, policy: Policy, rows: Sequence[int]) -> None:
        self._sets = [RowSet(count) for count in rows] if isinstance(policy.strategy, Differential) else []

    def add(self, group: int, changed: RowIds) -> RowIds:
        """The rows of a group that the next increment holds, ascending, as these have changed."""
        if not self._sets:
            return changed
        self._sets[group].add(changed)
        return self._sets[group].ids()

    def note_baseline(self) -> None:
        """A baseline is durable: only what changes from now on counts."""
        self._sets = [RowSet(rows.rows) for rows in self._sets]

    def resume(self, saved: Iterable[tuple[int, RowIds]]) -> None:
        """Go on from a version that holds these rows (group, ids) beyond its baseline."""
        for group, ids in saved if self._sets else ():
            if group < len(self._sets):  # not of rows that are stored raw: they are among the others, too
                self._sets[group].add(ids)


def write_rows(
    shard: Shard,
    store: Store,
    encoder: Encoder,
    version: int,
    rows: Sequence[Rows],
    *,
    baseline: bool,
    background_share: float,
    wanted: Cancellation,
) -> ShardChange:
    """Encode rows (of each group) and write them as a version's files; raises SaveCancelled."""
    with closing(encoder.blocks_ahead(rows, background_share, lambda: wanted.cancelled)) as blocks:
        return shard.write(store, version, blocks, baseline=baseline, check=wanted.check)
