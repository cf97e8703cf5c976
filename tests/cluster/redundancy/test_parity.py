"""Parities at one server, and sums by the schoolbook (docs/protocol.md, "Rows, stripes, parities")."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from holdfast.cluster.redundancy.parity import ParityShard, Records
from holdfast.coding.placement import Placement
from holdfast.kernels.memory import read_only
from holdfast.tables.first_values import first_records
from tests.cluster.redundancy.harness import coefficient, plan_of
from tests.coding.field import randoms, times

PLAN = plan_of(k=3, r=2, servers=6, rows=100).groups[0]
PLACEMENT = Placement(6, 3, 2)
BLOCKS = PLACEMENT.blocks(PLAN.rows)
ALL = np.arange(BLOCKS)


def empty_shard() -> ParityShard:
    """Parities that contain nothing yet."""
    return ParityShard(PLAN, PLACEMENT, 4, None)


def blank_shard() -> ParityShard:
    """Parities that contain all members, which are zero."""
    return ParityShard(replace(PLAN, initial="installed"), PLACEMENT, 4, 7)


def record(seed: int, blocks: int = BLOCKS) -> Records:
    return randoms(seed, blocks, PLAN.words)


def summed(parity: int, members: dict[int, Records]) -> Records:
    total = np.zeros_like(next(iter(members.values())))
    for member, records in members.items():
        total ^= times(coefficient(parity, member), records)
    return total


@pytest.mark.parametrize(("k", "r"), [(1, 1), (2, 1), (3, 2), (2, 3)])
def test_a_job_begins_with_parities_of_first_values(k: int, r: int) -> None:
    placement = Placement(k + r + 1, k, r)
    for server in range(placement.servers):
        shard = ParityShard(PLAN, placement, server, 7)
        assert shard.lacking == 0
        blocks = np.arange(shard.blocks)
        for t in range(r):
            rows = {m: placement.stripe_rows(server, t, m, blocks) for m in range(k)}
            members = {m: first_records(PLAN, 7, at) for m, at in rows.items()}
            assert (shard.get(t, blocks) == summed(t, members)).all()


def test_first_values_of_many_blocks_are_all_counted() -> None:
    """They are added up some thousand blocks at a time."""
    plan = plan_of(k=1, r=1, servers=2, rows=2 * (2 * (1 << 14) + 5)).groups[0]
    placement = Placement(2, 1, 1)
    shard = ParityShard(plan, placement, 0, 7)
    blocks = np.arange(shard.blocks)
    assert shard.blocks == 2 * (1 << 14) + 5
    rows = placement.stripe_rows(0, 0, 0, blocks)
    assert (shard.get(0, blocks) == first_records(plan, 7, rows)).all()


def test_values_that_are_still_to_come_count_as_zero_bits() -> None:
    shard = blank_shard()
    assert shard.lacking == 0
    assert not shard.records.any()


def test_a_change_goes_to_its_parity_and_its_blocks_alone() -> None:
    shard = blank_shard()
    blocks, differences = np.array([4, 1], np.uint32), record(1, 2)
    shard.change(1, 2, blocks, differences)
    expected = np.zeros((BLOCKS, PLAN.words), np.uint32)
    expected[[4, 1]] = times(coefficient(1, 2), differences)
    assert (shard.get(1, ALL) == expected).all()
    assert not shard.get(0, ALL).any()
    shard.change(1, 2, blocks, differences)
    assert not shard.records.any(), "the same again undoes it"


def test_parities_are_added_to_sums() -> None:
    shard, sums = blank_shard(), record(5, 2)
    shard.put(1, ALL, record(3))
    shard.add_to(sums, 1, np.array([4, 1]))
    assert (sums == record(5, 2) ^ record(3)[[4, 1]]).all()
    with pytest.raises(ValueError, match="sums of shape"):
        shard.add_to(sums, 1, np.array([4]))
    with pytest.raises(ValueError, match="sums of shape"):
        shard.add_to(sums, 1, np.array([4, BLOCKS]))


def test_put_overwrites_some() -> None:
    shard = blank_shard()
    shard.put(0, np.array([2]), record(3, 1))
    assert (shard.get(0, np.array([2])) == record(3, 1)).all()
    assert not shard.get(0, np.array([0, 1, 3])).any()
    assert not shard.get(1, ALL).any()


def test_a_lost_parity_is_whole_when_all_members_are_in() -> None:
    shard = empty_shard()
    assert shard.lacking == 2 * BLOCKS
    members = {m: record(m) for m in range(3)}
    for m, records in members.items():
        assert not shard.whole(1, ALL).any()
        assert not shard.contains(1, m, ALL).any()
        shard.add(1, m, ALL, records)
        assert shard.contains(1, m, ALL).all()
    assert shard.whole(1, ALL).all()
    assert not shard.whole(0, ALL).any()
    assert shard.lacking == BLOCKS
    assert (shard.get(1, ALL) == summed(1, members)).all()
    assert not shard.get(0, ALL).any()


def test_a_member_is_added_once() -> None:
    shard = empty_shard()
    shard.add(0, 1, np.array([0, 1]), record(1, 2))
    shard.add(0, 1, np.array([1, 2]), record(2, 2))
    assert (shard.get(0, np.array([0, 1])) == record(1, 2)).all()
    assert (shard.get(0, np.array([2])) == record(2, 2)[1:]).all()
    shard = blank_shard()
    shard.add(0, 1, ALL, record(1))
    assert not shard.records.any(), "all of them contain it"


def test_changes_of_a_member_that_is_not_in_yet_are_left_out() -> None:
    """The value that will be added contains them."""
    shard = empty_shard()
    shard.add(0, 2, np.array([0]), record(1, 1))
    shard.change(0, 2, np.array([0, 1]), record(2, 2))
    assert (shard.get(0, np.array([0])) == (record(1, 1) ^ record(2, 2)[:1])).all()
    assert not shard.get(0, np.array([1])).any()
    shard.change(0, 1, np.array([0]), record(3, 1))
    assert (shard.get(0, np.array([0])) == (record(1, 1) ^ record(2, 2)[:1])).all()


def test_which_parities_are_not_whole_among_some() -> None:
    shard = empty_shard()
    for m in range(3):
        shard.add(0, m, np.array([1, 3]), record(m, 2))
    assert shard.incomplete(0, 0, BLOCKS).tolist() == [0, 2, *range(4, BLOCKS)]
    assert shard.incomplete(0, 1, 3).tolist() == [2]
    assert shard.incomplete(0, BLOCKS - 1, 10).tolist() == [BLOCKS - 1]
    assert shard.incomplete(1, 1, 1).tolist() == [1]
    assert blank_shard().incomplete(0, 0, BLOCKS).tolist() == []


def test_forgotten_parities_contain_nothing_and_others_stay() -> None:
    shard = blank_shard()
    members = {m: record(m) for m in range(3)}
    for t in range(2):
        for m, records in members.items():
            shard.change(t, m, ALL, records)
    shard.forget(1, np.array([0, 2]))
    assert shard.lacking == 2
    assert shard.whole(1, ALL).tolist() == [False, True, False, *[True] * (BLOCKS - 3)]
    assert shard.whole(0, ALL).all()
    assert (shard.get(0, ALL) == summed(0, members)).all()
    assert (shard.get(1, np.array([1])) == summed(1, members)[1:2]).all()
    shard.change(1, 0, np.array([0]), record(9, 1))
    assert not shard.get(1, np.array([0])).any(), "it waits for the whole value"
    shard.forget(1, np.array([2, 2]))
    assert shard.lacking == 2
    for m, records in members.items():
        shard.add(1, m, ALL, records)
    assert shard.lacking == 0
    assert (shard.get(1, ALL) == summed(1, members)).all()


def test_how_many_parities_are_lacking_is_always_known() -> None:
    chance, shard = np.random.default_rng(1), empty_shard()
    for _ in range(300):
        blocks = np.flatnonzero(chance.random(BLOCKS) < 0.4)
        t, m = (int(number) for number in chance.integers((2, 3)))
        if chance.random() < 0.1:
            shard.forget(t, blocks)
        else:
            shard.add(t, m, blocks, record(m, len(blocks)))
        assert shard.lacking == sum(int((~shard.whole(t, ALL)).sum()) for t in range(2))


def test_what_is_read_only_is_so_for_the_reader_alone() -> None:
    records = record(1)
    view = read_only(records)
    assert not view.flags.writeable
    assert records.flags.writeable
    assert view.base is records
