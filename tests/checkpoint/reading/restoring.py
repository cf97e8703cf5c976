"""A small run to be saved and restored, with the rows carried over by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from holdfast.checkpoint.format.dense import decode_tree, encode_tree
from holdfast.checkpoint.format.records import Group, make_groups
from holdfast.checkpoint.torch.state import TrainingObjects

ROWS, DIM, BATCH = 50, 4, 8


class Model(nn.Module):
    """Two tables, and layers with parameters, buffers and random numbers."""

    def __init__(
        self, *, sparse: bool = False, dtype: torch.dtype = torch.float32, rows: int = ROWS, dim: int = DIM
    ) -> None:
        super().__init__()
        self.users = nn.Embedding(rows, dim, sparse=sparse, dtype=dtype)
        self.items = nn.EmbeddingBag(2 * rows, dim, mode="sum", sparse=sparse, dtype=dtype)
        self.norm = nn.BatchNorm1d(2 * dim)
        self.drop = nn.Dropout(0.3)
        self.top = nn.Linear(2 * dim, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        both = torch.cat([self.users(users), self.items(items)], 1).float()
        found: Tensor = self.top(self.drop(self.norm(both)))
        return found

    def table_parameters(self) -> list[nn.Parameter]:
        return [*self.users.parameters(), *self.items.parameters()]

    def network_parameters(self) -> list[nn.Parameter]:
        return [*self.norm.parameters(), *self.top.parameters()]


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Ids of the lower half of each table, other ones for each number."""
    rng = np.random.default_rng(number)
    users = torch.from_numpy(rng.integers(0, ROWS // 2, BATCH))
    return users, torch.from_numpy(rng.integers(0, ROWS, (BATCH, 3)))


def train(model: nn.Module, optimizers: Iterable[Optimizer], numbers: Iterable[int]) -> None:
    for number in numbers:
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(*batch(number)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


@dataclass(frozen=True)
class Saved:
    groups: tuple[Group, ...]
    rows: Mapping[str, tuple[NDArray[np.uint8], ...]]
    dense: bytes

    @property
    def tree(self) -> Any:
        return decode_tree(self.dense, "dense")


def save(objects: TrainingObjects) -> Saved:
    groups = make_groups(objects.layout())
    rows = {name: tuple(f.copy() for f in objects.fields(name)) for name in objects.tables}
    return Saved(groups, rows, b"".join(map(bytes, encode_tree(objects.dense_tree()))))


def restore(saved: Saved, objects: TrainingObjects) -> None:
    objects.check_dense(saved.tree)
    objects.prepare(saved.groups)
    for group in saved.groups:
        for table in group.tables:
            places = objects.fields(table.name)
            assert [p.shape for p in places] == [(table.rows, f.bytes) for f in group.fields]
            for place, rows in zip(places, saved.rows[table.name], strict=True):
                place[:] = rows
    objects.load_dense(saved.tree)


def assert_equal(a: TrainingObjects, b: TrainingObjects) -> None:
    """Bit by bit, without the random states."""
    one, two = save(a), save(b)
    assert one.groups == two.groups
    for name, fields in one.rows.items():
        for i, (x, y) in enumerate(zip(fields, two.rows[name], strict=True)):
            assert np.array_equal(x, y), f"{name}, field {i}"
    assert one.tree["objects"] == two.tree["objects"]


class Holder:
    """An object with any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def model_and(optimizer: Any = None, **options: Any) -> dict[str, Any]:
    model = Model(**options)
    return {"model": model, "optim": (optimizer or (lambda p: Adam(p, lr=0.1)))(model.parameters())}
