"""The bench on a few rows: every figure that is claimed is there and makes sense."""

from __future__ import annotations

import io

from rich.console import Console

from holdfast.bench.harness import BENCHES, Report
from holdfast.bench.kernels import CASES, measure_openmp, measure_simd
from holdfast.kernels import openmp


def test_every_claimed_figure() -> None:
    report = Report("kernels", quick=True, console=Console(file=io.StringIO()))
    measure_simd(report, rows=16, rounds=1, dims=(16,))
    measure_openmp(report, rounds=1, max_rows=1000)
    names = {f"simd.{work}.{name}.dim16" for work, name in CASES}
    assert names | {"openmp.own_thread_stall_over_openmp"} <= report.figures.keys()
    assert all(value > 0 for value in report.figures.values())
    assert openmp.ENABLED
    report.to_json()


def test_the_bench_is_listed() -> None:
    assert "kernels" in BENCHES
