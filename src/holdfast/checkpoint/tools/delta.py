"""Deltas: the changes of a model between two versions, as a file for servers that have the first.

Within an era the store's own files say which rows were written since; between eras the two versions are
compared. ``docs/checkpoints-format.md`` says what the file looks like and how it is applied.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.dense import places_of
from holdfast.checkpoint.format.records import Bytes2D, Field, Group, RowIds, Rows, Table
from holdfast.checkpoint.format.tensor_file import Spec, check_free, new_tensor_file
from holdfast.checkpoint.progress_bar import byte_progress
from holdfast.checkpoint.reading.version import VersionReader, open_version
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.tools.export import (
    WEIGHT,
    ExportedFile,
    FieldKey,
    RowTensor,
    as_one,
    choose_object,
    encode_dense,
    export_dcp,
    export_model,
    read_into,
    read_tree,
    reading,
    row_tensors,
    scratch,
    split_by_table,
)
from holdfast.errors import ConfigError

_MERGE_BYTES = 64 << 20
_COMPARE_ROWS = 1 << 16

Changes = dict[str, tuple[RowIds, dict[str, Bytes2D]]]
"""By table: its changed rows, ascending, and the new bytes of each wanted field."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A table of the exported object: the key of its weights, and the fields that the delta has."""

    key: str
    table: Table
    fields: tuple[Field, ...]
    shape: tuple[int, ...]


def export_as(
    store: Store,
    version: int | None,
    out: Path,
    format_: Literal["safetensors", "dcp", "delta"],
    *,
    object_name: str | None = None,
    since: int | None = None,
    all_fields: bool = False,
    force: bool = False,
) -> ExportedFile:
    """Export in a format by name; ``since`` and ``all_fields`` are of "delta" alone."""
    if format_ == "delta":
        if since is None:
            raise ConfigError("a delta leads from one version to another: name the first with --since")
        return export_delta(
            store, since, version, out, object_name=object_name, all_fields=all_fields, force=force
        )
    if since is not None or all_fields:
        raise ConfigError(f"--since and --all-fields are for --format delta, not for {format_}")
    write = export_dcp if format_ == "dcp" else export_model
    return write(store, version, out, object_name=object_name, force=force)


def export_delta(
    store: Store,
    since: int,
    version: int | None,
    out: Path,
    *,
    object_name: str | None = None,
    all_fields: bool = False,
    force: bool = False,
) -> ExportedFile:
    """Write what leads from one version's export to another's, the newest by default, as safetensors.

    Args:
        store: where both versions are.
        since: the version that the delta is applied to; it may be newer than the other.
        version: the version that the delta leads to.
        out: the file.
        object_name: the object to export. Default: the only module. Optimizers with per-row state: not
            supported.
        all_fields: include the optimizer state of the listed rows.
        force: overwrite the file.
    """
    check_free(out, force=force)

    def write(reader: VersionReader) -> ExportedFile:
        tree = read_tree(reader)
        name = choose_object(tree, object_name)
        tensors, aliases = row_tensors(reader.groups, places_of(tree["objects"][name]))
        wanted = _wanted(reader.groups, tensors, all_fields=all_fields)
        with open_version(store, since) as older, contextlib.ExitStack() as stack:
            for one in (older, reader):
                one.check_complete()  # of what did not change nothing is read, so nothing is counted
            found = stack.enter_context(_changes(older, reader, wanted, out))
            metadata = {
                "holdfast": "delta 1",
                "object": name,
                "since": str(since),
                "since_step": str(older.version.step),
                "version": str(reader.version.version),
                "step": str(reader.version.step),
                "aliases": json.dumps(aliases),
            }
            return _write(reader, tree["objects"][name], wanted, found, out, metadata, force=force)

    return reading(store, version, write)


def _wanted(groups: Sequence[Group], tensors: Sequence[RowTensor], *, all_fields: bool) -> list[_Wanted]:
    states = [tensor.name for tensor in tensors if tensor.field.name != WEIGHT]
    if states:
        raise ConfigError(
            f"a delta leads from weights to weights, and {states[0]} of this object is state of rows: "
            "take the module's delta with --all-fields, or export the object as safetensors or dcp"
        )
    fields_of = {t.name: g.fields for g in groups for t in g.tables}
    return [
        _Wanted(
            key=tensor.name,
            table=tensor.table,
            fields=fields_of[tensor.table.name] if all_fields else (tensor.field,),
            shape=tensor.spec.shape,
        )
        for tensor in tensors
    ]


