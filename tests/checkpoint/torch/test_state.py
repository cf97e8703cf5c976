"""Training objects as rows and plain data."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad

from holdfast.checkpoint.format.dense import TablePlace
from holdfast.checkpoint.format.records import Field, make_groups
from holdfast.checkpoint.torch.state import TrainingObjects
from holdfast.errors import CheckpointError, ConfigError, UnsupportedState
from holdfast.training.optimizers import RowWiseAdagrad
from tests.checkpoint.reading.restoring import (
    DIM,
    ROWS,
    Holder,
    assert_equal,
    model_and,
    restore,
    save,
    train,
)

# Tables and their fields


def test_tables_are_found_and_named() -> None:
    class Own(nn.EmbeddingBag):
        pass

    bag = Own(4, 2)
    model = nn.ModuleDict({"tables": nn.ModuleList([nn.Embedding(3, 2), bag]), "net": nn.Linear(2, 2)})
    objects = TrainingObjects({"model": model, "other": nn.Embedding(5, 1)})
    assert objects.layout() == [
        ("model.tables.0.weight", 3, (Field("weight", "F32", 2),)),
        ("model.tables.1.weight", 4, (Field("weight", "F32", 2),)),
        ("other.weight", 5, (Field("weight", "F32", 1),)),
    ]
    assert objects.tables["model.tables.1.weight"].modules == (bag,)
    assert {f"model.{key}" for key in model.state_dict()} >= set(list(objects.tables)[:2])


def test_the_layout_grows_with_the_optimizers_state() -> None:
    parts = model_and()
    objects = TrainingObjects(parts)
    assert [f.name for _, _, fields in objects.layout() for f in fields] == ["weight", "weight"]
    train(parts["model"], [parts["optim"]], [0])
    expected = tuple(Field(n, "F32", DIM) for n in ("weight", "optim.exp_avg", "optim.exp_avg_sq"))
    assert objects.layout() == [
        ("model.users.weight", ROWS, expected),
        ("model.items.weight", 2 * ROWS, expected),
    ]
    assert len(make_groups(objects.layout())) == 1


def test_the_order_of_objects_and_states_does_not_matter() -> None:
    parts = model_and()
    train(parts["model"], [parts["optim"]], [0])
    weight = parts["model"].users.weight
    expected = TrainingObjects(parts).layout()
    parts["optim"].state[weight] = dict(reversed(parts["optim"].state[weight].items()))
    assert TrainingObjects(dict(reversed(parts.items()))).layout() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_fields_are_the_live_memory(dtype: torch.dtype) -> None:
    table = nn.Embedding(6, 3, dtype=dtype)
    objects = TrainingObjects({"table": table})
    (field,) = objects.fields("table.weight")
    assert field.shape == (6, 3 * dtype.itemsize)
    with torch.no_grad():
        table.weight[2] = 7
    field[4] = field[2]
    assert table.weight[4].tolist() == [7, 7, 7]
    table.weight = nn.Parameter(torch.ones(6, 3, dtype=dtype))
    assert torch.equal(torch.from_numpy(objects.fields("table.weight")[0]).view(dtype), table.weight)


def test_several_optimizers_of_one_table() -> None:
    model = nn.Embedding(8, 2, sparse=True)
    a, b = RowWiseAdagrad(model.parameters(), lr=0.1), Adagrad(model.parameters(), lr=0.1)
    objects = TrainingObjects({"b": b, "a": a, "model": model})
    model(torch.arange(3)).sum().backward()
    a.step()
    fields = (Field("weight", "F32", 2), Field("a.sum", "F32", 1), Field("b.sum", "F32", 2))
    assert objects.layout() == [("model.weight", 8, fields)]
    assert [f.shape for f in objects.fields("model.weight")] == [(8, 8), (8, 4), (8, 8)]


def test_shared_weights_are_one_table() -> None:
    def build() -> dict[str, Any]:
        shared = nn.Embedding(7, 2)
        model = nn.ModuleDict({"a": shared, "b": nn.Embedding(7, 2), "again": shared, "out": nn.Linear(2, 7)})
        model["b"].weight = shared.weight
        model["out"].weight = shared.weight
        return {"model": model, "part": model["b"], "optim": SGD(model.parameters(), lr=0.1, momentum=0.9)}

    def step(parts: dict[str, Any]) -> None:
        parts["optim"].zero_grad()
        model = parts["model"]
        model["out"](model["a"](torch.arange(3)) + model["b"](torch.arange(3))).square().sum().backward()
        parts["optim"].step()

    parts = build()
    objects = TrainingObjects(parts)
    assert list(objects.tables) == ["model.a.weight"]
    assert objects.tables["model.a.weight"].modules == (parts["model"]["a"], parts["model"]["b"])
    step(parts)
    saved = save(objects)
    place = TablePlace("model.a.weight", "weight", (7, 2))
    state = saved.tree["objects"]["model"]
    assert [k for k, v in state.items() if v == place] == [
        "a.weight",
        "b.weight",
        "again.weight",
        "out.weight",
    ]
    assert saved.tree["objects"]["part"] == {"weight": place}
    step(parts)
    fresh = build()
    resumed = TrainingObjects(fresh)
    restore(saved, resumed)
    step(fresh)
    assert_equal(objects, resumed)
    assert fresh["model"]["out"].weight is fresh["model"]["a"].weight


def test_a_computed_weight_is_dense_state() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Embedding(4, 2))
    objects = TrainingObjects({"model": model})
    assert not objects.tables
    saved = save(objects)
    fresh = nn.utils.parametrizations.weight_norm(nn.Embedding(4, 2))
    restore(saved, TrainingObjects({"model": fresh}))
    assert torch.equal(fresh.weight, model.weight)


class Odd(nn.Embedding):
    def __init__(self, weight: Tensor) -> None:
        super().__init__(1, 1)
        self.weight = nn.Parameter(weight, requires_grad=False)


MEMORY = torch.ones(6, 2)


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"thing": 3}, r"thing is a int, which lacks state_dict\(\) or load_state_dict\(\)"),
        ({"": Holder()}, "named ''"),
        ({"a": Holder(), "a.b": Holder()}, "a.b's name begins with another object's"),
        ({"model": Odd(torch.ones(4, 6)[:, ::2])}, "table model.weight is not contiguous"),
        ({"model": nn.Embedding(3, 2, device="meta")}, "table model.weight is on meta: so far only"),
        ({"model": Odd(torch.ones(4, 2) * 1j)}, "elements of type torch.complex64, expected one of F64"),
        ({"a": Odd(MEMORY[:4]), "b": Odd(MEMORY[3:])}, "tables a.weight and b.weight share memory"),
    ],
    ids=lambda p: p if isinstance(p, str) else "",
)  # fmt: skip
def test_objects_that_cannot_be_saved(objects: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingObjects(objects)


def test_one_object_under_two_names() -> None:
    thing = Holder()
    with pytest.raises(ConfigError, match="b and a are the same object"):
        TrainingObjects({"a": thing, "b": thing})


# Dense state


def test_a_tree_is_a_snapshot() -> None:
    parts = model_and()
    held = {"list": [1, {"n": np.zeros(3)}], "tensor": torch.zeros(2)}
    objects = TrainingObjects({**parts, "held": Holder(held)})
    train(parts["model"], [parts["optim"]], [0])
    saved = save(objects)
    tree = objects.dense_tree()
    train(parts["model"], [parts["optim"]], [1, 2])
    held["list"][1]["n"][:] = 5  # type: ignore[index]
    held["list"].append(2)  # type: ignore[attr-defined]
    held["tensor"].fill_(9)  # type: ignore[attr-defined]
    assert tree == saved.tree


def test_what_a_state_may_hold() -> None:
    state = {
        "size": torch.Size([2, 3]),
        "scalar": np.float32(1.5),
        "zero_dim": torch.tensor(3),
        "bool": torch.tensor([True]),
        "nested": [(torch.ones(2, 2).T, None)],
        "counts": OrderedDict(a=1),
        "view": torch.arange(6).reshape(2, 3)[:, 1:],
        "empty": torch.zeros(0, 3),
        "complex": torch.tensor([1 + 2j]),
        "tiny": torch.ones(2).to(torch.float8_e5m2),
        "grad": torch.ones(2, requires_grad=True),
    }
    found = Holder()
    restore(save(TrainingObjects({"x": Holder(state)})), TrainingObjects({"x": found}))
    back = found.state
    assert list(back) == list(state)
    assert back["size"] == (2, 3)
    assert type(back["scalar"]) is np.float32
    for key in ("zero_dim", "bool", "view", "empty", "complex", "tiny", "grad"):
        assert back[key].dtype == state[key].dtype  # type: ignore[attr-defined]
        assert back[key].tolist() == state[key].tolist()  # type: ignore[attr-defined]
    back["view"][0, 0] = 9  # in memory of its own


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"x\.deep\.0 is a object"),
        (torch.float32, r"x\.deep\.0 is a torch.dtype"),
        (torch.device("cpu"), r"x\.deep\.0 is a torch.device"),
        (torch.ones(2).to_sparse(), r"x\.deep\.0 is a tensor of layout torch.sparse_coo"),
        (torch.ones(2).as_subclass(Subclass), r"x\.deep\.0 is a .*Subclass"),
        (torch.ones(2, device="meta"), r"x\.deep\.0 \(torch.float32 on meta\)"),
        (torch.ones(2, dtype=torch.complex128), r"x\.deep\.0 \(torch.complex128 on cpu\)"),
        (np.array([object()]), r"x\.deep\.0 \(of type object\)"),
        (np.str_("a"), r"x\.deep\.0 \(of type <U1\)"),
    ],
)
def test_what_a_state_must_not_hold(value: Any, message: str) -> None:
    with pytest.raises(UnsupportedState, match=message):
        TrainingObjects({"x": Holder({"deep": [value]})}).dense_tree()


def test_sparse_momentum_has_a_cure() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.arange(2)).sum().backward()
    optimizer.step()
    with pytest.raises(UnsupportedState, match=r"optim\.state\.0\.momentum_buffer is a .*RowMomentum"):
        TrainingObjects({"model": model, "optim": optimizer}).dense_tree()


def test_modules_get_the_versions_of_their_formats() -> None:
    seen = []

    class Versioned(nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            seen.append(metadata.get("version"))
            super()._load_from_state_dict(state, prefix, metadata, *rest)

        def get_extra_state(self) -> Any:
            return {"anything": (1, 2)}

        def set_extra_state(self, state: Any) -> None:
            seen.append(state)

    objects = TrainingObjects({"model": nn.Sequential(Versioned(2, 2))})
    restore(save(objects), objects)
    assert seen == [7, {"anything": (1, 2)}]


# Nothing large is copied


def test_rows_are_loaded_where_they_are() -> None:
    parts = model_and()
    train(parts["model"], [parts["optim"]], [0])
    objects = TrainingObjects(parts)
    saved = save(objects)

    def tensors(parts: dict[str, Any]) -> list[Tensor]:
        weights = [parts["model"].users.weight, parts["model"].items.weight]
        return weights + [parts["optim"].state[w][k] for w in weights for k in ("exp_avg", "exp_avg_sq")]

    before = tensors(parts)
    pointers = [t.data_ptr() for t in before]
    restore(saved, objects)
    assert all(a is b for a, b in zip(before, tensors(parts), strict=True))
    assert [t.data_ptr() for t in tensors(parts)] == pointers

    fresh = model_and()
    resumed = TrainingObjects(fresh)
    resumed.check_dense(saved.tree)
    resumed.prepare(saved.groups)
    assert not fresh["optim"].state  # an optimizer gets its state whole or not at all
    filled = [f.ctypes.data for name in resumed.tables for f in resumed.fields(name)]
    resumed.load_dense(saved.tree)
    assert [f.ctypes.data for name in resumed.tables for f in resumed.fields(name)] == filled


def test_loading_takes_no_longer_for_large_tables() -> None:
    model = nn.Embedding(2_000_000, 16, _weight=torch.zeros(2_000_000, 16))  # 128 MB
    objects = TrainingObjects({"model": model, "optim": Adagrad(model.parameters())})
    tree = objects.dense_tree()
    start = time.process_time()
    copy = model.weight.detach().clone()
    one_copy = time.process_time() - start
    del copy
    took = []
    for _ in range(3):
        start = time.process_time()
        objects.load_dense(tree)
        took.append(time.process_time() - start)
    assert min(took) < max(one_copy / 4, 0.005)


def test_looking_does_not_give_state_to_an_optimizer() -> None:
    parts = model_and()
    save(TrainingObjects(parts))
    assert not parts["optim"].state


class OwnState(torch.optim.SGD):
    """An optimizer whose state is of its own making."""

    made: Any = None

    def state_dict(self) -> Any:
        return self.made

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


@pytest.mark.parametrize("made", [{"x": 1}, [1, 2], {"state": {}}])
def test_an_optimizer_with_a_state_of_its_own_judges_itself(made: Any) -> None:
    model = nn.Embedding(4, 2)
    optim = OwnState(model.parameters(), lr=0.1)
    optim.made = made
    objects = TrainingObjects({"model": model, "optim": optim})
    restore(save(objects), objects)
    assert optim.loaded == made


class TestLoadersThatAreIteratedOver:
    class Loader(Holder):
        is_iterating: Any = False

    def objects(self, **attributes: Any) -> TrainingObjects:
        loader = self.Loader({"position": 3})
        vars(loader).update(attributes)
        return TrainingObjects({"loader": loader})

    @pytest.mark.parametrize(
        "attributes",
        [
            {"is_iterating": True},
            {"_iterator": object()},
            {"_iterator": object(), "_initial_iter_for_state_dict": False},
        ],
    )
    def test_they_cannot_be_restored(self, attributes: dict[str, Any]) -> None:
        tree = self.objects().dense_tree()
        with pytest.raises(CheckpointError, match=r"loader is being iterated over: call restore\(\) before"):
            self.objects(**attributes).check_dense(tree)

    @pytest.mark.parametrize(
        "attributes",
        [
            {},
            {"is_iterating": "what"},
            {"_iterator": None},
            {"_iterator": object(), "_initial_iter_for_state_dict": True},
        ],
    )
    def test_others_can(self, attributes: dict[str, Any]) -> None:
        self.objects(**attributes).check_dense(self.objects().dense_tree())


class TestOptimizersInTheBackwardPass:
    def model(self) -> Any:
        model = nn.ModuleDict({"a": nn.Embedding(4, 2), "b": nn.Linear(2, 2)})
        made: Any = model
        return made

    def give(self, parameter: Any, *optimizers: torch.optim.Optimizer) -> None:
        parameter._in_backward_optimizers = list(optimizers)

    def test_they_are_found_and_named(self) -> None:
        model = self.model()
        first, second, third = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(3))
        self.give(model["a"].weight, first, second)
        self.give(model["b"].bias, third)
        found = TrainingObjects({"m": model}).optimizers
        assert found == {
            "m.a.weight:backward": first,
            "m.a.weight:backward1": second,
            "m.b.bias:backward": third,
        }

    def test_one_that_was_given_is_not_found_again(self) -> None:
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.give(model["a"].weight, optimizer)
        self.give(model["b"].weight, optimizer)
        assert list(TrainingObjects({"m": model, "o": optimizer}).optimizers) == ["o"]
        assert list(TrainingObjects({"m": model}).optimizers) == ["m.a.weight:backward"]

    def test_one_that_comes_later_is_refused(self) -> None:
        model = self.model()
        objects = TrainingObjects({"m": model})
        assert not objects.find_again()
        self.give(model["a"].weight, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(
            ConfigError, match=r"m\.a\.weight has got an optimizer that steps in the backward pass"
        ):
            objects.find_again()


class TestTablesThatComeAndGo:
    def test_they_are_found_again(self) -> None:
        model: Any = nn.ModuleDict({"a": nn.Embedding(4, 2), "b": nn.Embedding(4, 2)})
        for table in model.values():
            table.weight.requires_grad_(False)
        objects = TrainingObjects({"m": model})
        assert objects.tables_with_unseen_changes() == {}
        live = objects.live_tables()
        assert objects.live_tables() is live
        assert not objects.find_again()
        with torch.no_grad():
            model["a"].weight[0] = 1.0
        model["c"] = nn.Embedding(4, 2)
        model["c"].weight.requires_grad_(False)
        del model["b"]
        assert objects.find_again()
        assert list(objects.tables) == ["m.a.weight", "m.c.weight"]
        assert objects.live_tables() is not live
        found = objects.tables_with_unseen_changes()
        assert found["m.a.weight"].why == "it was written to"
        assert found["m.c.weight"].why == "its tensors were replaced"
        assert not any(unseen.lasts for unseen in found.values())
        found = objects.tables_with_unseen_changes()
        assert list(found) == ["m.a.weight"]
        objects.cancel_restore()
        assert objects.tables_with_unseen_changes() == {}

    def test_tensors_that_are_replaced_are_noticed_once(self) -> None:
        model = nn.Embedding(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        objects = TrainingObjects({"m": model, "o": optimizer})
        objects.layout()
        model.weight.data = torch.zeros(4, 2)
        objects.layout()
        assert objects.tables_with_unseen_changes()["m.weight"].why == "its tensors were replaced"
        assert objects.tables_with_unseen_changes() == {}
        model.weight.data = torch.zeros(4, 2)
        objects.layout()
        objects.forget_replaced()
        assert objects.tables_with_unseen_changes() == {}


class TestTablesWithoutAnOptimizer:
    def test_those_that_gradients_reach(self) -> None:
        a, b, c = (nn.Embedding(4, 2) for _ in range(3))
        b.weight.requires_grad_(False)
        model = nn.ModuleList([a, b, c])
        objects = TrainingObjects({"m": model, "o": torch.optim.SGD(c.parameters(), lr=0.1)})
        assert objects.tables_without_optimizer() == ["m.0.weight"]
        assert objects.tables_with_unseen_changes()["m.0.weight"].lasts

    def test_an_average_of_a_model_misses_none(self) -> None:
        model = nn.Embedding(4, 2)
        average = torch.optim.swa_utils.AveragedModel(model)
        objects = TrainingObjects({"a": average, "o": torch.optim.SGD(model.parameters(), lr=0.1)})
        assert objects.tables_without_optimizer() == []
