"""Metrics of a model, and a checksum of its weights."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import nn


def auc(scores: NDArray[np.floating], labels: NDArray[np.floating]) -> float:
    """The area under the ROC curve: how often a click scores above a non-click, ties counting half.

    NaN if there are only clicks, or none, or a score is NaN.
    """
    clicks = int(np.count_nonzero(labels))
    others = len(labels) - clicks
    if clicks == 0 or others == 0 or np.isnan(scores).any():
        return float("nan")
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    # Samples of equal score share the mean of the ranks that they take up.
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    ends = np.append(starts[1:], len(ordered))
    mean_rank = np.repeat((starts + 1 + ends) / 2, ends - starts)
    rank_sum = float(mean_rank[labels[order] > 0].sum())
    return (rank_sum - clicks * (clicks + 1) / 2) / (clicks * others)


def log_loss(logits: NDArray[np.floating], labels: NDArray[np.floating]) -> float:
    """The mean binary cross-entropy."""
    x = logits.astype(np.float64)
    return float(np.mean(np.logaddexp(0, x) - x * labels))


def digest(model: nn.Module) -> str:
    """A checksum over the bits of all parameters."""
    state = xxhash.xxh3_128()
    for name, parameter in model.named_parameters():
        state.update(name.encode())
        state.update(np.ascontiguousarray(parameter.detach().numpy()).reshape(-1).view(np.uint8).data)
    return state.hexdigest()
