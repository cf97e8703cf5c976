"""What of a version belongs to some objects, under the names that these have.

A version has the state of all objects of a run. Who loads some of them (``loading.py``) needs only the tables
whose weights are in their states, and of these tables only the fields that are. Names may differ in those of
wrappers (``names.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from holdfast.checkpoint.format.dense import TablePlace, map_tree, places_of
from holdfast.checkpoint.format.records import WEIGHT, Group
from holdfast.checkpoint.memory.parts import GroupPart
from holdfast.checkpoint.torch.capture import state_of
from holdfast.checkpoint.torch.fit import some
from holdfast.checkpoint.torch.names import matched_names, matched_paths
from holdfast.checkpoint.torch.state import BACKWARD, TrainingObjects
from holdfast.errors import CorruptCheckpoint, ModelMismatch

_IN_BACKWARD = re.compile(rf"(.+)({BACKWARD}\d*)")


@dataclass(frozen=True, slots=True)
class Chosen:
    """The part of a version that some objects are loaded from.

    Attributes:
        tree: its dense part, without other objects and random states, in the names of the objects.
        parts: of each of the version's groups what is needed, in the version's names.
        live_parts: the same groups in the names of the objects.
        tables: the live table of each of the version's tables that is needed.
    """

    tree: dict[str, Any]
    parts: tuple[GroupPart, ...]
    live_parts: tuple[Group, ...]
    tables: Mapping[str, str]


def choose(tree: Any, groups: Sequence[Group], objects: TrainingObjects, given: Iterable[str]) -> Chosen:
    """Choose what these objects need; ModelMismatch if the version has nothing of one that was ``given``.

    Optimizers that step in the backward pass, and which the version does not have, are left out.
    """
    saved = tree.get("objects") if isinstance(tree, dict) else None
    if not isinstance(saved, dict):
        raise CorruptCheckpoint("the checkpoint's dense state has no objects")
    for name in given:
        if name not in saved:
            raise ModelMismatch(f"the checkpoint holds no state of {name!r}, only of {some(saved)}")
    keys = {
        name: matched_names(saved[name], state_of(module))
        for name, module in objects.modules.items()
        if isinstance(saved[name], dict)
    }
    names = {_live_object(name, keys): name for name in saved}
    objects.leave_out([name for name in objects.objects if name not in names])
    sources = {name: names[name] for name in objects.objects}

    tables = _live_tables(saved, keys, objects)
    fields = {WEIGHT} | {
        place.field
        for name, source in sources.items()
        if name not in objects.modules
        for place in _places(name, saved[source], tables)
    }

    def live_field(field: str) -> str:
        for name, source in sources.items():
            if name != source and field.startswith(f"{source}."):
                return f"{name}{field.removeprefix(source)}"
        return field

    def leaf(value: Any, path: str) -> Any:
        if not isinstance(value, TablePlace):
            return value
        return TablePlace(tables[value.table], live_field(value.field), value.shape)

    states = {name: map_tree(saved[source], leaf) for name, source in sources.items()}
    for name, known in keys.items():
        states[name] = {known[key]: value for key, value in states[name].items()}
    parts = tuple(GroupPart.of(group, tables.keys(), fields) for group in groups)
    return Chosen(
        tree={
            "objects": states,
            "optimizers": {name: tree.get("optimizers", {}).get(source) for name, source in sources.items()},
            "metadata": {
                name: _live_metadata(tree, name, module, saved[name])
                for name, module in objects.modules.items()
            },
        },
        parts=parts,
        live_parts=tuple(_renamed(part.group, tables, live_field) for part in parts),
        tables=tables,
    )


def _live_object(name: str, keys: Mapping[str, Mapping[str, str]]) -> str:
    """The name here of a saved object; that of an optimizer in the backward pass has a parameter's in it."""
    found = _IN_BACKWARD.fullmatch(name)
    for root, known in keys.items():
        if found is not None and found[1].startswith(f"{root}."):
            key = found[1].removeprefix(f"{root}.")
            return f"{root}.{known.get(key, key)}{found[2]}"
    return name


def _live_tables(
    saved: Mapping[str, Any], keys: Mapping[str, Mapping[str, str]], objects: TrainingObjects
) -> dict[str, str]:
    """The live table of each saved one that a module needs; of tied ones, by the key that names it here."""
    tables: dict[str, str] = {}
    others: dict[str, str] = {}
    for name, known in keys.items():
        for key, place in places_of(saved[name]).items():
            if place.field == WEIGHT:
                live = f"{name}.{known[key]}"
                (tables if live in objects.tables else others).setdefault(place.table, live)
    return others | tables


def _places(name: str, state: Any, tables: Mapping[str, str]) -> Iterable[TablePlace]:
    for place in places_of(state).values():
        if place.table not in tables:
            raise ModelMismatch(
                f"{name} holds {place.field} of table {place.table}: load it together with the model that "
                "has this table"
            )
        yield place


def _live_metadata(tree: Mapping[str, Any], name: str, module: nn.Module, saved: Any) -> dict[str, object]:
    """Versions of modules' formats, which PyTorch keeps by the modules' paths."""
    live = state_of(module)
    known = tree.get("metadata", {}).get(name, {})
    paths = getattr(live, "_metadata", {})
    return matched_paths(known, saved, paths, live) if isinstance(saved, dict) else {}


def _renamed(group: Group, tables: Mapping[str, str], live_field: Callable[[str], str]) -> Group:
    return Group(
        tuple(replace(field, name=live_field(field.name)) for field in group.fields),
        tuple(replace(table, name=tables[table.name]) for table in group.tables),
    )
