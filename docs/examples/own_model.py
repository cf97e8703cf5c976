"""A model and a reader of your own, by import path:

    python own_model.py clicks.npz    # makes up some clicks
    holdfast train --set model=own_model:build --set data.build=own_model:reader \
        --set data.arguments.path=clicks.npz

Users have short vectors and items long ones; a click is their match in the items' space plus what the
context says. The data are arrays in one .npz file: user, item [n], history [n, 5] (items, -1 for none),
context [n, 3] and click [n].
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

import holdfast as hf


class Match(nn.Module):
    """A user (with what they looked at before) and an item, each in a tower of its own."""

    def __init__(self, context: int, user_dim: int, item_dim: int) -> None:
        super().__init__()
        self.table_dims = (user_dim, item_dim, item_dim)  # of each table; one width for all: table_dim
        self.user = nn.Sequential(
            nn.Linear(user_dim + item_dim + context, 64), nn.ReLU(), nn.Linear(64, item_dim)
        )
        self.bias = nn.Linear(context, 1)

    def forward(self, dense: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        """Logits [samples] from dense [samples, context] and a [samples, width] for each table."""
        user, item, history = embeddings
        wanted = self.user(torch.cat([user, history, dense], dim=1))
        logits: Tensor = (wanted * item).sum(1) + self.bias(dense).squeeze(1)
        return logits

    # loss(self, logits, labels) would take the place of the mean cross-entropy.


def build(reader: hf.Reader, user_dim: int = 8, item_dim: int = 16) -> nn.Module:
    return Match(reader.dense_features, user_dim, item_dim)


class Clicks:
    """Batches of samples ``first`` to ``last`` of the arrays: batch i is the same wherever it is made."""

    dense_features = 3

    def __init__(self, arrays: dict[str, np.ndarray], first: int, last: int, batch_size: int) -> None:
        items = int(arrays["item"].max()) + 1
        self.table_rows = (int(arrays["user"].max()) + 1, items, items)
        self.arrays, self.first, self.last, self.batch_size = arrays, first, last, batch_size
        self.share = range(-(-(last - first) // batch_size))  # the indices of this worker's batches
        self.handed_out = 0

    def __iter__(self) -> Iterator[hf.Batch]:
        while self.handed_out < len(self.share):
            self.handed_out += 1
            yield self.batch(self.share[self.handed_out - 1])
        self.handed_out = 0

    def batch(self, index: int) -> hf.Batch:
        begin = self.first + index * self.batch_size
        of = {
            name: array[begin : min(begin + self.batch_size, self.last)]
            for name, array in self.arrays.items()
        }
        one_each = np.arange(len(of["click"]))
        there = of["history"] >= 0
        counts = there.sum(1)  # of ids in each sample's bag, which may be empty
        return hf.Batch(
            index=index,
            dense=of["context"].astype(np.float32),
            ids=[of["user"], of["item"], of["history"][there]],
            offsets=[one_each, one_each, np.cumsum(counts) - counts],
            labels=of["click"].astype(np.float32),
        )

    def split(self, worker: int, workers: int) -> Self:
        mine = copy.copy(self)
        mine.share, mine.handed_out = range(worker, len(self.share), workers), 0
        return mine

    def skip_to(self, index: int) -> None:  # may be left out: done batches are then made and dropped
        self.handed_out = sum(i < index for i in self.share)

    def progress(self) -> float:
        return self.handed_out / max(1, len(self.share))

    def state_dict(self) -> dict[str, Any]:
        return {"handed_out": self.handed_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.handed_out = int(state["handed_out"])


def reader(part: str, batch_size: int, path: str) -> Clicks:
    """The first nine tenths to train on, the rest to test."""
    if not Path(path).exists():
        raise hf.DataError(f"{path} does not exist: make it with `python own_model.py {path}`")
    arrays = dict(np.load(path))
    cut, end = len(arrays["click"]) * 9 // 10, len(arrays["click"])
    first, last = (0, cut) if part == "train" else (cut, end)
    return Clicks(arrays, first, last, batch_size)


def make_clicks(path: str, samples: int = 100_000) -> None:
    """Made-up clicks: users like items with the last digit of their own number, if the context is good."""
    random = np.random.default_rng(1)
    user, item = random.integers(0, 5_000, samples), random.integers(0, 2_000, samples)
    history = np.where(random.random((samples, 5)) < 0.7, random.integers(0, 2_000, (samples, 5)), -1)
    context = random.normal(size=(samples, 3)).astype(np.float32)
    liked = 2.0 * (user % 10 == item % 10) + context[:, 0] - 0.5
    click = random.random(samples) < 1 / (1 + np.exp(-liked))
    np.savez(path, user=user, item=item, history=history, context=context, click=click)


if __name__ == "__main__":
    make_clicks(sys.argv[1])
