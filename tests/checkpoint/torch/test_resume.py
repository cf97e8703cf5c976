"""A restored run goes on as if it had never stopped, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, SparseAdam
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.checkpoint.torch.state import TrainingObjects
from holdfast.data.synthetic import Synthetic
from holdfast.errors import CheckpointError, WrongReaderState
from holdfast.training.optimizers import RowMomentum, RowWiseAdagrad
from tests.checkpoint.reading.restoring import ROWS, Model, assert_equal, batch, restore, save, train

Build = Callable[[], dict[str, Any]]


def dense(make: Callable[[Any], Optimizer], dtype: torch.dtype = torch.float32) -> Build:
    def build() -> dict[str, Any]:
        model = Model(dtype=dtype)
        return {"model": model, "optim": make(model.parameters())}

    return build


def sparse(make: Callable[[Any], Optimizer]) -> Build:
    def build() -> dict[str, Any]:
        model = Model(sparse=True)
        return {
            "model": model,
            "tables": make(model.table_parameters()),
            "optim": Adam(model.network_parameters(), lr=0.01),
        }

    return build


class WideState(Optimizer):
    """Keeps states of a type and of shapes that nobody would guess: float64 for any parameter, [rows, 1]."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"shape": torch.Size([2, 3])})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exact"] = torch.zeros(p.shape, dtype=torch.float64)
                    state["column"] = torch.zeros(len(p), 1, dtype=torch.float64)
                    state["cube"] = torch.zeros(len(p), 2, 3)
                    state["parts"] = [torch.zeros(3), {"n": 0, "t": torch.tensor(1.5)}]
                state["exact"].add_(p.grad, alpha=0.1)
                state["column"].add_(p.grad.reshape(len(p), -1).square().sum(1, keepdim=True))
                state["cube"].add_(1)
                state["parts"][1]["n"] += 1
                state["parts"][1]["t"] *= 1.1
                p.sub_((0.01 * state["exact"] * state["parts"][1]["t"]).to(p.dtype))


RUNS = {
    "sgd": dense(lambda p: SGD(p, lr=0.1)),
    "momentum": dense(lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "adagrad": dense(lambda p: Adagrad(p, lr=0.1)),
    "adam": dense(lambda p: Adam(p, lr=0.1, amsgrad=True)),
    "adamw": dense(lambda p: AdamW(p, lr=torch.tensor(0.1))),
    "fused": dense(lambda p: Adam(p, lr=0.1, fused=True)),
    "rmsprop": dense(lambda p: RMSprop(p, lr=0.1, centered=True)),
    "bf16": dense(lambda p: Adam(p, lr=0.1), torch.bfloat16),
    "fp16": dense(lambda p: SGD(p, lr=0.1, momentum=0.5), torch.float16),
    "fp64": dense(lambda p: Adam(p, lr=0.1), torch.float64),
    "wide state": dense(WideState, torch.bfloat16),
    "row momentum": sparse(lambda p: RowMomentum(p, lr=0.1)),
    "row-wise adagrad": sparse(lambda p: RowWiseAdagrad(p, lr=0.1)),
    "sparse adam": sparse(lambda p: SparseAdam(p, lr=0.1)),
    "sparse sgd": sparse(lambda p: SGD(p, lr=0.1)),
    "sparse adagrad": sparse(lambda p: Adagrad(p, lr=0.1)),
}


def optimizers(parts: dict[str, Any]) -> list[Optimizer]:
    return [o for o in parts.values() if isinstance(o, Optimizer)]


@pytest.mark.parametrize("before", [0, 1, 5])
@pytest.mark.parametrize("build", RUNS.values(), ids=RUNS)
def test_the_next_steps_are_bit_equal(build: Build, before: int) -> None:
    torch.manual_seed(1)
    parts = build()
    run = TrainingObjects(parts)
    train(parts["model"], optimizers(parts), range(before))
    saved = save(run)
    train(parts["model"], optimizers(parts), range(before, before + 5))

    torch.manual_seed(2)
    fresh = build()
    resumed = TrainingObjects(fresh)
    restore(saved, resumed)
    train(fresh["model"], optimizers(fresh), range(before, before + 5))
    assert_equal(run, resumed)


@pytest.mark.parametrize("build", RUNS.values(), ids=RUNS)
def test_objects_that_have_trained_go_back(build: Build) -> None:
    """Also to before their optimizers had any state, and without new memory for rows."""
    parts = build()
    run = TrainingObjects(parts)
    saves = []
    for step in range(3):
        saves.append(save(run))
        train(parts["model"], optimizers(parts), [step])
    for saved in reversed(saves):
        restore(saved, run)
        again = save(run)
        assert again.dense == saved.dense
        assert again.groups == saved.groups


def scheduled(make: Callable[[Optimizer], Any]) -> Build:
    def build() -> dict[str, Any]:
        model = Model()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"schedule": make(optimizer), "model": model, "optim": optimizer}

    return build


