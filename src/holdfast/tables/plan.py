"""What a group of tables looks like: agreed on once, known to every node, so that nothing needs looking up.

Tables of equal width that one optimizer updates form a *group*: their rows are numbered through, table after
table, and a row of the group is one record of 32-bit words, weights first, then optimizer state, then the
number of updates where the optimizer counts them. All words are float32, but for that number ("step"),
which is an unsigned integer and so counts exactly. The network's parameters are a group too: one long
vector, cut into rows of equal width.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

OptimizerName = Literal["sgd", "momentum", "adagrad", "rowwise-adagrad", "adam"]


class OptimizerPlan(Struct, frozen=True, kw_only=True):
    """Which optimizer updates a group. ``momentum`` and the betas are read by those that have them."""

    name: OptimizerName
    lr: float
    eps: float = 1e-8
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999


class RecordField(Struct, frozen=True):
    """Some words of a record: weights or a part of the optimizer's state."""

    name: str
    """As ``torch.optim`` calls it; "weight" for the weights."""
    first: int
    """Its first word."""
    width: int
    """Words."""


class TablePlan(Struct, frozen=True):
    """One table of a group."""

    name: str
    rows: int


class RowPlacement(Protocol):
    """Where rows lie, as ``holdfast.coding.placement.Placement`` says it."""

    @property
    def servers(self) -> int:
        """How many there are."""
        ...

    @property
    def k(self) -> int:
        """Data records of a stripe."""
        ...

    @property
    def r(self) -> int:
        """Parity records of a stripe."""
        ...

    @property
    def groups(self) -> int:
        """How many groups the servers form, each with stripes of its own."""
        ...

    def records(self, rows: int) -> int:
        """How many records a server keeps for so many rows."""
        ...

    def owner(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The server of each row."""
        ...

    def place(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The record of each row at its server."""
        ...

    def row(self, server: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of each record of a server."""
        ...


class GroupPlan(Struct, frozen=True, kw_only=True, dict=True):  # a dict for what is computed once
    """Tables that share a record layout.

    ``initial`` says where first values come from: "uniform" are drawn from (seed, table, row), within
    ±1/sqrt(rows of the table); "installed" are sent by a worker, as the network's are.
    """

    name: str
    dim: int
    """Weights of a row."""
    tables: tuple[TablePlan, ...]
    optimizer: OptimizerPlan
    initial: Literal["uniform", "installed"] = "uniform"

    @cached_property
    def rows(self) -> int:
        """Of all tables together."""
        return sum(table.rows for table in self.tables)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The number of each table's first row in the group, and the number of rows behind the last."""
        return tuple(itertools.accumulate((table.rows for table in self.tables), initial=0))

    @cached_property
    def fields(self) -> tuple[RecordField, ...]:
        """What the words of a record are."""
        dim = self.dim
        states: dict[str, tuple[tuple[str, int], ...]] = {
            "sgd": (),
            "momentum": (("momentum_buffer", dim),),
            "adagrad": (("sum", dim),),
            "rowwise-adagrad": (("sum", 1),),
            "adam": (("exp_avg", dim), ("exp_avg_sq", dim), ("step", 1)),
        }
        widths = (("weight", dim), *states[self.optimizer.name])
        firsts = itertools.accumulate((width for _, width in widths), initial=0)
        return tuple(
            RecordField(name, first, width) for (name, width), first in zip(widths, firsts, strict=False)
        )

    @cached_property
    def words(self) -> int:
        """32-bit words of a record."""
        return sum(field.width for field in self.fields)
