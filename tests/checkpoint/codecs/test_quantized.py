"""``hf.quantize``: arrays and tensors there and back."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

import holdfast as hf
from holdfast.checkpoint.codecs.quantize import choose_grid_bits

PATTERNS = hnp.arrays(
    np.uint32,
    st.tuples(st.integers(0, 6), st.integers(1, 20)),
    elements=st.one_of(
        st.integers(0, 2**32 - 1),
        st.integers(0x3A000000, 0x3F000000),
        st.sampled_from([0, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F7FFFFF]),
    ),
)


@settings(deadline=None)
@given(PATTERNS, st.sampled_from([2, 3, 4, 8]), st.sampled_from([None, 16, 32]))
def test_finite_rows_within_a_step_others_bit_by_bit(
    patterns: NDArray[np.uint32], bits: int, grid_bits: int | None
) -> None:
    rows = patterns.view(np.float32)
    quantized = hf.quantize(rows, bits, grid_bits=grid_bits)
    back = quantized.dequantize()
    assert back.shape == quantized.shape == rows.shape
    assert back.dtype == quantized.dtype == np.float32
    finite = np.isfinite(rows).all(1)
    assert np.array_equal(back[~finite].view(np.uint32), patterns[~finite])
    assert np.isfinite(back[finite]).all()
    wide = rows[finite].astype(np.float64)
    steps = (wide.max(1) - wide.min(1)) / (2**bits - 1) if len(wide) else np.empty(0)
    assert (np.abs(back[finite] - wide) <= steps[:, None]).all()
    assert quantized.bits == bits
    per_row = quantized.codec.stored_bytes(rows.shape[1])
    raw = len(quantized.raw_ids)
    assert quantized.nbytes == len(rows) * per_row + raw * (8 + rows.shape[1] * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_come_back_as_tensors(dtype: torch.dtype) -> None:
    rows = torch.randn(100, 17, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[3, 5] = float("nan")
    rows[4, 0] = -float("inf")
    parameter = torch.nn.Parameter(rows.clone())
    quantized = hf.quantize(parameter, 8)
    back = quantized.dequantize()
    assert back.dtype == quantized.dtype == dtype
    assert torch.equal(back[3:5].view(torch.uint8), rows[3:5].view(torch.uint8))
    good = [i for i in range(100) if i not in (3, 4)]
    step = (rows[good].float().amax(1) - rows[good].float().amin(1)) / 255
    rounding = rows[good].float().abs() * torch.finfo(dtype).eps
    assert ((back[good].float() - rows[good].float()).abs() <= step[:, None] + rounding).all()


def test_halves_and_slices_of_numpy() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 32)).astype(np.float16)[::2, ::2]
    back = hf.quantize(rows, 8).dequantize()
    assert back.dtype == np.float16
    assert np.abs(back - rows).max() < 0.03


def test_threads_change_nothing() -> None:
    rows = np.random.default_rng(0).normal(size=(20_003, 8)).astype(np.float32)
    rows[::997] = np.inf
    one, three = hf.quantize(rows, 2), hf.quantize(rows, 2, threads=3)
    assert np.array_equal(one.stored, three.stored)
    assert np.array_equal(one.raw_ids, three.raw_ids)
    assert np.array_equal(one.dequantize(), three.dequantize(threads=3))


def test_grids_are_chosen_by_the_rows() -> None:
    rows = np.random.default_rng(0).normal(size=(500, 64)).astype(np.float32)
    assert hf.quantize(rows).codec.grid_bits == 16
    assert hf.quantize(rows + 1000).codec.grid_bits == 32
    assert choose_grid_bits(rows + 1000, 4) == 32
    assert "500 rows of 64 float32 in 4 bits: 18000 bytes, 0 rows raw" in repr(hf.quantize(rows))


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([[1.0]], {}, "rows is a list: expected a NumPy array or a torch tensor"),
        (np.zeros((2, 2)), {}, "rows is float64: expected float32.*convert it to float32"),
        (torch.zeros(2, 2, dtype=torch.int32), {}, "rows is torch.int32: expected float32"),
        (np.zeros(4, np.float32), {}, r"rows has the shape \(4,\): expected \[rows, dim\]"),
        (np.zeros((4, 0), np.float32), {}, r"rows has the shape \(4, 0\)"),
        (np.zeros((2, 2), np.float32), {"bits": 5}, "bits is 5: expected 2, 3, 4 or 8"),
        (np.zeros((2, 2), np.float32), {"bits": "4"}, "bits is '4'"),
        (np.zeros((2, 2), np.float32), {"method": "kmeans"}, "method is 'kmeans': expected one of symmetric"),
        (np.zeros((2, 2), np.float32), {"num_bins": 0}, "num_bins is 0: expected"),
        (np.zeros((2, 2), np.float32), {"ratio": 1.5}, "ratio is 1.5: expected"),
        (np.zeros((2, 2), np.float32), {"grid_bits": 8}, "grid_bits is 8: expected 16 or 32"),
        (np.zeros((2, 2), np.float32), {"threads": 0}, "threads is 0: expected 1 or more"),
    ],
    ids=str,
)
def test_mistakes_are_named(rows: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(hf.ConfigError, match=message):
        hf.quantize(rows, **options)


def test_arrays_are_quantized_without_torch() -> None:
    code = (
        "import sys, numpy, holdfast; "
        "holdfast.quantize(numpy.ones((3, 4), numpy.float32)).dequantize(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_example_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "quantization.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "quantization.md", "exec"), names)  # noqa: S102
    assert f"{float(capsys.readouterr().out):.2f}" == re.findall(r"# (0\.\d+)", example)[0]
    assert names["back"].shape == (100_000, 64)
