"""A worker's model: the user's network, run on rows that servers hold.

``plan_groups`` maps the tables and the network's parameters to groups of rows; every node of a job knows the
result. A worker then loops: ``look_up`` a batch, pull the rows, ``load_network``, ``train``, push the
gradients.

The network's parameters are views of one flat vector, and their gradients of another: loading pulled values
is one copy, and pushing needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from holdfast.cluster.protocol.plan import NetworkPart
from holdfast.data.reader import Batch
from holdfast.errors import ConfigError
from holdfast.models.recommender import loss_function
from holdfast.tables.lookup import Placed, Placer
from holdfast.tables.plan import GroupPlan, OptimizerPlan, TablePlan

Floats = NDArray[np.float32]

NETWORK_ROW_WORDS = 256
"""Parameters per row of the network's group: 1 KB, so that rows spread evenly and headers cost little."""


class Step(NamedTuple):
    """The result of a batch. The caller owns all arrays; for a batch without samples they are empty."""

    loss: float
    gradients: list[Floats]
    """For each group of tables [rows pulled, dim], in the order of the rows pulled."""
    network: Floats
    """[rows of the network's group, 256]"""


def group_tables(dims: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The numbers of the tables in each group: equal widths together, in the order of first appearance."""
    return tuple(tuple(t for t, d in enumerate(dims) if d == dim) for dim in dict.fromkeys(dims))


def plan_groups(
    network: nn.Module,
    table_rows: Sequence[int],
    table_dims: Sequence[int],
    table_optimizer: OptimizerPlan,
    network_optimizer: OptimizerPlan,
) -> tuple[GroupPlan, ...]:
    """Plan the tables' groups, then the network's.

    Row-wise Adagrad makes sense only for embedding rows; the network uses plain Adagrad instead, as in the
    single-process trainer.
    """
    groups = [
        GroupPlan(
            name=f"tables-{table_dims[tables[0]]}",
            dim=table_dims[tables[0]],
            tables=tuple(TablePlan(f"tables.{t}.weight", table_rows[t]) for t in tables),
            optimizer=table_optimizer,
        )
        for tables in group_tables(table_dims)
    ]
    if network_optimizer.name == "rowwise-adagrad":
        network_optimizer = msgspec.structs.replace(network_optimizer, name="adagrad")
    words = sum(parameter.numel() for _, parameter in _trained(network))
    groups.append(
        GroupPlan(
            name="network",
            dim=NETWORK_ROW_WORDS,
            tables=(TablePlan("network", _network_rows(words)),),
            optimizer=network_optimizer,
            initial="installed",
        )
    )
    return tuple(groups)


def network_parts(network: nn.Module) -> tuple[NetworkPart, ...]:
    """The position of each trained parameter in the flat vector."""
    parts = []
    first = 0
    for name, parameter in _trained(network):
        parts.append(NetworkPart(f"network.{name}", first, tuple(parameter.shape)))
        first += parameter.numel()
    return tuple(parts)


def _network_rows(words: int) -> int:
    # A network without parameters has a row of zeros, so that no node has to handle an empty group.
    return max(1, -(-words // NETWORK_ROW_WORDS))


def _trained(network: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that training changes, each once; others and buffers keep their initial values."""
    trained = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    for name, parameter in trained:
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ConfigError(
                f"parameter {name} of {type(network).__name__} is {parameter.dtype} on {parameter.device}:"
                " expected torch.float32 on the CPU; convert it, or set its requires_grad to False"
                " to exclude it from training"
            )
    return trained


class WorkerModel:
    """A network whose tables and parameters are rows at servers.

    This object takes over the network: its parameters become views of one vector. Use it only through this
    object from then on.

    Args:
        network: takes dense features and one looked-up embedding for each table, and returns logits.
        table_rows: number of rows of each table.
        table_dims: width of each table.
    """

    def __init__(self, network: nn.Module, table_rows: Sequence[int], table_dims: Sequence[int]) -> None:
        if len(table_rows) != len(table_dims):
            raise ConfigError(
                f"{len(table_rows)} tables with {len(table_dims)} widths: expected one for each"
            )
        self.network = network
        self.groups = group_tables(table_dims)
        self.parts = network_parts(network)
        self._dims = [table_dims[tables[0]] for tables in self.groups]
        self._tables = len(table_dims)
        self._loss = loss_function(network)
        self._parameters = [parameter for _, parameter in _trained(network)]
        rows = _network_rows(sum(parameter.numel() for parameter in self._parameters))
        self._flat = torch.zeros(rows * NETWORK_ROW_WORDS)
        for parameter, view in zip(self._parameters, self._views(self._flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = None

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[part.first : part.first + parameter.numel()].view(part.shape)
            for part, parameter in zip(self.parts, self._parameters, strict=True)
        ]

    def initial_network(self) -> Floats:
        """The current parameters, [rows, 256]; call it before ``load_network``."""
        return self._rows(self._flat).copy()

    def load_network(self, values: Floats) -> None:
        """Set all parameters to pulled values, [rows, 256]."""
        np.copyto(self._rows(self._flat), values)

    @staticmethod
    def _rows(flat: Tensor) -> Floats:
        rows: Floats = flat.numpy().reshape(-1, NETWORK_ROW_WORDS)
        return rows

    def look_up(self, batch: Batch, placers: Sequence[Placer]) -> list[Placed]:
        """The rows that the batch needs from each group of tables, found by the groups' placers."""
        return [
            placer.place(
                [batch.ids[t] for t in tables],
                None if batch.offsets is None else [batch.offsets[t] for t in tables],
            )
            for placer, tables in zip(placers, self.groups, strict=True)
        ]

    def train(self, batch: Batch, placed: Sequence[Placed], pulled: Sequence[Floats]) -> Step:
        """Compute the loss of a batch and its gradients; no parameter changes.

        Args:
            batch: the samples.
            placed: for each group of tables, the result of the lookup.
            pulled: for each group, the rows [U, dim] of the lookup, in its order.
        """
        if len(batch) == 0:
            empty = [np.empty((0, dim), np.float32) for dim in self._dims]
            return Step(0.0, empty, np.empty((0, NETWORK_ROW_WORDS), np.float32))
        self.network.train()
        # A new tensor for each step: the last gradients may have to be sent again.
        gradient = torch.zeros_like(self._flat)
        views = self._views(gradient)
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.grad = view
        leaves = self._gather(batch, placed, pulled)
        for leaf in leaves:
            leaf.requires_grad_()
        loss = self._loss(self._forward(batch, leaves), _tensor(batch.labels))
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter, view in zip(self._parameters, views, strict=True):
            if parameter.grad is not view:  # the network itself has replaced the tensor
                view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
            parameter.grad = None
        gradients = [
            np.zeros_like(rows)  # the network reads none of these tables
            if leaf.grad is None
            else at.sum_gradients(leaf.grad.numpy().reshape(-1, rows.shape[1]))
            for leaf, at, rows in zip(leaves, placed, pulled, strict=True)
        ]
        return Step(loss.item(), gradients, self._rows(gradient))

    def predict(self, batch: Batch, placed: Sequence[Placed], pulled: Sequence[Floats]) -> Floats:
        """Compute logits [samples], with the network in evaluation mode."""
        if len(batch) == 0:
            return np.empty(0, np.float32)
        self.network.eval()
        with torch.no_grad():
            logits: Floats = self._forward(batch, self._gather(batch, placed, pulled)).numpy()
        return logits

    def _forward(self, batch: Batch, looked_up: Sequence[Tensor]) -> Tensor:
        embeddings: list[Tensor] = [torch.empty(0)] * self._tables
        for tables, group in zip(self.groups, looked_up, strict=True):
            for table, embedding in zip(tables, group.unbind(0), strict=True):
                embeddings[table] = embedding
        logits: Tensor = self.network(_tensor(batch.dense), embeddings)
        if logits.shape != (len(batch),):
            raise ConfigError(
                f"{type(self.network).__name__} returned logits of shape {list(logits.shape)} for"
                f" {len(batch)} samples: expected [{len(batch)}]"
            )
        return logits

    def _gather(self, batch: Batch, placed: Sequence[Placed], pulled: Sequence[Floats]) -> list[Tensor]:
        """Gather the embeddings of the samples for each group: [tables, samples, dim]."""
        return [
            torch.from_numpy(at.gather(rows)).view(len(tables), len(batch), dim)
            for tables, dim, at, rows in zip(self.groups, self._dims, placed, pulled, strict=True)
        ]


def _tensor(array: NDArray[np.float32]) -> Tensor:
    # Copy only if necessary: readers may return read-only memory-mapped arrays.
    return torch.from_numpy(np.require(array, np.float32, ["C", "W"]))
