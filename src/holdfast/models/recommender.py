"""A model together with its tables, for training in a single process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from holdfast.errors import ConfigError


def table_dims(network: nn.Module, tables: int) -> tuple[int, ...]:
    """The dimension of each table: the network's ``table_dims``, or its ``table_dim`` for all."""
    name = type(network).__name__
    dims = getattr(network, "table_dims", None)
    if dims is None:
        dim = getattr(network, "table_dim", None)
        if dim is None:
            raise ConfigError(
                f"{name} has no attribute table_dim: set it to the length of a row of its tables,"
                " or table_dims to a length for each table"
            )
        dims = (dim,) * tables
    dims = tuple(dims)
    if len(dims) != tables:
        raise ConfigError(
            f"{name}.table_dims has {len(dims)} lengths: expected one for each of {tables} tables"
        )
    for dim in dims:
        if not isinstance(dim, int) or dim < 1:
            raise ConfigError(f"{name} wants table rows of length {dim!r}: expected a whole number from 1")
    return dims


def loss_function(network: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss to minimize: the network's own ``loss(logits, labels)``, else the mean cross-entropy."""
    own = getattr(network, "loss", None)
    return own if callable(own) else binary_cross_entropy_with_logits


class EmbeddingTables(nn.ModuleList):
    """One ``nn.EmbeddingBag`` per table, which sums the embeddings of a sample's ids.

    Rows are initialized uniformly in ±1/sqrt(rows), as in the DLRM reference.
    """

    def __init__(self, table_rows: Sequence[int], dims: int | Sequence[int]) -> None:
        super().__init__()
        widths = [dims] * len(table_rows) if isinstance(dims, int) else dims
        for rows, dim in zip(table_rows, widths, strict=True):
            # EmbeddingBag would fill the weight with normals first: at millions of rows that shows.
            weight = torch.empty(rows, dim).uniform_(-1 / math.sqrt(rows), 1 / math.sqrt(rows))
            self.append(nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, _weight=weight))

    def forward(self, ids: Sequence[Tensor], offsets: Sequence[Tensor] | None) -> list[Tensor]:
        """Embeddings [samples, dim] of each table; ``offsets`` as in ``Batch``."""
        bags = cast("list[nn.EmbeddingBag]", list(self))
        if offsets is None:
            one_each = torch.arange(len(ids[0]))
            offsets = [one_each] * len(bags)
        return [bag(i, o) for bag, i, o in zip(bags, ids, offsets, strict=True)]


class Recommender(nn.Module):
    """A network together with its embedding tables.

    Args:
        network: a model that takes dense features and embeddings. Its ``table_dim`` is the dimension of all
            tables; or its ``table_dims`` has one per table.
        table_rows: number of rows of each table.
    """

    def __init__(self, network: nn.Module, table_rows: Sequence[int]) -> None:
        super().__init__()
        self.tables = EmbeddingTables(table_rows, table_dims(network, len(table_rows)))
        self.network = network

    def forward(self, dense: Tensor, ids: Sequence[Tensor], offsets: Sequence[Tensor] | None) -> Tensor:
        """Logits [samples]."""
        logits: Tensor = self.network(dense, self.tables(ids, offsets))
        return logits
