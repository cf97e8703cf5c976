"""Objects that cannot be saved, and states of other objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint.format.dense import Array, TablePlace
from holdfast.checkpoint.torch.fit import check_module, check_objects, some
from holdfast.errors import ConfigError, ModelMismatch


class OnlySaves:
    def state_dict(self) -> dict[str, Any]:
        return {}


class OnlyLoads:
    state_dict = 3

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"": nn.Linear(1, 1)}, "is named ''"),
        ({3: nn.Linear(1, 1)}, "is named 3"),
        ({"a": OnlySaves()}, "a is a OnlySaves, which lacks"),
        ({"a": OnlyLoads()}, "a is a OnlyLoads, which lacks"),
        ({"a": nn.Linear(1, 1), "a.b": nn.Linear(1, 1)}, r"a\.b's name begins with another object's"),
    ],
)
def test_objects_that_cannot_be_saved(objects: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_objects(objects)


def test_objects_that_can() -> None:
    check_objects({"a": nn.Linear(1, 1), "ab": nn.Linear(1, 1), "b.a": nn.Linear(1, 1)})


def test_an_object_given_twice() -> None:
    module = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="b and a are the same object"):
        check_objects({"a": module, "b": module})


def state_of(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in module.state_dict().items():
        array = Array.of(value.numpy())
        assert array is not None
        found[key] = array
    return found


class TestModules:
    def test_one_that_fits(self) -> None:
        check_module("m", nn.Linear(2, 3), state_of(nn.Linear(2, 3)))
        place = TablePlace("m.weight", "weight", (4, 2))
        check_module("m", nn.Embedding(4, 2), {"weight": place})

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda state: state.pop("bias"), "m has other keys in the checkpoint; only here: bias"),
            (lambda state: state.update(more=3), "m has other keys in the checkpoint; not here: more"),
            (
                lambda state: state.update(weight=Array.of(np.zeros((3, 3), np.float32))),
                r"m\.weight is F32 of shape \[3, 3\] in the checkpoint and F32 of shape \[3, 2\] here",
            ),
            (
                lambda state: state.update(weight=Array.of(np.zeros((3, 2), np.float16))),
                r"m\.weight is F16 of shape \[3, 2\] in the checkpoint and F32 of shape \[3, 2\] here",
            ),
            (
                lambda state: state.update(weight=TablePlace("m.weight", "weight", (3, 3))),
                r"m\.weight is F32 of shape \[3, 3\] in the checkpoint and F32 of shape \[3, 2\] here",
            ),
            (
                lambda state: state.update(bias=3),
                r"m\.bias is no tensor in the checkpoint and F32 of shape \[3\]",
            ),
        ],
    )
    def test_one_that_does_not(self, change: Any, message: str) -> None:
        state = state_of(nn.Linear(2, 3))
        change(state)
        with pytest.raises(ModelMismatch, match=message):
            check_module("m", nn.Linear(2, 3), state)

    def test_what_is_no_module(self) -> None:
        with pytest.raises(ModelMismatch, match="m is not a module in the checkpoint, but a Linear here"):
            check_module("m", nn.Linear(2, 3), [1, 2])

    def test_hooks_that_translate_older_states_judge_themselves(self) -> None:
        module = nn.Sequential(nn.Linear(2, 3))
        module[0].register_load_state_dict_pre_hook(lambda *_: None)  # type: ignore[no-untyped-call]
        check_module("m", module, {"other": 3})

    def test_what_has_no_shape_yet_and_what_is_no_tensor(self) -> None:
        lazy = nn.LazyLinear(3)
        check_module("m", lazy, dict.fromkeys(lazy.state_dict(), 3))

        class Extra(nn.Module):
            def get_extra_state(self) -> Any:
                return 3

            def set_extra_state(self, state: Any) -> None:
                pass

        check_module("m", Extra(), {"_extra_state": 4})

    def test_types_without_a_name(self) -> None:
        module = nn.Module()
        module.register_buffer("b", torch.zeros(2, dtype=torch.complex128))
        with pytest.raises(ModelMismatch, match=r"torch\.complex128 of shape \[2\] here"):
            check_module("m", module, {"b": 3})


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ([], "none"),
        (["a"], "a"),
        (list("abcde"), "a, b, c, d, e"),
        (list("abcdef"), "a, b, c, d, e and 1 more"),
        (list("abcdefgh"), "a, b, c, d, e and 3 more"),
    ],
)
def test_the_first_few_names(names: list[str], shown: str) -> None:
    assert some(names) == shown
