"""The bench itself on a few rows: every figure that is claimed is there and makes sense."""

from __future__ import annotations

import io
import json

from rich.console import Console

from holdfast.bench.harness import Report
from holdfast.bench.quantize import measure
from holdfast.bench.quantize_rivals import clusters_within, fbgemm, kmeans_bytes

CLAIMED = {
    f"adaptive.{bits}.dim16.{figure}"
    for bits in (2, 3, 4)
    for figure in ("loss_over_torch", "loss_over_kmeans", "loss_over_kmeans_equal_bytes",
                   "rows_per_second_over_torch")
} | {"asymmetric.8.dim16.loss_over_prepack"}  # fmt: skip


def test_every_claimed_figure() -> None:
    output = io.StringIO()
    report = Report("quantize", quick=True, console=Console(file=output, width=120))
    measure(report, dims=(16,), steps=2, rows=60, timed_rows=64, rounds=1, max_rows=100)
    figures = report.figures
    assert figures.keys() >= CLAIMED
    assert all(value > 0 for value in figures.values())
    for bits in (2, 3, 4):
        assert figures[f"adaptive.{bits}.dim16.worst_loss_over_any"] <= 1
        assert figures[f"adaptive.{bits}.dim16.loss_of_16_bit_grids"] < 1.005
        assert figures[f"adaptive.{bits}.dim16.loss_over_kmeans_equal_bytes"] < 1.02
    # Sixteen centers for sixteen values: k-means stores the row itself, in more bytes than it had.
    assert figures["adaptive.4.dim16.loss_over_kmeans"] == float("inf")
    assert json.loads(report.to_json())["figures"]["adaptive.4.dim16.loss_over_kmeans"] is None
    assert ("asymmetric.8.dim16.rows_per_second_over_fbgemm" in figures) == (fbgemm(8) is not None)
    assert ("fbgemm-gpu-cpu is not installed" in output.getvalue()) == (fbgemm(8) is None)


def test_kmeans_in_equal_bytes() -> None:
    assert kmeans_bytes(64, 16) == 32 + 32
    for dim in (1, 16, 64, 128):
        for limit in (3, 20, 36, 100):
            clusters = clusters_within(limit, dim)
            assert kmeans_bytes(dim, clusters) <= limit < kmeans_bytes(dim, clusters + 1)
