"""The one place where a name becomes a model."""

from __future__ import annotations

from torch import nn

from holdfast.models.deepfm import DeepFM
from holdfast.models.dlrm import DLRM
from holdfast.models.pnn import PNN
from holdfast.models.presets import Architecture, Sizes


def build(architecture: Architecture, sizes: Sizes, dense_features: int, tables: int) -> nn.Module:
    """The model of these sizes. Its ``table_dim`` says how long the rows of its tables must be."""
    if architecture == "dlrm":
        return DLRM(dense_features, tables, sizes.dim, sizes.bottom, sizes.top)
    deep = {"deepfm": DeepFM, "pnn": PNN}[architecture]
    return deep(dense_features, tables, sizes.dim, sizes.top[:-1])
