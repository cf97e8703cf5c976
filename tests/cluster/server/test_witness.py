"""Comparing what is recovered with the memory of a server that died."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.server.witness import Witness
from holdfast.coding.placement import Placement
from holdfast.tables.plan import GroupPlan, OptimizerPlan, TablePlan
from holdfast.tables.shard import GroupShard

ROWS = 40
GROUP = GroupPlan(
    name="t", dim=3, tables=(TablePlan("t", ROWS),), optimizer=OptimizerPlan(name="adagrad", lr=0.1)
)
PLACEMENT = Placement(2, 1, 1)


def made(
    folder: Path, incarnation: int, flushes: int = 0, counts_until: int = 0
) -> tuple[Witness, GroupShard]:
    witness = Witness(folder, Peer("server", 1, incarnation))
    replicator: Any = SimpleNamespace(flushes=flushes)
    witness.replicator, witness.counts_until = replicator, counts_until
    return witness, witness.shard(GROUP, PLACEMENT, 1, 7, empty=incarnation > 1)


def test_rows_that_come_back_are_compared_with_those_that_were_lost(tmp_path: Path) -> None:
    witness, dying = made(tmp_path, 1, flushes=3)
    everything = np.arange(len(dying.records))
    dying.push(everything[:6], np.ones((6, 3), np.float32))  # in flush 4
    assert np.array_equal(dying.records, _plain(6).records), "the same as in memory"
    kept = dying.records.copy()
    assert witness.replicator is not None
    witness.replicator.flushes = 4
    dying.push(everything[4:8], np.ones((4, 3), np.float32))  # in flush 5, which is not kept
    del dying

    witness, successor = made(tmp_path, 2, counts_until=4)
    assert not successor.records.any()
    kept[9, 0] ^= 1
    successor.write(everything[:10], kept[:10])
    assert (witness.compared, witness.unequal) == (6, 1), "4 to 7 are newer than what was kept, 9 is wrong"
    kept[9, 0] ^= 1
    successor.write(everything[10:], kept[10:])
    assert (witness.compared, witness.unequal) == (len(kept) - 4, 1)
    del successor

    # It dies in turn, before it had all rows: what it did not have cannot be compared.
    witness, half = made(tmp_path, 3, counts_until=0)
    half.write(everything[:5], kept[:5])
    witness, last = made(tmp_path, 4, counts_until=0)
    last.write(everything, kept)
    assert (witness.compared, witness.unequal) == (5, 0)


def _plain(pushed: int) -> GroupShard:
    shard = GroupShard(GROUP, PLACEMENT, 1, 7)
    shard.push(np.arange(pushed), np.ones((pushed, 3), np.float32))
    return shard
