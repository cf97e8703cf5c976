"""A batch's rows, found and placed, against obvious twins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.coding.placement import Placement
from holdfast.tables.lookup import Placed, Placer
from holdfast.tables.plan import GroupPlan, OptimizerPlan, TablePlan

Ids = NDArray[np.int64]


def plan_of(*rows: int) -> GroupPlan:
    tables = tuple(TablePlan(f"t{i}", count) for i, count in enumerate(rows))
    return GroupPlan(name="g", dim=4, tables=tables, optimizer=OptimizerPlan(name="sgd", lr=0.5))


def rows_of(placed: Placed, placement: Placement) -> Ids:
    """The row of the group that each of the batch's rows is."""
    parts = [
        placement.row(s, placed.places[placed.starts[s] : placed.starts[s + 1]].astype(np.int64))
        for s in range(placement.servers)
    ]
    return np.concatenate(parts)


def check(placed: Placed, plan: GroupPlan, placement: Placement, ids: Sequence[Ids]) -> None:
    looked_up = np.concatenate([part + first for part, first in zip(ids, plan.firsts, strict=False)])
    rows = rows_of(placed, placement)
    assert placed.places.dtype == np.uint32
    assert placed.starts[0] == 0
    assert placed.starts[-1] == placed.unique == len(rows)
    assert len(set(rows)) == len(rows)
    assert set(rows) == set(looked_up)
    np.testing.assert_array_equal(
        np.repeat(np.arange(placement.servers), np.diff(placed.starts)), placement.owner(rows)
    )
    np.testing.assert_array_equal(placed.places, placement.place(rows))
    np.testing.assert_array_equal(rows[placed.inverse], looked_up)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_are_found_once_each_and_placed(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=4))
    k, r = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 2))
    groups = data.draw(st.integers(1, 3))
    placement = Placement(groups * (k + r) + data.draw(st.integers(0, 3)), k, r, groups)
    plan = plan_of(*rows)
    placer = Placer(plan, placement)
    for _ in range(3):  # the hash table is kept
        ids = [
            np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=40)), np.int64) for count in rows
        ]
        check(placer.place(ids), plan, placement, ids)


@pytest.mark.parametrize("placement", [Placement(5, 3, 2), Placement(17, 3, 2, groups=3)])
def test_large_batches_and_many_of_them(placement: Placement) -> None:
    plan = plan_of(10, 3_000_000, 500)
    placer = Placer(plan, placement)
    random = np.random.default_rng(0)
    for count in (1, 100, 20_000, 3, 5_000):
        ids = [(random.random(count) ** 8 * table.rows).astype(np.int64) for table in plan.tables]
        check(placer.place(ids), plan, placement, ids)


def test_servers_with_as_many_records_as_places_can_name() -> None:
    for placement in (Placement(6, 2, 1), Placement(6, 2, 1, groups=2)):
        plan = plan_of(6 * 2**32)
        ids = [np.concatenate([np.arange(40), plan.rows - 1 - np.arange(40)])]
        placed = Placer(plan, placement).place(ids)
        check(placed, plan, placement, ids)
        assert placed.places.max() == 2**32 - 1
        with pytest.raises(ValueError, match="use more servers"):
            Placer(plan_of(plan.rows + 1), placement)


def test_fewer_servers_than_members_of_a_stripe() -> None:
    """Without parities, nothing forbids it."""
    plan, placement = plan_of(50), Placement(2, 5, 0)
    ids = [np.arange(50)]
    check(Placer(plan, placement).place(ids), plan, placement, ids)


def test_stamps_of_the_hash_table_start_over() -> None:
    plan, placement = plan_of(100), Placement(2)
    placer = Placer(plan, placement)
    ids = [np.arange(100)[::-1] % 7]
    placer.place(ids)
    for left in (1000, 130, 100, 50):
        placer._base = 2**32 - left
        for _ in range(3):
            check(placer.place(ids), plan, placement, ids)


