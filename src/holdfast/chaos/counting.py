"""A model whose rows count: whatever order batches come in, each row's bits say how often it was looked up.

Every row that a batch looks up has a gradient of 1, and every parameter of the network one of ``SAMPLES``,
whatever their values are. So a record depends on nothing but how many batches have touched it, and a
``Twin`` that nothing ever happens to has, bit for bit, what a job must have.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from holdfast.cluster.protocol.envelope import as_array
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.coding.placement import Placement
from holdfast.data.reader import Batch
from holdfast.tables.shard import GroupShard

TABLE_ROWS = (10_007, 61)
"""A table that takes a while to recover, and one whose rows all workers want at once; both prime."""
SAMPLES = 8
NETWORK_WORDS = 1400

Counts = NDArray[np.int64]


class Counting(nn.Module):
    """A model in which each looked-up row has a gradient of 1."""

    table_dim = 4

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(NETWORK_WORDS))

    def forward(self, dense: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        """The sum of everything."""
        return torch.cat(list(embeddings), dim=1).sum(1) + self.bias.sum()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Likewise: its gradient is 1 everywhere."""
        return logits.sum()


def rows_of(batches: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The rows that each batch looks up in each table, [batches, samples]: all different."""
    numbers = np.arange(SAMPLES)
    found = []
    for rows in TABLE_ROWS:
        # A stride that is no multiple of a prime number of rows does not come back to where it was.
        first, stride = batches * 2_654_435_761 % rows, 1 + (batches * 40_503 + 17) % (rows - 1)
        found.append((first[:, None] + stride[:, None] * numbers) % rows)
    return found


class Numbered:
    """So many batches, each known by its number, made at most every ``pace_seconds``."""

    table_rows = TABLE_ROWS
    dense_features = 1

    def __init__(self, part: str, batch_size: int, batches: int, pace_seconds: float = 0.0) -> None:
        self.batches = batches if part == "train" else 1
        self._pace_seconds = pace_seconds
        self._worker, self._workers = 0, 1
        self._next = 0

    def __iter__(self) -> Iterator[Batch]:
        dense = np.zeros((SAMPLES, 1), np.float32)
        labels = (np.arange(SAMPLES) % 2).astype(np.float32)
        first = self._next + (self._worker - self._next) % self._workers
        for index in range(first, self.batches, self._workers):
            time.sleep(self._pace_seconds)
            self._next = index + 1
            yield Batch(index, dense, [rows[0] for rows in rows_of(np.array([index]))], None, labels)
        self._next = 0

    def split(self, worker: int, workers: int) -> Numbered:
        """A worker's part."""
        mine = copy.copy(self)
        mine._worker, mine._workers, mine._next = worker, workers, 0
        return mine

    def skip_to(self, index: int) -> None:
        """Leave out what is before this batch."""
        self._next = index

    def progress(self) -> float:
        """How much has been handed out."""
        return self._next / self.batches

    def state_dict(self) -> dict[str, Any]:
        """The next batch."""
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self._next = state["next"]


class Twin:
    """The rows of a job without faults.

    Args:
        plan: of a job with a ``Counting`` model and a ``Numbered`` reader.
    """

    def __init__(self, plan: JobPlan) -> None:
        self.shards = [GroupShard(group, Placement(1), 0, plan.seed) for group in plan.groups]
        self.counts: list[Counts] = [np.zeros(group.rows, np.int64) for group in plan.groups]
        """How many batches have touched each row."""
        network = self.shards[-1]
        network.install(np.arange(network.rows), np.zeros((network.rows, network.plan.dim), np.float32))
        flat = np.zeros(network.rows * network.plan.dim, np.float32)
        flat[:NETWORK_WORDS] = SAMPLES
        self._network = flat.reshape(network.rows, network.plan.dim)
        self.first = copy.deepcopy(self.shards)
        """Before anything has counted."""

    def go_to(self, batches: NDArray[np.int64]) -> bool:
        """Count exactly these batches. Returns False, without changes, if others already count."""
        wanted = [count_rows(batches), np.full_like(self.counts[-1], len(batches))]
        missing = [new - old for new, old in zip(wanted, self.counts, strict=True)]
        if any((each < 0).any() for each in missing):
            return False
        for shard, left in zip(self.shards, missing, strict=True):
            while len(rows := np.flatnonzero(left)):
                shape = len(rows), shard.plan.dim
                gradients = self._network[rows] if shard is self.shards[-1] else np.ones(shape, np.float32)
                # Of the kinds of arrays that messages have: for others, other code would be compiled.
                places = as_array(rows.astype(np.uint32), np.uint32, rows.shape)
                shard.push(places, as_array(gradients, np.float32, shape))
                left[rows] -= 1
        self.counts = wanted
        return True


def count_rows(batches: NDArray[np.int64]) -> Counts:
    """How often each row of the tables, one table behind the other, is looked up by these batches."""
    tables = zip(rows_of(batches), TABLE_ROWS, strict=True)
    return np.concatenate([np.bincount(found.reshape(-1), minlength=rows) for found, rows in tables])


def counted(shards: Sequence[GroupShard], first: Sequence[GroupShard]) -> list[Counts]:
    """How many batches have touched each row, as Adagrad's sum of squares says it, or with SGD how far it is
    from its first value."""
    if "sum" in [field.name for field in shards[0].plan.fields]:
        tables, network = (np.round(shard.field("sum")[:, 0]).astype(np.int64) for shard in shards)
        return [tables, network // SAMPLES**2]
    moved = [
        (old.field("weight")[:, 0] - new.field("weight")[:, 0]).astype(np.float64) / new.plan.optimizer.lr
        for new, old in zip(shards, first, strict=True)
    ]
    tables, network = (np.round(distance).astype(np.int64) for distance in moved)
    return [tables, network // SAMPLES]
