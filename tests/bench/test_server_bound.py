"""The bench on tables that take no time: every figure that is claimed is there and makes sense."""

from __future__ import annotations

import io
import statistics

import numpy as np
import pytest
from rich.console import Console

from holdfast.bench.harness import BENCHES, Report
from holdfast.bench.server_bound import (
    FLUSH,
    FULL,
    NONE,
    QUICK,
    Case,
    Machines,
    Pushes,
    Scale,
    Side,
    measure,
)
from holdfast.kernels import teams
from holdfast.tables.shard import digest

SMALL = Scale(200, FLUSH, 1, (Case("kaggle", 3, (Side("ecrm", 2), Side("ecrec", 2))),))


@pytest.mark.soak
def test_every_claimed_figure() -> None:
    report = Report("server-bound", quick=True, console=Console(file=io.StringIO()))
    measure(report, SMALL)
    for side in SMALL.cases[0].sides:
        for figure in ("cost", "step_cost", "machine_cost", "bytes_minimum"):
            assert report.figures[f"server_bound.kaggle.{side.name}.{figure}"] > 0
    assert {f"server_bound.none.servers{count}.cost" for count in (2, 5)} <= report.figures.keys()
    for figure in ("speedup", "cost", "machine_speedup", "ecrm.k4.machine_speedup"):
        assert 0.1 < report.figures[f"server_bound.threads2.{figure}"] < 10
    report.to_json()


@pytest.mark.parametrize("scale", [FULL, QUICK], ids=["full", "quick"])
def test_the_figures_with_a_target_are_measured(scale: Scale) -> None:
    (first, *_) = scale.cases
    assert (first.preset, first.servers) == ("terabyte", 5)
    assert {Side("ecrm", 4), Side("ecrec", 4)} <= set(first.sides)


def test_sides_get_the_same_pushes() -> None:
    """Rows and places differ with the placement; how many rows a push has does not."""
    none, coded = (Pushes.of("kaggle", 3, side, SMALL) for side in (NONE, Side("ecrm", 2)))
    rows = [[sum(part.rows for part, _ in shares) for shares in pushes.shares] for pushes in (none, coded)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == SMALL.pushes


def test_parities_follow_while_machines_run() -> None:
    machines = Machines(Pushes.of("kaggle", 3, Side("ecrec", 2), SMALL))
    before = digest(machines.servers[0].shards)
    assert machines.window() > 0
    assert digest(machines.servers[0].shards) != before
    for server in machines.servers:
        assert server.replicator is not None
        assert server.replicator.flushes == 1
        assert server.replicator.stable == 1
        assert server.replicator.kept(0) == FLUSH // 2


def test_threads_leave_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and parities, and the time on the clock is that of each window."""
    monkeypatch.setattr(teams, "LEAST_BYTES", 1)
    pushes = Pushes.of("kaggle", 3, Side("ecrec", 2), SMALL)
    assert pushes.with_threads(2).plan.server_threads == 2
    assert pushes.with_threads(2).shares is pushes.shares
    one, two = Machines(pushes), Machines(pushes, teams.Team(2))
    for machines in (one, two):
        machines.window()
        machines.window()
        assert len(machines.walls) == 2
        assert min(machines.walls) > 0
    for a, b in zip(one.servers, two.servers, strict=True):
        assert digest(a.shards) == digest(b.shards)
        assert a.replicator is not None
        assert b.replicator is not None
        for group, parity in a.replicator.parities.items():
            np.testing.assert_array_equal(parity.records, b.replicator.parities[group].records)


def test_the_bytes_that_must_move() -> None:
    """The slow twin: row by row."""
    pushes = Pushes.of("kaggle", 3, Side("replication", 1), SMALL)
    words = 2 * 16
    moved = 0
    different: list[set[int]] = [set() for _ in range(3)]
    for shares in pushes.shares:
        for server, (_, frames) in enumerate(shares):
            for place in np.asarray(frames[0]).tolist():
                moved += 16 * 4 + 2 * words * 4
                different[server].add(place)
    moved += sum(len(places) for places in different) * 3 * words * 4
    assert pushes.bytes_minimum() == moved
    assert statistics.mean(len(places) for places in different) > 0


def test_the_bench_is_listed() -> None:
    assert "server-bound" in BENCHES
