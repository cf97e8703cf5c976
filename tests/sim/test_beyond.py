"""More servers die than the code covers: rows that are lost go back to what was last saved, no others do."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.cluster import protection
from holdfast.cluster.transport.memory import Weather
from holdfast.sim.cluster import Cluster
from holdfast.sim.schedule import protected_plan_of, simulate

SEEDS = range(16)


def run(seed: int) -> tuple[int, list[str]]:
    """How many rows went back, and what is wrong."""
    weather = Weather(loss=0.02, duplication=0.05, delay_seconds=0.003, ordered=seed % 5 == 0)
    plan = replace(protected_plan_of(seed), beyond="rows")
    cluster = Cluster(plan, seed, 60, weather)
    outcome = simulate(seed, cluster=cluster, faults=16)
    return sum(recovery.went_back.went_back for recovery in cluster.recoveries), outcome.violations


def test_only_what_is_lost_goes_back_and_parities_follow() -> None:
    found = []
    for seed in SEEDS:
        count, violations = run(seed)
        assert violations == [], seed
        found.append(count)
    assert sum(count > 0 for count in found) > len(found) / 4, found
    assert sum(count == 0 for count in found) > len(found) / 10, found


def test_parities_that_contain_what_was_lost_would_be_taken_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard is taken out: parity servers do not hear that rows went back."""

    def silent(self: Any, *args: Any) -> None:
        """Tell nobody."""

    monkeypatch.setattr(protection.Protection, "forget", silent)
    assert run(1)[1], "simulated jobs do not notice"
