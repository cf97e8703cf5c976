"""A job's state in a store: named and laid out as if a single process had trained and saved the model.

Tables are groups of rows, with the optimizer's state as further fields; ids are the rows of the job's groups.
The network's parameters are dense tensors: servers send their rows of it to the supervisor, which puts them
into a *template*, the tree of the dense state (``checkpoint.dense``), with a placeholder for each
tensor that training changes. Parity is never stored. State that only a job needs (which batches are done) is
under "job". Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.dense import Array, TablePlace, decode_tree, map_tree
from holdfast.checkpoint.format.encoding import Encoder
from holdfast.checkpoint.format.manifest import Version
from holdfast.checkpoint.format.records import WEIGHT, Field, Group, Table
from holdfast.cluster.protocol.batches import Layout
from holdfast.cluster.protocol.plan import JobPlan, SavePlan
from holdfast.errors import CorruptCheckpoint, ModelMismatch
from holdfast.redaction import redacted
from holdfast.tables.plan import GroupPlan

MODEL = "model"
"""The object that contains tables and network."""
NETWORK = "network:"
"""Prefix of the table name in a placeholder for a parameter of the network."""
STEP_NUMBER, STEP_TENSOR = "step:number", "step:tensor"
"""Table names in placeholders for the number of steps, in the two forms that torch's optimizers use."""
STEP = "step"

Words = NDArray[np.uint32]


def saving_of(plan: JobPlan) -> SavePlan:
    """The plan's ``saving``, which must be set."""
    assert plan.saving is not None
    return plan.saving


def table_groups(plan: JobPlan) -> tuple[GroupPlan, ...]:
    """The groups that are stored as rows: all, or all but the network's."""
    return plan.groups[:-1] if saving_of(plan).template else plan.groups


def live_groups(plan: JobPlan) -> tuple[Group, ...]:
    """The same groups in the form that checkpoints use."""
    optimizer = saving_of(plan).table_optimizer
    groups = []
    for group in table_groups(plan):
        fields = tuple(
            Field(
                field.name if field.name == WEIGHT else f"{optimizer}.{field.name}",
                "U32" if field.name == STEP else "F32",
                field.width,
            )
            for field in group.fields
        )
        tables = tuple(
            Table(f"{MODEL}.{table.name}", table.rows, first)
            for table, first in zip(group.tables, group.firsts, strict=False)
        )
        groups.append(Group(fields, tables))
    return tuple(groups)


def encoder_of(plan: JobPlan) -> Encoder:
    """The encoder of the job: the same at every server, whatever its rows are."""
    restores = plan.resume.restores if plan.resume else 0
    return Encoder.for_shards(saving_of(plan).config.policy, restores, live_groups(plan))


@dataclass(frozen=True)
class JobState:
    """The state of the job in a version."""

    layouts: tuple[Layout, ...]
    """The batches that the version contains."""
    samples: int
    servers: int
    workers: int
    k: int
    r: int
    rings: int = 1

    def has_servers_of(self, plan: JobPlan) -> bool:
        """Whether each server of the plan has the same rows as the server of its slot that saved them."""
        saved = self.servers, self.k, self.r, self.rings
        return saved == (plan.servers, plan.k, plan.r, plan.rings)


def version_metadata(plan: JobPlan, samples: int) -> dict[str, Any]:
    """The metadata of a version, which ``ckpt ls`` shows."""
    return {"samples": samples, "servers": plan.servers, "workers": plan.workers, "job": plan.job}


def dense_tree(plan: JobPlan, network: Words | None, steps: int, state: JobState) -> dict[str, Any]:
    """The dense state of a version: the template filled with the network's records, [rows, words]."""
    job: dict[str, Any] = {
        "state": msgspec.to_builtins(state),
        "config": msgspec.json.encode(redacted(plan.training)).decode(),
    }
    template = saving_of(plan).template
    if not template or network is None:
        return {"objects": {}, "metadata": {}, "optimizers": {}, "rng": None, "job": job}
    group = plan.groups[-1]
    flat = _flat_fields(group, network)
    if STEP in flat:
        job["network_steps"] = Array.of(flat[STEP])
    updates = int(flat[STEP].max()) if STEP in flat else steps
    parts = {f"{NETWORK}{part.name}": part for part in saving_of(plan).parts}

    def leaf(value: Any, path: str) -> Any:
        if not isinstance(value, TablePlace):
            return value
        if value.table == STEP_NUMBER:
            return steps
        if value.table == STEP_TENSOR:
            return Array("F32", (), np.array([updates], np.float32).view(np.uint8), "tensor")
        part = parts.get(value.table)
        if part is None:
            return value
        words = flat[value.field][part.first : part.first + math.prod(part.shape)]
        return Array("F32", value.shape, words.view(np.uint8), "tensor")

    tree: dict[str, Any] = map_tree(_template(plan), leaf)
    return tree | {"job": job}


