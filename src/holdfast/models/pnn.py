"""PNN (Qu et al., 2016), with inner products: fields and their products go into a deep network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from holdfast.models.layers import PairwiseProducts, mlp
from holdfast.recipe import described


@described
class PNN(nn.Module):
    """The inner-product network (IPNN) without its tables.

    A dense feature is a field, too: its learned vector, multiplied by its value.

    Args:
        dense_features: number of dense features.
        tables: number of embedding tables.
        dim: dimension of a field's vector.
        hidden: layer sizes of the deep part, without the output layer.
    """

    def __init__(self, dense_features: int, tables: int, dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.table_dim = dim
        fields = dense_features + tables
        self.dense_vectors = nn.Parameter(torch.randn(dense_features, dim) * 0.01)
        self.products = PairwiseProducts(fields)
        self.deep = mlp([fields * dim + fields * (fields - 1) // 2, *hidden, 1], activate_last=False)

    def forward(self, dense: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        """Logits [samples] from dense features [samples, dense_features] and embeddings [samples, dim]."""
        dense_fields = dense.unsqueeze(2) * self.dense_vectors  # [samples, dense_features, dim]
        table_fields = torch.stack(list(embeddings), dim=1)  # [samples, tables, dim]
        fields = torch.cat([dense_fields, table_fields], dim=1)  # [samples, fields, dim]
        inputs = torch.cat([fields.flatten(1), self.products(fields)], dim=1)
        logits: Tensor = self.deep(inputs)  # [samples, 1]
        return logits.squeeze(1)
