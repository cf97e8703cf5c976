"""The interface of readers, and the batches that they produce.

A training stream is a numbered sequence of batches. Batch *i* contains the same samples in every process and
in every run, so a stream can be split over workers, stopped, resumed and replayed exactly.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one training step as NumPy arrays; ``torch.from_numpy`` does not copy them."""

    index: int
    """Position in the stream, from 0."""
    dense: NDArray[np.float32]
    """[samples, dense features]"""
    ids: Sequence[NDArray[np.int64]]
    """For each table, the row ids that the samples look up, sample after sample."""
    offsets: Sequence[NDArray[np.int64]] | None
    """For each table, where each sample's ids start ([samples], as ``nn.EmbeddingBag`` takes them);
    None when every sample has exactly one id in every table."""
    labels: NDArray[np.float32]
    """[samples], 0 or 1"""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(slots=True)
class ReadCount:
    """How many batches of a loader were read in this process; ``Checkpointer`` compares it with the steps.

    Any loader may provide one as its attribute ``read_count``.
    """

    batches: int = 0
    passes: int = 0
    """Number of iterations, the current one included."""
    thread: int | None = None
    """The thread that got the last batch."""

    def begin(self) -> None:
        """Record the start of an iteration."""
        self.passes += 1

    def count(self) -> None:
        """Record that a batch is handed out in this thread."""
        self.batches += 1
        self.thread = threading.get_ident()


@runtime_checkable
class Reader(Protocol):
    """A stream of batches that can be stopped, resumed and split.

    The order of calls: create it; optionally ``load_state_dict``; then iterate. ``state_dict`` may
    be called at any time and is the position after the last batch that was handed out; after the end of the
    stream, it is the start. Iterating again after the end starts over; after
    a ``break`` it continues. ``load_state_dict`` between ``iter`` and the stream's end
    raises ``WrongReaderState``, because it would have no effect.

    A reader that can skip batches cheaply may have ``skip_to(index)``, which skips the batches before
    ``index`` and may be called whenever ``load_state_dict`` may be. Without it, skipped batches are produced
    and dropped.
    """

    @property
    def table_rows(self) -> Sequence[int]:
        """The number of rows that each table must have for this reader's ids."""
        ...

    @property
    def dense_features(self) -> int:
        """The number of dense features of a sample."""
        ...

    def __iter__(self) -> Iterator[Batch]:
        """The batches from the current position to the end of the stream."""
        ...

    def split(self, worker: int, workers: int) -> Self:
        """A new reader at the start of the stream, of the batches with ``index % workers == worker``.

        The readers of all workers together produce each batch once."""
        ...

    def progress(self) -> float:
        """The share of the stream that has been handed out, from 0 to 1."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The current position, as plain values that JSON can represent."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position from ``state_dict`` of an equal reader."""
        ...
