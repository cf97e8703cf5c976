"""The optimizers of the reference trainer: PyTorch's own, and two that it lacks for sparse gradients.

All of them touch only the rows that a batch looked up. For SGD, Adagrad and SparseAdam PyTorch does so
itself. Its SGD with momentum would let a sparse momentum buffer grow without end, and it has no
row-wise Adagrad; both are here, with the meaning that a parameter server gives them: a row that was
not looked up does not move.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam

from holdfast.models.recommender import Recommender
from holdfast.training.config import OptimizerConfig


def build_optimizers(config: OptimizerConfig, model: Recommender) -> list[Optimizer]:
    """The optimizers that together update every parameter of the model once."""
    # Sparse tensors that optimizers make are valid by construction; checking them costs time, and
    # PyTorch warns unless the choice is made explicitly.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    tables = list(model.tables.parameters())
    network = list(model.network.parameters())
    lr, eps = config.rate, config.eps
    if config.name == "sgd":
        return [SGD([*network, *tables], lr=lr)]
    if config.name == "momentum":
        return [
            SGD(network, lr=lr, momentum=config.momentum),
            RowMomentum(tables, lr=lr, momentum=config.momentum),
        ]
    if config.name == "adagrad":
        return [Adagrad([*network, *tables], lr=lr, eps=eps)]
    if config.name == "rowwise-adagrad":
        return [Adagrad(network, lr=lr, eps=eps), RowWiseAdagrad(tables, lr=lr, eps=eps)]
    return [Adam(network, lr=lr, eps=eps), SparseAdam(tables, lr=lr, eps=eps)]


class _RowOptimizer(Optimizer, ABC):
    """An optimizer that updates the rows of a sparse gradient, each once."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all rows that the gradients name."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is None:
                    continue
                if not table.grad.is_sparse:
                    raise TypeError(
                        f"{type(self).__name__} needs sparse gradients: make the table with sparse=True"
                    )
                gradient = table.grad.coalesce()  # a row that a batch names twice is updated once, by the sum
                self._update(table, gradient.indices()[0], gradient.values(), group)
        return loss

    @abstractmethod
    def _update(self, table: Tensor, rows: Tensor, gradients: Tensor, group: dict[str, Any]) -> None:
        """Apply the summed gradients [rows, dim] to these rows, all different."""


class RowMomentum(_RowOptimizer):
    """SGD with momentum in which a row's momentum changes only when the row is looked up.

    State: ``momentum_buffer``, of the table's shape.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def _update(self, table: Tensor, rows: Tensor, gradients: Tensor, group: dict[str, Any]) -> None:
        state = self.state[table]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(table)
        buffer = state["momentum_buffer"]
        moved = buffer.index_select(0, rows).mul_(group["momentum"]).add_(gradients)
        buffer.index_copy_(0, rows, moved)
        table.index_add_(0, rows, moved, alpha=-group["lr"])


class RowWiseAdagrad(_RowOptimizer):
    """Adagrad with one accumulator a row: the running sum of the mean square of the row's gradient.

    State: ``sum``, one number a row.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    def _update(self, table: Tensor, rows: Tensor, gradients: Tensor, group: dict[str, Any]) -> None:
        state = self.state[table]
        if not state:
            state["sum"] = torch.zeros(len(table), dtype=table.dtype)
        accumulator = state["sum"]
        total = accumulator.index_select(0, rows).add_(gradients.square().mean(1))
        accumulator.index_copy_(0, rows, total)
        scaled = gradients / total.sqrt().add_(group["eps"]).unsqueeze(1)
        table.index_add_(0, rows, scaled, alpha=-group["lr"])
