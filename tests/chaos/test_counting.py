"""The model whose rows count, and its twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.chaos.counting import (
    SAMPLES,
    TABLE_ROWS,
    Counting,
    Numbered,
    Twin,
    count_rows,
    counted,
    rows_of,
)
from holdfast.chaos.run import ChaosOptions
from holdfast.cluster.make_plan import plan_job
from holdfast.cluster.protocol.plan import JobPlan


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> JobPlan:
    return plan_job(ChaosOptions().config(tmp_path_factory.mktemp("twin") / "store"))


def test_the_rows_of_a_batch_are_all_different() -> None:
    for found, rows in zip(rows_of(np.arange(5000)), TABLE_ROWS, strict=True):
        assert found.shape == (5000, SAMPLES)
        assert found.min() >= 0
        assert found.max() < rows
        ordered = np.sort(found, axis=1)
        assert (np.diff(ordered, axis=1) > 0).all()
    assert (count_rows(np.arange(20_000)) > 0).all(), "a row that nobody looks up is a row that nobody checks"


def test_gradients_depend_on_nothing_but_the_rows() -> None:
    model = Counting()
    rows = [torch.randn(SAMPLES, Counting.table_dim, requires_grad=True) for _ in TABLE_ROWS]
    with torch.no_grad():
        model.bias.normal_()
    loss = model.loss(model(torch.zeros(SAMPLES, 1), rows), torch.zeros(SAMPLES))
    torch.autograd.backward(loss)
    assert all(torch.equal(each.grad, torch.ones_like(each)) for each in rows if each.grad is not None)
    assert all(each.grad is not None for each in rows)
    assert torch.equal(model.bias.grad, torch.full_like(model.bias, SAMPLES))  # type: ignore[arg-type]


def test_a_reader_goes_on_where_it_is_told_to() -> None:
    reader = Numbered("train", 8, batches=11)
    assert [batch.index for batch in reader.split(1, 3)] == [1, 4, 7, 10]
    mine = reader.split(1, 3)
    mine.skip_to(5)
    assert [batch.index for batch in mine] == [7, 10]
    assert len(list(Numbered("test", 8, batches=11))) == 1


def test_a_twin_does_not_care_about_the_order(plan: JobPlan) -> None:
    one, other = Twin(plan), Twin(plan)
    batches = np.arange(300)
    assert one.go_to(batches)
    for part in (batches[::3], batches[batches % 3 < 2], batches):
        assert other.go_to(part)
    for mine, theirs in zip(one.shards, other.shards, strict=True):
        assert np.array_equal(mine.records, theirs.records)
    assert [counts.tolist() for counts in counted(one.shards, one.first)] == [
        counts.tolist() for counts in one.counts
    ]
    assert np.array_equal(one.counts[0], count_rows(batches))


def test_a_twin_does_not_go_back(plan: JobPlan) -> None:
    twin = Twin(plan)
    twin.go_to(np.arange(20))
    before = [shard.records.copy() for shard in twin.shards]
    assert not twin.go_to(np.arange(19))
    assert all(np.array_equal(a, shard.records) for a, shard in zip(before, twin.shards, strict=True))
