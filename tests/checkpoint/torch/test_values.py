"""Tensors, arrays and random states as bits, and back."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast.checkpoint.format.dense import Array
from holdfast.checkpoint.format.records import Field
from holdfast.checkpoint.torch.values import (
    TORCH_DTYPES,
    WIDEST_ROW,
    copy_random_states,
    is_plain_memory,
    live_leaf,
    memory_key,
    plain_leaf,
    random_states,
    row_bytes,
    row_field,
    set_random_states,
    why_no_rows,
)
from holdfast.errors import CorruptCheckpoint, UnsupportedState


class Subclass(Tensor):
    """A tensor that may be more than its numbers."""


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.zeros(1, 1), None),
        (torch.zeros(3, 2), None),
        (torch.zeros(3), None),
        (torch.zeros(2, WIDEST_ROW, dtype=torch.int8), None),
        (torch.zeros(2, WIDEST_ROW + 1, dtype=torch.int8), "expected rows of 1 to 1048576 elements"),
        (torch.zeros(3, 2).to_sparse(), "is torch.sparse_coo, expected a dense tensor"),
        (torch.zeros(3, 2, device="meta"), "is on meta"),
        (torch.zeros(3, 2, dtype=torch.complex64), "has elements of type torch.complex64"),
        (torch.zeros(2, 3).t(), "is not contiguous"),
        (torch.zeros(3, 2, dtype=torch.complex64).conj().imag, "is not contiguous"),
        (torch.tensor(1.0), r"has shape \(\)"),
        (torch.zeros(0, 2), r"has shape \(0, 2\)"),
        (torch.zeros(3, 0), r"has shape \(3, 0\)"),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, Tensor) else None,
)
def test_what_can_be_seen_as_rows(tensor: Tensor, why: str | None) -> None:
    found = why_no_rows(tensor)
    if why is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(why, found)


def test_rows_are_the_tensors_own_memory() -> None:
    tensor = torch.arange(12, dtype=torch.int16).reshape(3, 2, 2)
    assert row_field("weight", tensor) == Field("weight", "I16", 4)
    view = row_bytes(tensor)
    assert view.shape == (3, 8)
    view[1, 0] = 77
    assert tensor[1, 0, 0] == 77


@pytest.mark.parametrize(
    ("tensor", "plain"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), False),
        (torch.zeros(2, 3, dtype=torch.complex64).conj(), False),
        (torch.zeros(3, dtype=torch.complex64).conj().imag, False),
        (torch._neg_view(torch.zeros(3)), False),
    ],
)
def test_memory_that_is_its_elements(tensor: Tensor, plain: bool) -> None:
    assert is_plain_memory(tensor) is plain


class TestMemoryKeys:
    def test_the_same_memory_in_the_same_way(self) -> None:
        tensor = torch.zeros(4, 2)
        key = memory_key(tensor)
        assert key is not None
        assert memory_key(tensor.detach()) == key
        assert memory_key(nn.Parameter(tensor)) == key

    def test_other_memory_or_another_way(self) -> None:
        tensor = torch.zeros(2, 2, dtype=torch.complex64)
        others = [
            torch.zeros(2, 2, dtype=torch.complex64),
            tensor.t(),
            tensor[:1],
            tensor.view(4),
            tensor.view(torch.float32),
            tensor.conj(),
            torch._neg_view(tensor),
        ]
        assert memory_key(tensor) not in [memory_key(other) for other in others]

    @pytest.mark.parametrize(
        "tensor", [torch.zeros(2, 2).to_sparse(), torch.zeros(2, device="meta"), torch.zeros(0, 3)]
    )
    def test_none_at_all(self, tensor: Tensor) -> None:
        assert memory_key(tensor) is None


class TestLeaves:
    @pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
    def test_tensors_of_every_type_come_back(self, dtype: torch.dtype) -> None:
        bits = torch.randint(0, 2, (2, 3, 16), dtype=torch.uint8)
        tensor = bits.view(dtype) if dtype is not torch.bool else bits.bool()
        stored = plain_leaf(tensor, "x")
        tensor_before = tensor.clone()
        tensor.zero_()
        back = live_leaf(stored)
        assert (back.dtype, back.shape) == (tensor_before.dtype, tensor_before.shape)
        assert torch.equal(back.reshape(-1).view(torch.uint8), tensor_before.reshape(-1).view(torch.uint8))

    def test_views_and_parameters_come_back_as_their_values(self) -> None:
        for tensor in (
            torch.arange(6.0).reshape(2, 3).t(),
            nn.Parameter(torch.arange(3.0)),
            torch._neg_view(torch.arange(3.0)),
            torch.tensor(5),
            torch.zeros(0, 3),
        ):
            assert torch.equal(live_leaf(plain_leaf(tensor, "x")), tensor)

    def test_arrays_numbers_and_shapes(self) -> None:
        array = np.arange(6).reshape(2, 3).T
        back = live_leaf(plain_leaf(array, "x"))
        assert np.array_equal(back, array)
        assert type(live_leaf(plain_leaf(np.float32(1.5), "x"))) is np.float32
        assert plain_leaf(torch.Size([2, 3]), "x") == (2, 3)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (object(), "x"),
            (np.array(["text"]), "x .*of type"),
            (np.zeros(2).view(np.recarray), "x"),
            (torch.zeros(2).as_subclass(Subclass), "x"),
            (torch.zeros(2, device="meta"), r"x .*float32 on meta"),
            (torch.zeros(2, dtype=torch.complex128), r"x .*complex128"),
            (torch.zeros(2).to_sparse(), "x is a tensor of layout torch.sparse_coo.*RowMomentum"),
        ],
    )
    def test_what_no_checkpoint_can_hold(self, value: Any, message: str) -> None:
        with pytest.raises(UnsupportedState, match=message):
            plain_leaf(value, "x")

    def test_what_no_checkpoint_should_hold(self) -> None:
        with pytest.raises(CorruptCheckpoint, match="holds a complex"):
            live_leaf(1j)


class TestRandomStates:
    def test_they_go_back(self) -> None:
        saved = random_states(copy_random_states())
        drawn = [(torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()) for _ in range(2)]
        set_random_states(saved)
        assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()) == drawn[0]

    def test_a_number_that_was_drawn_ahead_is_part_of_it(self) -> None:
        random.gauss(0, 1)
        np.random.randn()
        saved = random_states(copy_random_states())
        drawn = random.gauss(0, 1), np.random.randn()
        set_random_states(saved)
        assert (random.gauss(0, 1), np.random.randn()) == drawn

    @pytest.mark.parametrize("states", [None, {}, {"python": {}}, 3])
    def test_what_nobody_saved(self, states: Any) -> None:
        with pytest.raises(CorruptCheckpoint, match="random states cannot be restored"):
            set_random_states(states)

    def test_words_that_are_no_state(self) -> None:
        saved = random_states(copy_random_states())
        saved["python"]["words"] = Array.of(np.zeros(3, np.uint32))
        with pytest.raises(CorruptCheckpoint, match="random states cannot be restored"):
            set_random_states(saved)