def network_records(plan: JobPlan, tree: Any) -> Words | None:
    """Extract the network's records, [rows, words], from a version's dense state; None if stored as rows.

    Raises ModelMismatch, with the name of the parameter, if the version has another network.
    """
    if not saving_of(plan).template:
        return None
    group = plan.groups[-1]
    records = np.zeros((group.rows, group.words), np.uint32)
    flat = {f.name: np.zeros(group.rows * f.width, np.uint32) for f in group.fields}
    parts = {f"{NETWORK}{part.name}": part for part in saving_of(plan).parts}
    saved = dict(_leaves(tree))
    for path, place in _leaves(_template(plan)):
        part = parts.get(place.table) if isinstance(place, TablePlace) else None
        if part is None:
            continue
        found = saved.get(path)
        if not isinstance(found, Array) or (found.dtype, found.shape) != ("F32", place.shape):
            had = f"{found.dtype} {list(found.shape)}" if isinstance(found, Array) else "missing"
            raise ModelMismatch(
                f"{path.removeprefix('objects.')} is {had} in the checkpoint, expected F32 "
                f"{list(place.shape)}: restore it with the model and optimizer that saved it"
            )
        flat[place.field][part.first : part.first + math.prod(part.shape)] = found.data.view(np.uint32)
    if STEP in flat:
        counts = tree.get("job", {}).get("network_steps")
        if not isinstance(counts, Array) or counts.to_numpy().shape != flat[STEP].shape:
            raise ModelMismatch(
                "the checkpoint has no step counts of the network: another optimizer saved it"
            )
        flat[STEP][:] = counts.to_numpy()
    for field in group.fields:
        records[:, field.first : field.first + field.width] = flat[field.name].reshape(-1, field.width)
    return records


def job_state(tree: Any, version: Version, url: str) -> JobState:
    """Read the job's state from the dense state. Raises ModelMismatch if no job has saved it."""
    where = f"version {version.version} of {url}"
    if not isinstance(tree, dict) or not isinstance(tree.get("job"), dict):
        raise ModelMismatch(
            f"{where} was not saved by a job and does not say which batches are done: use another path"
        )
    try:
        return msgspec.convert(tree["job"]["state"], JobState)
    except (KeyError, msgspec.ValidationError) as error:
        raise CorruptCheckpoint(f"{where} has no valid job state: {error}") from None


def check_fit(plan: JobPlan, groups: Sequence[Group], tree: Any) -> None:
    """Raise ModelMismatch, which says what differs, unless a version matches the plan."""
    wanted = {t.name: (t.rows, g.fields) for g in live_groups(plan) for t in g.tables}
    found = {t.name: (t.rows, g.fields) for g in groups for t in g.tables}
    for name in wanted.keys() - found.keys():
        raise ModelMismatch(f"table {name} of the job is not in the checkpoint, which has {_some(found)}")
    for name in found.keys() - wanted.keys():
        raise ModelMismatch(f"the checkpoint has a table {name}, which the job lacks; it has {_some(wanted)}")
    for name, (rows, fields) in wanted.items():
        had_rows, had_fields = found[name]
        if (rows, fields) != (had_rows, had_fields):
            raise ModelMismatch(
                f"table {name} is {_shown(had_rows, had_fields)} in the checkpoint, expected "
                f"{_shown(rows, fields)}: resume with the tables and the optimizer that saved it"
            )
    if live_groups(plan) != tuple(groups):
        raise ModelMismatch("the checkpoint has the job's tables in another order: another model saved it")
    network_records(plan, tree)


def _shown(rows: int, fields: Sequence[Field]) -> str:
    return f"{rows} rows of " + ", ".join(f"{f.name} ({f.width} {f.dtype})" for f in fields)


def _some(names: Any) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


def _template(plan: JobPlan) -> Any:
    return decode_tree(saving_of(plan).template, "the plan's template")


def _flat_fields(group: GroupPlan, records: Words) -> dict[str, Words]:
    return {
        f.name: np.ascontiguousarray(records[:, f.first : f.first + f.width]).reshape(-1)
        for f in group.fields
    }


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []

    def leaf(value: Any, path: str) -> Any:
        found.append((path, value))

    map_tree(tree, leaf)
    yield from found
