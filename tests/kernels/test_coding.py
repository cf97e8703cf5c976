"""The loops of codes against the schoolbook."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from holdfast.kernels import coding as loops
from tests.coding.field import Records, product, randoms, times, words

SIZES = [1, 2, 7, 8, 9, 16, 31, 33, 128]


def test_products_are_those_of_the_schoolbook() -> None:
    assert loops.PRODUCTS.tolist() == [[product(a, b) for b in range(256)] for a in range(256)]


def test_two_generates_the_field() -> None:
    powers, value = set(), 1
    for _ in range(255):
        powers.add(value)
        value = int(loops.PRODUCTS[value, 2])
    assert powers == set(range(1, 256))


@pytest.mark.parametrize("size", [0, *SIZES, 1000])
def test_xor(size: int) -> None:
    a, b, guarded = randoms(1, size), randoms(2, size), randoms(3, size + 2)
    out, before = guarded[1:-1], guarded.copy()
    loops.xor(a, b, out)
    assert (out == a ^ b).all()
    assert (guarded[[0, -1]] == before[[0, -1]]).all()
    loops.xor(out, b, out)
    assert (out == a).all()


@pytest.mark.parametrize("size", [0, *SIZES, 1000])
def test_multiply_add(size: int) -> None:
    source, guarded = randoms(1, size), randoms(2, size + 2)
    for coefficient in (0, 1, 2, 0x1D, 0x80, 0xFF):
        before = guarded.copy()
        loops.multiply_add(coefficient, source, guarded[1:-1])
        assert (guarded[1:-1] == before[1:-1] ^ times(coefficient, source)).all()
        assert (guarded[[0, -1]] == before[[0, -1]]).all()


@pytest.mark.parametrize("shuffles", [False, None], ids=["any machine", "this machine"])
def test_every_product_by_both_ways(shuffles: bool | None) -> None:
    whole, some = loops._step(multiplies=True, shuffles=shuffles)  # type: ignore[no-untyped-call]
    tables = loops._TABLES

    @njit
    def multiply(coefficient: int, source: Any, target: Any) -> None:
        at, of, table = target.ctypes.data, source.ctypes.data, tables.ctypes.data + coefficient * 32
        for w in range(0, 224, 32):
            whole(at + w, of + w, table)
        some(at + 224, of + 224, table, 7)

    source = np.arange(256, dtype=np.uint8)
    for coefficient in range(256):
        target = np.full(256, 0xA5, np.uint8)
        multiply(coefficient, source.view(np.uint32), target.view(np.uint32))
        assert (target[:252] == loops.PRODUCTS[coefficient, :252] ^ 0xA5).all()
        assert (target[252:] == 0xA5).all()


def scattered(parity: Records, places: Any, coefficients: Any, differences: Records) -> Records:
    result = parity.copy()
    for place, coefficient, difference in zip(places, coefficients, differences, strict=True):
        result[place] ^= times(int(coefficient), difference)
    return result


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [np.uint32, np.int64])
def test_scattered_differences_all_count(size: int, kind: type[np.integer[Any]]) -> None:
    """Many places are named several times (hole 12)."""
    rng = np.random.default_rng(size)
    parity, differences = randoms(1, 40, size), randoms(2, 100, size)
    places = rng.integers(0, 40, 100).astype(kind)
    ones = np.ones(100, np.uint8)
    result = parity.copy()
    loops.xor_into(result, places, differences)
    assert (result == scattered(parity, places, ones, differences)).all()
    coefficients = rng.integers(0, 4, 100).astype(np.uint8) * 85
    for given_ in (coefficients, np.array([0x53], np.uint8), ones):
        result = parity.copy()
        loops.multiply_add_into(result, places, given_, differences)
        each = np.broadcast_to(given_, 100)
        assert (result == scattered(parity, places, each, differences)).all()


def test_nothing_to_add() -> None:
    parity = randoms(1, 3, 5)
    before = parity.copy()
    nowhere, nothing = np.zeros(0, np.uint32), np.zeros((0, 5), np.uint32)
    loops.xor_into(parity, nowhere, nothing)
    loops.multiply_add_into(parity, nowhere, np.array([3], np.uint8), nothing)
    loops.multiply_add_into(parity, nowhere, np.zeros(0, np.uint8), nothing)
    assert (parity == before).all()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 255), words), max_size=40), st.integers(1, 11))
def test_any_bits(changes: list[tuple[int, int, int]], size: int) -> None:
    """NaN, infinities, -0 and denormals are bits like any others (hole 2)."""
    parity = np.zeros((3, size), np.uint32)
    places = np.array([p for p, _, _ in changes], np.uint32)
    coefficients = np.array([c for _, c, _ in changes], np.uint8)
    differences = np.array([[w + i & 0xFFFFFFFF for i in range(size)] for _, _, w in changes], np.uint32)
    differences = differences.reshape(-1, size)
    result = parity.copy()
    loops.multiply_add_into(result, places, coefficients, differences)
    expected = parity.copy()
    for i in range(len(changes)):
        column = expected[places[i]].view(np.uint8)
        for b, byte in enumerate(differences[i].view(np.uint8)):
            column[b] ^= product(int(coefficients[i]), int(byte))
    assert (result == expected).all()


@pytest.mark.parametrize("size", SIZES)
def test_xor_from(size: int) -> None:
    parity, guarded = randoms(1, 40, size), randoms(2, 12, size)
    target, before = guarded[1:-1], guarded.copy()
    places = np.random.default_rng(size).integers(0, 40, 10)
    loops.xor_from(target, parity, places)
    assert (target == before[1:-1] ^ parity[places]).all()
    assert (guarded[[0, -1]] == before[[0, -1]]).all()
