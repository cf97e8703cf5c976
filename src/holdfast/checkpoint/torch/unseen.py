"""Which optimizers change rows without a lookup.

Changed rows are found by watching lookups. That is enough if a row without a gradient keeps its bits, in
its weights and in its optimizer state:

- With *sparse* gradients (``nn.Embedding(sparse=True)``) an optimizer gets the rows of the batch and their
  gradients, and those of PyTorch touch no others. The exception is momentum in ``torch.optim.SGD``: its
  buffer, sparse too, gathers every row ever looked up and moves all of them in every step. Of an optimizer
  that is not known here nobody can tell.
- With *dense* gradients an optimizer computes on the whole table, where rows that were not looked up
  have gradients of 0. Plain SGD subtracts 0, Adagrad adds 0 and subtracts 0 / (√sum + eps): no bit changes.
  Anything that remembers (momentum, Adam's averages) or decays moves them all the same. So may any
  optimizer that is not known here.
- ``maximize`` negates gradients: a 0 becomes -0, and subtracting -0 turns a weight of -0 into 0. The
  numbers are equal, the bits are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Optimizer

_BY_ROW = {"SparseAdam", "RowMomentum", "RowWiseAdagrad"}


def why_unseen_rows_change(
    optimizer: Optimizer, group: Mapping[str, Any], *, sparse: bool, dtype: torch.dtype
) -> str | None:
    """Why a step of this optimizer can change rows that the step's batch did not look up; None if it cannot.

    Args:
        optimizer: any; what it is decides.
        group: its parameter group with the table, for the settings.
        sparse: whether the table's gradients are sparse.
        dtype: of the table.
    """
    name = type(optimizer).__name__
    if sparse and name in _BY_ROW:
        return None
    if type(optimizer) not in (SGD, Adagrad):
        return f"{name} may change rows that have no gradient"
    for option in ("weight_decay", "momentum", *(() if sparse else ("maximize",))):
        if group.get(option):
            return f"{name} with {option} changes rows that have no gradient"
    # An eps that the table's type rounds to 0 makes 0 / 0 of every row without a gradient so far.
    if not sparse and type(optimizer) is Adagrad and _rounds_to_zero(float(group["eps"]), dtype):
        return "Adagrad with an eps of 0 changes rows that have no gradient"
    return None


@cache
def _rounds_to_zero(value: float, dtype: torch.dtype) -> bool:
    return not bool(torch.tensor(value, dtype=dtype) > 0)
