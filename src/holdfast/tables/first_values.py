"""The first values of rows: drawn from (seed, names of group and table, row of the table, column).

So whoever knows the plan and the seed has them, for any row: nobody has to ask the server that holds it.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from holdfast.kernels import update
from holdfast.tables.plan import GroupPlan


def first_records(plan: GroupPlan, seed: int, rows: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The whole first records of these rows of the group, [rows, words]: their optimizer state is zero.

    Rows beyond the last give zeros, as do the members that a group's last stripe lacks.
    """
    if plan.initial != "uniform":
        raise ValueError(f"group {plan.name}: first values are {plan.initial}, only uniform ones are drawn")
    if rows.ndim != 1 or rows.dtype != np.int64 or (len(rows) and rows.min() < 0):
        raise ValueError(
            f"group {plan.name}: rows are {rows.dtype} {list(rows.shape)}, "
            "expected int64 in one dimension, none of them negative"
        )
    out = np.zeros((len(rows), plan.words), np.uint32)
    update.first_values(out, plan.dim, rows, *drawing(plan, seed))
    return out


def drawing(plan: GroupPlan, seed: int) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.float32]]:
    """What the loops draw from: each table's first row, key and scale."""
    names = [f"{seed}\0{plan.name}\0{table.name}" for table in plan.tables]
    keys = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    scales = [2.0**-24 / math.sqrt(max(table.rows, 1)) for table in plan.tables]
    return (
        np.array(plan.firsts, np.int64),
        np.frombuffer(b"".join(keys), "<u8").astype(np.uint64),
        np.array(scales, np.float32),
    )
