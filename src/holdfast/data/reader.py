"""What a reader gives, and what every reader promises.

A training stream is a numbered sequence of batches. Batch *i* holds the same
samples whichever process makes it and whenever, so a stream can be split over
workers, stopped, resumed and replayed exactly: the number says it all.
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
    """One step's samples as NumPy arrays, ready for ``torch.from_numpy`` without a copy."""

    index: int
    """Its place in the stream, from 0."""
    dense: NDArray[np.float32]
    """[samples, dense features]"""
    ids: Sequence[NDArray[np.int64]]
    """For each table, the row ids that its samples look up, one sample after the other."""
    offsets: Sequence[NDArray[np.int64]] | None
    """For each table, where each sample's ids start ([samples], as ``nn.EmbeddingBag`` takes them);
    None when every sample has exactly one id in every table."""
    labels: NDArray[np.float32]
    """[samples], 0 or 1"""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(slots=True)
class ReadCount:
    """How far a loader has been read in this process, for ``Checkpointer`` to compare with what was trained.

    Any loader may have one as its ``read_count``.
    """

    batches: int = 0
    passes: int = 0
    """How often it was iterated over, the last time included."""
    thread: int | None = None
    """The thread that has got the last batch."""

    def begin(self) -> None:
        """Somebody iterates over it."""
        self.passes += 1

    def count(self) -> None:
        """A batch is handed out, in this thread."""
        self.batches += 1
        self.thread = threading.get_ident()


@runtime_checkable
class Reader(Protocol):
    """A stream of batches that can be stopped, resumed and split.

    The order of calls: make one; optionally ``load_state_dict``; then iterate. ``state_dict`` may
    be called at any time and speaks of the batches that iteration has handed out so far; after the
    last one has been asked for in vain, of the start. Iterating again after the end starts over; after
    a break it goes on where it was. ``load_state_dict`` between ``iter`` and the stream's end
    raises ``WrongReaderState``: it would come too late to have an effect.

    A reader that can pass batches for less than it costs to make them may have ``skip_to(index)``: called
    where ``load_state_dict`` may be, it leaves out the batches before ``index``. Without it, they are made
    and dropped.
    """

    @property
    def table_rows(self) -> Sequence[int]:
        """How many rows each table must have for this reader's ids."""
        ...

    @property
    def dense_features(self) -> int:
        """How many numbers a sample has."""
        ...

    def __iter__(self) -> Iterator[Batch]:
        """The batches from the current position to the end of the stream."""
        ...

    def split(self, worker: int, workers: int) -> Self:
        """A new reader at the start of the stream, of those batches whose index leaves ``worker``
        when divided by ``workers``: all the workers' readers together give each batch once."""
        ...

    def progress(self) -> float:
        """How much of the stream has been handed out, 0 to 1."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The current position, as values that JSON can hold."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that ``state_dict`` of an equal reader gave."""
        ...
