"""The bench itself, on a trace that takes seconds: every figure that is claimed is there and makes sense."""

from __future__ import annotations

import io

from rich.console import Console

from holdfast.bench.checkpoint import measure
from holdfast.bench.harness import Report

CLAIMED = {
    "tracking_percent", "chunked.stall_over_gather", "chunked.read_over_live",
    "chunked.restore_over_differential", "incremental.restore_over_chunked",
    "chunked.stored_over_incremental", "chunked.stored_over_differential",
    "full.written_over_chunked", "dcp_async.stall_over_chunked",
    "chunked.restore_over_differential.cached", "incremental.restore_over_chunked.cached",
    "floor.restore_over_chunked", "floor.restore_over_chunked.cached",
    "digest.percent", "dense_adam.written_over_full", "dense_adam.stall_over_step",
    "chunked.rewritten_per_saved", "chunked.background_cpu_seconds_per_checkpoint",
}  # fmt: skip


def test_every_claimed_figure() -> None:
    report = Report("checkpoint", quick=True, console=Console(file=io.StringIO()))
    measure(report, versions=20, max_rows=3000, rounds=1)
    figures = report.figures
    assert figures.keys() >= CLAIMED
    assert all(value > 0 for value in figures.values())
    # Counts do not depend on the machine: what is read is at least what is live, and far less than all.
    assert 1 <= figures["chunked.read_over_live"] < figures["incremental.read_over_live.last"]
    assert figures["chunked.stored_over_differential"] < 1
    # Adam moves rows that it has ever touched, and no others.
    assert 0.9 < figures["dense_adam.rows_over_touched"] < 1.1
    report.to_json()
