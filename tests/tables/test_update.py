"""Each loop that applies a push against an obvious twin (bit for bit) and against torch's optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from holdfast.coding.placement import Placement
from holdfast.kernels import update
from holdfast.tables.plan import GroupPlan, OptimizerName, OptimizerPlan, TablePlan
from holdfast.tables.shard import GroupShard
from holdfast.training.optimizers import RowMomentum, RowWiseAdagrad

F = np.float32
Floats = NDArray[np.float32]
NAMES: list[OptimizerName] = ["sgd", "momentum", "adagrad", "rowwise-adagrad", "adam"]
DIMS = [1, 3, 8, 16, 17, 64]


def shard_of(
    name: OptimizerName, dim: int, rows: int = 40, lr: float = 0.05, k: int = 1, *, keep_changes: bool = True
) -> GroupShard:
    plan = GroupPlan(
        name="g", dim=dim, tables=(TablePlan("t", rows),), optimizer=OptimizerPlan(name=name, lr=lr)
    )
    return GroupShard(plan, Placement(1, k), 0, seed=5, keep_changes=keep_changes)


def square_sum(g: Floats) -> np.float32:
    """In the order that the loop says: eight partial sums, added in pairs, then the rest."""
    s = [F(0)] * 8
    whole = len(g) // 8 * 8
    for d in range(whole):
        s[d % 8] += g[d] * g[d]
    total = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))
    for d in range(whole, len(g)):
        total += g[d] * g[d]
    return F(total)


def twin(plan: GroupPlan, record: NDArray[np.uint32], g: Floats) -> NDArray[np.uint32]:
    """The record after one update, as the formulas say it."""
    o, dim = plan.optimizer, plan.dim
    new = record.copy()
    f = new.view(np.float32)
    w = f[:dim]
    lr, eps = F(o.lr), F(o.eps)
    if o.name == "sgd":
        w -= lr * g
    elif o.name == "momentum":
        f[dim:] = f[dim:] * F(o.momentum) + g
        w -= lr * f[dim:]
    elif o.name == "adagrad":
        f[dim:] += g * g
        w -= lr * (g / (np.sqrt(f[dim:]) + eps))
    elif o.name == "rowwise-adagrad":
        f[dim] += square_sum(g) / F(dim)
        w -= lr * (g / (np.sqrt(f[dim]) + eps))
    else:
        new[3 * dim] += 1
        t = int(new[3 * dim])
        m, v = f[dim : 2 * dim], f[2 * dim : 3 * dim]
        m += (g - m) * F(1 - o.beta1)
        v += (g * g - v) * F(1 - o.beta2)
        size = F(o.lr * math.sqrt(1 - o.beta2**t) / (1 - o.beta1**t))
        w -= size * (m / (np.sqrt(v) + eps))
    return new


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_a_push_is_its_formula_bit_for_bit(name: OptimizerName, dim: int) -> None:
    shard = shard_of(name, dim)
    random = np.random.default_rng(0)
    for _ in range(30):
        places = random.permutation(40)[: random.integers(0, 41)].astype(np.uint32)
        gradients = random.standard_normal((len(places), dim)).astype(F)
        old = shard.records.copy()
        expected = old.copy()
        for place, gradient in zip(places, gradients, strict=True):
            expected[place] = twin(shard.plan, old[place], gradient)
        shard.push(places, gradients)
        np.testing.assert_array_equal(shard.records, expected)
        np.testing.assert_array_equal(taken(shard), old ^ expected)
        assert sorted(shard.take_marks()) == sorted(places)


@pytest.mark.parametrize("name", NAMES)
def test_pushes_with_and_without_changes_are_the_same(name: OptimizerName) -> None:
    one, other = shard_of(name, 19, keep_changes=False), shard_of(name, 19)
    random = np.random.default_rng(1)
    for _ in range(10):
        places = random.permutation(40)[:23].astype(np.int64)
        gradients = random.standard_normal((23, 19)).astype(F)
        one.push(places, gradients)
        other.push(places.astype(np.uint32), gradients)
    np.testing.assert_array_equal(one.records, other.records)
    assert len(one.changes) == 0
    assert one.changes.take() == []


def test_many_updates_of_a_row_are_one_difference() -> None:
    shard = shard_of("adam", 3, k=4)
    random = np.random.default_rng(2)
    for _ in range(20):
        before = shard.records.copy()
        touched: set[int] = set()
        for _ in range(random.integers(0, 6)):
            places = random.permutation(40)[: random.integers(0, 30)].astype(np.uint32)
            shard.push(places, random.standard_normal((len(places), 3)).astype(F))
            touched |= set(places.tolist())
            some = np.sort(random.permutation(40)[:15])
            np.testing.assert_array_equal(shard.changes.told(some), before[some])
        assert len(shard.changes) == len(touched)
        np.testing.assert_array_equal(taken(shard), before ^ shard.records)


def test_taken_changes_stay_as_they_are_while_somebody_has_them() -> None:
    """Their memory is used again, but only then: they may wait to be sent, or to be undone."""
    shard = shard_of("momentum", 8, k=4)
    random = np.random.default_rng(3)
    held: list[tuple[NDArray[np.uint32], NDArray[np.uint32]]] = []
    for step in range(30):
        places = random.permutation(40)[: random.integers(1, 40)].astype(np.uint32)
        shard.push(places, random.standard_normal((len(places), 8)).astype(F))
        for _, blocks, differences in shard.changes.take():
            held += [(array, array.copy()) for array in (blocks, differences)]
        if step % 3 == 0:  # somebody has all, or only a part of one
            del held[random.integers(0, len(held)) :]
        for array, copy in held:
            np.testing.assert_array_equal(array, copy)


def test_memory_of_changes_that_nobody_has_is_used_again() -> None:
    shard = shard_of("momentum", 8, k=4)
    every = np.arange(40, dtype=np.uint32)
    gradients = np.ones((40, 8), F)
    addresses = set()
    for _ in range(10):
        shard.push(every, gradients)
        addresses |= {change.differences.ctypes.data for change in shard.changes.take()}
    assert len(addresses) == 4, "one for each member"


def test_first_values_are_a_change() -> None:
    plan = GroupPlan(
        name="g", dim=2, tables=(TablePlan("t", 9),), optimizer=OptimizerPlan(name="sgd", lr=1.0),
        initial="installed",
    )  # fmt: skip
    shard = GroupShard(plan, Placement(1, 2), 0, 0, keep_changes=True)
    shard.install(np.arange(9), np.arange(18, dtype=F).reshape(9, 2))
    assert len(shard.changes) == 9
    np.testing.assert_array_equal(taken(shard)[:9].view(F).ravel(), np.arange(18))


def taken(shard: GroupShard) -> NDArray[np.uint32]:
    """The differences of all records, zeros where nothing changed."""
    out = np.zeros_like(shard.records)
    k = shard.placement.k
    for member, blocks, differences in shard.changes.take():
        assert len(set(blocks.tolist())) == len(blocks)
        out[blocks.astype(np.int64) * k + member] = differences
    return out


Make = Callable[[list[nn.Parameter], float], Any]
TORCH: dict[str, Make] = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: RowMomentum(p, lr=lr, momentum=0.9),
    "adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr, eps=1e-8),
    "rowwise-adagrad": lambda p, lr: RowWiseAdagrad(p, lr=lr, eps=1e-8),
    "adam": lambda p, lr: torch.optim.SparseAdam(p, lr=lr, eps=1e-8),
}


@pytest.mark.parametrize("dim", [1, 16, 17])
@pytest.mark.parametrize("name", NAMES)
def test_200_sparse_steps_are_those_of_torch(name: OptimizerName, dim: int) -> None:
    """The optimizer's state bit for bit, but for the mean square of a row, which torch adds up in another
    order: 4 ulp. Weights within 8 ulp of the largest: torch fuses the last product with its sum."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    shard = shard_of(name, dim)
    weight = nn.Parameter(torch.from_numpy(shard.field("weight").copy()))
    optimizer = TORCH[name]([weight], 0.05)
    random = np.random.default_rng(2)
    largest = np.abs(shard.field("weight")).max()
    for _ in range(200):
        # SparseAdam counts steps of the whole table, so with it all rows are in every step.
        count = 40 if name == "adam" else int(random.integers(1, 40))
        places = random.permutation(40)[:count]
        gradients = random.standard_normal((count, dim)).astype(F)
        shard.push(places, gradients)
        weight.grad = torch.sparse_coo_tensor(
            torch.from_numpy(places)[None], torch.from_numpy(gradients), (40, dim), check_invariants=True
        )
        optimizer.step()
        largest = max(largest, np.abs(shard.field("weight")).max())
    theirs = weight.detach().numpy()
    assert np.abs(shard.field("weight") - theirs).max() <= 8 * np.spacing(largest)
    for field in shard.plan.fields[1:]:
        ours, theirs = shard.field(field.name), optimizer.state[weight][field.name]
        if name == "rowwise-adagrad":
            np.testing.assert_array_max_ulp(ours, theirs.reshape(40, 1).numpy(), 4)
        else:
            np.testing.assert_array_equal(ours, np.asarray(theirs))


