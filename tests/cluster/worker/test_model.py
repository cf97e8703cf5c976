"""A worker's model against the single-process one: the same samples must give the same gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from holdfast.cluster.worker.model import WorkerModel, network_parts, plan_groups
from holdfast.coding.placement import Placement
from holdfast.data.reader import Batch
from holdfast.errors import ConfigError
from holdfast.models.factory import build
from holdfast.models.presets import Sizes
from holdfast.models.recommender import Recommender, loss_function, table_dims
from holdfast.tables.lookup import Placed, Placer
from holdfast.tables.plan import GroupPlan, OptimizerPlan

ROWS = (7, 100, 1, 30)
PLACEMENT = Placement(servers=5, k=3, r=1)
SGD = OptimizerPlan(name="sgd", lr=0.1)


class Widths(nn.Module):
    """A user's network: tables of different widths, a frozen and an unused parameter, a buffer."""

    table_dims = (4, 2, 4, 3)
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(13, 13)
        self.frozen = nn.Parameter(torch.ones(13), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, dense: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
        self.steps += 1
        logits: Tensor = self.mix(torch.cat(list(embeddings), 1).tanh() + dense * self.frozen).sum(1)
        return logits

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (logits - labels).square().mean()


def make_network(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name == "widths":
        return Widths()
    return build(name, Sizes(8, (16, 8), (16, 1)), 13, len(ROWS))  # type: ignore[arg-type]


def make_batch(samples: int, hots: str) -> Batch:
    random = np.random.default_rng(5)
    lengths = [np.ones(samples, np.int64) if hots == "one" else random.integers(0, 4, samples) for _ in ROWS]
    return Batch(
        index=0,
        dense=random.random((samples, 13), np.float32),
        ids=[random.integers(0, rows, n.sum()) for rows, n in zip(ROWS, lengths, strict=True)],
        offsets=None if hots == "one" else [np.concatenate(([0], n.cumsum()[:-1])) for n in lengths],
        labels=random.integers(0, 2, samples).astype(np.float32),
    )


def worker_and_single(name: str) -> tuple[WorkerModel, Recommender, tuple[GroupPlan, ...]]:
    single = Recommender(make_network(name), ROWS)
    network = make_network(name)
    dims = table_dims(network, len(ROWS))
    plans = plan_groups(network, ROWS, dims, SGD, SGD)
    return WorkerModel(network, ROWS, dims), single, plans


def pull(
    worker: WorkerModel, single: Recommender, plans: Sequence[GroupPlan], batch: Batch
) -> tuple[list[Placed], list[NDArray[np.float32]]]:
    placed = worker.look_up(batch, [Placer(plan, PLACEMENT) for plan in plans[:-1]])
    weights = [w.detach().numpy() for w in single.tables.parameters()]
    groups = [np.concatenate([weights[t] for t in tables]) for tables in worker.groups]
    return placed, [group[rows_of(at)] for group, at in zip(groups, placed, strict=True)]


def rows_of(placed: Placed) -> NDArray[np.int64]:
    """Which row of its group each of the rows is."""
    servers = itertools.pairwise(placed.starts)
    places = placed.places.astype(np.int64)
    return np.concatenate([PLACEMENT.row(s, places[a:b]) for s, (a, b) in enumerate(servers)])


def tensors(batch: Batch) -> tuple[Tensor, list[Tensor], list[Tensor] | None]:
    offsets = None if batch.offsets is None else [torch.from_numpy(o) for o in batch.offsets]
    return torch.from_numpy(batch.dense), [torch.from_numpy(i) for i in batch.ids], offsets


@pytest.mark.parametrize("hots", ["one", "several"])
@pytest.mark.parametrize("name", ["dlrm", "deepfm", "pnn", "widths"])
def test_gradients_are_those_of_the_single_process_model(name: str, hots: str) -> None:
    worker, single, plans = worker_and_single(name)
    batch = make_batch(50, hots)
    placed, pulled = pull(worker, single, plans, batch)
    logits = single(*tensors(batch))
    loss = loss_function(single.network)(logits, torch.from_numpy(batch.labels))
    loss.backward()  # type: ignore[no-untyped-call]
    step = worker.train(batch, placed, pulled)
    exact = hots == "one"  # several ids of a sample are summed in whichever order
    assert step.loss == loss.item() if exact else step.loss == pytest.approx(loss.item(), rel=1e-5)
    np.testing.assert_allclose(worker.predict(batch, placed, pulled), logits.detach(), rtol=1e-5, atol=1e-6)
    for tables, at, plan, gradient in zip(worker.groups, placed, plans, step.gradients, strict=False):
        parts = [list(single.tables.parameters())[t].grad for t in tables]
        expected = np.concatenate([part.to_dense().numpy() for part in parts if part is not None])
        dense = np.zeros((plan.rows, plan.dim), np.float32)
        dense[rows_of(at)] = gradient
        np.testing.assert_allclose(dense, expected, rtol=1e-5, atol=1e-7)
    named = dict(single.named_parameters())
    flat = step.network.reshape(-1)
    for part in worker.parts:
        found = named[part.name].grad
        mine = flat[part.first : part.first + int(np.prod(part.shape))].reshape(part.shape)
        if found is None:
            assert not mine.any()
        elif exact:
            assert mine.tobytes() == found.numpy().tobytes()
        else:
            np.testing.assert_allclose(mine, found, rtol=1e-4, atol=1e-6)
    used = worker.parts[-1].first + int(np.prod(worker.parts[-1].shape))
    assert not flat[used:].any()


def test_groups_are_tables_of_equal_width_and_then_the_network() -> None:
    rowwise = OptimizerPlan(name="rowwise-adagrad", lr=0.1)
    network = make_network("widths")
    plans = plan_groups(network, ROWS, (4, 2, 4, 3), rowwise, rowwise)
    assert [(p.name, p.dim, [t.name for t in p.tables]) for p in plans] == [
        ("tables-4", 4, ["tables.0.weight", "tables.2.weight"]),
        ("tables-2", 2, ["tables.1.weight"]),
        ("tables-3", 3, ["tables.3.weight"]),
        ("network", 256, ["network"]),
    ]
    assert [p.optimizer.name for p in plans] == ["rowwise-adagrad"] * 3 + ["adagrad"]
    assert [p.initial for p in plans] == ["uniform"] * 3 + ["installed"]
    assert [p.rows for p in plans] == [8, 100, 30, 1]
    single = Recommender(network, ROWS)
    names = {part.name for part in network_parts(network)} | {t.name for p in plans[:-1] for t in p.tables}
    assert names == {name for name, p in single.named_parameters() if p.requires_grad}


def test_parameters_stay_views_of_what_was_loaded() -> None:
    worker, single, plans = worker_and_single("dlrm")
    initial = worker.initial_network()
    named = dict(single.network.named_parameters())
    for part in worker.parts:
        mine = initial.reshape(-1)[part.first :][: int(np.prod(part.shape))].reshape(part.shape)
        assert mine.tobytes() == named[part.name.removeprefix("network.")].detach().numpy().tobytes()
    batch = make_batch(20, "one")
    placed, pulled = pull(worker, single, plans, batch)
    first = worker.train(batch, placed, pulled)
    kept = first.network.copy()
    worker.load_network(initial + 1)
    for parameter, other in zip(worker.network.parameters(), single.network.parameters(), strict=True):
        torch.testing.assert_close(parameter, other + 1)
    second = worker.train(batch, placed, pulled)
    assert second.loss != first.loss
    assert (first.network == kept).all(), "a step's gradient is the caller's to keep"
    worker.load_network(initial)
    again = worker.train(batch, placed, pulled)
    assert again.loss == first.loss
    assert again.network.tobytes() == first.network.tobytes()


def test_what_is_not_trained_stays_local() -> None:
    worker, single, plans = worker_and_single("widths")
    assert {part.name for part in worker.parts} == {
        "network.mix.weight", "network.mix.bias", "network.unused",
    }  # fmt: skip
    worker.load_network(np.full_like(worker.initial_network(), 9))
    assert isinstance(worker.network, Widths)
    assert (worker.network.frozen == 1).all()
    batch = make_batch(3, "several")
    worker.train(batch, *pull(worker, single, plans, batch))
    assert worker.network.steps == 1


@pytest.mark.parametrize("hots", ["one", "several"])
def test_a_batch_without_samples_is_no_step(hots: str) -> None:
    worker, single, plans = worker_and_single("widths")
    batch = make_batch(0, hots)
    placed, pulled = pull(worker, single, plans, batch)
    step = worker.train(batch, placed, pulled)
    assert step.loss == 0
    assert [g.shape for g in step.gradients] == [(0, 4), (0, 2), (0, 3)]
    assert step.network.shape == (0, 256)
    assert worker.predict(batch, placed, pulled).shape == (0,)


def test_bags_may_all_be_empty() -> None:
    worker, single, plans = worker_and_single("dlrm")
    samples = make_batch(6, "one")
    nothing = np.zeros(0, np.int64)
    offsets = [np.zeros(6, np.int64)] * len(ROWS)
    batch = Batch(0, samples.dense, [nothing] * len(ROWS), offsets, samples.labels)
    step = worker.train(batch, *pull(worker, single, plans, batch))
    assert step.gradients[0].shape == (0, 8)
    assert step.network.any()


def test_a_network_that_reads_no_table_gives_zeros() -> None:
    class Dense(nn.Module):
        def forward(self, dense: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
            return dense.sum(1) * self.weight

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

    worker = WorkerModel(Dense(), ROWS, (2, 2, 2, 2))
    batch = make_batch(4, "one")
    plan = plan_groups(worker.network, ROWS, (2, 2, 2, 2), SGD, SGD)[0]
    placed = worker.look_up(batch, [Placer(plan, PLACEMENT)])
    step = worker.train(batch, placed, [np.ones((placed[0].unique, 2), np.float32)])
    assert step.gradients[0].shape == (placed[0].unique, 2)
    assert not step.gradients[0].any()


def test_parameters_of_other_types_are_refused() -> None:
    network = nn.Linear(3, 1, dtype=torch.float64)
    with pytest.raises(
        ConfigError, match=r"parameter weight of Linear is torch\.float64.*expected torch\.float32"
    ):
        WorkerModel(network, [3], [2])


def test_logits_of_another_shape_are_refused() -> None:
    class Column(nn.Module):
        def forward(self, dense: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
            return dense[:, :1]

    worker = WorkerModel(Column(), [], [])
    with pytest.raises(
        ConfigError, match=r"Column returned logits of shape \[4, 1\] for 4 samples: expected \[4\]"
    ):
        worker.predict(make_batch(4, "one"), [], [])
