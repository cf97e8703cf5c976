"""A model and a reader of your own for a job on Ray: see job.yaml beside this file.

Users buy what suits them: the samples are made up, batch by batch, the same on every machine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

import holdfast as hf

USERS, ITEMS, CONTEXT = 5_000, 2_000, 3


class Match(nn.Module):
    """The logit of a sale: how well the vectors of user and item match, plus what the context says."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.table_dim = dim
        self.context = nn.Sequential(nn.Linear(CONTEXT, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        """Logits [samples] from dense [samples, 3] and a [samples, dim] for each table."""
        user, item = embeddings
        logits: Tensor = torch.sum(user * item, dim=1) + self.context(dense).squeeze(1)
        return logits


def build(dim: int = 16) -> nn.Module:
    return Match(dim)


class Sales:
    """Batches ``share`` of a part of the samples."""

    table_rows = (USERS, ITEMS)
    dense_features = CONTEXT

    def __init__(self, part: str, samples: int, batch_size: int) -> None:
        self.part, self.samples, self.batch_size = part, samples, batch_size
        self.share = range(-(-samples // batch_size))
        self.handed_out = 0

    def __iter__(self) -> Iterator[hf.Batch]:
        while self.handed_out < len(self.share):
            self.handed_out += 1
            yield self.batch(self.share[self.handed_out - 1])
        self.handed_out = 0

    def batch(self, index: int) -> hf.Batch:
        count = min(self.batch_size, self.samples - index * self.batch_size)
        random = np.random.default_rng([index, self.part == "test"])
        user, item = random.integers(0, USERS, count), random.integers(0, ITEMS, count)
        context = random.normal(size=(count, CONTEXT)).astype(np.float32)
        wanted = 2.0 * (user % 10 == item % 10) + context[:, 0] - 0.5
        sold = random.random(count) < 1 / (1 + np.exp(-wanted))
        one_each = np.arange(count)
        return hf.Batch(
            index=index,
            dense=context,
            ids=[user, item],
            offsets=[one_each, one_each],
            labels=sold.astype(np.float32),
        )

    def split(self, worker: int, workers: int) -> Self:
        mine = copy.copy(self)
        mine.share, mine.handed_out = range(worker, len(self.share), workers), 0
        return mine

    def progress(self) -> float:
        return self.handed_out / max(1, len(self.share))

    def state_dict(self) -> dict[str, Any]:
        return {"handed_out": self.handed_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.handed_out = int(state["handed_out"])


def reader(part: str, batch_size: int, samples: int, test_samples: int = 20_000) -> Sales:
    return Sales(part, samples if part == "train" else test_samples, batch_size)
