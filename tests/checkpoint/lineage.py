"""Rows that change in a way that is the same in every process: the oracle of what any version must hold.

The state after a step is a function of the step alone, so whoever finds a version in a store, after whatever
has happened to its writers, can tell whether its rows are right. That is so of quantized rows as well: rows
that lie on a grid exactly, and those with NaN in them, which are kept raw, come back as they were.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.dense import encode_tree
from holdfast.checkpoint.format.manifest import DATA_FOLDERS, Manifest, Version, read_newest
from holdfast.checkpoint.format.records import Field, make_groups
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.checkpoint.reading.loader import RowLoader
from holdfast.checkpoint.reading.version import VersionReader, open_version
from holdfast.checkpoint.saving.writer import Writer
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.store.local import Files
from holdfast.events import EventLog
from holdfast.options import Chunked, Differential, Full, Incremental, Policy
from tests.checkpoint.plain_source import PlainSource

FIELDS = (Field("weight", "F32", 2), Field("sum", "F32", 1))  # whole words, and not
GROUPS = make_groups([("a", 14, FIELDS), ("b", 6, (Field("weight", "F16", 3),)), ("c", 9, FIELDS)])
TABLES = {t.name: (t.rows, g.fields) for g in GROUPS for t in g.tables}
STRATEGIES: list[Any] = [
    Full(),
    Differential(baseline="one-shot"),
    Differential(baseline="intermittent"),
    Incremental(),
    Chunked(round_versions=2, dead_fraction=0.0, reset="never"),
    Chunked(round_versions=1, dead_fraction=0.3, reset="auto"),
    Chunked(layout="2d", threshold=0.0, reset="never"),
]
WITH_QUANTIZED = [STRATEGIES[2], STRATEGIES[4], STRATEGIES[6]]
"""Enough to try with quantized rows in the suite: a strategy does not know what it moves."""
QUANTIZED: dict[str, Any] = {"quantize": 2, "quantize_state": 16}
"""What a policy says for rows that lie on grids."""
Fields = dict[str, tuple[NDArray[np.uint8], ...]]


class QuickFiles(Files):
    """Files that are not made durable: for processes that do not crash."""

    def fsync(self, handle: int) -> None:
        """Nothing."""

    def fsync_dir(self, path: str) -> None:
        """Nothing."""


def blank() -> Fields:
    return {n: tuple(np.zeros((rows, f.bytes), np.uint8) for f in fs) for n, (rows, fs) in TABLES.items()}


def touched(step: int) -> dict[str, NDArray[np.int64]]:
    """The rows that a step changes: a few often, most seldom, sometimes none."""
    random = np.random.default_rng(step)
    counts = {name: int(random.integers(0, 7)) for name in TABLES}
    return {
        name: np.unique((rows * random.random(counts[name]) ** 2).astype(np.int64))
        for name, (rows, _) in TABLES.items()
    }


def any_rows(random: np.random.Generator, table: str, count: int) -> list[NDArray[np.uint8]]:
    """New bytes for each field."""
    return [random.integers(0, 256, (count, f.bytes), dtype=np.uint8) for f in TABLES[table][1]]


def rows_on_grids(random: np.random.Generator, table: str, count: int) -> list[NDArray[np.uint8]]:
    """The same, of rows that 2 bits hold exactly, zeros, and rows that are not finite; of short states."""
    fields = []
    for field in TABLES[table][1]:
        dtype = np.float16 if field.dtype == "F16" else np.float32
        if field.name != "weight":
            fields.append(random.integers(0, 200, (count, field.width)).astype(dtype).view(np.uint8))
            continue
        codes = random.integers(0, 4, (count, field.width))
        codes[:, 0], codes[:, 1] = 0, 3  # the whole grid is used, or it would be another
        step = 2.0 ** random.integers(-2, 3, (count, 1))
        values = (random.integers(-40, 40, (count, 1)) + codes) * step
        values[random.random(count) < 0.1] = 0
        values[random.random(count) < 0.15, 1] = random.choice([np.nan, np.inf, -np.inf])
        fields.append(values.astype(dtype).view(np.uint8))
    return fields


def advance(fields: Fields, step: int, on_grids: bool = False) -> None:
    random = np.random.default_rng([step, 1])
    make = rows_on_grids if on_grids else any_rows
    for name, ids in touched(step).items():
        for field, values in zip(fields[name], make(random, name, len(ids)), strict=True):
            field[ids] = values


_states: dict[bool, list[Fields]] = {False: [blank()], True: [blank()]}


def state_after(step: int, on_grids: bool = False) -> Fields:
    states = _states[on_grids]
    while len(states) <= step:
        fields = {name: tuple(f.copy() for f in own) for name, own in states[-1].items()}
        advance(fields, len(states), on_grids)
        states.append(fields)
    return states[step]


def same(one: Fields, other: Fields) -> bool:
    return all(np.array_equal(a, b) for name in TABLES for a, b in zip(one[name], other[name], strict=True))


class Lineage:
    """One process of a run: opens a store, takes up its newest version, trains and saves."""

    def __init__(self, store: Store, policy: Policy, events: EventLog | None = None) -> None:
        self.store = store
        self.writer = Writer(store, policy, events or EventLog(None))
        self.on_grids = policy.quantize is not None
        self.fields = blank()
        self.step = 0
        self.tables = LiveTables(GROUPS, lambda table: self.fields[table])
        self.writer.bind(self.tables)
        newest = self.writer.catalog.newest
        if newest is not None:
            self.go_to(newest)

    def go_to(self, version: Version) -> None:
        with open_version(self.store, version.version) as reader:
            self.fields = blank()
            digests = self.writer.begin_restore(reader.groups)
            reader.read_rows(RowLoader(GROUPS, lambda table: self.fields[table], digests))
            assert reader.dense() == dense(version.step)
        self.tables = LiveTables(GROUPS, lambda table: self.fields[table])
        self.writer.bind(self.tables)
        self.writer.resume(version, digests)
        self.step = version.step
        assert same(self.fields, state_after(self.step, self.on_grids))

    def train(self) -> None:
        self.step += 1
        advance(self.fields, self.step, self.on_grids)
        for table, ids in touched(self.step).items():
            self.writer.tracker.mark(table, ids)

    def save(self) -> int:
        step = self.step
        return self.writer.save(step, PlainSource(self.tables, dense(step)), {})


@cache
def dense(step: int) -> bytes:
    """A file of dense state, as a trainer's would be."""
    return b"".join(bytes(part) for part in encode_tree({"after step": step}))


