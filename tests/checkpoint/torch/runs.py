"""Small models of any kind with any optimizers, to fuzz checkpoints with.

A ``Spec`` says what a model is made of. ``build`` makes it, with weights of its own. What is done to a model
later (a table that grows, a parameter group that is added) changes its spec.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]
from torch.nn import functional
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from holdfast.training.optimizers import RowMomentum, RowWiseAdagrad

Scheduler = torch.optim.lr_scheduler.LRScheduler

DENSE: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda groups: SGD(groups, lr=0.1),
    "foreach": lambda groups: SGD(groups, lr=0.1, foreach=True),
    "momentum": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
    "decay": lambda groups: SGD(groups, lr=0.1, weight_decay=0.01),
    "adagrad": lambda groups: Adagrad(groups, lr=0.1),
    "adagrad-foreach": lambda groups: Adagrad(groups, lr=0.1, lr_decay=0.01, foreach=True),
    "adagrad-no-eps": lambda groups: Adagrad(groups, lr=0.1, eps=0.0, initial_accumulator_value=0.1),
    "adam": lambda groups: Adam(groups, lr=0.1),
    "adamw": lambda groups: AdamW(groups, lr=0.1, amsgrad=True),
}
SPARSE: dict[str, Callable[..., Optimizer]] = {
    "sparse-adam": lambda groups: SparseAdam(groups, lr=0.1),
    "row-momentum": lambda groups: RowMomentum(groups, lr=0.1),
    "row-adagrad": lambda groups: RowWiseAdagrad(groups, lr=0.1),
}
BOTH = ("sgd", "adagrad")
"""Optimizers that take gradients of either layout."""


@dataclass
class TableSpec:
    """One table and how it is used."""

    rows: int
    bag: str | None
    sparse: bool
    dtype: torch.dtype
    optimizer: str | None
    options: dict[str, Any] = field(default_factory=dict)
    frozen: bool = False
    hashed: bool = False
    tied: bool = False
    """It is the weight of a linear layer, too."""
    shared: bool | None = None
    """A second module looks it up, of this sparseness."""
    direct: bool = False
    """It is looked up without a module, too."""
    in_backward: bool = False
    """Its optimizer steps in the backward pass."""


@dataclass
class Spec:
    """A model and its optimizers."""

    tables: list[TableSpec]
    dim: int
    network: str
    scheduler: bool
    groups: list[tuple[str, list[list[str]]]]
    """For each optimizer, its name and the parameters of its groups."""


class Hashed(nn.Embedding):
    """Looks up other rows than it is given."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward((input * 7 + 3) % self.num_embeddings)