def _write(
    reader: VersionReader,
    state: object,
    wanted: Sequence[_Wanted],
    changes: Changes,
    out: Path,
    metadata: Mapping[str, str],
    *,
    force: bool,
) -> ExportedFile:
    dense, dense_bytes, text = encode_dense(state)
    specs = [Spec(f"dense/{s.name}", s.dtype, s.shape) for s in dense]
    data = {f"dense/{name}": part for name, part in dense_bytes.items()}
    tables: dict[str, object] = {}
    for one in wanted:
        ids, values = changes[one.table.name]
        tables[one.key] = {
            "table": one.table.name,
            "shape": one.shape,
            "fields": [f.name for f in one.fields],
        }
        specs.append(Spec(f"rows/{one.key}", "I64", (len(ids),)))
        data[f"rows/{one.key}"] = ids.view(np.uint8)
        for f in one.fields:
            name = f"values/{one.key}" if f.name == WEIGHT else f"values/{one.key}/{f.name}"
            inner = one.shape[1:] if f.name == WEIGHT else (f.width,)
            specs.append(Spec(name, f.dtype, (len(ids), *inner)))
            data[name] = values[f.name].reshape(-1)
    facts = {**metadata, "tables": json.dumps(tables), "tree": text}
    with new_tensor_file(out, specs, facts, force=force) as file:
        for name, part in data.items():
            file.bytes(name)[:] = part
    rows = sum(len(ids) for ids, _ in changes.values())
    return ExportedFile(str(out), reader.version.version, len(specs), out.stat().st_size, rows)


@contextlib.contextmanager
def _changes(
    older: VersionReader, newer: VersionReader, wanted: Sequence[_Wanted], out: Path
) -> Iterator[Changes]:
    same_era = older.era.number == newer.era.number
    if same_era and older.version.version <= newer.version.version:
        yield _changes_in_era(older, newer, wanted)
    else:
        with _compared(older, newer, wanted, out.parent) as changes:
            yield changes


# Within an era


@dataclass
class _Gathered:
    """Rows of one table as they come, the later ones right; put together when they have become many."""

    fields: tuple[Field, ...]
    ids: list[RowIds] = field(default_factory=list)
    values: list[list[Bytes2D]] = field(default_factory=list)
    bytes: int = 0
    limit: int = _MERGE_BYTES

    def add(self, ids: RowIds, values: Sequence[Bytes2D]) -> None:
        self.ids.append(ids.copy())
        self.values.append([v.copy() for v in values])  # theirs is a buffer that is used again
        self.bytes += ids.nbytes + sum(v.nbytes for v in values)
        if self.bytes > self.limit:
            self.merge()
            self.limit = max(_MERGE_BYTES, 2 * self.bytes)

    def merge(self) -> tuple[RowIds, list[Bytes2D]]:
        """Each row once, ascending."""
        if not self.ids:
            return np.empty(0, np.int64), [np.empty((0, f.bytes), np.uint8) for f in self.fields]
        ids = np.concatenate(self.ids)
        unique, from_the_end = np.unique(ids[::-1], return_index=True)
        last = len(ids) - 1 - from_the_end
        values = [np.concatenate([v[i] for v in self.values])[last] for i in range(len(self.fields))]
        self.ids, self.values = [unique], [values]
        self.bytes = unique.nbytes + sum(v.nbytes for v in values)
        return unique, values