@pytest.mark.parametrize(
    "make",
    [
        lambda o: StepLR(o, 2),
        lambda o: OneCycleLR(o, max_lr=1.0, total_steps=20),
        lambda o: MultiStepLR(o, [3, 6]),
        lambda o: SequentialLR(o, [StepLR(o, 1), StepLR(o, 2)], [4]),
        ReduceLROnPlateau,
    ],
    ids=["step", "one cycle", "multi step", "sequential", "plateau"],
)
def test_schedules_go_on(make: Callable[[Optimizer], Any]) -> None:
    def advance(parts: dict[str, Any], numbers: range) -> list[float]:
        rates = []
        for number in numbers:
            train(parts["model"], [parts["optim"]], [number])
            schedule = parts["schedule"]
            schedule.step(*([1.0] if isinstance(schedule, ReduceLROnPlateau) else []))
            rates.append(parts["optim"].param_groups[0]["lr"])
        return rates

    parts = scheduled(make)()
    run = TrainingObjects(parts)
    advance(parts, range(5))
    saved = save(run)
    expected = advance(parts, range(5, 10))
    fresh = scheduled(make)()
    resumed = TrainingObjects(fresh)
    restore(saved, resumed)
    assert advance(fresh, range(5, 10)) == expected
    assert_equal(run, resumed)
    assert type(getattr(fresh["schedule"], "milestones", None)) is type(
        getattr(parts["schedule"], "milestones", None)
    )


class Ids(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index % (ROWS // 2))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("before", [0, 3, 5])
def test_a_shuffled_loader_and_dropout_go_on(before: int, workers: int) -> None:
    """The restored run draws the same random numbers, although it must find its place in the data first."""

    def build() -> dict[str, Any]:
        loader = StatefulDataLoader(Ids(), batch_size=8, shuffle=True, num_workers=workers)
        model = Model()
        return {"loader": loader, "model": model, "optim": SGD(model.parameters(), lr=0.1)}

    def steps(parts: dict[str, Any], batches: Any) -> list[list[int]]:
        seen = []
        for users in batches:
            seen.append(users.tolist())
            parts["optim"].zero_grad()
            parts["model"](users, batch(0)[1]).sum().backward()
            parts["optim"].step()
        return seen

    torch.manual_seed(1)
    parts = build()
    run = TrainingObjects(parts)
    if before == 0:  # saved before anything is read
        saved = save(run)
        expected = steps(parts, parts["loader"])
    else:
        batches = iter(parts["loader"])
        steps(parts, [next(batches) for _ in range(before)])
        saved = save(run)
        expected = steps(parts, batches)
    expected += steps(parts, parts["loader"])

    torch.manual_seed(2)
    fresh = build()
    resumed = TrainingObjects(fresh)
    restore(saved, resumed)
    found = steps(fresh, fresh["loader"]) + steps(fresh, fresh["loader"])
    assert found == expected
    for name in ("users.weight", "items.weight", "top.weight", "norm.running_var"):
        one, two = (p["model"].state_dict()[name] for p in (parts, fresh))
        assert torch.equal(one, two)


def test_a_loader_that_is_being_iterated_over_is_refused() -> None:
    def build() -> dict[str, Any]:
        return {"loader": StatefulDataLoader(Ids(), batch_size=8)}

    saved = save(TrainingObjects(build()))
    parts = build()
    late = TrainingObjects(parts)
    iter(parts["loader"])
    for attempt in (late.check_dense, late.load_dense):
        with pytest.raises(CheckpointError, match=r"call restore\(\) before iter\(loader\)"):
            attempt(saved.tree)
    # That a state was asked for, or restored, before is no obstacle.
    parts = build()
    early = TrainingObjects(parts)
    save(early)
    restore(saved, early)
    restore(saved, early)
    assert len(list(parts["loader"])) == 5


def test_holdfast_readers_go_on() -> None:
    def build() -> dict[str, Any]:
        return {"reader": Synthetic(samples=64, batch_size=8, table_rows=(10, 20))}

    parts = build()
    stream = iter(parts["reader"])
    [next(stream) for _ in range(3)]
    saved = save(TrainingObjects(parts))
    fresh = build()
    restore(saved, TrainingObjects(fresh))
    assert [b.index for b in fresh["reader"]] == [3, 4, 5, 6, 7]
    late = build()
    stream = iter(late["reader"])
    next(stream)
    with pytest.raises(WrongReaderState):
        restore(saved, TrainingObjects(late))


def test_random_numbers_go_on() -> None:
    run = TrainingObjects({"model": nn.Linear(1, 1)})
    for seed, draws in ((1, 0), (2, 1), (3, 1000)):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        for _ in range(draws):
            torch.rand(1), np.random.standard_normal(), random.gauss(0, 1)
        saved = save(run)
        expected = [torch.rand(3).tolist(), np.random.standard_normal(3).tolist(), random.gauss(0, 1)]
        restore(saved, run)
        assert [torch.rand(3).tolist(), np.random.standard_normal(3).tolist(), random.gauss(0, 1)] == expected
