"""The dense part of a job's versions, as the single-process trainer's ``Checkpointer`` would save it.

Where training changes a tensor, a place stands for it (see ``stored``); all else, such as a network's
buffers, is there as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Adam, Optimizer, SparseAdam

from holdfast.checkpoint.dense import TablePlace, encode_tree, map_tree
from holdfast.checkpoint.records import WEIGHT
from holdfast.checkpoint.torch_values import copy_random_states, plain_leaf, random_states
from holdfast.cluster.protocol.plan import SavePlan
from holdfast.cluster.saving.layout import MODEL, NETWORK, STEP, STEP_NUMBER, STEP_TENSOR
from holdfast.cluster.worker.model import network_parts
from holdfast.models.recommender import Recommender
from holdfast.tables.plan import GroupPlan
from holdfast.training.config import OptimizerConfig
from holdfast.training.optimizers import build_optimizers
from holdfast.training.saving import CheckpointConfig


def plan_saving(
    config: CheckpointConfig,
    network: nn.Module,
    table_rows: Sequence[int],
    optimizer: OptimizerConfig,
    groups: Sequence[GroupPlan],
) -> SavePlan:
    """How a job that trains this network is saved.

    The objects of a version are "model", a ``Recommender``, and "optim"; where the trainer has one optimizer
    for the network and one for the tables, "optim_network" and "optim_tables".
    """
    with torch.device("meta"):  # tables of any size, without their memory
        model = Recommender(network, table_rows)
    optimizers = build_optimizers(optimizer, model)
    names = ("optim",) if len(optimizers) == 1 else ("optim_network", "optim_tables")
    by_name = dict(zip(names, optimizers, strict=True))
    places = _places(model, groups)
    state = model.state_dict(keep_vars=True)
    tree = {
        "objects": {
            MODEL: {key: _weight(value, key, places) for key, value in state.items()},
            **{name: _optimizer_state(one, places, name) for name, one in by_name.items()},
        },
        "optimizers": {name: type(one).__name__ for name, one in by_name.items()},
        "metadata": {MODEL: map_tree(dict(state._metadata), plain_leaf, MODEL)},  # type: ignore[attr-defined]
        "rng": random_states(copy_random_states()),
    }
    return SavePlan(
        config=config,
        table_optimizer=names[-1],
        parts=network_parts(network),
        template=b"".join(bytes(part) for part in encode_tree(tree)),
    )


_Places = Mapping[int, tuple[TablePlace, GroupPlan]]
"""By a parameter's identity: the place of its weights, and its group."""


def _places(model: Recommender, groups: Sequence[GroupPlan]) -> _Places:
    group_of = {table.name: group for group in groups for table in group.tables}
    places: dict[int, tuple[TablePlace, GroupPlan]] = {}
    for name, parameter in model.tables.named_parameters(prefix="tables"):
        place = TablePlace(f"{MODEL}.{name}", WEIGHT, tuple(parameter.shape))
        places[id(parameter)] = place, group_of[name]
    for name, parameter in model.network.named_parameters(prefix="network"):
        if parameter.requires_grad:
            place = TablePlace(f"{NETWORK}{name}", WEIGHT, tuple(parameter.shape))
            places[id(parameter)] = place, groups[-1]
    return places


def _weight(value: Any, key: str, places: _Places) -> Any:
    found = places.get(id(value))
    if found is not None:
        return found[0]
    plain = value.detach() if isinstance(value, Tensor) else value
    return map_tree(plain, plain_leaf, f"{MODEL}.{key}")


def _optimizer_state(optimizer: Optimizer, places: _Places, name: str) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    numbered = enumerate(p for group in optimizer.param_groups for p in group["params"])
    for number, parameter in numbered:
        if id(parameter) not in places:
            continue  # training leaves it as it is
        weight, group = places[id(parameter)]
        fields = [f for f in group.fields if f.name not in (WEIGHT, STEP)]
        of_table = not weight.table.startswith(NETWORK)
        entry: dict[str, Any] = {}
        if isinstance(optimizer, (Adagrad, Adam, SparseAdam)):
            entry["step"] = TablePlace(_step_place(optimizer), STEP, ())
        for field in fields:
            shape = weight.shape if field.width == group.dim else weight.shape[:1]
            stored = f"{name}.{field.name}" if of_table else field.name
            entry[field.name] = TablePlace(weight.table, stored, shape)
        if entry:
            state[number] = entry
    groups = map_tree(optimizer.state_dict()["param_groups"], plain_leaf, name)
    return {"state": state, "param_groups": groups}


def _step_place(optimizer: Optimizer) -> str:
    return STEP_NUMBER if isinstance(optimizer, SparseAdam) else STEP_TENSOR
