"""DLRM (Naumov et al., 2019): dense features and embeddings meet in pairwise inner products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from holdfast.models.layers import PairwiseProducts, mlp
from holdfast.recipe import described


@described
class DLRM(nn.Module):
    """DLRM without its tables.

    Args:
        dense_features: number of dense features.
        tables: number of embedding tables.
        dim: embedding dimension; equal to the last size of ``bottom``.
        bottom: layer sizes of the bottom MLP, for the dense features.
        top: layer sizes of the top MLP, after the interaction; the last is 1.
    """

    def __init__(
        self, dense_features: int, tables: int, dim: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        self.table_dim = dim
        self.bottom = mlp([dense_features, *bottom], activate_last=True)
        self.interaction = PairwiseProducts(tables + 1)
        pairs = (tables + 1) * tables // 2
        self.top = mlp([dim + pairs, *top], activate_last=False)

    def forward(self, dense: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        """Logits [samples] from dense features [samples, dense_features] and embeddings [samples, dim]."""
        x = self.bottom(dense)  # [samples, dim]
        fields = torch.stack([x, *embeddings], dim=1)  # [samples, tables + 1, dim]
        z = self.interaction(fields)  # [samples, pairs]
        logits: Tensor = self.top(torch.cat([x, z], dim=1))  # [samples, 1]
        return logits.squeeze(1)
