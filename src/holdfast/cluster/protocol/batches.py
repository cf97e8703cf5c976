"""A worker's batches: its share of every epoch, without batches that already count.

A batch is identified by its ``Position``, so a few numbers describe all completed ones: with ``workers``
workers, batch (e, i) belongs to worker ``i % workers``, and each worker's batches count in order. A job that
resumes with another number of workers stores its progress with the old number (a ``Layout``) and skips that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct

from holdfast.cluster.protocol.messages import Position
from holdfast.data.reader import Batch, Reader
from holdfast.errors import ConfigError, DataError


class Layout(Struct, frozen=True):
    """The progress of a job with some number of workers.

    Batch i of epoch e is done if it is not after ``positions[i % workers]``.
    """

    workers: int
    positions: tuple[Position, ...]

    def __post_init__(self) -> None:
        if self.workers < 1 or len(self.positions) != self.workers:
            raise ConfigError(
                f"a layout of {self.workers} workers with {len(self.positions)} positions:"
                " expected at least one worker and a position for each"
            )

    def has(self, batch: Position) -> bool:
        """Whether a batch is done."""
        return batch <= self.positions[batch.index % self.workers]

    def sharing(self, worker: int, workers: int) -> Iterator[Position]:
        """Positions of those workers of this layout that share batches with ``worker`` of ``workers``."""
        common = math.gcd(self.workers, workers)
        return (p for w, p in enumerate(self.positions) if w % common == worker % common)


def merge_layouts(*layouts: Layout) -> tuple[Layout, ...]:
    """Merge layouts into equivalent ones, at most one for each number of workers.

    Layouts that others cover are dropped, so that the list of a job that is often resumed stays short.
    """
    furthest: dict[int, tuple[Position, ...]] = {}
    for layout in layouts:
        before = furthest.get(layout.workers, layout.positions)
        furthest[layout.workers] = tuple(map(max, before, layout.positions))
    kept = [Layout(workers, positions) for workers, positions in furthest.items()]
    for layout in list(kept):
        if layout.positions == (Position(),) * layout.workers or any(
            _covers(other, layout) for other in kept if other is not layout
        ):
            kept.remove(layout)
    return tuple(kept)


def _covers(layout: Layout, other: Layout) -> bool:
    """Whether ``layout`` contains everything in ``other``, however long the stream is."""
    return all(
        position <= mine
        for worker, position in enumerate(other.positions)
        for mine in layout.sharing(worker, other.workers)
    )


class Stream:
    """The batches of one worker over all epochs, in order. Each ``iter`` restarts after ``after``.

    Args:
        reader: reader of the whole stream; this class splits it.
        worker: number of the worker, from 0.
        workers: total number of workers.
        epochs: number of passes over the whole stream.
        after: the worker's last batch that counts.
        done: batches that count from runs with other numbers of workers.
    """

    def __init__(
        self,
        reader: Reader,
        worker: int,
        workers: int,
        epochs: int,
        after: Position = Position(),  # noqa: B008 (it is frozen)
        done: Sequence[Layout] = (),
    ) -> None:
        self._source = reader
        self._worker, self._workers = worker, workers
        self._epochs = epochs
        self._after = after
        self._done = tuple(done)
        self._epoch = 0
        self._reader = reader.split(worker, workers)

    def __iter__(self) -> Iterator[tuple[Position, Batch]]:
        start = self._start()
        self._reader = self._source.split(self._worker, self._workers)
        for epoch in range(start.epoch, self._epochs):
            self._epoch = epoch
            if epoch == start.epoch:
                self._skip_to(start.index + 1)
            last = -1
            for batch in self._reader:
                self._check(batch, last)
                last = batch.index
                position = Position(epoch, batch.index)
                if position > start and not any(layout.has(position) for layout in self._done):
                    yield position, batch
        self._epoch = self._epochs

    def progress(self) -> float:
        """The completed part of all epochs after the last batch handed out, 0 to 1."""
        within = self._reader.progress() if self._epoch < self._epochs else 0.0
        return min(1.0, (self._epoch + within) / self._epochs)

    @property
    def bad_lines(self) -> int:
        """Lines that the reader has skipped in the current epoch; 0 for readers that never skip."""
        return int(getattr(self._reader, "bad_lines", 0))

    @property
    def first_bad(self) -> list[str]:
        """Error messages of the first of them."""
        return list(getattr(self._reader, "first_bad", []))

    def _start(self) -> Position:
        """A position up to which all of this worker's batches are done."""
        shares = [min(layout.sharing(self._worker, self._workers)) for layout in self._done]
        return max([self._after, *shares])

    def _skip_to(self, index: int) -> None:
        skip_to = getattr(self._reader, "skip_to", None)
        if skip_to is not None and index > 0:  # other readers read completed batches, which are dropped
            skip_to(index)

    def _check(self, batch: Batch, last: int) -> None:
        # Only these indices prevent a batch from being trained on twice or never.
        if batch.index % self._workers != self._worker or batch.index <= last:
            raise DataError(
                f"{type(self._reader).__name__} handed out batch {batch.index} after {last} to worker"
                f" {self._worker} of {self._workers}: expected increasing indices that leave {self._worker}"
                f" when divided by {self._workers}; see holdfast.Reader.split"
            )
