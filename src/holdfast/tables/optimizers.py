"""From an ``OptimizerPlan`` to the loop that applies its pushes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast.kernels import update
from holdfast.tables.plan import OptimizerPlan

# The loop of each, and the scalars that it takes. Those of Adam give a step's size, which torch works out in
# float64.
_LOOPS: dict[str, tuple[Callable[..., None], Callable[[OptimizerPlan], tuple[float | np.float32, ...]]]] = {
    "sgd": (update.update_sgd, lambda o: (np.float32(o.lr),)),
    "momentum": (update.update_momentum, lambda o: (np.float32(o.lr), np.float32(o.momentum))),
    "adagrad": (update.update_adagrad, lambda o: (np.float32(o.lr), np.float32(o.eps))),
    "rowwise-adagrad": (update.update_rowwise_adagrad, lambda o: (np.float32(o.lr), np.float32(o.eps))),
    "adam": (
        update.update_adam,
        lambda o: (float(o.lr), np.float32(o.eps), float(o.beta1), float(o.beta2)),
    ),
}


def updater(plan: OptimizerPlan) -> Callable[..., None]:
    """A function of (records, places, gradients, marks, changes, part, parts): see ``kernels.update``.

    It trusts its arguments: ``GroupShard.push`` checks them.
    """
    loop, scalars = _LOOPS[plan.name]
    chosen = scalars(plan)

    def apply(
        records: Any, places: Any, gradients: Any, marks: Any, changes: Any, part: int = 0, parts: int = 1
    ) -> None:
        loop(records, places, gradients, *chosen, marks, changes, part, parts)

    return apply
