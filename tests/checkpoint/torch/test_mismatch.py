"""Checkpoints of something else: refused with a sentence that says what differs, before any harm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam

from holdfast.checkpoint.format.dense import Array, TablePlace
from holdfast.checkpoint.format.records import Field, Group, Table
from holdfast.checkpoint.torch.state import TrainingObjects
from holdfast.errors import CheckpointError, CorruptCheckpoint, ModelMismatch
from tests.checkpoint.reading.restoring import DIM, Holder, Model, model_and, restore, save, train


def table_group(*fields: Field, name: str = "model.weight", rows: int = 6) -> list[Group]:
    return [Group(fields, (Table(name, rows, 0),))]


WEIGHT = Field("weight", "F32", 2)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "table model.weight of the model is not in the checkpoint; the checkpoint's: none"),
        (
            table_group(WEIGHT, name="x.weight"),
            "has a table x.weight, which the model lacks; the model's: model.weight",
        ),
        (table_group(WEIGHT, rows=7), "model.weight is 7 × 2 F32 in the checkpoint and 6 × 2 F32 here"),
        (table_group(Field("weight", "F32", 3)), "weight is 6 × 3 F32 in the checkpoint and 6 × 2 F32 here"),
        (table_group(Field("weight", "I32", 2)), "weight is 6 × 2 I32 in the checkpoint and 6 × 2 F32 here"),
        (
            table_group(Field("x.y", "F32", 2), WEIGHT),
            "has x.y of table model.weight, but no optimizer .*: optim, idle",
        ),
        (
            table_group(WEIGHT, Field("idle.sum", "F32", 2)),
            "has idle.sum of table model.weight, but no optimizer",
        ),
        (
            table_group(WEIGHT, Field("optim.sum", "F32", 1)),
            "optim.sum of model.weight is 6 × 1 F32 in the checkpoint and 6 × 2 F32 here",
        ),
        (
            table_group(Field("optim.sum", "F32", 1), Field("weight", "F32", 3)),
            "^model.weight is 6 × 3 F32 in the checkpoint",
        ),
        (table_group(Field("optim.sum", "F32", 2)), "no weights of table model.weight"),
    ],
)
def test_tables_that_do_not_fit(groups: list[Group], message: str) -> None:
    model = nn.Embedding(6, 2)
    idle = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optim = Adagrad(model.parameters())
    objects = TrainingObjects({"model": model, "optim": optim, "idle": idle})
    before = [f.copy() for f in objects.fields("model.weight")]
    with pytest.raises(ModelMismatch, match=message):
        objects.prepare(groups)
    assert all(map(np.array_equal, before, objects.fields("model.weight")))


def test_fields_come_in_the_order_of_the_checkpoint() -> None:
    model = nn.Embedding(6, 2)
    objects = TrainingObjects({"model": model, "optim": Adagrad(model.parameters())})
    objects.prepare(table_group(Field("optim.sum", "F32", 2), WEIGHT))
    state, weight = objects.fields("model.weight")
    assert weight.ctypes.data == model.weight.data_ptr()
    objects.prepare(table_group(WEIGHT))
    assert len(objects.fields("model.weight")) == 1
    objects.cancel_restore()
    assert [f.ctypes.data for f in objects.fields("model.weight")] == [weight.ctypes.data, state.ctypes.data]


def saved_tree(**changes: Any) -> Any:
    parts = model_and()
    train(parts["model"], [parts["optim"]], [0])
    return save(TrainingObjects({**parts, **changes})).tree


class Wide(Model):
    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(2 * DIM, 3)


def reordered(model: Model) -> dict[str, Any]:
    return {"model": model, "optim": Adam([*reversed(model.table_parameters()), *model.network_parameters()])}


def misfits() -> dict[str, tuple[dict[str, Any], str]]:
    good = model_and()
    wide, sequence = Wide(), nn.Sequential(nn.Linear(2, 2))
    half = Model()
    half.top.half()
    return {
        "missing": ({"model": good["model"]}, "holds the state of 'optim', which was not given"),
        "extra": ({**good, "more": Holder()}, "holds no state of 'more', only of model, optim"),
        "class": (model_and(lambda p: SGD(p, lr=0.1)), "optim is Adam in the checkpoint and SGD here"),
        "keys": (
            {"model": sequence, "optim": Adam(sequence.parameters())},
            "not here: items.weight.* and 4 more",
        ),
        "shape": (
            {"model": wide, "optim": Adam(wide.parameters())},
            r"model\.top\.(weight|bias) is F32 of shape \[1.*\] in the .* and F32 of shape \[3.*\] here",
        ),
        "dtype": (
            {"model": half, "optim": Adam(half.parameters())},
            r"is F32 of shape .* and F16 of shape .* here",
        ),
        "groups": (
            {"model": good["model"], "optim": Adam(good["model"].network_parameters())},
            r"optim has groups of \[6\] parameters in the checkpoint and of \[4\] here",
        ),
    }


@pytest.mark.parametrize("name", list(misfits()))
def test_objects_that_do_not_fit(name: str) -> None:
    parts, message = misfits()[name]
    tree = saved_tree()
    objects = TrainingObjects(parts)
    before = save(objects)
    for attempt in (objects.check_dense, objects.load_dense):
        with pytest.raises(ModelMismatch, match=message):
            attempt(tree)
    assert save(objects).dense == before.dense  # nothing was touched


def test_parameters_in_another_order() -> None:
    def build(model: Model) -> dict[str, Any]:
        return {"model": model, "optim": Adam([*model.table_parameters(), *model.network_parameters()])}

    parts = build(Model())
    train(parts["model"], [parts["optim"]], [0])
    tree = TrainingObjects(parts).dense_tree()
    TrainingObjects(build(Model())).check_dense(tree)
    with pytest.raises(
        ModelMismatch, match=r"parameter 0 of optim is model.users.weight in the checkpoint, model.items"
    ):
        TrainingObjects(reordered(Model())).check_dense(tree)


def test_an_object_that_refuses_its_state() -> None:
    class Picky(Holder):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("epoch")

    tree = TrainingObjects({"x": Holder({})}).dense_tree()
    with pytest.raises(ModelMismatch, match="x does not take the checkpoint's state: 'epoch'"):
        TrainingObjects({"x": Picky()}).load_dense(tree)


RNG = TrainingObjects({}).dense_tree()["rng"]


@pytest.mark.parametrize(
    "tree",
    [
        None,
        {},
        {"objects": 3},
        {"objects": {"x": 1}},
        {"objects": {"x": 1}, "rng": {"python": {}}},
        {"objects": {"x": TablePlace("t", "weight", (1,))}, "rng": RNG},
        {"objects": {"x": 1}, "rng": {**RNG, "torch": Array.of(np.zeros(3, np.uint8))}},
    ],
)
def test_trees_that_nobody_saved(tree: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        TrainingObjects({"x": Holder()}).load_dense(tree)
    assert isinstance(caught.value, (CorruptCheckpoint, ModelMismatch))


def test_hooks_that_translate_keys_are_left_to_work() -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.new = nn.Linear(2, 2)
            self.register_load_state_dict_pre_hook(self.translate)  # type: ignore[no-untyped-call]

        @staticmethod
        def translate(module: Any, state: Any, *_: Any) -> None:
            for key in [k for k in state if k.startswith("old.")]:
                state[key.replace("old.", "new.")] = state.pop(key)

    layer, new = nn.Linear(2, 2), Renamed()
    old = nn.ModuleDict({"old": layer})
    restore(save(TrainingObjects({"model": old})), TrainingObjects({"model": new}))
    assert torch.equal(new.new.weight, layer.weight)


def test_a_module_where_none_was() -> None:
    tree = TrainingObjects({"model": Holder(3)}).dense_tree()
    with pytest.raises(ModelMismatch, match="model is not a module in the checkpoint, but a Linear here"):
        TrainingObjects({"model": nn.Linear(1, 1)}).check_dense(tree)