def check_version(
    store: Store, version: Version, reader: VersionReader | None = None, *, on_grids: bool = False
) -> None:
    """Fails unless the version is bit for bit what was saved."""
    with reader or open_version(store, version.version) as opened:
        found = blank()
        opened.read_rows(RowLoader(opened.groups, lambda table: found[table]))
        assert opened.dense() == dense(version.step), f"version {version.version}"
    assert same(found, state_after(version.step, on_grids)), f"version {version.version}, step {version.step}"


def check_store(store: Store, *, on_grids: bool = False) -> Manifest:
    """Fails unless every version that is listed is right, and quantized if that is asked for."""
    manifest = read_newest(store)
    for version in manifest.versions:
        check_version(store, version, on_grids=on_grids)
    for era in manifest.eras:
        groups = era.decoded_groups()
        assert sum(g.is_coded for g in groups) == sum(g.raw_rows_of is not None for g in groups)
        assert any(g.is_coded for g in groups) == on_grids
    return manifest


def check_no_leftovers(line: Lineage) -> None:
    """Fails if there are files that nobody needs, or if one is missing."""
    catalog = line.writer.catalog
    named = catalog.manifest.file_names() | catalog._only_before
    found = {info.name for folder in DATA_FOLDERS for info in line.store.list(folder)}
    assert named <= found <= catalog.named_files()
