"""One shard's part in a version: which rows it holds, and writing them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from holdfast.checkpoint.background import Throttle
from holdfast.checkpoint.format.encoding import Encoder
from holdfast.checkpoint.format.records import RowIds, RowSource
from holdfast.checkpoint.layout.bundles import Puts, ShardChange
from holdfast.checkpoint.layout.shard import Shard
from holdfast.checkpoint.memory.copy_on_write import CopyOnWrite
from holdfast.checkpoint.memory.tracker import RowSet
from holdfast.errors import SaveVoid
from holdfast.options import Differential, Policy

BASELINE_SHARE = 0.025
"""Of all processors, for writing a baseline during training. PyTorch's threads wait for each other, and share
caches with the thread that writes: training loses several times as much."""


class SaveCancelled(Exception):
    """Another save has taken the place of this one."""


@dataclass
class Cancellation:
    """Whether a save is still wanted. One thread cancels it; the writing thread checks."""

    cancelled: bool = False
    is_waited_for: bool = False
    snapshot: CopyOnWrite | None = None
    """The snapshot that is read while the save is written."""

    def check(self) -> None:
        """Between two files or blocks: raise SaveCancelled unless the save is still wanted, and SaveVoid if
        rows have changed before they could be read."""
        if self.cancelled:
            raise SaveCancelled
        if self.snapshot is not None and self.snapshot.unannounced:
            table, why = next(iter(self.snapshot.unannounced.items()))
            raise SaveVoid(f"rows of {table} changed unannounced while it was written: {why}")

    def hurries(self) -> bool:
        """Whether somebody waits for the save, or nobody trains: it should not rest."""
        frozen = self.snapshot
        return (
            self.cancelled
            or self.is_waited_for
            or (frozen is not None and (frozen.is_waited_for or frozen.is_idle))
        )

    def pause_length(self) -> float:
        """How long its pauses should be, relative to usual ones: the fuller the side log, the shorter. If it
        were full, training would wait."""
        return 1.0 if self.snapshot is None else 1.0 - self.snapshot.fullness**2


def share_of(policy: Policy, *, baseline: bool) -> float:
    """The share of a processor that writing a version may take: a baseline's is limited even by default."""
    if policy.background_share is not None:
        return policy.background_share
    return min(1.0, BASELINE_SHARE * len(os.sched_getaffinity(0))) if baseline else 1.0


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
    store: Puts,
    encoder: Encoder,
    version: int,
    rows: Sequence[RowSource],
    *,
    baseline: bool,
    policy: Policy,
    wanted: Cancellation,
    file_bytes: int | None = None,
) -> ShardChange:
    """Encode rows (of each group) and write them as a version's files; raises what ``wanted`` raises."""
    share = share_of(policy, baseline=baseline)
    # A baseline's files are large: even without rests the store is to write them past the page cache.
    throttle = Throttle(share, wanted.hurries, wanted.pause_length) if share < 1 or baseline else None
    with closing(encoder.blocks_ahead(rows, throttle)) as blocks, _pausing(store, throttle):
        return shard.write(
            store, version, blocks, baseline=baseline, check=wanted.check, file_bytes=file_bytes
        )


@contextmanager
def _pausing(store: Puts, throttle: Throttle | None) -> Iterator[None]:
    """Let the store pause within a file: writing one at a time would delay a training step noticeably."""
    store.pause = None if throttle is None else throttle.pause
    try:
        yield
    finally:
        store.pause = None