@pytest.mark.parametrize("wrong", [-1, 20, 2**40, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("table", [0, 1, 2])
def test_ids_that_a_table_does_not_have_are_named(table: int, wrong: int) -> None:
    plan = plan_of(20, 20, 20)
    placer = Placer(plan, Placement(2))
    good = [np.arange(20)] * 3
    ids = [part.copy() for part in good]
    ids[table][5] = wrong
    with pytest.raises(ValueError, match=rf"table t{table}: id {wrong}, but it has 20 rows"):
        placer.place(ids)
    check(placer.place(good), plan, Placement(2), good)


def test_tables_without_rows_and_batches_without_ids() -> None:
    none = np.zeros(0, np.int64)
    placer = Placer(plan_of(0, 5), Placement(3))
    placed = placer.place([none, none])
    assert placed.unique == placed.bags == 0
    assert list(placed.starts) == [0, 0, 0, 0]
    assert placed.gather(np.zeros((0, 4), np.float32)).shape == (0, 4)
    assert placed.sum_gradients(np.zeros((0, 4), np.float32)).shape == (0, 4)
    with pytest.raises(ValueError, match="table t0: id 0, but it has 0 rows"):
        placer.place([np.zeros(1, np.int64), none])
    with pytest.raises(ValueError, match="ids for 1 tables, expected 2"):
        placer.place([none])
    assert Placer(plan_of(), Placement(1)).place([]).unique == 0


@pytest.mark.parametrize("dim", [1, 4, 17])
def test_one_id_each(dim: int) -> None:
    """Hole 12: ids that are there twice add up."""
    plan, placement = plan_of(6, 9), Placement(3)
    random = np.random.default_rng(0)
    ids = [random.integers(0, 6, 50), random.integers(0, 9, 50)]
    placed = Placer(plan, placement).place(ids)
    values = random.standard_normal((placed.unique, dim)).astype(np.float32)
    np.testing.assert_array_equal(placed.gather(values), values[placed.inverse])
    gradients = random.standard_normal((100, dim)).astype(np.float32)
    expected = np.zeros_like(values)
    for position, gradient in zip(placed.inverse, gradients, strict=True):
        expected[position] += gradient
    np.testing.assert_array_equal(placed.sum_gradients(gradients), expected)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_bags(data: st.DataObject) -> None:
    """The same ids twice in a bag, empty bags, and bags at both ends."""
    plan, placement = plan_of(5, 8), Placement(3, 2, 1)
    samples = data.draw(st.integers(1, 6))
    ids, offsets, bags = [], [], []
    for table, first in zip(plan.tables, plan.firsts, strict=False):
        parts = [data.draw(st.lists(st.integers(0, table.rows - 1), max_size=5)) for _ in range(samples)]
        lengths = [len(part) for part in parts]
        ids.append(np.array([i for part in parts for i in part], np.int64))
        offsets.append(np.cumsum([0, *lengths[:-1]]))
        bags += [[first + i for i in part] for part in parts]
    placed = Placer(plan, placement).place(ids, offsets)
    rows = list(rows_of(placed, placement))
    assert placed.bags == len(bags) == 2 * samples
    random = np.random.default_rng(0)
    values = random.standard_normal((placed.unique, 4)).astype(np.float32)
    gradients = random.standard_normal((len(bags), 4)).astype(np.float32)
    looked_up, summed = np.zeros_like(gradients), np.zeros_like(values)
    for b, bag in enumerate(bags):
        for row in bag:
            looked_up[b] += values[rows.index(row)]
            summed[rows.index(row)] += gradients[b]
    np.testing.assert_array_equal(placed.gather(values), looked_up)
    np.testing.assert_array_equal(placed.sum_gradients(gradients), summed)


@pytest.mark.parametrize("offsets", [[1, 2], [0, 9], [0, -1], [2, 0], []])
def test_offsets_that_do_not_fit_are_refused(offsets: list[int]) -> None:
    placer = Placer(plan_of(5), Placement(1))
    with pytest.raises(ValueError, match="table t0: offsets do not ascend from 0 to its 3 ids"):
        placer.place([np.arange(3)], [np.array(offsets, np.int64)])


def test_wrong_shapes_are_refused() -> None:
    placed = Placer(plan_of(5), Placement(1)).place([np.array([1, 1, 2])])
    with pytest.raises(ValueError, match=r"rows are float32 \[3, 4\], expected float32 \[2, dim\]"):
        placed.gather(np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match=r"gradients are float64 \[3, 4\], expected float32 \[3, dim\]"):
        placed.sum_gradients(np.zeros((3, 4)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"out is float32 \[3, 4\], expected float32 \[2, 4\] without gaps"):
        placed.sum_gradients(np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float32))
