"""What the models share: multi-layer perceptrons and pairwise products."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def mlp(sizes: Sequence[int], *, activate_last: bool) -> nn.Sequential:
    """Linear layers of these sizes with ReLU between them, initialised as the DLRM reference does."""
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(inputs, outputs)
        nn.init.normal_(linear.weight, std=math.sqrt(2 / (inputs + outputs)))
        nn.init.normal_(linear.bias, std=math.sqrt(1 / outputs))
        layers.append(linear)
        if activate_last or i < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class PairwiseProducts(nn.Module):
    """The inner products of all pairs of fields: [samples, fields, dim] → [samples, pairs]."""

    flat: Tensor

    def __init__(self, fields: int) -> None:
        super().__init__()
        i, j = torch.tril_indices(fields, fields, offset=-1)
        # One flat index per pair: index_select is quicker than indexing with two index tensors.
        self.register_buffer("flat", i * fields + j, persistent=False)

    def forward(self, fields: Tensor) -> Tensor:
        """The lower triangle of the fields' Gram matrix, row by row."""
        gram = torch.bmm(fields, fields.transpose(1, 2))  # [samples, fields, fields]
        return gram.flatten(1).index_select(1, self.flat)
