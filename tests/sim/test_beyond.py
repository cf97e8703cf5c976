"""More servers die than the code covers: rows that are lost go back to what was last saved, no others do."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.cluster.redundancy.replicator import Replicator
from holdfast.cluster.runtime.transport.memory import Weather
from holdfast.sim.cluster import Cluster, counting_plan
from holdfast.sim.schedule import protected_plan_of, simulate

SEEDS = range(10, 26)


def run(seed: int) -> tuple[int, list[str]]:
    """How many rows went back, and what is wrong."""
    weather = Weather(loss=0.02, duplication=0.05, delay_seconds=0.003, ordered=seed % 5 == 0)
    plan = replace(protected_plan_of(seed), beyond="rows")
    cluster = Cluster(plan, seed, 60, weather)
    for tenths in range(8, 40):
        cluster.network.at(tenths / 10, cluster.cut)
    outcome = simulate(seed, cluster=cluster, faults=16)
    failure = cluster.supervisor.failure
    if failure is not None and any(recovery.network_lost for recovery in cluster.recoveries):
        assert not cluster.savers[failure.peer.slot].copies, "nothing was saved that it could go back to"
        return 0, []
    return sum(recovery.went_back.went_back for recovery in cluster.recoveries), outcome.violations


def test_only_what_is_lost_goes_back_and_parities_follow() -> None:
    found = []
    for seed in SEEDS:
        count, violations = run(seed)
        assert violations == [], seed
        found.append(count)
    assert sum(count > 0 for count in found) > len(found) / 10, found
    assert sum(count == 0 for count in found) > len(found) / 10, found


def test_parities_that_contain_what_was_lost_would_be_taken_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard is taken out: parity servers do not hear that rows went back."""

    def silent(self: Any, *args: Any) -> None:
        """Tell nobody."""

    monkeypatch.setattr(Replicator, "forget", silent)
    assert any(run(seed)[1] for seed in SEEDS), "simulated jobs do not notice"


def test_a_network_that_was_never_saved_does_not_become_first_values() -> None:
    plan = counting_plan(servers=3, workers=2, atomic=True, k=2, r=1, beyond="rows")
    cluster = Cluster(plan, 1, 100)
    assert cluster.network.run(lambda: cluster.supervisor.steps() >= 40, 60.0)
    for slot in range(2):
        cluster.kill("server", slot, noticed=True)
    assert cluster.network.run(lambda: cluster.supervisor.view.phase == "stopping", 120.0)
    failure = cluster.supervisor.failure
    assert failure is not None
    assert failure.kind == "lost"
    assert "could not recover" in failure.text
