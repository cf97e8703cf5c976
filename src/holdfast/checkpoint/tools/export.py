"""Versions as files that other programs read: safetensors and PyTorch's distributed checkpoints.

Rows go from the store straight into the mapped file, so a table larger than memory is no problem. Only
``export_dcp`` needs torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.dense import TablePlace, decode_tree, encode_tree, map_tree, places_of
from holdfast.checkpoint.format.records import Bytes2D, Field, Group, Rows, Table
from holdfast.checkpoint.format.tensor_file import Spec, check_free, mapped, new_tensor_file
from holdfast.checkpoint.progress_bar import byte_progress
from holdfast.checkpoint.reading.version import VersionReader, open_version
from holdfast.checkpoint.store import Store
from holdfast.errors import CheckpointError, ConfigError, CorruptCheckpoint, ObjectMissing, StoreError

WEIGHT = "weight"
_TRIES = 3

FieldKey = tuple[str, str]
"""(table, field)"""


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """The result of an export."""

    path: str
    version: int
    tensors: int
    bytes: int
    rows: int | None = None
    """Of a delta: how many it lists."""


def restore_file(store: Store, version: int | None, out: Path, *, force: bool = False) -> ExportedFile:
    """Write all state of a version, the newest by default, as one safetensors file.

    Weights have their names ("model.tables.0.weight"), other fields of rows theirs behind it
    ("model.tables.0.weight.optim.sum"), dense tensors their path ("optim.state.3.step"). What is no tensor
    stands as JSON under "tree" in the metadata, with the tensors' names in their places.
    """
    check_free(out, force=force)

    def write(reader: VersionReader) -> ExportedFile:
        tree = read_tree(reader)
        state = {_free_name("rng", tree["objects"]): tree.get("rng"), **tree["objects"]}
        places = places_of(state)
        shapes = {(p.table, p.field): p.shape for p in places.values()}
        rows = [
            RowTensor((t.name, f.name), row_name(t.name, f.name), f, t, shapes.get((t.name, f.name)))
            for group in reader.groups
            for t in group.tables
            for f in group.fields
        ]
        metadata = {
            "holdfast": "state 1",
            "optimizers": json.dumps(tree.get("optimizers", {})),
            "metadata": json.dumps(reader.version.metadata),
        }
        return _write_file(reader, out, rows, state, metadata, {}, force=force)

    return reading(store, version, write)


def export_model(
    store: Store, version: int | None, out: Path, *, object_name: str | None = None, force: bool = False
) -> ExportedFile:
    """Write the ``state_dict`` of one object, by default of the only module, as a safetensors file."""
    check_free(out, force=force)

    def write(reader: VersionReader) -> ExportedFile:
        tree = read_tree(reader)
        name = choose_object(tree, object_name)
        state = tree["objects"][name]
        rows, aliases = row_tensors(reader.groups, places_of(state))
        metadata = {"holdfast": "object 1", "object": name, "format": "pt"}
        return _write_file(reader, out, rows, state, metadata, aliases, force=force)

    return reading(store, version, write)


def export_dcp(
    store: Store, version: int | None, out: Path, *, object_name: str | None = None, force: bool = False
) -> ExportedFile:
    """Write a folder that ``torch.distributed.checkpoint.load`` reads.

    It holds the ``state_dict`` of every object under the object's name, or with ``object_name`` that
    object's alone, without a name before it. Optimizers' states are numbered as PyTorch numbers them.
    """
    _check_folder(out, force=force)

    def write(reader: VersionReader) -> ExportedFile:
        tree = read_tree(reader)
        objects = tree["objects"]
        state = objects if object_name is None else objects[choose_object(tree, object_name)]
        with _scratch_rows(reader, places_of(state), out.parent) as rows:
            tensors = _save_dcp(state, rows, out, force=force)
        size = sum(file.stat().st_size for file in out.iterdir())
        return ExportedFile(str(out), reader.version.version, tensors, size)

    return reading(store, version, write)


# What is in a version


@dataclass(frozen=True, slots=True)
class RowTensor:
    """A field of a table as a tensor of a file; ``shape`` is the tensor's own, if it is known."""

    key: FieldKey
    name: str
    field: Field
    table: Table
    shape: tuple[int, ...] | None

    @property
    def spec(self) -> Spec:
        """The description of the tensor in the file."""
        flat = (self.table.rows, self.field.width)
        if self.shape is not None and math.prod(self.shape) != math.prod(flat):
            raise CorruptCheckpoint(f"{self.name} has shape {self.shape} and {flat[0]} rows of {flat[1]}")
        return Spec(self.name, self.field.dtype, self.shape if self.shape is not None else flat)


