"""Which of a server's rows are saved first."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.cluster.saving.shard_saver import rankings
from holdfast.coding.placement import Placement
from holdfast.options import PriorityName
from holdfast.tables.plan import GroupPlan, OptimizerPlan, TablePlan
from holdfast.tables.shard import GroupShard

LARGE, SMALL = 4000, 10


def shard_of(server: int) -> GroupShard:
    """One of two servers of a group with a large table and a small one."""
    tables = (TablePlan("large", LARGE), TablePlan("small", SMALL))
    group = GroupPlan(name="g", dim=4, tables=tables, optimizer=OptimizerPlan(name="sgd", lr=1.0))
    return GroupShard(group, Placement(2), server, 0)


@pytest.mark.parametrize("name", ["mfu", "scar"])
def test_the_rows_that_matter_most_and_all_of_small_tables(name: PriorityName) -> None:
    shard = shard_of(1)
    (ranking,) = rankings([shard], name, 0.01)
    real = np.flatnonzero(shard.rows_of(np.arange(len(shard.records))) < shard.plan.rows).astype(np.uint32)
    often = real[5:20]  # places; no more than the fraction allows
    for places in (real, often, often):
        shard.push(places, np.ones((len(places), 4), np.float32))
        ranking.touched(places)
    rows = shard.rows_of(real)
    chosen = rows[ranking.chosen(rows)]
    assert set(shard.rows_of(often)) <= set(chosen)
    assert set(rows[rows >= LARGE]) <= set(chosen), "what is small is saved whole"
    assert len(chosen) <= 0.01 * len(shard.records) + SMALL
    ranking.saved(chosen)
    later = rows[ranking.chosen(rows)]
    assert not set(shard.rows_of(often)) & set(later), "it is the turn of others"
    ranking.failed(chosen)
    assert set(shard.rows_of(often)) <= set(rows[ranking.chosen(rows)]), "they did not get to the store"


def test_without_a_priority_nothing_is_ranked() -> None:
    assert rankings([shard_of(0)], None, 0.125) == []
