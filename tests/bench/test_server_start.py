"""The start of a server is measured: every figure that is claimed is there and makes sense."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from holdfast.bench.harness import Report
from holdfast.bench.server_start import measure
from holdfast.sim.cluster import counting_plan


@pytest.mark.soak
def test_every_claimed_figure() -> None:
    report = Report("job", quick=True, console=Console(file=io.StringIO()))
    measure(report, counting_plan(servers=2, workers=1, atomic=True), rounds=1)
    for kind in ("server_start_seconds", "server_start_cpu_seconds"):
        assert {f"job.{kind}.{how}" for how in ("cold", "warm", "uncached")} <= report.figures.keys()
    assert all(value > 0 for value in report.figures.values())
    cpu = {how: report.figures[f"job.server_start_cpu_seconds.{how}"] for how in ("cold", "uncached")}
    assert cpu["uncached"] > cpu["cold"], "it compiles what the other loads"
    report.to_json()
