"""Copy the dense state of modules and optimizers between two steps, as fast as possible.

``state_dict()`` walks through every module and every parameter, and what it gives has to be walked through
again to copy it: for a small model that takes as long as copying tens of thousands of rows, and training
waits for it. As a rule the same tensors are in the same places as at the last save. So the first save makes
a ``StatePlan``: which containers and tensors the state was made of, and the state itself with numbered
places for its tensors. As long as the containers hold the same objects, a save only copies the tensors'
memory, in one go. Whatever is not plainly as PyTorch makes it (hooks, own ``state_dict`` methods, tensors
elsewhere than in this machine's memory) has no plan and is asked for its state every time.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.checkpoint.format.dense import Array, TablePlace, map_tree
from holdfast.checkpoint.torch.sharded import LocalCopy, is_sharded, local
from holdfast.checkpoint.torch.values import DTYPE_NAMES, is_plain_memory, memory_key, plain_leaf
from holdfast.kernels.rows import copy_ranges

State = Callable[[], Any]
"""A captured state; calling it returns a tree of plain values."""
_ATOMS = {int, float, bool, str, bytes, type(None), complex}
_MOST_FAILURES = 3
_MOST_COPIES = 2  # one may still be being written when the next is made
_REFERENCES_OF_NOBODY = 2  # the list's reference, and that of the caller


@dataclass(frozen=True, slots=True)
class Places:
    """Finds the placeholder of a tensor that is stored as rows, by the tensor or by its memory."""

    by_id: dict[int, TablePlace]
    by_memory: dict[int, tuple[Any, TablePlace]]

    def add(self, tensor: Tensor, place: TablePlace) -> None:
        """``tensor`` must live as long as this does."""
        if is_sharded(tensor):  # it has no memory of its own
            self.by_id[id(tensor)] = place
            return
        known = self.by_memory.setdefault(tensor.data_ptr(), (memory_key(tensor), place))
        self.by_id[id(tensor)] = known[1] if known[0] == memory_key(tensor) else place

    def find(self, tensor: Tensor) -> TablePlace | None:
        """For the tensor, or one that shows the same memory in the same way."""
        place = self.by_id.get(id(tensor))
        if place is None and not is_sharded(tensor):
            key, other = self.by_memory.get(tensor.data_ptr(), (None, None))
            place = other if key is not None and key == memory_key(tensor) else None
        return place


class Capturer:
    """Copies the state of one object at each save."""

    def __init__(self, name: str, thing: Any) -> None:
        self._name = name
        self._thing = thing
        self._plan: StatePlan | None = None
        self._failures = 0

    def capture(self, places: Places) -> tuple[State, Mapping[str, Any]]:
        """Copy the state and a module's metadata, now."""
        plan = self._plan
        if plan is not None:
            if plan.holds(places):
                self._failures = 0
                return plan.copy(), plan.metadata
            self._plan = None
        state = state_of(self._thing)
        with torch.no_grad():
            copied = copied_state(state, places)
        metadata = dict(getattr(state, "_metadata", {}))
        if self._failures < _MOST_FAILURES:  # a state that changes every time is not worth a plan
            self._failures += 1
            self._plan = _make_plan(self._name, self._thing, state, metadata, places)

        def leaf(value: Any, path: str) -> Any:
            return value if type(value) is TablePlace else plain_leaf(value, path)

        return lambda: map_tree(copied, leaf, self._name), metadata


def state_of(thing: Any) -> Any:
    """Its ``state_dict()``."""
    plain = isinstance(thing, nn.Module) and type(thing).state_dict is nn.Module.state_dict
    if plain and "state_dict" not in vars(thing):
        # With the parameters themselves, not with views of them made for the occasion, which cost time twice.
        return thing.state_dict(keep_vars=True)
    return thing.state_dict()


