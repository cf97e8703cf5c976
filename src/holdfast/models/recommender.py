"""A model together with its own tables: what a single process trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn


class EmbeddingTables(nn.ModuleList):
    """One ``nn.EmbeddingBag`` for each table; a sample's ids in a table are summed.

    Rows start uniform in ±1/sqrt(rows), as in the DLRM reference.
    """

    def __init__(self, table_rows: Sequence[int], dim: int) -> None:
        super().__init__()
        for rows in table_rows:
            # EmbeddingBag would fill the weight with normals first: at millions of rows that shows.
            weight = torch.empty(rows, dim).uniform_(-1 / math.sqrt(rows), 1 / math.sqrt(rows))
            self.append(nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, _weight=weight))

    def forward(self, ids: Sequence[Tensor], offsets: Sequence[Tensor] | None) -> list[Tensor]:
        """A [samples, dim] for each table; ``offsets`` as in ``Batch``."""
        bags = cast("list[nn.EmbeddingBag]", list(self))
        if offsets is None:
            one_each = torch.arange(len(ids[0]))
            offsets = [one_each] * len(bags)
        return [bag(i, o) for bag, i, o in zip(bags, ids, offsets, strict=True)]


class Recommender(nn.Module):
    """Tables and the network that reads them.

    Args:
        network: a model that takes dense features and looked-up embeddings, with a ``table_dim``.
        table_rows: rows of each table.
    """

    def __init__(self, network: nn.Module, table_rows: Sequence[int]) -> None:
        super().__init__()
        self.tables = EmbeddingTables(table_rows, cast("int", network.table_dim))
        self.network = network

    def forward(self, dense: Tensor, ids: Sequence[Tensor], offsets: Sequence[Tensor] | None) -> Tensor:
        """Logits [samples]."""
        logits: Tensor = self.network(dense, self.tables(ids, offsets))
        return logits
