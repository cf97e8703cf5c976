"""A server's rows in several threads: bit for bit what one thread leaves, and parities that follow."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.cluster.redundancy.parity import ParityShard
from holdfast.coding.placement import Placement
from holdfast.kernels import coding, copies, teams, update
from holdfast.kernels.memory import read_only
from holdfast.kernels.teams import Team
from holdfast.tables.plan import GroupPlan, OptimizerName, OptimizerPlan, TablePlan
from holdfast.tables.shard import GroupShard

NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
K, R = 3, 2
PLACEMENT = Placement(K + R, K, R)
ROWS = 30_000  # of five servers: some cache lines of bits at each


@pytest.fixture(autouse=True)
def everything_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teams, "LEAST_BYTES", 1)


def shard_of(name: OptimizerName, threads: int, dim: int = 5) -> GroupShard:
    plan = GroupPlan(
        name="g", dim=dim, tables=(TablePlan("t", ROWS),), optimizer=OptimizerPlan(name=name, lr=0.05)
    )
    return GroupShard(plan, PLACEMENT, 0, seed=5, keep_changes=True, team=Team(threads))


def drawn(random: np.random.Generator, count: int) -> NDArray[np.uint32]:
    places = random.permutation(count)[: random.integers(0, count)].astype(np.uint32)
    places.flags.writeable = False
    return places


def differences(shard: GroupShard) -> NDArray[np.uint32]:
    """Of all records, from ``take``."""
    found = np.zeros_like(shard.records)
    seen = np.zeros(len(found), np.int64)
    for member, blocks, changed in shard.changes.take():
        places = blocks.astype(np.int64) * K + member
        found[places] ^= changed
        seen[places] += 1
    assert seen.max() <= 1
    return found


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_pushes_leave_the_bits_of_one_thread(name: OptimizerName, threads: int) -> None:
    one, many = shard_of(name, 1), shard_of(name, threads)
    random = np.random.default_rng(threads)
    count = one.rows
    for step in range(12):
        before = one.records.copy()
        for number in range(3):
            places = drawn(random, count if number != 1 else 300)  # a few, too: in fewer threads
            gradients = random.standard_normal((len(places), 5)).astype(np.float32)
            one.push(places, gradients)
            many.push(places, gradients)
            np.testing.assert_array_equal(many.pull(places), one.pull(places))
            some = np.sort(random.permutation(count)[:700])
            np.testing.assert_array_equal(many.changes.told(some), before[some])
        assert len(one.changes) == len(many.changes)
        np.testing.assert_array_equal(many.records, one.records)
        np.testing.assert_array_equal(many.marks, one.marks)
        if step % 4 == 3:
            np.testing.assert_array_equal(one.take_marks(), many.take_marks())
        expected = one.records ^ before
        np.testing.assert_array_equal(differences(many), expected)
        np.testing.assert_array_equal(differences(one), expected)
        assert len(many.changes) == 0
        assert many.changes.take() == []


def test_few_rows_in_many_threads() -> None:
    """Threads that have nothing to do, and a push that only one of them has room for."""
    one, many = shard_of("adagrad", 1), shard_of("adagrad", 16)
    for places in (np.arange(0), np.arange(1), np.arange(100), np.arange(512, 1024), np.arange(one.rows)):
        gradients = np.ones((len(places), 5), np.float32)
        one.push(places, gradients)
        many.push(places, gradients)
    np.testing.assert_array_equal(differences(many), differences(one))
    np.testing.assert_array_equal(many.records, one.records)


@pytest.mark.parametrize("threads", [2, 3])
def test_memory_of_changes_that_nobody_has_is_used_again(threads: int) -> None:
    shard = shard_of("momentum", threads)
    places = np.arange(shard.rows, dtype=np.uint32)
    seen = set()
    for _ in range(8):
        shard.push(places, np.ones((len(places), 5), np.float32))
        seen.add(shard.changes.take()[0].differences.ctypes.data)
    assert len(seen) <= 2


@pytest.mark.parametrize("threads", [2, 3])
def test_parities_are_those_of_one_thread(threads: int) -> None:
    shard = shard_of("adam", threads)
    random = np.random.default_rng(0)
    one, many, late = (
        ParityShard(shard.plan, PLACEMENT, 1, seed, Team(count))
        for seed, count in ((5, 1), (5, threads), (None, threads))
    )
    for _ in range(6):
        places = drawn(random, shard.rows)
        shard.push(places, random.standard_normal((len(places), 5)).astype(np.float32))
        for member, blocks, changed in shard.changes.take():
            for t in range(R):
                one.change(t, member, blocks, changed)
                many.change(t, member, blocks, changed)
                late.add(t, member, blocks, changed)
    np.testing.assert_array_equal(one.records, many.records)
    assert 0 < late.lacking <= len(late.records)


def test_threads_need_no_other_loops_than_one() -> None:
    """What a server compiles before its first beat is all it needs."""

    def compiled() -> int:
        loops = [vars(module).values() for module in (update, coding, copies)]
        return sum(len(getattr(loop, "signatures", ())) for found in loops for loop in found)

    def use(threads: int) -> None:
        for name in NAMES:
            shard = shard_of(name, threads)
            places = drawn(np.random.default_rng(1), shard.rows)
            shard.push(places, read_only_zeros(len(places), 5))
            shard.pull(places)
            shard.changes.told(np.arange(700))
            parity = ParityShard(shard.plan, PLACEMENT, 1, None, Team(threads))
            for member, blocks, changed in shard.changes.take():
                for t in range(R):
                    parity.add(t, member, blocks, read_only(changed))
                    parity.change(t, member, blocks, read_only(changed))

    use(1)
    before = compiled()
    assert before
    use(2)
    use(3)
    assert compiled() == before


def read_only_zeros(rows: int, dim: int) -> NDArray[np.float32]:
    zeros = np.zeros((rows, dim), np.float32)
    zeros.flags.writeable = False
    return zeros
