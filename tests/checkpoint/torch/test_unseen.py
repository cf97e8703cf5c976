"""What is said of rows that change unseen, against the bits of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import (
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)
from torch.optim.swa_utils import AveragedModel

from holdfast.checkpoint.torch.state import TrainingObjects
from holdfast.checkpoint.torch.unseen import why_unseen_rows_change
from holdfast.training.optimizers import RowMomentum, RowWiseAdagrad

ROWS = 40


class Negated(SGD):
    """Nobody knows what this does."""


Make = Callable[[Any], Optimizer]
DENSE: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd tensor lr": lambda p: SGD(p, lr=torch.tensor(0.1)),
    "sgd foreach": lambda p: SGD(p, lr=0.1, foreach=True),
    "sgd fused": lambda p: SGD(p, lr=0.1, fused=True),
    "sgd maximize": lambda p: SGD(p, lr=0.1, maximize=True),
    "sgd momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "sgd nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd decay": lambda p: SGD(p, lr=0.1, weight_decay=0.1),
    "adagrad": lambda p: Adagrad(p, lr=0.1),
    "adagrad lr_decay": lambda p: Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "adagrad foreach": lambda p: Adagrad(p, lr=0.1, foreach=True),
    "adagrad fused": lambda p: Adagrad(p, lr=0.1, fused=True),
    "adagrad decay": lambda p: Adagrad(p, lr=0.1, weight_decay=0.1),
    "adagrad maximize": lambda p: Adagrad(p, lr=0.1, maximize=True),
    "adagrad eps 0": lambda p: Adagrad(p, lr=0.1, eps=0),
    "adam": lambda p: Adam(p, lr=0.1),
    "adamw": lambda p: AdamW(p, lr=0.1),
    "adamw no decay": lambda p: AdamW(p, lr=0.1, weight_decay=0),
    "adadelta": lambda p: Adadelta(p, lr=0.1),
    "adafactor": lambda p: Adafactor(p, lr=0.1),
    "adamax": lambda p: Adamax(p, lr=0.1),
    "nadam": lambda p: NAdam(p, lr=0.1),
    "radam": lambda p: RAdam(p, lr=0.1),
    "rmsprop": lambda p: RMSprop(p, lr=0.1),
    "rprop": lambda p: Rprop(p, lr=0.1),
    "unknown": lambda p: Negated(p, lr=0.1),
}
SPARSE: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd maximize": lambda p: SGD(p, lr=0.1, maximize=True),
    "sgd momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: Adagrad(p, lr=0.1),
    "adagrad eps 0": lambda p: Adagrad(p, lr=0.1, eps=0),
    "sparse adam": lambda p: SparseAdam(p, lr=0.1),
    "row momentum": lambda p: RowMomentum(p, lr=0.1),
    "row-wise adagrad": lambda p: RowWiseAdagrad(p, lr=0.1),
    "unknown": lambda p: Negated(p, lr=0.1),
}
QUIET = {
    "sgd", "sgd tensor lr", "sgd foreach", "sgd fused", "adagrad", "adagrad lr_decay", "adagrad foreach",
    "adagrad fused", "sparse adam", "row momentum", "row-wise adagrad",
}  # fmt: skip


def rows_changed_unseen(objects: TrainingObjects, step: Callable[[Tensor], None]) -> bool:
    """Whether any field of any row changes in steps that do not look it up."""
    rng = np.random.default_rng(0)
    changed = False
    for _ in range(6):
        ids = rng.integers(0, ROWS, 5)
        (table,) = objects.tables
        before = [f.copy() for f in objects.fields(table)]
        step(torch.from_numpy(ids))
        unseen = np.setdiff1d(np.arange(ROWS), ids)
        after = objects.fields(table)
        if len(before) == len(after):  # otherwise states were made in this step: all of them new
            changed |= any(
                not np.array_equal(b[unseen], a[unseen]) for b, a in zip(before, after, strict=True)
            )
    return changed


def stepper(model: nn.Module, optimizers: Iterable[Optimizer]) -> Callable[[Tensor], None]:
    def step(ids: Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(ids).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def table(*, sparse: bool, dtype: torch.dtype = torch.float32) -> nn.Embedding:
    found = nn.Embedding(ROWS, 4, sparse=sparse, dtype=dtype)
    with torch.no_grad():
        found.weight[::3] = -0.0  # whose sign is the first thing to be lost
        found.weight[1::3, 0] = 0.0
    return found


HALF = [torch.float16, torch.bfloat16]  # for which PyTorch lacks some sparse kernels
CASES = [(name, make, False, dtype) for dtype in [torch.float32, *HALF] for name, make in DENSE.items()]
CASES += [(name, make, True, torch.float32) for name, make in SPARSE.items()]


@pytest.mark.parametrize(
    ("name", "make", "sparse", "dtype"), CASES, ids=[f"{n}-{d}{'-sparse' * s}" for n, _, s, d in CASES]
)
def test_no_row_changes_unannounced(name: str, make: Make, sparse: bool, dtype: torch.dtype) -> None:
    model = table(sparse=sparse, dtype=dtype)
    optimizer = make(model.parameters())
    objects = TrainingObjects({"model": model, "optim": optimizer})
    said = "model.weight" in objects.tables_with_unseen_changes()
    changed = rows_changed_unseen(objects, stepper(model, [optimizer]))
    assert said or not changed
    assert said or "model.weight" not in objects.tables_with_unseen_changes()
    if dtype != torch.float16:
        # Not a duty, but what makes checkpoints small, and without which this test would have no point.
        assert said == (name not in QUIET) or (sparse and not changed)


def test_settings_are_read_when_asked() -> None:
    model = table(sparse=False)
    groups: list[dict[str, Any]] = [
        {"params": model.parameters()},
        {"params": [nn.Parameter(torch.ones(1))], "momentum": 0.9},
    ]
    optimizer = SGD(groups, lr=0.1)
    objects = TrainingObjects({"model": model, "optim": optimizer})
    assert "model.weight" not in objects.tables_with_unseen_changes()
    optimizer.param_groups[0]["momentum"] = 0.9
    assert "model.weight" in objects.tables_with_unseen_changes()


def test_one_of_two_optimizers_is_enough() -> None:
    model = table(sparse=False)
    plain, decaying = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    objects = TrainingObjects({"model": model, "a": plain, "b": decaying})
    assert rows_changed_unseen(objects, stepper(model, [plain, decaying]))
    assert "model.weight" in objects.tables_with_unseen_changes()


class Tied(nn.Module):
    """An output layer that shares the table, as a module or through its weight alone."""

    def __init__(self, *, sparse: bool, linear: bool) -> None:
        super().__init__()
        self.table = table(sparse=sparse)
        if linear:
            self.out = nn.Linear(4, ROWS, bias=False)
            self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.table(ids)
        return rows @ self.table.weight.T + 1


@pytest.mark.parametrize(("sparse", "linear"), [(False, True), (True, True), (True, False)])
def test_a_table_that_is_also_an_output_layer(sparse: bool, linear: bool) -> None:
    model = Tied(sparse=sparse, linear=linear)
    optimizer = SGD(model.parameters(), lr=0.001)
    objects = TrainingObjects({"model": model, "optim": optimizer})
    assert rows_changed_unseen(objects, stepper(model, [optimizer]))
    assert "model.table.weight" in objects.tables_with_unseen_changes()


def test_embeddings_of_both_kinds_share_a_weight() -> None:
    model = nn.ModuleList([table(sparse=True), table(sparse=False)])
    model[1].weight = model[0].weight
    objects = TrainingObjects({"model": model, "optim": Adam(model.parameters())})
    assert "model.0.weight" in objects.tables_with_unseen_changes()


def test_tables_without_an_optimizer() -> None:
    model = table(sparse=True)
    average = AveragedModel(model, avg_fn=lambda mean, new, n: 0.9 * mean + 0.1 * new)
    average.requires_grad_(False)
    frozen = nn.Embedding(3, 2).requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)
    objects = TrainingObjects(
        {
            "model": model,
            "average": average,
            "frozen": frozen,
            "trained": nn.Embedding(3, 2),
            "optim": optimizer,
        }
    )
    step = stepper(model, [optimizer])
    for _ in range(2):
        step(torch.arange(3))
        average.update_parameters(model)
    said = {name: (name in objects.tables_with_unseen_changes()) for name in objects.tables}
    assert said == {
        "model.weight": False,
        "average.module.weight": True,
        "frozen.weight": False,
        "trained.weight": True,  # by whom, is not known
    }


def test_optimizers_that_touch_only_rows_with_sparse_gradients() -> None:
    model = table(sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    (group,) = optimizer.param_groups
    for sparse in (True, False):
        why = why_unseen_rows_change(optimizer, group, sparse=sparse, dtype=torch.float32)
        assert (why is None) is sparse
