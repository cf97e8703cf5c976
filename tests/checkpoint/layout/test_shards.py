"""Several writers of one store: each saves its own rows, one manifest counts for all (hole 26: no parity)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint.format.chunk import checksum
from holdfast.checkpoint.format.manifest import DenseEntry, Version
from holdfast.checkpoint.format.records import Field, Rows, make_groups
from holdfast.checkpoint.layout.bundles import ShardChange
from holdfast.checkpoint.layout.shard import Shard
from holdfast.checkpoint.reading.version import open_version
from holdfast.checkpoint.saving.catalog import Catalog
from holdfast.checkpoint.store import Store, open_store
from holdfast.options import Chunked, Incremental, Policy

ROWS = 90
GROUPS = make_groups([("table", ROWS, (Field("record", "U32", 3),))])
Array = np.ndarray[Any, Any]


def owner(ids: Array, shards: int) -> Array:
    """Rows are spread by arithmetic, as parameter servers do it."""
    return np.asarray((ids // 4 + ids % 4) % shards)


class Cluster:
    """Shards that each hold some rows of a table, and the catalog over them."""

    def __init__(self, store: Store, strategy: Any, shards: int, state: Array) -> None:
        self.store, self.state = store, state
        self.catalog = Catalog(store, Policy(strategy=strategy))
        self.shards = [Shard(n, GROUPS, strategy) for n in range(shards)]
        self.era = 0

    def save(self, touched: Array) -> int:
        number = self.catalog.next_version()
        baseline = not self.era
        changes: list[ShardChange] = []
        for shard in self.shards:
            ids = np.arange(ROWS) if baseline else touched
            mine = ids[owner(ids, len(self.shards)) == shard.number]
            changes.append(
                shard.write(self.store, number, [(0, Rows(mine, (self.state[mine],)))], baseline=baseline)
            )
        # Every shard is durable by now: one manifest makes the version exist.
        self.era = self.era or number
        dense = f"dense/{number}"
        self.store.put(dense, [b"x"])
        version = Version(
            version=number, era=self.era, step=number, time=0.0, baseline=baseline, rows=0, bytes=0,
            dense=DenseEntry(dense, 1, checksum(b"x")),
        )  # fmt: skip
        self.catalog.commit_version(
            version, GROUPS, type(self.shards[0].strategy).__name__, [c.for_manifest() for c in changes]
        )
        for shard, change in zip(self.shards, changes, strict=True):
            shard.apply(change)
        self.tidy(number)
        return number

    def tidy(self, number: int) -> None:
        kept = [v.version for v in self.catalog.manifest.versions]
        tidied = [(shard, shard.tidy(self.store, number, kept)) for shard in self.shards]
        changes = [(shard, change) for shard, change in tidied if change is not None]
        if changes:
            self.catalog.commit_round(self.era, [change.for_manifest() for _, change in changes])
            for shard, change in changes:
                shard.apply(change)

    def resume(self) -> None:
        """As if every shard were a new process."""
        self.era = self.catalog.manifest.versions[-1].era
        for shard in self.shards:
            shard.resume(self.store, self.catalog.manifest.era(self.era))


def restored_onto(store: Store, version: int, shards: int) -> Array:
    """Each of the shards takes its own rows; together they are the table."""
    state = np.zeros((ROWS, 12), np.uint8)
    for shard in range(shards):

        def sink(group: int, rows: Rows, shard: int = shard) -> None:
            mine = owner(rows.ids, shards) == shard
            state[rows.ids[mine]] = rows.fields[0][mine]

        with open_version(store, version) as reader:
            reader.read_rows(sink)
    return state


@pytest.mark.parametrize("strategy", [Incremental(), Chunked(round_versions=2)], ids=str)
@pytest.mark.parametrize("shards", [1, 3, 5])
def test_n_shards_save_and_m_restore(tmp_path: Path, strategy: Any, shards: int) -> None:
    random = np.random.default_rng(shards)
    state = random.integers(0, 256, (ROWS, 12), dtype=np.uint8)
    store = open_store(tmp_path, create=True)
    cluster = Cluster(store, strategy, shards, state)
    truth = {cluster.save(np.arange(0)): state.copy()}
    for step in range(14):
        if step == 7:  # all shards die and come back
            cluster = Cluster(store, strategy, shards, state)
            cluster.resume()
        touched = np.unique((ROWS * random.random(20) ** 2).astype(np.int64))
        state[touched] = random.integers(0, 256, (len(touched), 12), dtype=np.uint8)
        truth[cluster.save(touched)] = state.copy()
    for version, expected in truth.items():
        for other in (1, 2, 7):
            assert np.array_equal(restored_onto(store, version, other), expected)
