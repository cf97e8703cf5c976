"""Any version of any strategy, against a dictionary that remembers everything."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint.format.chunk import checksum
from holdfast.checkpoint.format.manifest import DenseEntry, Version
from holdfast.checkpoint.format.records import Field, Rows, make_groups
from holdfast.checkpoint.layout import rounds
from holdfast.checkpoint.layout.shard import Shard
from holdfast.checkpoint.reading.version import MOST_OPEN, open_version
from holdfast.checkpoint.saving.catalog import Catalog
from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.store.local import LocalReader
from holdfast.options import Chunked, Differential, Full, Incremental, Policy

FIELDS = (Field("weight", "F32", 3), Field("sum", "F32", 1))
GROUPS = make_groups([("a", 40, FIELDS), ("b", 25, (Field("weight", "F16", 5),)), ("c", 60, FIELDS)])
STRATEGIES = [
    Full(),
    Differential(),
    Incremental(),
    Chunked(round_versions=3),
    Chunked(round_versions=1, dead_fraction=0),
    Chunked(layout="2d", threshold=0.0),
    Chunked(layout="2d", threshold=0.02),
    Chunked(layout="2d", threshold=0.3),
]
Tables = list[tuple[np.ndarray[Any, Any], ...]]


class Trainer:
    """Rows that change at random, saved through a shard; every version is remembered whole."""

    def __init__(self, store: Store, policy: Policy, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.store = store
        self.catalog = Catalog(store, policy)
        assert not isinstance(policy.strategy, str)
        self.shard = Shard(0, GROUPS, policy.strategy)
        self.state: Tables = [
            tuple(self.random.integers(0, 256, (g.rows, f.bytes), dtype=np.uint8) for f in g.fields)
            for g in GROUPS
        ]
        self.remembered: dict[int, Tables] = {}
        self.since_baseline = [np.zeros(g.rows, bool) for g in GROUPS]
        self.era = 0

    def train(self) -> list[np.ndarray[Any, Any]]:
        touched = []
        for group, fields in zip(GROUPS, self.state, strict=True):
            # A few rows change often, most seldom, sometimes none at all.
            count = int(self.random.integers(0, 12))
            ids = np.unique((group.rows * self.random.random(count) ** 3).astype(np.int64))
            for field in fields:
                field[ids] = self.random.integers(0, 256, (len(ids), field.shape[1]), dtype=np.uint8)
            touched.append(ids)
        return touched

    def save(self, touched: Sequence[np.ndarray[Any, Any]], *, baseline: bool = False) -> None:
        strategy = self.shard.strategy
        number = self.catalog.next_version()
        baseline = baseline or not self.shard.base or isinstance(strategy, Full)
        for marks, ids in zip(self.since_baseline, touched, strict=True):
            marks[ids] = True
        wanted: list[np.ndarray[Any, Any]] = list(touched)
        if baseline:
            wanted = [np.arange(g.rows) for g in GROUPS]
            self.since_baseline = [np.zeros(g.rows, bool) for g in GROUPS]
            self.era = number
        elif isinstance(strategy, Differential):
            wanted = [np.flatnonzero(marks) for marks in self.since_baseline]
        snapshot = [
            Rows(ids, tuple(f[ids] for f in fields)) for ids, fields in zip(wanted, self.state, strict=True)
        ]
        change = self.shard.write(self.store, number, enumerate(snapshot), baseline=baseline)
        files = change.for_manifest()
        dense = f"dense/{number:08}-{'f' * 12}.safetensors"
        self.store.put(dense, [b"dense"])
        version = Version(
            version=number, era=self.era, step=number, time=0.0, baseline=baseline, rows=files.rows,
            bytes=files.bytes, dense=DenseEntry(dense, 5, checksum(b"dense")),
        )  # fmt: skip
        self.catalog.commit_version(version, GROUPS, "x", [files])
        self.shard.apply(change)
        self.remembered[number] = [tuple(f.copy() for f in fields) for fields in self.state]
        tidied = self.shard.tidy(self.store, number, [v.version for v in self.catalog.manifest.versions])
        if tidied is not None:
            self.catalog.commit_round(self.era, [tidied.for_manifest()])
            self.shard.apply(tidied)

    def restart(self) -> None:
        """Another process takes up the newest version."""
        self.catalog = Catalog(self.store, self.catalog.policy)
        self.catalog.take_over()
        self.shard = Shard(0, GROUPS, self.shard.strategy)
        newest = self.catalog.newest
        assert newest is not None
        self.shard.resume(self.store, self.catalog.manifest.era(newest.era))


def restored(store: Store, version: int) -> Tables:
    state: Tables = [tuple(np.zeros((g.rows, f.bytes), np.uint8) for f in g.fields) for g in GROUPS]

    def sink(group: int, rows: Rows) -> None:
        for field, values in zip(state[group], rows.fields, strict=True):
            field[rows.ids] = values

    with open_version(store, version) as reader:
        assert reader.groups == GROUPS
        reader.read_rows(sink)
        assert reader.dense() == b"dense"
    return state


def same(one: Tables, other: Tables) -> bool:
    return all(
        np.array_equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def check_all(trainer: Trainer) -> None:
    for version in trainer.catalog.manifest.versions:
        assert same(restored(trainer.store, version.version), trainer.remembered[version.version]), (
            version.version
        )


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_every_version_comes_back_bit_for_bit(
    tmp_path: Path, strategy: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 40)
    trainer = Trainer(open_store(tmp_path, create=True), Policy(strategy=strategy), seed)
    for step in range(25):
        trainer.save(trainer.train(), baseline=step == 17)
        if step % 6 == 5:
            check_all(trainer)
    check_all(trainer)
    assert [v.version for v in trainer.catalog.manifest.versions] == list(range(1, 26))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_what_retention_leaves_comes_back_and_the_rest_is_freed(tmp_path: Path, strategy: Any) -> None:
    policy = Policy(strategy=strategy, keep=3, keep_every=7)
    store = open_store(tmp_path, create=True)
    trainer = Trainer(store, policy, 1)
    for step in range(30):
        trainer.save(trainer.train(), baseline=step == 17)
    check_all(trainer)
    assert [v.version for v in trainer.catalog.manifest.versions] == [7, 14, 21, 28, 29, 30]
    trainer.catalog.delete_versions([7, 14, 21])
    trainer.save(trainer.train())
    trainer.save(trainer.train())
    check_all(trainer)
    named = trainer.catalog.manifest.file_names() | trainer.catalog._only_before
    on_disk = {info.name for folder in ("chunks/", "dense/") for info in store.list(folder)}
    assert on_disk == named, "deleted versions leave no files behind"
    assert all("00000001" not in name for name in on_disk)


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if not isinstance(s, Full)], ids=str)
def test_restarts_change_nothing(tmp_path: Path, strategy: Any) -> None:
    policy = Policy(strategy=strategy, keep=6, keep_every=5)
    trainer = Trainer(open_store(tmp_path, create=True), policy, 2)
    for step in range(24):
        trainer.save(trainer.train(), baseline=step == 9)
        if step % 3 == 2:
            trainer.restart()
            check_all(trainer)


def test_nothing_is_stored_twice_by_rounds(tmp_path: Path) -> None:
    """Rows on disk are as many as were ever saved: moved, never copied."""
    trainer = Trainer(open_store(tmp_path, create=True), Policy(strategy=Chunked(round_versions=2)), 5)
    for _ in range(20):
        trainer.save(trainer.train())
    files = [f for era in trainer.catalog.manifest.eras for f in era.files if f.kind != "baseline"]
    assert {f.kind for f in files} >= {"live", "history"}
    baseline_rows = sum(g.rows for g in GROUPS)
    assert sum(f.rows for f in files) + baseline_rows == sum(
        v.rows for v in trainer.catalog.manifest.versions
    )


def test_versions_of_more_files_than_may_be_open(tmp_path: Path) -> None:
    """A long chain of increments is restored, not taken for damage by a process that ran out of handles."""
    trainer = Trainer(open_store(tmp_path, create=True), Policy(strategy=Incremental()), 5)
    while (
        len(trainer.catalog.manifest.eras[0].files if trainer.catalog.manifest.eras else ()) < MOST_OPEN + 60
    ):
        trainer.save(trainer.train())
    newest = trainer.catalog.manifest.versions[-1].version
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + MOST_OPEN + 20, hard))
    try:
        assert same(restored(trainer.store, newest), trainer.remembered[newest])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_may_open_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(open_store(tmp_path, create=True), Policy(strategy=Incremental()), 5)
    for _ in range(12):
        trainer.save(trainer.train())
    monkeypatch.setattr(resource, "getrlimit", lambda which: (16, 16))
    with open_version(trainer.store) as reader:
        assert sum(isinstance(file.reader, LocalReader) for file in reader.files) == 4
    assert same(restored(trainer.store, 12), trainer.remembered[12])
