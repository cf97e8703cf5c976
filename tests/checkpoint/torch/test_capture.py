"""States that are copied by plan are those that ``state_dict()`` gives, whatever was done in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint.format.dense import TablePlace
from holdfast.checkpoint.torch.capture import Capturer, Places, copied_state
from holdfast.kernels.rows import copy_ranges


class Net(nn.Module):
    """A table, dense layers, a buffer that is counted up, and ones that are and are not in the state."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(6, 3)
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("stored", torch.ones(2))
        self.register_buffer("left_out", torch.ones(3), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(self.table(ids)))  # type: ignore[no-any-return]


class Run:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.Adagrad(self.net.parameters(), lr=0.1)
        self.places = Places({}, {})
        weight = self.net.table.weight
        self.places.add(weight, TablePlace("t", "weight", tuple(weight.shape)))
        self.capturers = [Capturer("net", self.net), Capturer("optim", self.optimizer)]

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.net(torch.tensor([[1, 2], [3, 4]])).square().sum().backward()
        self.optimizer.step()

    def check(self) -> None:
        """What is captured now is what is captured by somebody who has never done it before."""
        for mine, thing, name in zip(
            self.capturers, (self.net, self.optimizer), ("net", "optim"), strict=True
        ):
            found, metadata = mine.capture(self.places)
            expected, other = Capturer(name, thing).capture(self.places)
            assert found() == expected()
            assert metadata == other

    def has_plans(self) -> list[bool]:
        return [c._plan is not None and c._plan.holds(self.places) for c in self.capturers]


def set_lr(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.01


def load(run: Run) -> None:
    state = run.optimizer.state_dict()
    for inner in state["state"].values():
        inner["sum"] = inner["sum"] + 1
    run.optimizer.load_state_dict(state)


def add_group(run: Run) -> None:
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 3.0})


def replace_parameter(run: Run) -> None:
    run.net.layer.weight = nn.Parameter(torch.ones(2, 3))


def replace_layer(run: Run) -> None:
    run.net.layer = nn.Linear(3, 2)


def other_memory(run: Run) -> None:
    run.net.layer.weight.data = torch.full((2, 3), 5.0)


def other_shape(run: Run) -> None:
    run.net.norm.running_mean.resize_(1)  # type: ignore[union-attr]


def rename(run: Run) -> None:
    run.net._modules["renamed"] = run.net._modules.pop("norm")


def hook(run: Run) -> None:
    def add(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["extra"] = torch.ones(1)

    run.net._register_state_dict_hook(add)  # type: ignore[no-untyped-call]


def optimizer_hook(run: Run) -> None:
    run.optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "more": 1})


def new_buffer(run: Run) -> None:
    run.net.register_buffer("more", torch.ones(2))


def buffer_left_out(run: Run) -> None:
    run.net._non_persistent_buffers_set.add("stored")


def buffer_taken_in(run: Run) -> None:
    run.net._non_persistent_buffers_set.remove("left_out")


def odd_state(run: Run) -> None:
    run.optimizer.state[run.net.layer.bias]["count"] = 7


def replace_state(run: Run) -> None:
    run.optimizer.state[run.net.layer.bias] = {"step": torch.ones(()), "sum": torch.ones(2)}


