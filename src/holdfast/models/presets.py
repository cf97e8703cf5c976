"""Named model sizes. A configuration is checked by them, which must not take as long as to load torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
