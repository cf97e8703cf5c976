"""Sets of row ids in few bytes: whichever of these is smallest.

range     first to last, nothing stored
gap1/2/4  differences between neighbours, in 1, 2 or 4 bytes each
zgap1/2/4 the same, compressed with Blosc2
bitmap    one bit for each id from first to last
raw       8 bytes each
"""

from __future__ import annotations

from typing import Any

import blosc2
import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.records import RowIds
from holdfast.errors import CorruptCheckpoint

_WORTH_COMPRESSING = 512


def encode_ids(ids: RowIds) -> tuple[str, Any]:
    """How they are stored, and their bytes. ``ids`` ascend; one may repeat."""
    if not len(ids):
        return "range", np.empty(0, np.uint8)
    gaps = np.diff(ids, prepend=ids[0])
    all_different = bool((gaps[1:] > 0).all())
    if all_different and ids[-1] - ids[0] == len(ids) - 1:
        return "range", np.empty(0, np.uint8)
    widest = int(gaps.max())
    if widest >= 1 << 32:
        return "raw", np.ascontiguousarray(ids, "<i8").view(np.uint8)
    size = 1 if widest < 1 << 8 else 2 if widest < 1 << 16 else 4
    encoding, data = f"gap{size}", gaps.astype(f"<u{size}")
    best: tuple[str, Any] = (encoding, data.view(np.uint8))
    if data.nbytes >= _WORTH_COMPRESSING:
        packed = blosc2.compress2(data, typesize=size, codec=blosc2.Codec.ZSTD, clevel=1, nthreads=1)
        if len(packed) < data.nbytes:
            best = (f"z{encoding}", packed)
    span = int(ids[-1] - ids[0]) + 1
    if all_different and (span + 7) // 8 < memoryview(best[1]).nbytes:
        bits = np.zeros(span, np.bool_)
        bits[ids - ids[0]] = True
        best = ("bitmap", np.packbits(bits, bitorder="little"))
    return best


def decode_ids(
    encoding: str, data: NDArray[np.uint8], rows: int, first: int, last: int, where: str
) -> RowIds:
    """The ids again, checked to be ``rows`` ascending ones from ``first`` to ``last``."""
    if rows == 0:
        return np.empty(0, np.int64)
    try:
        ids = _decode(encoding, data, rows, first, last)
    except (ValueError, RuntimeError) as error:
        raise CorruptCheckpoint(f"{where}: row ids cannot be decoded: {error}") from None
    if len(ids) != rows or ids[0] != first or ids[-1] != last or (np.diff(ids) < 0).any():
        raise CorruptCheckpoint(f"{where}: row ids are not what the header says")
    return ids


def _decode(encoding: str, data: NDArray[np.uint8], rows: int, first: int, last: int) -> RowIds:
    if encoding == "range":
        if last - first != rows - 1:
            raise ValueError(f"{rows} ids from {first} to {last} are no range")
        return np.arange(first, last + 1, dtype=np.int64)
    if encoding == "raw":
        return data.view("<i8")
    if encoding == "bitmap":
        if len(data) != (last - first + 8) // 8:
            raise ValueError("a bitmap of the wrong length")
        return np.flatnonzero(np.unpackbits(data, count=last - first + 1, bitorder="little")) + first
    size = int(encoding[-1])
    if encoding == f"zgap{size}":
        unpacked = np.empty(rows, f"<u{size}")
        # A frame says how long its content is; decompress2 refuses one that does not fit the buffer.
        written = blosc2.decompress2(data, dst=unpacked)
        if written is not None and written != unpacked.nbytes:
            raise ValueError("compressed ids of the wrong length")
        gaps = unpacked
    elif encoding == f"gap{size}":
        gaps = data.view(f"<u{size}")
    else:
        raise ValueError(f"unknown encoding {encoding!r}")
    ids = np.cumsum(gaps, dtype=np.int64)
    ids += first
    return ids