def _gather(
    reader: VersionReader,
    wanted: Sequence[_Wanted],
    *,
    baseline: bool = True,
    born_after: int = 0,
) -> dict[str, tuple[RowIds, list[Bytes2D]]]:
    gathered = {one.table.name: _Gathered(one.fields) for one in wanted}

    def sink(number: int, rows: Rows) -> None:
        group = reader.groups[number]
        for table, ids, a, b in split_by_table(group, rows):
            mine = gathered.get(table.name)
            if mine is not None:
                places = [group.fields.index(f) for f in mine.fields]
                mine.add(ids, [rows.fields[i][a:b] for i in places])

    total = sum(p.length for _, p in reader.pieces(baseline=baseline, born_after=born_after))
    with byte_progress(f"reading version {reader.version.version}", total) as on_progress:
        reader.read_rows(sink, baseline=baseline, born_after=born_after, on_progress=on_progress)
    return {name: mine.merge() for name, mine in gathered.items()}


def _changes_in_era(older: VersionReader, newer: VersionReader, wanted: Sequence[_Wanted]) -> Changes:
    """Rows that were written since: a record of the newer version that is younger than the older one."""
    found = _gather(newer, wanted, born_after=older.version.version)
    if newer.era.strategy == "Differential":
        # Its increments repeat all that changed since the baseline; the older one's tells what did not.
        before = _gather(older, wanted, baseline=False)
        found = {name: _without_equal(found[name], before[name]) for name in found}
    return {
        one.table.name: (
            found[one.table.name][0],
            dict(zip(_names(one), found[one.table.name][1], strict=True)),
        )
        for one in wanted
    }


def _without_equal(
    new: tuple[RowIds, list[Bytes2D]], old: tuple[RowIds, list[Bytes2D]]
) -> tuple[RowIds, list[Bytes2D]]:
    at = np.searchsorted(old[0], new[0])
    both = np.flatnonzero(np.append(old[0], -1)[at] == new[0])
    equal = np.ones(len(both), bool)
    for mine, theirs in zip(new[1], old[1], strict=True):
        equal &= (mine[both] == theirs[at[both]]).all(axis=1)
    keep = np.ones(len(new[0]), bool)
    keep[both[equal]] = False
    return new[0][keep], [values[keep] for values in new[1]]


# Between eras


@contextlib.contextmanager
def _compared(
    older: VersionReader, newer: VersionReader, wanted: Sequence[_Wanted], folder: Path
) -> Iterator[Changes]:
    """Both versions, in scratch files, and the rows in which they differ."""
    with (
        _whole(older, wanted, folder) as before,
        _whole(newer, wanted, folder) as after,
    ):
        changes: Changes = {}
        for one in wanted:
            new = {f.name: after[one.table.name, f.name] for f in one.fields}
            old = [before.get((one.table.name, f.name)) for f in one.fields]
            ids = _different(list(new.values()), old, one.table.rows)
            # Taken from the mapped file, copied once more only into the result.
            changes[one.table.name] = (ids, {name: values[ids] for name, values in new.items()})
        yield changes


@contextlib.contextmanager
def _whole(
    reader: VersionReader, wanted: Sequence[_Wanted], folder: Path
) -> Iterator[dict[FieldKey, Bytes2D]]:
    tables = {t.name: (t.rows, g.fields) for g in reader.groups for t in g.tables}
    shapes: dict[FieldKey, tuple[int, int]] = {}
    for one in wanted:
        rows, fields = tables.get(one.table.name, (0, ()))
        for f in one.fields:
            if f in fields:  # of the same type, too: otherwise there is nothing to compare
                shapes[one.table.name, f.name] = (rows, f.bytes)
    with scratch(folder, {key: rows * width for key, (rows, width) in shapes.items()}) as memory:
        into = {key: memory[key].reshape(shape) for key, shape in shapes.items()}
        read_into(reader, into)
        yield into


def _different(new: Sequence[Bytes2D], old: Sequence[Bytes2D | None], rows: int) -> RowIds:
    """Rows that differ in a field; all of them if the older version has no such table."""
    found: list[NDArray[np.int64]] = []
    for start in range(0, rows, _COMPARE_ROWS):
        end = min(start + _COMPARE_ROWS, rows)
        differs = np.zeros(end - start, bool)
        for mine, theirs in zip(new, old, strict=True):
            if theirs is None or theirs.shape != mine.shape:
                differs[:] = True
            else:
                differs |= as_one(mine[start:end]) != as_one(theirs[start:end])
        found.append(np.flatnonzero(differs) + start)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _names(one: _Wanted) -> list[str]:
    return [f.name for f in one.fields]
