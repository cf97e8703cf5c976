"""A server's rows: first values, reading and writing them, and what must not be done to them."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.coding.placement import Placement
from holdfast.tables.plan import GroupPlan, OptimizerName, OptimizerPlan, TablePlan
from holdfast.tables.shard import GroupShard

SGD = OptimizerPlan(name="sgd", lr=0.5)


def plan_of(
    *rows: int, dim: int = 6, name: str = "g", optimizer: OptimizerPlan = SGD, **more: Any
) -> GroupPlan:
    tables = tuple(TablePlan(f"t{i}", count) for i, count in enumerate(rows))
    return GroupPlan(name=name, dim=dim, tables=tables, optimizer=optimizer, **more)


def weights(plan: GroupPlan, placement: Placement, seed: int = 1) -> NDArray[np.float32]:
    """Of all rows, from all servers."""
    out = np.full((plan.rows, plan.dim), np.nan, np.float32)
    for server in range(placement.servers):
        shard = GroupShard(plan, placement, server, seed)
        rows = shard.rows_of(np.arange(len(shard.records)))
        real = rows < plan.rows
        assert shard.rows == real.sum()
        assert not shard.records[~real].any()
        out[rows[real]] = shard.pull(np.flatnonzero(real))
    return out


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 4))
def test_first_values_do_not_depend_on_the_servers(rows: list[int], dim: int, servers: int) -> None:
    plan = plan_of(*rows, dim=dim)
    expected = weights(plan, Placement(1))
    assert not np.isnan(expected).any()
    np.testing.assert_array_equal(weights(plan, Placement(servers)), expected)
    np.testing.assert_array_equal(weights(plan, Placement(servers + 3, k=2, r=2)), expected)
    np.testing.assert_array_equal(weights(plan, Placement(servers + 5, k=2, r=1, groups=2)), expected)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_records_that_stand_for_no_row_are_refused_in_groups_of_servers(data: st.DataObject) -> None:
    k, r, groups = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))
    placement = Placement(groups * (k + r) + data.draw(st.integers(0, 3)), k, r, groups)
    plan = plan_of(data.draw(st.integers(0, 60)), dim=1)
    for server in range(placement.servers):
        shard = GroupShard(plan, placement, server, 0)
        for place in range(len(shard.records)):
            if placement.row(server, np.array([place]))[0] < plan.rows:
                shard.check(np.array([place]))
            else:
                with pytest.raises(ValueError, match="stands for no row"):
                    shard.check(np.array([place]))
        with pytest.raises(ValueError, match="beyond"):
            shard.check(np.array([len(shard.records)]))


def test_first_values_are_uniform_and_all_different() -> None:
    plan = plan_of(40_000, 10_000, 40_000, dim=16)
    values = weights(plan, Placement(3))
    for first, end in zip(plan.firsts, plan.firsts[1:], strict=False):
        bound = 1 / np.sqrt(end - first)
        scaled = values[first:end] / bound
        assert np.abs(scaled).max() < 1
        counts, _ = np.histogram(scaled, bins=20, range=(-1, 1))
        expected = scaled.size / 20
        assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
        assert abs(np.corrcoef(scaled.T)[0, 1:]).max() < 5 / np.sqrt(len(scaled))
        assert abs(np.corrcoef(scaled[:-1].ravel(), scaled[1:].ravel())[0, 1]) < 5 / np.sqrt(scaled.size)
    same_size = values[: plan.firsts[1]], values[plan.firsts[2] :]
    assert (same_size[0] == same_size[1]).mean() < 1e-5
    assert len(np.unique(values[:, :2].copy().view(np.uint64))) == plan.rows
    assert (values == weights(plan, Placement(3), seed=2)).mean() < 1e-5
    other = plan_of(40_000, 10_000, 40_000, dim=16, name="h")
    assert (values == weights(other, Placement(3))).mean() < 1e-5


def mixed(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_first_values_stay_what_they_are(dim: int) -> None:
    """A server's replacement, of a later release perhaps, must draw what its predecessor drew."""
    plan = plan_of(3, 7, dim=dim)
    expected = np.empty((10, dim), np.float32)
    for table, first in zip(plan.tables, plan.firsts, strict=False):
        name = f"7\0g\0{table.name}".encode()
        key = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        scale = np.float32(1 / math.sqrt(table.rows) / 2**24)
        for row in range(table.rows):
            state = mixed((key + row * 0x9E3779B97F4A7C15) % 2**64)
            for column in range(dim):
                word = mixed((state + (column // 2 + 1) * 0x9E3779B97F4A7C15) % 2**64)
                bits = word % 2**24 if column % 2 else word >> 40
                expected[first + row, column] = np.float32(2 * bits - (2**24 - 1)) * scale
    np.testing.assert_array_equal(weights(plan, Placement(2), seed=7), expected)


def test_pull_push_read_and_write() -> None:
    shard = GroupShard(plan_of(9, 8), Placement(3, 2, 1), 1, 0)
    real = np.flatnonzero(shard.rows_of(np.arange(len(shard.records))) < 17)[::-1].astype(np.uint32)
    before = shard.pull(real)
    gradients = np.random.default_rng(0).standard_normal(before.shape).astype(np.float32)
    gradients.flags.writeable = False  # as those from a message are
    shard.push(real[:3], gradients[:3])
    np.testing.assert_array_equal(shard.pull(real)[:3], before[:3] - np.float32(0.5) * gradients[:3])
    np.testing.assert_array_equal(shard.pull(real)[3:], before[3:])
    assert set(shard.take_marks()) == set(shard.rows_of(real[:3]))
    assert len(shard.take_marks()) == 0

    twin = GroupShard(shard.plan, Placement(3, 2, 1), 1, seed=99)
    twin.write(real, shard.read(real))
    np.testing.assert_array_equal(twin.records, shard.records)
    assert set(twin.take_marks()) == set(shard.rows_of(real))
    twin.mark_all()
    assert set(twin.take_marks()) == set(shard.rows_of(real))
    assert twin.records.ctypes.data % 64 == 0


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
@pytest.mark.parametrize(
    ("places", "what"),
    [
        ([0, 1, 6], r"place 6 \(entry 2\) is beyond the 6 records of server 1"),
        ([2**31], "beyond"),
        ([2**32 - 1], "beyond"),
        ([0, 4, 1], r"place 4 \(entry 1\) is a record that stands for no row"),
        ([0, 3, 1, 3], r"place 3 \(entry 3\) is there twice"),
    ],
)
def test_wrong_places_change_nothing(dtype: type, places: list[int], what: str) -> None:
    shard = GroupShard(plan_of(10), Placement(2, 2, 0), 1, 0)  # rows 2 1 6 5, none, 9
    old = shard.records.copy()
    wrong: NDArray[Any] = np.array(places, dtype)
    values = np.ones((len(places), 6), np.float32)
    with pytest.raises(ValueError, match=what):
        shard.push(wrong, values)
    with pytest.raises(ValueError, match=what):
        shard.write(wrong, values.view(np.uint32))
    if "twice" not in what:
        with pytest.raises(ValueError, match=what):
            shard.pull(wrong)
        with pytest.raises(ValueError, match=what):
            shard.read(wrong)
    np.testing.assert_array_equal(shard.records, old)
    assert len(shard.take_marks()) == 0
    shard.push(
        np.array([0, 3, 1], dtype), values[:1].repeat(3, 0)
    )  # what was refused has left nothing behind
    assert len(shard.take_marks()) == 3


def test_negative_places_are_refused() -> None:
    shard = GroupShard(plan_of(10), Placement(1), 0, 0)
    for place in (-1, -(2**63), 2**62):
        with pytest.raises(ValueError, match="beyond"):
            shard.push(np.array([place]), np.ones((1, 6), np.float32))


def test_wrong_shapes_and_types_are_refused() -> None:
    shard = GroupShard(plan_of(10), Placement(1), 0, 0)
    places = np.arange(2)
    wrong: list[NDArray[Any]] = [
        np.ones((2, 5), np.float32),
        np.ones((3, 6), np.float32),
        np.ones(12, np.float32),
        np.ones((2, 6)),
    ]
    for gradients in wrong:
        with pytest.raises(ValueError, match=r"group g: gradients are .*, expected float32 \[2, 6\]"):
            shard.push(places, gradients)
    with pytest.raises(ValueError, match="expected uint32 or int64 in one dimension"):
        shard.pull(np.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected uint32 or int64 in one dimension"):
        shard.pull(np.zeros((2, 2), np.int64))
    with pytest.raises(ValueError, match="no field sum: expected one of weight"):
        shard.field("sum")
    with pytest.raises(ValueError, match="server 2: expected 0 to 0"):
        GroupShard(shard.plan, Placement(1), 2, 0)


def test_arrays_with_gaps_or_at_odd_addresses_are_taken_too() -> None:
    shard, twin = (GroupShard(plan_of(10), Placement(1), 0, 0) for _ in range(2))
    gradients = np.random.default_rng(0).standard_normal((4, 12)).astype(np.float32)
    odd = np.frombuffer(b"x" + gradients[:, ::2].tobytes(), np.uint8)[1:].view(np.float32).reshape(4, 6)
    shard.push(np.arange(8)[::2], gradients[:, ::2])
    twin.push(np.arange(0, 8, 2), odd)
    np.testing.assert_array_equal(shard.records, twin.records)


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_a_preview_is_what_a_push_leaves(name: OptimizerName) -> None:
    group = plan_of(40, optimizer=OptimizerPlan(name=name, lr=0.1))
    shard = GroupShard(group, Placement(1), 0, 1, keep_changes=True)
    rng = np.random.default_rng(0)
    places = rng.permutation(40)[:17].astype(np.uint32)
    for _ in range(3):
        gradients = rng.standard_normal((17, 6)).astype(np.float32)
        before, told = shard.records.copy(), len(shard.changes)
        marks = shard.marks.copy()
        seen = shard.preview(places, gradients)
        assert np.array_equal(shard.records, before)
        assert np.array_equal(shard.marks, marks)
        assert len(shard.changes) == told
        shard.push(places, gradients)
        assert np.array_equal(shard.pull(places), seen)
    assert shard.preview(places[:0], gradients[:0]).shape == (0, 6)


def test_first_values_that_are_installed_count_once() -> None:
    adagrad = OptimizerPlan(name="adagrad", lr=0.1)
    shard = GroupShard(plan_of(5, optimizer=adagrad, initial="installed"), Placement(2), 1, 0)
    assert shard.installed is False
    assert not shard.records.any()
    values = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    with pytest.raises(ValueError, match="first values of 1 rows, but server 1 has 2"):
        shard.install(np.array([0]), values[:1])
    assert shard.install(np.array([1, 0], np.uint32), values)
    assert bool(shard.installed)
    assert not shard.install(np.array([1, 0], np.uint32), values + 1)
    np.testing.assert_array_equal(shard.pull(np.array([1, 0])), values)
    assert not shard.field("sum").any()
    assert sorted(shard.take_marks()) == [1, 3]


@pytest.mark.parametrize("rows", [(), (0,), (0, 0), (1,)])
def test_shards_of_few_or_no_rows(rows: tuple[int, ...]) -> None:
    none = np.zeros(0, np.uint32)
    for server in range(3):
        shard = GroupShard(plan_of(*rows, dim=1), Placement(3), server, 0)
        assert shard.rows == (server < sum(rows))
        assert shard.pull(none).shape == (0, 1)
        shard.push(none, np.zeros((0, 1), np.float32))
        shard.mark_all()
        assert len(shard.take_marks()) == shard.rows
        with pytest.raises(ValueError, match="beyond"):
            shard.pull(np.array([1]))
    empty = GroupShard(plan_of(*rows, initial="installed"), Placement(3), 2, 0)
    assert empty.install(none, np.zeros((0, 6), np.float32))


def test_servers_do_not_import_torch() -> None:
    code = "import sys, holdfast.tables.shard, holdfast.tables.lookup; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