def reading(store: Store, version: int | None, work: Callable[[VersionReader], ExportedFile]) -> ExportedFile:
    """Call ``work`` with an open version, and retry if a writer removes its files meanwhile."""
    for _ in range(_TRIES):
        with open_version(store, version) as reader:
            version = reader.version.version  # stay with it, though newer ones may come
            try:
                return work(reader)
            except ObjectMissing as error:
                missing = error
    raise missing


def read_tree(reader: VersionReader) -> dict[str, Any]:
    """The dense part of a version."""
    where = f"{reader.store.url}: {reader.version.dense.name}"
    tree = decode_tree(reader.dense(), where)
    if not isinstance(tree, dict) or not isinstance(tree.get("objects"), dict):
        raise CorruptCheckpoint(f"{where} has no objects")
    return tree


def choose_object(tree: Mapping[str, Any], name: str | None) -> str:
    """Find the object to export: by name, or the only module."""
    objects, modules = list(tree["objects"]), list(tree.get("metadata", {}))
    if name is None:
        if len(modules) != 1:
            raise ConfigError(
                f"the version has {len(modules)} modules: choose one object with --object, of "
                f"{', '.join(objects)}"
            )
        return str(modules[0])
    if name not in objects:
        raise ConfigError(f"the version has no object {name!r}: it has {', '.join(objects)}")
    if not isinstance(tree["objects"][name], dict):
        raise ConfigError(f"the state of {name!r} is not a dict: it cannot be exported")
    return name


def row_name(table: str, field: str) -> str:
    """The name of a table's field in a file with all of them."""
    return table if field == WEIGHT else f"{table}.{field}"


def row_tensors(
    groups: Sequence[Group], places: Mapping[str, TablePlace]
) -> tuple[list[RowTensor], dict[str, str]]:
    """The row tensors of a state under their paths, and the paths that show the same as another."""
    known = {(t.name, f.name): (t, f) for g in groups for t in g.tables for f in g.fields}
    first: dict[FieldKey, RowTensor] = {}
    aliases: dict[str, str] = {}
    for path, place in places.items():
        key = (place.table, place.field)
        if key in first:
            aliases[path] = first[key].name
            continue
        if key not in known:
            raise CorruptCheckpoint(f"{path} is {place.field} of {place.table}, which the version lacks")
        table, field = known[key]
        first[key] = RowTensor(key, path, field, table, place.shape)
    return list(first.values()), aliases


def read_into(reader: VersionReader, into: Mapping[FieldKey, Bytes2D]) -> None:
    """Read the rows of a version and keep those of some fields: ``into`` maps them to [rows, bytes]."""
    text = f"reading version {reader.version.version}"
    with byte_progress(text, reader.total_bytes()) as on_progress:
        reader.read_rows(RowSink(reader.groups, into), on_progress=on_progress)


class RowSink:
    """Takes rows of a version and writes those of some fields to where ``into`` says."""

    def __init__(self, groups: Sequence[Group], into: Mapping[FieldKey, Bytes2D]) -> None:
        self._groups = groups
        self._into = into

    def __call__(self, group: int, rows: Rows) -> None:
        """Write rows of a group to their tables."""
        for table, ids, a, b in split_by_table(self._groups[group], rows):
            for field, values in zip(self._groups[group].fields, rows.fields, strict=True):
                out = self._into.get((table.name, field.name))
                if out is not None:
                    _put_rows(out, ids, values[a:b])


def split_by_table(group: Group, rows: Rows) -> Iterator[tuple[Table, NDArray[np.int64], int, int]]:
    """(table, its row ids, begin, end) for the tables that have some of these rows of a group."""
    ids = rows.ids
    if len(ids) and not (ids[0] >= 0 and ids[-1] < group.rows):
        raise CorruptCheckpoint(f"rows {ids[0]} to {ids[-1]} of a group of {group.rows}")
    edges = np.searchsorted(ids, [*(t.first for t in group.tables), group.rows]).tolist()
    for table, a, b in zip(group.tables, edges[:-1], edges[1:], strict=True):
        if a < b:
            yield table, ids[a:b] - table.first, a, b


def _put_rows(out: Bytes2D, ids: NDArray[np.int64], values: Bytes2D) -> None:
    first, last = int(ids[0]), int(ids[-1])
    if last - first == len(ids) - 1:
        out[first : last + 1] = values
    else:
        as_one(out)[ids] = as_one(values)


def as_one(rows: Bytes2D) -> NDArray[np.void]:
    """Each row as one value, which NumPy copies in one go."""
    return rows.view(f"V{rows.shape[1]}").reshape(-1)


# Writing


