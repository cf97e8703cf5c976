"""``hf.quantize``: the row codecs on their own, for arrays and tensors in memory."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.codecs.quantize import (
    Bytes2D,
    Flags,
    Floats2D,
    Method,
    RowCodec,
    UniformCodec,
    as_float32,
    choose_grid_bits,
    from_float32,
)
from holdfast.errors import ConfigError

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_CHUNK = 4096  # rows that a thread takes at a time, a multiple of the eight that kernels take


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """Quantized rows, the result of ``quantize``.

    ``stored`` has ``codec.stored_bytes(dim)`` bytes per row, in the format of docs/quantization.md. Rows that
    no grid can represent (with NaN or infinity, or too far from zero for a grid of 16 bits) are kept
    unchanged in ``raw_rows``; ``raw_ids`` are their numbers.
    """

    codec: UniformCodec
    shape: tuple[int, int]
    dtype: Any
    """The dtype of the given rows, and of the result of ``dequantize``: NumPy's or torch's."""
    stored: Bytes2D
    raw_ids: NDArray[np.int64]
    raw_rows: Bytes2D

    @property
    def bits(self) -> int:
        """Bits per value."""
        return self.codec.bits

    @property
    def nbytes(self) -> int:
        """Total size in bytes: grids, codes and raw rows."""
        return self.stored.nbytes + self.raw_ids.nbytes + self.raw_rows.nbytes

    def dequantize(self, *, threads: int = 1) -> Any:
        """Decode the rows to an array or a tensor, like the given one. Raw rows are bit-identical."""
        name = _DTYPES[str(self.dtype).rpartition(".")[2]]
        values = np.empty(self.shape, np.float32)
        _in_chunks(lambda s: self.codec.decode(self.stored[s], values[s]), self.shape[0], _checked(threads))
        values[self.raw_ids] = 0
        rows = from_float32(values, name)
        rows[self.raw_ids] = self.raw_rows
        return _like(rows, self.dtype)

    def __repr__(self) -> str:
        return (
            f"QuantizedRows({self.shape[0]} rows of {self.shape[1]} {self.dtype} in {self.bits} bits: "
            f"{self.nbytes} bytes, {len(self.raw_ids)} rows raw)"
        )


def quantize(
    rows: Any,
    bits: int = 4,
    *,
    method: Method | None = None,
    num_bins: int | None = None,
    ratio: float | None = None,
    grid_bits: int | None = None,
    threads: int = 1,
) -> QuantizedRows:
    """Quantize each row of a matrix to ``bits`` bits per value, with its own scale and zero point.

    A row takes ``dim * bits / 8`` bytes, rounded up, and 4 more for its scale and zero point (8 with
    ``grid_bits=32``). The error of ``dequantize()`` is at most one step per value, ``(max - min) /
    (2**bits - 1)`` of the row; rows with NaN or infinity are restored bit for bit.

    Args:
        rows: a NumPy array or a torch tensor [rows, dim] of float32, float16 or (torch) bfloat16.
        bits: 2, 3, 4 or 8.
        method: "symmetric", "asymmetric" or "adaptive". Default: adaptive, for 8 bits asymmetric.
        num_bins: number of steps into which the adaptive search divides a row's range.
        ratio: the part of the range that the search covers.
        grid_bits: bits of the scale and of the zero point, 16 or 32. Default: 16, or 32 where 16 would cost
            accuracy.
        threads: number of threads.
    """
    table, dtype, name = _fields(rows)
    values = as_float32(table, name)
    threads = _checked(threads)
    if grid_bits is None:
        UniformCodec(bits, 16, method, num_bins, ratio)  # says what is wrong before anything is measured
        grid_bits = choose_grid_bits(values, bits, method)
    codec = UniformCodec(bits, grid_bits, method, num_bins, ratio)
    stored, raw = encode_rows(codec, values, threads=threads)
    raw_ids = np.flatnonzero(raw)
    shape = (values.shape[0], values.shape[1])
    return QuantizedRows(codec, shape, dtype, stored, raw_ids, table[raw_ids])


def encode_rows(codec: RowCodec, values: Floats2D, *, threads: int = 1) -> tuple[Bytes2D, Flags]:
    """Encode all rows. Returns the stored rows, and which of them are raw."""
    stored = np.empty((len(values), codec.stored_bytes(values.shape[1])), np.uint8)
    raw = np.empty(len(values), np.bool_)

    def encode(chunk: slice) -> None:
        raw[chunk] = codec.encode(values[chunk], stored[chunk])

    _in_chunks(encode, len(values), threads)
    return stored, raw


def _in_chunks(work: Any, rows: int, threads: int) -> None:
    """Call ``work`` with slices of all rows; the kernels let go of the GIL, so threads run side by side."""
    if threads == 1 or rows <= _CHUNK:
        work(slice(0, rows))
        return
    chunks = [slice(first, min(first + _CHUNK, rows)) for first in range(0, rows, _CHUNK)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, chunks))


def _checked(threads: int) -> int:
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ConfigError(f"threads is {threads!r}: expected 1 or more")
    return threads


def _fields(rows: Any) -> tuple[Bytes2D, Any, str]:
    """A matrix's bytes by rows, its dtype, and the name that a field of it has."""
    if not hasattr(rows, "dtype") or not hasattr(rows, "shape"):
        raise ConfigError(
            f"rows is a {type(rows).__name__}: expected a NumPy array or a torch tensor; "
            "numpy.asarray(rows, numpy.float32) makes one"
        )
    kind = str(rows.dtype).rpartition(".")[2]
    if kind not in _DTYPES:
        raise ConfigError(
            f"rows is {rows.dtype}: expected float32, float16 or bfloat16; convert it to float32 first"
        )
    if len(rows.shape) != 2 or rows.shape[1] == 0:
        raise ConfigError(
            f"rows has the shape {tuple(rows.shape)}: expected [rows, dim]; reshape it so that what shares "
            "a grid is a row"
        )
    dtype = rows.dtype
    if _is_torch(dtype):
        torch = importlib.import_module("torch")
        rows = rows.detach().cpu().contiguous().view(torch.uint8).numpy()
        return rows, dtype, _DTYPES[kind]
    return np.ascontiguousarray(rows).view(np.uint8), dtype, _DTYPES[kind]


def _is_torch(dtype: Any) -> bool:
    return type(dtype).__module__ == "torch"


def _like(rows: Bytes2D, dtype: Any) -> Any:
    if _is_torch(dtype):
        return importlib.import_module("torch").from_numpy(rows).view(dtype)
    return rows.view(dtype)
