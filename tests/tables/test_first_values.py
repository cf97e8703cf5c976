"""First records of any rows, for whoever does not hold them: a parity server, say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coding.placement import Placement
from holdfast.tables.first_values import first_records
from holdfast.tables.plan import GroupPlan, OptimizerName, OptimizerPlan, TablePlan
from holdfast.tables.shard import GroupShard


def plan_of(rows: list[int], dim: int, optimizer: OptimizerName = "adam") -> GroupPlan:
    tables = tuple(TablePlan(f"t{i}", count) for i, count in enumerate(rows))
    return GroupPlan(name="g", dim=dim, tables=tables, optimizer=OptimizerPlan(name=optimizer, lr=0.5))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 30), max_size=4),
    st.integers(1, 9),
    st.sampled_from(["sgd", "adam"]),
    st.integers(0, 2**32),
)
def test_first_records_are_those_of_the_owners(
    rows: list[int], dim: int, optimizer: OptimizerName, seed: int
) -> None:
    plan, placement = plan_of(rows, dim, optimizer), Placement(7, 2, 1, groups=2)
    for server in range(placement.servers):
        shard = GroupShard(plan, placement, server, seed)
        backwards = np.arange(len(shard.records))[::-1]
        records = first_records(plan, seed, shard.rows_of(backwards))  # with rows beyond the last among them
        np.testing.assert_array_equal(records, shard.records[backwards])


def test_a_parity_server_finds_the_members_of_its_stripes() -> None:
    """Block for block what the owners have: nothing has to be sent for the first parities."""
    plan, placement = plan_of([31, 20], 3), Placement(11, 3, 2, groups=2)
    shards = [GroupShard(plan, placement, server, 5) for server in range(placement.servers)]
    blocks = np.arange(placement.blocks(plan.rows))
    for server in range(placement.servers):
        for parity in range(placement.r):
            for member in range(placement.k):
                rows = placement.stripe_rows(server, parity, member, blocks)
                owner = shards[placement.member_server(server, parity, member)]
                np.testing.assert_array_equal(
                    first_records(plan, 5, rows), owner.records[blocks * placement.k + member]
                )


def test_rows_may_come_twice_and_in_any_order() -> None:
    plan = plan_of([10, 10], 4)
    all_rows = first_records(plan, 1, np.arange(20))
    some = np.array([19, 0, 10, 10, 9, 2**62, 3])
    expected = np.append(all_rows, np.zeros((1, plan.words), np.uint32), 0)[np.minimum(some, 20)]
    np.testing.assert_array_equal(first_records(plan, 1, some), expected)
    assert first_records(plan, 1, some[:0]).shape == (0, plan.words)


def test_what_cannot_be_drawn_is_refused() -> None:
    plan = plan_of([10], 4)
    with pytest.raises(
        ValueError, match=r"group g: rows are int64 .*, expected int64 .*, none of them negative"
    ):
        first_records(plan, 1, np.array([3, -1]))
    with pytest.raises(ValueError, match="group g: rows are uint32"):
        first_records(plan, 1, np.zeros(3, np.uint32))
    installed = GroupPlan(name="n", dim=4, tables=plan.tables, optimizer=plan.optimizer, initial="installed")
    with pytest.raises(ValueError, match="group n: first values are installed, only uniform ones are drawn"):
        first_records(installed, 1, np.arange(3))