CHANGES: list[Callable[[Run], None]] = [
    set_lr, load, add_group, replace_parameter, replace_layer, other_memory, other_shape, rename, hook,
    optimizer_hook, new_buffer, buffer_left_out, buffer_taken_in, odd_state, replace_state,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_plan_notices_what_was_changed(change: Callable[[Run], None]) -> None:
    run = Run()
    for _ in range(3):
        run.train()
        run.check()
    assert run.has_plans() == [True, True]
    change(run)
    run.check()
    run.check()


def test_buffers_that_are_not_in_the_state_are_not_copied() -> None:
    run = Run()
    for _ in range(2):
        run.train()
        run.check()
    state = run.capturers[0].capture(run.places)[0]()
    assert "stored" in state
    assert "left_out" not in state


def test_what_was_captured_does_not_change_any_more() -> None:
    run = Run()
    run.train()
    run.check()
    captured = [c.capture(run.places)[0] for c in run.capturers]
    expected = [c() for c in captured]
    before = [str(e) for e in expected]
    run.train()
    set_lr(run)
    assert [str(c()) for c in captured] == before
    assert [c.capture(run.places)[0]() for c in run.capturers] != expected


def test_memory_of_copies_that_nobody_has_is_used_again() -> None:
    run = Run()
    run.train()
    run.check()
    capturer = run.capturers[0]
    assert capturer._plan is not None
    kept = [capturer.capture(run.places)[0] for _ in range(3)]
    texts = [str(state()) for state in kept]
    run.train()
    trees = [capturer.capture(run.places)[0]()]  # its arrays are views of the memory
    assert [str(state()) for state in kept] == texts
    known = {id(copy) for copy in capturer._plan._copies}
    del kept, trees
    for _ in range(4):
        run.train()
        run.check()
    assert {id(copy) for copy in capturer._plan._copies} == known


def test_what_changes_every_time_gets_no_plan_after_a_while() -> None:
    run = Run()
    for _ in range(5):
        load(run)
        run.train()
        run.check()
    assert run.has_plans()[1] is False


def test_states_of_other_kinds_have_no_plan() -> None:
    class Odd(nn.Linear):
        def state_dict(self, *arguments: Any, **named: Any) -> Any:
            return {"x": 1}

    for thing in (Odd(1, 1), nn.Sequential(Odd(1, 1)), torch.optim.lr_scheduler.StepLR(Run().optimizer, 3)):
        capturer = Capturer("thing", thing)
        capturer.capture(Places({}, {}))
        assert capturer._plan is None


class TestPlaces:
    TENSOR = torch.arange(12.0).reshape(4, 3)
    PLACE = TablePlace("t", "weight", (4, 3))

    def test_a_tensor_or_one_that_shows_the_same_memory(self) -> None:
        places = Places({}, {})
        places.add(self.TENSOR, self.PLACE)
        assert places.find(self.TENSOR) is self.PLACE
        assert places.find(self.TENSOR.detach()) is self.PLACE
        for other in (self.TENSOR.clone(), self.TENSOR.reshape(-1), self.TENSOR[:2], torch.zeros(0)):
            assert places.find(other) is None

    def test_two_names_of_the_same_memory_are_one_place(self) -> None:
        places = Places({}, {})
        alias, part = self.TENSOR.detach(), self.TENSOR[:2]
        places.add(self.TENSOR, self.PLACE)
        places.add(alias, TablePlace("u", "weight", (4, 3)))
        assert places.find(alias) is self.PLACE
        other = TablePlace("p", "weight", (2, 3))
        places.add(part, other)
        assert places.find(part) is other


class TestCopies:
    def copied(self, value: Any) -> Any:
        return copied_state(value, Places({}, {}))

    @pytest.mark.parametrize("value", [1, 1.5, True, "x", b"x", None, 1j, object(), range(3)])
    def test_what_cannot_change_is_passed_on(self, value: Any) -> None:
        assert self.copied(value) is value

    @pytest.mark.parametrize(
        "value",
        [torch.ones(2), nn.Parameter(torch.ones(2)), np.ones(2)],
        ids=["tensor", "parameter", "array"],
    )
    def test_tensors_and_arrays_are_copied(self, value: Any) -> None:
        copied = self.copied(value)
        with torch.no_grad():
            value[0] = 7
        assert copied.tolist() == [1, 1]

    def test_containers_and_all_that_is_in_them(self) -> None:
        inner = [torch.ones(1)]
        value = {
            "list": inner,
            "tuple": (inner, 3),
            "dict": {1: inner},
            "set": {1},
            "counter": Counter("aab"),
        }
        copied = self.copied(value)
        assert type(copied["tuple"]) is tuple
        assert type(copied["counter"]) is Counter
        before = str(copied)
        inner[0].zero_()
        inner.append(torch.ones(2))
        value["set"].add(2)  # type: ignore[attr-defined]
        value["counter"].update("b")  # type: ignore[attr-defined]
        assert str(copied) == before

    def test_what_has_no_plain_memory_is_passed_on(self) -> None:
        for value in (torch.ones(2).to_sparse(), torch.ones(2, device="meta")):
            assert self.copied(value) is value

    def test_rows_are_only_named(self) -> None:
        places = Places({}, {})
        places.add(TestPlaces.TENSOR, TestPlaces.PLACE)
        assert copied_state([TestPlaces.TENSOR], places) == [TestPlaces.PLACE]


class TestPlans:
    def test_a_plan_is_used_from_the_second_time_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []
        plain = nn.Module.state_dict

        def state_dict(module: nn.Module, **named: Any) -> Any:
            asked.append(type(module).__name__)
            return plain(module, **named)

        run = Run()
        run.train()
        monkeypatch.setattr(nn.Module, "state_dict", state_dict)
        for _ in range(4):
            run.capturers[0].capture(run.places)
        assert asked.count("Net") == 1

    def test_other_places_make_another_plan(self) -> None:
        run = Run()
        run.train()
        run.check()
        first = run.capturers[0]._plan
        run.places = Places({}, {})
        run.check()
        assert run.capturers[0]._plan is not first
        assert "weight" not in str(run.capturers[0].capture(run.places)[0]()["table.weight"])

    def test_failures_in_a_row_end_it(self) -> None:
        """What changes every time is not worth a plan; what changes now and then is."""
        run = Run()
        run.train()
        for _ in range(10):
            run.check()
            load(run)
            run.train()
            run.check()
            run.train()
            run.check()
        assert run.has_plans() == [True, True]
        for _ in range(3):
            load(run)
            run.check()
        load(run)
        run.check()
        assert run.has_plans()[1] is False

    @pytest.mark.parametrize(
        "make",
        [
            lambda: nn.Linear(1, 1, dtype=torch.complex128),
            lambda: nn.Linear(1, 1, device="meta"),
            lambda: with_buffer(torch.ones(2, 3).t()),
            lambda: with_buffer(torch.ones(3).to_sparse()),
            lambda: with_buffer(torch._neg_view(torch.ones(3))),
        ],
    )
    def test_tensors_that_cannot_be_copied_as_they_lie(self, make: Callable[[], nn.Module]) -> None:
        capturer = Capturer("thing", make())
        capturer.capture(Places({}, {}))
        assert capturer._plan is None

    @pytest.mark.parametrize("name", ["state_dict", "_save_to_state_dict"])
    def test_methods_of_an_object_of_its_own(self, name: str) -> None:
        module = nn.Linear(1, 1)
        setattr(module, name, lambda *a, **k: {"x": 1})
        capturer = Capturer("thing", module)
        assert name != "state_dict" or capturer.capture(Places({}, {}))[0]() == {"x": 1}
        capturer.capture(Places({}, {}))
        assert capturer._plan is None

    def test_optimizers_of_other_kinds(self) -> None:
        class Odd(torch.optim.SGD):
            def state_dict(self) -> Any:
                return {"x": 1}

        plain = torch.optim.SGD([nn.Parameter(torch.ones(1))])
        plain.state[plain.param_groups[0]["params"][0]] = 3
        own = torch.optim.SGD([nn.Parameter(torch.ones(1))])
        own.state_dict = lambda: {"x": 1}  # type: ignore[method-assign]
        hooked = torch.optim.SGD([nn.Parameter(torch.ones(1))])
        hooked.register_state_dict_pre_hook(lambda optimizer: None)
        for thing in (Odd([nn.Parameter(torch.ones(1))]), plain, own, hooked):
            capturer = Capturer("thing", thing)
            capturer.capture(Places({}, {}))
            assert capturer._plan is None

    def test_modules_with_extra_state(self) -> None:
        class Extra(nn.Linear):
            def get_extra_state(self) -> Any:
                return {"x": 1}

        capturer = Capturer("thing", Extra(1, 1))
        for _ in range(2):
            assert capturer.capture(Places({}, {}))[0]()["_extra_state"] == {"x": 1}
        assert capturer._plan is None


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("b", buffer)
    return module


def test_ranges_are_copied_one_behind_the_other() -> None:
    random = np.random.default_rng(0)
    parts = [random.integers(0, 256, n).astype(np.uint8) for n in (3, 0, 64, 1, 1000)]
    out = np.full(sum(map(len, parts)) + 1, 7, np.uint8)
    addresses = np.array([p.ctypes.data for p in parts], np.int64)
    copy_ranges(addresses, np.array([len(p) for p in parts]), out)
    assert np.array_equal(out[:-1], np.concatenate(parts))
    assert out[-1] == 7
