"""Vectors and their scalar fallback: the same operations, the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit

from holdfast.kernels import simd

HERE = Path(__file__)
FLOATS = np.array([0.0, -0.0, 1.5, -2.5, np.nan, np.inf, -np.inf, 3e-39], np.float32)
OTHERS = np.array([1.0, 0.0, np.nan, -2.5, 7.0, 2.0, -3.0, 0.0], np.float32)
WHOLE = np.array([0, 1, 2, 100, 128, 200, 254, 255], np.float32)

ops: Any = simd  # Numba passes an intrinsic's first argument
smaller, greater, where_less, nearest = ops.smaller, ops.greater, ops.where_less, ops.nearest
load, store, load_some, store_some = ops.load, ops.store, ops.load_some, ops.store_some
magnitude_bits, to_bytes, from_bytes, highest_int = (
    ops.magnitude_bits,
    ops.to_bytes,
    ops.from_bytes,
    ops.highest_int,
)


@njit
def elementwise(a, b, out):  # type: ignore[no-untyped-def]
    x, y = load(a), load(b)
    store(out, smaller(x, y))
    store(out + 32, greater(x, y))
    store(out + 64, where_less(x, y, x + y, x * y))
    store(out + 96, nearest(x - y))


@njit
def some(a, count, out):  # type: ignore[no-untyped-def]
    store_some(out, load_some(a, count, load(a + 32)), 8 - count)


@njit
def through_bytes(a, out):  # type: ignore[no-untyped-def]
    word = to_bytes(load(a))
    store(out, from_bytes(word))
    return word, highest_int(magnitude_bits(load(a)))


def test_elements_equal_numpys() -> None:
    out = np.zeros((4, 8), np.float32)
    elementwise(FLOATS.ctypes.data, OTHERS.ctypes.data, out.ctypes.data)
    a, b = FLOATS, OTHERS
    with np.errstate(invalid="ignore"):
        expected = [
            np.where(a < b, a, b),
            np.where(a > b, a, b),
            np.where(a < b, a + b, a * b),
            np.rint(a - b),
        ]
    for found, wanted in zip(out, expected, strict=True):
        nan = np.isnan(wanted)
        assert np.array_equal(np.isnan(found), nan)
        assert np.array_equal(found[~nan].view(np.uint32), wanted[~nan].view(np.uint32))


@pytest.mark.parametrize("count", range(9))
def test_nothing_beyond_the_count_is_read_or_written(count: int) -> None:
    memory = np.arange(16, dtype=np.float32)
    out = np.full(8, -1, np.float32)
    some(memory.ctypes.data, count, out.ctypes.data)
    expected = np.concatenate([memory[:count], memory[8 + count :]])
    expected[8 - count :] = -1
    assert np.array_equal(out, expected)


def test_bytes_come_back() -> None:
    out = np.zeros(8, np.float32)
    word, highest = through_bytes(WHOLE.ctypes.data, out.ctypes.data)
    assert int(word).to_bytes(8, "little") == bytes(WHOLE.astype(np.uint8))
    assert np.array_equal(out, WHOLE)
    assert highest == int(WHOLE.view(np.int32).max())


def run_python(*arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True,
        check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not simd.VECTORS, reason="this is the run with scalars")
def test_scalars_give_the_same_bits() -> None:
    """All tests here, of the codecs' loops, golden checksums included, and of threads, without vectors."""
    run_python("-c", "from holdfast.kernels import simd; assert not simd.VECTORS", HOLDFAST_SIMD="0")
    threads = HERE.parents[1] / "tables" / "test_threads.py"
    tests = [str(HERE), str(HERE.with_name("test_quantize.py")), str(threads)]
    run_python("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *tests, HOLDFAST_SIMD="0")


def test_scalars_if_llvm_does_not_know_the_intrinsics() -> None:
    assert simd.accepted("declare float @llvm.sqrt.f32(float)")
    assert not simd.accepted("declare float @llvm.no.such.f32(float)")
    assert not simd.accepted("not assembly")
    code = """if True:
        from llvmlite import binding
        def refuse(assembly):
            raise RuntimeError("invalid intrinsic")
        binding.parse_assembly = refuse
        from holdfast.kernels import simd
        assert not simd.VECTORS
    """
    run_python("-c", code)
