"""Named model sizes, and the one place where a name becomes a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from holdfast.models.deepfm import DeepFM
from holdfast.models.dlrm import DLRM
from holdfast.models.pnn import PNN

Architecture = Literal["dlrm", "deepfm", "pnn"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a model is: ``dim`` of its embeddings, and its layers.

    DLRM uses all three; DeepFM and PNN have no bottom network, and ``top`` is their deep part.
    """

    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]


PRESETS: dict[str, Sizes] = {
    "criteo-kaggle": Sizes(dim=16, bottom=(512, 256, 64, 16), top=(512, 256, 1)),
    "criteo-terabyte": Sizes(dim=64, bottom=(512, 256, 64), top=(512, 512, 256, 1)),
}


def build(architecture: Architecture, sizes: Sizes, dense_features: int, tables: int) -> nn.Module:
    """The model of these sizes. Its ``table_dim`` says how long the rows of its tables must be."""
    if architecture == "dlrm":
        return DLRM(dense_features, tables, sizes.dim, sizes.bottom, sizes.top)
    deep = {"deepfm": DeepFM, "pnn": PNN}[architecture]
    return deep(dense_features, tables, sizes.dim, sizes.top[:-1])
