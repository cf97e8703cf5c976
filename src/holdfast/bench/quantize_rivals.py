"""What ``bench quantize`` compares the codecs with: torch's row-wise quantizers, fbgemm's, and k-means.

A rival that quantizes gives the rows back as they would be read, and the bytes that it takes for one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.kernels.kmeans import kmeans_rows

Floats = NDArray[np.float32]
ITERATIONS = 15
"""Of k-means, as in Check-N-Run's section 4.2.2."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A row-wise quantizer of another library.

    ``encode`` quantizes rows; it is what is timed. ``decode`` takes what it gives.
    """

    name: str
    bits: int
    encode: Callable[[Tensor], Any]
    decode: Callable[[Any], Tensor]
    bytes_per_row: Callable[[int], int]

    def read_back(self, values: Floats) -> Floats:
        """The rows after quantization."""
        rows: Floats = self.decode(self.encode(torch.from_numpy(values))).numpy()
        return rows


def torch_optimized(bits: int) -> Rival:
    """``torch.choose_qparams_optimized`` row by row, with its defaults, then what those numbers imply.

    Only the choice is timed. Both numbers are kept in float32.
    """
    levels = 2**bits - 1

    def encode(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = [torch.choose_qparams_optimized(row, len(row), 200, 0.16, bits) for row in rows]
        return rows, torch.cat([high for high, _ in found]), torch.cat([low for _, low in found])

    def decode(chosen: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        rows, high, low = chosen[0], chosen[1][:, None], chosen[2][:, None]
        scale = (high - low) / levels
        back: Tensor = torch.clamp(torch.round((rows - low) / scale), 0, levels) * scale + low
        return back

    return Rival("torch", bits, encode, decode, lambda dim: 8 + (dim * bits + 7) // 8)


def prepack(bits: int, *, optimized: bool = False) -> Rival:
    """``torch.ops.quantized.embedding_bag_…_prepack``; ``optimized`` searches as ``choose_qparams`` does."""
    kind = "byte" if bits == 8 else f"{bits}bit"
    pack = getattr(torch.ops.quantized, f"embedding_bag_{kind}_prepack")
    unpack = getattr(torch.ops.quantized, f"embedding_bag_{kind}_unpack")
    header = 8 if bits == 8 else 4
    return Rival(
        "prepack_optimized" if optimized else "prepack",
        bits,
        (lambda rows: pack(rows, True)) if optimized else pack,
        unpack,
        lambda dim: header + (dim * bits + 7) // 8,
    )


def fbgemm(bits: int) -> Rival | None:
    """Fbgemm's row-wise quantizers; None where the package is missing."""
    try:
        importlib.import_module("fbgemm_gpu")
        ops = torch.ops.fbgemm
        if bits == 8:
            encode, decode = ops.FloatToFused8BitRowwiseQuantized, ops.Fused8BitRowwiseQuantizedToFloat
            return Rival("fbgemm", 8, encode, decode, lambda dim: 8 + dim)
        pack, unpack = ops.FloatToFusedNBitRowwiseQuantizedSBHalf, ops.FusedNBitRowwiseQuantizedSBHalfToFloat
    except (ImportError, OSError, AttributeError):
        return None
    return Rival(
        "fbgemm",
        bits,
        lambda rows: pack(rows, bits),
        lambda packed: unpack(packed, bits),
        lambda dim: 4 + (dim * bits + 7) // 8,
    )


def rivals(bits: int) -> list[Rival]:
    """All that there are for so many bits; torch and fbgemm do not pack 3."""
    found: list[Rival | None] = []
    if bits < 8:
        found.append(torch_optimized(bits))
    if bits != 3:
        found += [prepack(bits), fbgemm(bits)]
    if bits in (2, 4):
        found.append(prepack(bits, optimized=True))
    return [rival for rival in found if rival is not None]


def kmeans(values: Floats, clusters: int, *, plus_plus: bool = False) -> Floats:
    """Each row through k-means of its own, 15 iterations.

    They start from values of the row at places drawn at random, none twice; ``plus_plus``: drawn far from
    each other (k-means++), which costs more and finds better clusters.
    """
    out = np.empty_like(values)
    kmeans_rows(values, np.sort(values, 1).astype(np.float64), clusters, ITERATIONS, plus_plus, 0, out)
    return out


def kmeans_bytes(dim: int, clusters: int) -> int:
    """Bytes of a row: its codes, and its centers in 16 bits."""
    return (dim * (clusters - 1).bit_length() + 7) // 8 + 2 * clusters


def clusters_within(limit: int, dim: int) -> int:
    """The most clusters that k-means can have in so many bytes a row."""
    clusters = 1
    while kmeans_bytes(dim, clusters + 1) <= limit:
        clusters += 1
    return clusters