def copied_state(value: Any, places: Places) -> Any:
    """A copy of a state that is independent of training; tensors that are stored as rows are only named.

    What is not plain data is passed on as it is, for whoever turns the copy into a tree to refuse.
    """
    kind = type(value)
    copied: Any = value
    if kind in _ATOMS:
        return value
    if kind is Tensor or kind is nn.Parameter:
        if value.layout == torch.strided and not value.is_meta:
            place = places.find(value)
            copied = place if place is not None else value.clone()
    elif is_sharded(value):
        place = places.find(value)
        copied = place if place is not None else LocalCopy(local(value).clone(), value)
    elif isinstance(value, dict):
        copied = {k: copied_state(v, places) for k, v in value.items()}
        if kind is Counter:
            copied = Counter(copied)
    elif kind is list or kind is tuple:
        copied = kind([copied_state(v, places) for v in value])
    elif isinstance(value, np.ndarray | set):
        copied = value.copy()
    return copied


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor's placeholder in a template."""

    number: int


class StatePlan:
    """How to copy a state that consists of the same objects as the last time.

    Args:
        name: of the object, for messages.
        template: its state, with a ``_Slot`` or ``TablePlace`` for each tensor.
        metadata: of a module.
        tensors: what is in the slots.
        guards: containers and what they held: (mapping, its keys or None, its values).
        empty: containers that hold nothing.
        sets: sets and what they held: names of buffers that are no part of the state.
        optimizer: whose parameter groups these are: (parameters, their numbers) of each. The rest of a group
            (the learning rate) is copied every time.
    """

    def __init__(
        self,
        name: str,
        template: Any,
        metadata: Mapping[str, Any],
        tensors: list[Tensor],
        guards: list[tuple[Mapping[Any, Any], list[Any] | None, list[Any]]],
        empty: list[Mapping[Any, Any]],
        sets: list[tuple[set[str], frozenset[str]]],
        optimizer: Optimizer | None,
        groups: list[tuple[list[Any], list[int]]],
        places: Places,
    ) -> None:
        self.metadata = metadata
        self._name, self._template = name, template
        self._tensors, self._guards, self._empty, self._sets = tensors, guards, empty, sets
        self._optimizer, self._groups = optimizer, groups
        self._containers = (optimizer.state, optimizer.param_groups) if optimizer is not None else ()
        self._places = places
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._shapes = [tensor.shape for tensor in tensors]
        sizes = [tensor.nbytes for tensor in tensors]
        self._ends = np.cumsum([0, *sizes])
        self._ranges = np.array(self._addresses, np.int64), np.array(sizes, np.int64)
        self._copies: list[NDArray[np.uint8]] = []

    def holds(self, places: Places) -> bool:
        """Whether the state is still made of the same objects."""
        if places is not self._places or any(self._empty) or any(now != then for now, then in self._sets):
            return False
        for mapping, keys, values in self._guards:
            if len(mapping) != len(values) or not all(map(operator.is_, mapping.values(), values)):
                return False
            if keys is not None and list(mapping) != keys:
                return False
        if self._optimizer is not None and not self._holds_groups(self._optimizer):
            return False
        # A tensor can be given other memory.
        return (
            [t.data_ptr() for t in self._tensors] == self._addresses
            and [t.shape for t in self._tensors] == self._shapes
            and all(map(is_plain_memory, self._tensors))
        )

    def _holds_groups(self, optimizer: Optimizer) -> bool:
        # A state that is loaded comes with containers of its own.
        state, groups = self._containers or (None, [])
        if optimizer.state is not state or optimizer.param_groups is not groups:
            return False
        if len(groups) != len(self._groups):
            return False
        for group, (known, _) in zip(groups, self._groups, strict=True):
            mine = group["params"]
            if len(mine) != len(known) or not all(map(operator.is_, mine, known)):
                return False
        return True

    def copy(self) -> State:
        """Copy everything that training changes, now."""
        data = self._memory()
        copy_ranges(*self._ranges, data)
        template = self._template
        if self._optimizer is not None:
            copied = [
                {k: copied_state(v, self._places) for k, v in group.items() if k != "params"}
                | {"params": list(numbers)}
                for group, (_, numbers) in zip(self._optimizer.param_groups, self._groups, strict=True)
            ]
            template = {**template, "param_groups": copied}

        def leaf(value: Any, path: str) -> Any:
            if type(value) is _Slot:
                tensor = self._tensors[value.number]
                begin, end = self._ends[value.number], self._ends[value.number + 1]
                shape = tuple(self._shapes[value.number])
                return Array(DTYPE_NAMES[tensor.dtype], shape, data[begin:end], "tensor")
            return value if type(value) is TablePlace else plain_leaf(value, path)

        return lambda: map_tree(template, leaf, self._name)

    def _memory(self) -> NDArray[np.uint8]:
        """For a copy: that of one that nobody has any more, else fresh memory, which costs a page fault for
        every 4 KiB, in the trainer's time."""
        for i in range(len(self._copies)):
            if sys.getrefcount(self._copies[i]) == _REFERENCES_OF_NOBODY:
                return self._copies[i]
        data = np.empty(int(self._ends[-1]), np.uint8)
        self._copies = [data, *self._copies][:_MOST_COPIES]
        return data


