"""A model whose rows count the batches that have looked them up: each takes 1 off."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.data.reader import Batch

ROWS = (60, 25)
SAMPLES = 8


class Counting(nn.Module):
    """Whatever it is given, each looked-up row has a gradient of 1."""

    table_dim = 1

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, dense: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(embeddings), dim=1).sum(1) + self.bias.sum()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits.sum()


def rows_of(batch: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """The rows that a batch looks up in each table, all different."""
    random = np.random.default_rng(batch)
    return [random.choice(rows, SAMPLES, replace=False) for rows in ROWS]


class Numbered:
    """So many batches, each known by its number."""

    def __init__(self, part: str, batch_size: int, batches: int) -> None:
        self.batches = batches if part == "train" else 1
        self._worker, self._workers = 0, 1
        self._next = 0

    table_rows = ROWS
    dense_features = 1

    def __iter__(self) -> Iterator[Batch]:
        for index in range(self._worker, self.batches, self._workers):
            self._next = index + 1
            labels = (np.arange(SAMPLES) % 2).astype(np.float32)
            yield Batch(index, np.zeros((SAMPLES, 1), np.float32), rows_of(index), None, labels)
        self._next = 0

    def split(self, worker: int, workers: int) -> Numbered:
        mine = copy.copy(self)
        mine._worker, mine._workers, mine._next = worker, workers, 0
        return mine

    def progress(self) -> float:
        return self._next / self.batches

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]
