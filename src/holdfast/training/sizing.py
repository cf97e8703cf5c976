"""How large the model of a configuration is, and what a batch of its data touches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from holdfast.errors import DataError
from holdfast.models.recommender import table_dims
from holdfast.policy.increments import RowSize
from holdfast.training.config import Config
from holdfast.training.networks import build_network
from holdfast.training.planning import record_words
from holdfast.training.readers import build_readers


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes of a model."""

    table_bytes: float
    """All tables with their optimizer state."""
    row: RowSize
    """One row; of tables of different widths, the mean."""
    dense_bytes: float
    """The network's gradients."""
    rows_per_batch: float
    """Different rows that a batch looks up."""


def model_size(config: Config) -> ModelSize:
    """Of the model that this configuration trains; reads one batch."""
    reader, _ = build_readers(config)
    with torch.device("meta"):  # sizes without memory
        network = build_network(config, reader)
    dims = table_dims(network, len(reader.table_rows))
    weights = sum(rows * dim for rows, dim in zip(reader.table_rows, dims, strict=True))
    words = sum(
        rows * record_words(config.optimizer.name, dim)
        for rows, dim in zip(reader.table_rows, dims, strict=True)
    )
    batch = next(iter(reader), None)
    if batch is None:
        raise DataError("the configuration's data holds no batch")
    rows = sum(reader.table_rows)
    dim = round(weights / rows)
    return ModelSize(
        table_bytes=4.0 * words,
        row=RowSize(dim, state_bytes=max(0.0, 4.0 * words / rows - 4 * dim)),
        dense_bytes=4.0 * sum(p.numel() for p in network.parameters() if p.requires_grad),
        rows_per_batch=float(sum(len(np.unique(ids)) for ids in batch.ids)),
    )
