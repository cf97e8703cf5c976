"""DeepFM (Guo et al., 2017): a factorization machine and a deep network on the same embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from holdfast.models.layers import mlp
from holdfast.recipe import described


@described
class DeepFM(nn.Module):
    """DeepFM without its tables.

    A row of a table has ``dim + 1`` values: its weight in the linear part, then its vector. A dense feature
    is a field, too: its learned row, multiplied by its value.

    Args:
        dense_features: number of dense features.
        tables: number of embedding tables.
        dim: dimension of a field's vector.
        hidden: layer sizes of the deep part, without the output layer.
    """

    def __init__(self, dense_features: int, tables: int, dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.table_dim = dim + 1
        self.bias = nn.Parameter(torch.zeros(()))
        self.dense_rows = nn.Parameter(torch.randn(dense_features, dim + 1) * 0.01)
        self.deep = mlp([(dense_features + tables) * dim, *hidden, 1], activate_last=False)

    def forward(self, dense: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        """Logits [samples] from dense [samples, dense_features] and embeddings [samples, dim + 1]."""
        dense_fields = dense.unsqueeze(2) * self.dense_rows  # [samples, dense_features, dim + 1]
        table_fields = torch.stack(list(embeddings), dim=1)  # [samples, tables, dim + 1]
        fields = torch.cat([dense_fields, table_fields], dim=1)  # [samples, fields, dim + 1]
        linear = fields[:, :, 0].sum(1)  # [samples]
        vectors = fields[:, :, 1:]  # [samples, fields, dim]
        # The sum of all pairs' inner products is half of (square of the sum - sum of the squares).
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)  # [samples]
        deep: Tensor = self.deep(vectors.flatten(1))  # [samples, 1]
        return self.bias + linear + pairs + deep.squeeze(1)