class Net(nn.Module):
    """Its output is a loss."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.direct_now: set[int] = set()
        """Tables that are looked up without a module for a while."""
        self.tables = nn.ModuleList(make_table(table, spec.dim) for table in spec.tables)
        self.others = nn.ModuleDict()
        for i, table in enumerate(spec.tables):
            module: Any = self.tables[i]
            if table.shared is not None:
                other = nn.Embedding(table.rows, spec.dim, sparse=table.shared, dtype=table.dtype)
                other.weight = module.weight
                self.others[str(i)] = other
            if table.tied:
                self.others[str(i)] = nn.Linear(spec.dim, table.rows, bias=False, dtype=table.dtype)
                self.others[str(i)].weight = module.weight
        self.top = nn.Sequential(nn.Linear(spec.dim, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Linear(3, 1))

    def forward(self, ids: dict[int, Tensor]) -> Tensor:
        """The loss of these ids of some of the tables."""
        total = torch.zeros(2, self.spec.dim)
        for i, mine in ids.items():
            table = self.spec.tables[i]
            module: Any = self.tables[i]
            if table.bag is not None and mine.dim() == 1:
                cuts = torch.tensor([0, len(mine) // 2, len(mine) // 2])  # the second bag is empty
                found = module(mine, cuts)
            else:
                found = module(mine)
            parts = [found]
            if table.shared is not None and len(mine) % 2:
                parts.append(self.others[str(i)]((mine + 5) % table.rows))
            if table.tied:
                parts.append(self.others[str(i)](found).logsumexp(-1).reshape(-1, 1))
            if table.direct or i in self.direct_now:
                parts.append(
                    functional.embedding((mine * 11 + 1) % table.rows, module.weight, sparse=table.sparse)
                )
            for part in parts:
                total = total + part.reshape(-1, part.shape[-1]).float().sum(0)
        noise = torch.randn(2, self.spec.dim)
        loss: Tensor = (self.top(total.tanh() + noise) - 1).square().mean()
        return loss


def make_table(table: TableSpec, dim: int) -> nn.Embedding | nn.EmbeddingBag:
    """A module for the table."""
    options: dict[str, Any] = {"sparse": table.sparse, "dtype": table.dtype, **table.options}
    if table.bag is not None:
        module: Any = nn.EmbeddingBag(table.rows, dim, mode=table.bag, **options)
    else:
        module = (Hashed if table.hashed else nn.Embedding)(table.rows, dim, **options)
    module.weight.requires_grad_(not table.frozen)
    return module  # type: ignore[no-any-return]


def step_in_backward(weight: Any, name: str) -> None:
    """Let an optimizer step as soon as the gradient of a weight is there."""
    _apply_optimizer_in_backward((DENSE | SPARSE)[name], [weight], {})


def any_spec(rng: random.Random) -> Spec:
    """A model of any kind."""
    tables = [_any_table(rng) for _ in range(rng.randint(1, 4))]
    groups: dict[str, list[list[str]]] = {}
    network = rng.choice(["sgd", "adagrad", "adam", "momentum"])
    groups["net"] = [["top"]]
    for i, table in enumerate(tables):
        if table.optimizer is not None and not table.in_backward:
            mine = groups.setdefault(table.optimizer, [[]])
            if mine[-1] and rng.random() < 0.5:
                mine.append([])
            mine[-1].append(f"tables.{i}")
    return Spec(tables, rng.choice([2, 3, 8]), network, rng.random() < 0.5, list(groups.items()))


def _any_table(rng: random.Random) -> TableSpec:
    bag = rng.choice([None, None, "sum", "mean", "max"])
    sparse = bag != "max" and rng.random() < 0.4
    rows = rng.choice([1, 7, 60, 60, 200, 300])
    table = TableSpec(
        rows, bag, sparse, rng.choice([torch.float32] * 3 + [torch.bfloat16, torch.float64]), None
    )
    if rng.random() < 0.2:
        table.options["padding_idx"] = rng.randrange(rows)
    if rng.random() < 0.2:
        table.options["max_norm"] = 1.0
    if bag is None and not sparse and rng.random() < 0.2:
        table.options["scale_grad_by_freq"] = True
    use = rng.choice(
        ["", "", "", "", "frozen", "hashed", "tied", "shared", "direct", "nobody", "late", "back"]
    )
    table.frozen = use == "frozen"
    table.hashed = use == "hashed" and bag is None
    table.tied = use == "tied" and not sparse and "max_norm" not in table.options
    table.direct = use == "direct"
    table.in_backward = use == "back"
    if use == "shared" and "max_norm" not in table.options:
        table.shared = sparse if rng.random() < 0.6 else not sparse
    mixed = table.direct or table.shared is not None
    if use not in ("nobody", "late"):
        names = list(BOTH) if mixed else [*BOTH, *SPARSE] if sparse else list(DENSE)
        table.optimizer = rng.choice(names)
    if table.dtype == torch.bfloat16 and table.optimizer in ("adagrad", "row-adagrad") and sparse:
        table.dtype = torch.float32
    return table


def build(spec: Spec) -> dict[str, Any]:
    """The objects of a run."""
    net = Net(spec)
    objects: dict[str, Any] = {"model": net}
    for i, table in enumerate(spec.tables):
        if table.in_backward:
            step_in_backward(net.tables[i].weight, table.optimizer or "sgd")
    for name, groups in spec.groups:
        found = [
            {"params": [p for path in paths for p in net.get_submodule(path).parameters()]}
            for paths in groups
        ]
        kind = spec.network if name == "net" else name
        objects[f"optim-{name}"] = (DENSE | SPARSE)[kind](found)
    if spec.scheduler:
        objects["schedule"] = torch.optim.lr_scheduler.ExponentialLR(objects["optim-net"], 0.99)
    return objects
