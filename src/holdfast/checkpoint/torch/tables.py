"""The embedding tables of a model, and the optimizer states that go with their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.checkpoint.format.records import WEIGHT, Field
from holdfast.checkpoint.memory.shares import Share
from holdfast.checkpoint.torch.sharded import is_sharded, local, rows_here
from holdfast.checkpoint.torch.values import row_bytes, row_field, why_no_rows
from holdfast.errors import ConfigError, UnsupportedState


@dataclass(frozen=True, slots=True)
class LiveTable:
    """A table of the model.

    Attributes:
        name: "<object's name>.<key in its state_dict>", the first if it has several.
        modules: all modules that look up its rows.
        only_looked_up: whether no module of another kind has the same weight, such as an output layer
            tied to an embedding.
        sharded: the parameter of which each rank has some rows; None if it is on every rank. FSDP2 puts
            whole ones in its place at times.
    """

    name: str
    modules: tuple[nn.Embedding | nn.EmbeddingBag, ...]
    only_looked_up: bool
    sharded: nn.Parameter | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that its modules currently share, or whose rows the ranks share."""
        return self.sharded if self.sharded is not None else cast("nn.Parameter", self.modules[0].weight)

    @property
    def weight(self) -> nn.Parameter:
        """The same, which can be saved by rows."""
        weight = self.parameter
        reason = why_no_rows(weight)
        if reason:
            raise ConfigError(f"table {self.name} {reason}")
        return weight

    @property
    def first(self) -> int:
        """Number in the whole table of the first row that is here."""
        here = rows_here(self.name, self.parameter)
        return 0 if here is None else here.first


@dataclass(frozen=True, slots=True)
class RowTensors:
    """A table's tensors and derived data, valid until a tensor is replaced.

    Attributes:
        tensors: by field: the weights, then the optimizer states that have an entry a row, by name.
        fields: what they look like.
        views: their memory, of the rows that are here.
        held: the rows that are here; None for all.
        share: the rows that this process saves; None for all.
        saved_views: their memory.
    """

    tensors: dict[str, Tensor]
    fields: tuple[Field, ...]
    views: tuple[NDArray[np.uint8], ...]
    held: Share | None
    share: Share | None
    saved_views: tuple[NDArray[np.uint8], ...]
    _table: LiveTable
    _weight: _Place
    _states: list[tuple[Optimizer, int, list[tuple[str, _Place]]]]
    """For each optimizer, the length of its state of this weight, and all tensors in it."""

    @classmethod
    def of(
        cls,
        table: LiveTable,
        optimizers: Mapping[str, Optimizer],
        share_of: Callable[[int], Share] | None = None,
    ) -> RowTensors:
        """The table's current tensors. ``share_of`` says which of so many rows this process saves."""
        weight = table.weight
        tensors: dict[str, Tensor] = {WEIGHT: weight}
        states: list[tuple[Optimizer, int, list[tuple[str, _Place]]]] = []
        named: dict[str, Tensor] = {}
        for name, optimizer in optimizers.items():
            state = optimizer.state.get(weight, {})
            found = {k: t for k, t in state.items() if isinstance(k, str) and isinstance(t, Tensor)}
            named |= {f"{name}.{key}": tensor for key, tensor in found.items()}
            states.append((optimizer, len(state), [(key, _place(tensor)) for key, tensor in found.items()]))
        tensors |= {name: t for name, t in sorted(named.items()) if _is_row_state(t, weight)}
        views = tuple(row_bytes(local(tensor)) for tensor in tensors.values())
        held = rows_here(table.name, weight)
        share, kept = held, slice(None)
        if held is None and share_of is not None:
            share = share_of(len(weight))
            kept = slice(share.first, share.first + share.rows)
        elif held is not None and share_of is None and held.rows != held.of:
            raise UnsupportedState(
                f"{table.name} has its rows on several ranks: make the Checkpointer on all of them, and "
                "leave out process_group or give the one with these ranks"
            )
        return cls(
            tensors=tensors,
            fields=tuple(row_field(name, tensor) for name, tensor in tensors.items()),
            views=views,
            held=held,
            share=share,
            saved_views=tuple(view[kept] for view in views),
            _table=table,
            _weight=_place(weight),
            _states=states,
        )

    def has_replaced(self, before: RowTensors) -> bool:
        """Whether the memory of a field has been replaced since."""
        old = dict(zip(before.tensors, before.views, strict=True))
        now = zip(self.tensors, self.views, strict=True)
        return any(name in old and view.ctypes.data != old[name].ctypes.data for name, view in now)

    def valid(self) -> bool:
        """Whether the table still has the same tensors in the same memory. Asked at every save."""
        table = self._table
        weight: Any = table.sharded
        if weight is None:
            weight = table.modules[0]._parameters.get("weight")
        if weight is None or not _is_at(weight, self._weight):
            return False
        for optimizer, length, known in self._states:
            state = optimizer.state.get(weight, {})
            if len(state) != length:
                return False
            for key, place in known:
                if not _is_at(state.get(key), place):
                    return False
        return True


_Place = tuple[Tensor, int, Any]
"""A tensor, kept alive, with its address and shape: it can be given other memory."""


def _place(tensor: Tensor) -> _Place:
    return tensor, -1 if tensor.is_sparse else local(tensor).data_ptr(), tensor.shape


def _is_at(tensor: Any, place: _Place) -> bool:
    known, address, shape = place
    return (
        tensor is known
        and (-1 if tensor.is_sparse else local(tensor).data_ptr()) == address
        and (tensor.shape == shape)
    )


def find_tables(modules: Mapping[str, nn.Module]) -> dict[str, LiveTable]:
    """Find every weight that is looked up, with all modules that look it up."""
    names: dict[int, str] = {}
    sharded: dict[int, nn.Parameter] = {}
    users: dict[int, dict[int, Any]] = {}
    others: set[int] = set()
    for root, model in modules.items():
        for path, module in model.named_modules(remove_duplicate=False):
            # Not module.weight: that can be computed from other parameters, which then are dense state.
            weight = module._parameters.get("weight")
            if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                others |= set(map(id, module._parameters.values()))
            elif weight is not None and (weight.is_meta or weight.numel()):
                names.setdefault(id(weight), ".".join(filter(None, (root, path, "weight"))))
                users.setdefault(id(weight), {})[id(module)] = module
                if is_sharded(weight):
                    sharded[id(weight)] = cast("nn.Parameter", weight)
    tables = {
        name: LiveTable(name, tuple(users[weight].values()), weight not in others, sharded.get(weight))
        for weight, name in names.items()
    }
    _check_overlaps(tables)
    return tables


def _check_overlaps(tables: Mapping[str, LiveTable]) -> None:
    """Refuse two tables in the same memory: in a restore they would overwrite each other's rows."""
    weights = [(local(t.weight), t.name) for t in tables.values()]
    ranges = sorted((weight.data_ptr(), weight.nbytes, name) for weight, name in weights)
    for (begin, length, first), (after, _, second) in pairwise(ranges):
        if begin + length > after:
            raise ConfigError(
                f"tables {first} and {second} share memory but not their Parameter: tie them by assigning "
                "the Parameter of one to the other"
            )


def _is_row_state(value: Any, weight: Tensor) -> bool:
    if is_sharded(weight):
        fits = is_sharded(value) and value.placements == weight.placements
    else:
        fits = type(value) in (Tensor, nn.Parameter)
    return fits and value.dim() > 0 and value.shape[0] == weight.shape[0] and why_no_rows(value) is None