def _make_plan(
    name: str, thing: Any, state: Any, metadata: Mapping[str, Any], places: Places
) -> StatePlan | None:
    guards: list[tuple[Mapping[Any, Any], list[Any] | None, list[Any]]] = []
    empty: list[Mapping[Any, Any]] = []
    sets: list[tuple[set[str], frozenset[str]]] = []
    groups: list[tuple[list[Any], list[int]]] = []
    if isinstance(thing, nn.Module) and all(_is_plain_module(m) for m in thing.modules()):
        for module in thing.modules():
            for mapping in (module._parameters, module._buffers, module._modules):
                guards.append((mapping, list(mapping), list(mapping.values())))
            empty += [module._state_dict_hooks, module._state_dict_pre_hooks]
            left_out = module._non_persistent_buffers_set  # buffers could move into it and out of it
            sets.append((left_out, frozenset(left_out)))
    elif isinstance(thing, Optimizer) and _is_plain_optimizer(thing):
        # Its keys are tensors, of which == makes another tensor: the values are dicts of their own each.
        guards.append((thing.state, None, list(thing.state.values())))
        guards += [(inner, list(inner), list(inner.values())) for inner in thing.state.values()]
        empty += [thing._optimizer_state_dict_pre_hooks, thing._optimizer_state_dict_post_hooks]
        groups = [
            (list(group["params"]), list(packed["params"]))
            for group, packed in zip(thing.param_groups, state["param_groups"], strict=True)
        ]
        state = {"state": state["state"], "param_groups": []}
    else:
        return None
    tensors: list[Tensor] = []
    template = _slotted(state, places, tensors)
    if template is None:
        return None
    optimizer = thing if isinstance(thing, Optimizer) else None
    return StatePlan(name, template, metadata, tensors, guards, empty, sets, optimizer, groups, places)


def _is_plain_module(module: nn.Module) -> bool:
    kind = type(module)
    return (
        kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and getattr(kind, "get_extra_state", None) is nn.Module.get_extra_state
        and not ({"state_dict", "_save_to_state_dict"} & vars(module).keys())
        and not module._state_dict_hooks
        and not module._state_dict_pre_hooks
    )


def _is_plain_optimizer(optimizer: Optimizer) -> bool:
    return (
        type(optimizer).state_dict is Optimizer.state_dict
        and "state_dict" not in vars(optimizer)
        and not optimizer._optimizer_state_dict_pre_hooks
        and not optimizer._optimizer_state_dict_post_hooks
        and all(isinstance(inner, dict) for inner in optimizer.state.values())
    )


def _slotted(value: Any, places: Places, tensors: list[Tensor]) -> Any:
    """The state with slots for its tensors; None if something else in it could change."""
    if type(value) in (Tensor, nn.Parameter):
        return _slot(value, places, tensors)
    if isinstance(value, dict) and type(value) is not Counter:
        slotted = {k: _slotted(v, places, tensors) for k, v in value.items()}
        return None if _any_none(slotted.values()) else slotted
    # The numbers and lists of an optimizer's state: their place would be guarded, what is in them not.
    return [] if type(value) is list and not value else None


def _slot(tensor: Tensor, places: Places, tensors: list[Tensor]) -> _Slot | TablePlace | None:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in DTYPE_NAMES:
        return None
    place = places.find(tensor)
    if place is not None:
        return place
    if not is_plain_memory(tensor):
        return None
    tensors.append(tensor)
    return _Slot(len(tensors) - 1)


def _any_none(values: Iterable[Any]) -> bool:
    return any(value is None for value in values)