def test_adam_counts_the_steps_of_each_row() -> None:
    """A row that is looked up every third time moves as if there were only those times."""
    shard, twins = shard_of("adam", 8), shard_of("adam", 8)
    gradients = np.random.default_rng(3).standard_normal((30, 40, 8)).astype(F)
    every_third = np.arange(0, 40, 3)
    for step in range(30):
        places = np.arange(40) if step % 3 == 0 else np.setdiff1d(np.arange(40), every_third)
        shard.push(places, gradients[step][places])
        if step % 3 == 0:
            twins.push(every_third, gradients[step][every_third])
    np.testing.assert_array_equal(shard.records[every_third], twins.records[every_third])
    assert set(shard.field("step")[every_third, 0]) == {10}
    assert set(np.delete(shard.field("step")[:, 0], every_third)) == {30}


def test_adam_counts_beyond_what_a_float_can() -> None:
    shard = shard_of("adam", 4)
    shard.field("step")[:] = 2**24 + 1
    shard.push(np.arange(40), np.ones((40, 4), F))
    assert (shard.field("step") == 2**24 + 2).all()
    assert np.isfinite(shard.field("weight")).all()


ODD = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1e-39, 3.4e38, -3.4e38]


@pytest.mark.parametrize("dim", [4, 16])
@pytest.mark.parametrize("name", NAMES)
def test_odd_gradients_are_applied_as_they_are(name: OptimizerName, dim: int) -> None:
    """Not a bit of another row moves. NaNs are NaNs: which one, IEEE leaves open."""
    shard = shard_of(name, dim)
    random = np.random.default_rng(4)
    with np.errstate(all="ignore"):
        for _ in range(5):
            places = random.permutation(40)[:10]
            gradients = random.choice(np.array(ODD, F), (10, dim))
            old = shard.records.copy()
            expected = old.copy()
            for place, gradient in zip(places, gradients, strict=True):
                expected[place] = twin(shard.plan, old[place], gradient)
            shard.push(places, gradients)
            np.testing.assert_array_equal(shard.records ^ old, taken(shard))
            nan = np.isnan(expected.view(F))
            np.testing.assert_array_equal(np.isnan(shard.records.view(F)), nan)
            np.testing.assert_array_equal(shard.records[~nan], expected[~nan])


def test_powers_are_those_of_the_formula() -> None:
    for base in (0.9, 0.999, 0.5):
        for exponent in (1, 2, 3, 10, 1000, 2**20, 2**32 - 1):
            power = update._power.py_func(base, exponent)
            assert power == pytest.approx(base**exponent, rel=1e-9, abs=1e-300)
