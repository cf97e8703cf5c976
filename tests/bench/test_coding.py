"""The bench on arrays that take no time: every figure that is claimed is there and makes sense."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from holdfast.bench.coding import WORDS, measure_drift, measure_updates, measure_xor
from holdfast.bench.harness import BENCHES, Report


@pytest.fixture
def report() -> Report:
    return Report("coding", quick=True, console=Console(file=io.StringIO()))


def test_speeds(report: Report) -> None:
    measure_xor(report, rounds=1, table_bytes=1 << 16)
    for words in WORDS:
        measure_updates(report, words, rounds=1, table_bytes=1 << 16)
    names = [
        f"coding.{prefix}{code}_gigabytes_per_second"
        for prefix in ("", "words128.")
        for code in ("xor", "rs2", "rs3")
    ]
    assert {"coding.xor_over_memcpy", *names} <= set(report.figures)
    assert all(value > 0 for value in report.figures.values())
    report.to_json()


def test_float_sums_drift_and_bits_do_not(report: Report) -> None:
    """Hole 1."""
    measure_drift(report, updates=4000, columns=64)
    figures = report.figures
    assert figures["coding.xor.bit_exact"] == 1
    assert figures["coding.float_sum.bit_exact"] < 0.5
    assert 1e-8 < figures["coding.float_sum.median_relative_error"] < 1e-2
    assert (
        figures["coding.float_sum.worst_relative_error"] > figures["coding.float_sum.median_relative_error"]
    )


def test_the_bench_is_listed() -> None:
    assert "coding" in BENCHES