def encode_dense(state: Any) -> tuple[list[Spec], dict[str, NDArray[np.uint8]], str]:
    """The dense tensors of a state, their bytes, and the rest as JSON text."""
    head, *parts = encode_tree(state)
    described = json.loads(bytes(head[8:]))
    text = described.pop("__metadata__")["tree"]
    specs = [Spec(name, entry["dtype"], tuple(entry["shape"])) for name, entry in described.items()]
    data = iter(parts)
    return specs, {s.name: next(data) for s in specs if s.bytes}, text


def _write_file(
    reader: VersionReader,
    out: Path,
    rows: Sequence[RowTensor],
    state: Any,
    metadata: Mapping[str, str],
    aliases: Mapping[str, str],
    *,
    force: bool,
) -> ExportedFile:
    dense, data, text = encode_dense(state)
    specs = {r.name: r.spec for r in rows}
    for spec in dense:
        if spec.name in specs:
            raise CheckpointError(
                f"two tensors of the version are named {spec.name}: export one object alone"
            )
        specs[spec.name] = spec
    for alias, name in aliases.items():
        specs[alias] = Spec(alias, specs[name].dtype, specs[name].shape)
    version = reader.version
    facts = {"version": str(version.version), "step": str(version.step), "time": repr(version.time)}
    with new_tensor_file(out, list(specs.values()), {**facts, **metadata, "tree": text}, force=force) as file:
        for name, part in data.items():
            file.bytes(name)[:] = part
        read_into(reader, {r.key: file.rows(r.name, r.table.rows) for r in rows})
        for alias, name in aliases.items():  # tied weights: a plain file has them twice
            file.bytes(alias)[:] = file.bytes(name)
    return ExportedFile(str(out), version.version, len(specs), out.stat().st_size)


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    while name in taken:
        name += "_"
    return name


@contextlib.contextmanager
def scratch(folder: Path, sizes: Mapping[Any, int]) -> Iterator[dict[Any, NDArray[np.uint8]]]:
    """Arrays of these sizes in an unnamed file, for data larger than memory."""
    aligned = {key: -(-size // 64) * 64 for key, size in sizes.items()}
    try:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - entered below
    except OSError as error:
        raise StoreError(f"could not write to {folder}: {error.strerror or error}") from error
    with file, mapped(file.fileno(), sum(aligned.values()), "a scratch file") as memory:
        views: dict[Any, NDArray[np.uint8]] = {}
        at = 0
        for key, size in sizes.items():
            views[key] = memory[at : at + size]
            at += aligned[key]
        yield views


@contextlib.contextmanager
def _scratch_rows(
    reader: VersionReader, places: Mapping[str, TablePlace], folder: Path
) -> Iterator[dict[FieldKey, tuple[RowTensor, NDArray[np.uint8]]]]:
    rows, _ = row_tensors(reader.groups, places)
    with scratch(folder, {r.key: r.spec.bytes for r in rows}) as memory:
        read_into(reader, {r.key: memory[r.key].reshape(r.table.rows, -1) for r in rows if r.table.rows})
        yield {r.key: (r, memory[r.key]) for r in rows}


def _save_dcp(
    state: Any, rows: Mapping[FieldKey, tuple[RowTensor, NDArray[np.uint8]]], out: Path, *, force: bool
) -> int:
    # Importing torch takes seconds: nothing else here needs it.
    import torch  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

    from holdfast.checkpoint.torch.values import TORCH_DTYPES, live_leaf  # noqa: PLC0415

    count = 0

    def leaf(value: Any, path: str) -> Any:
        nonlocal count
        count += 1
        if not isinstance(value, TablePlace):
            return live_leaf(value)
        tensor, data = rows[value.table, value.field]
        return torch.from_numpy(data).view(TORCH_DTYPES[tensor.field.dtype]).view(value.shape)

    alive = map_tree(state, leaf)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.partial-", dir=out.parent) as name:
        folder = Path(name) / "new"
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant
                save(alive, checkpoint_id=folder, no_dist=True)
            if out.exists():
                if force and any(out.iterdir()):
                    os.rename(out, Path(name) / "old")  # goes with the temporary folder
                else:
                    out.rmdir()
            os.rename(folder, out)
        except OSError as error:
            raise StoreError(f"could not write {out}: {error.strerror or error}") from error
    return count


def _check_folder(out: Path, *, force: bool) -> None:
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent} for {out.name}: make it first")
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"{out} is a file: name a folder")
    if any(out.iterdir()):
        if not force:
            raise ConfigError(f"{out} is not empty: name another folder, or replace it with --force")
        if not (out / ".metadata").is_file():
            raise ConfigError(
                f"{out} is not a distributed checkpoint and is not overwritten: name another folder"
            )
