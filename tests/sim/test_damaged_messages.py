"""Messages of which a bit is flipped on their way: noticed, dropped, and sent again as lost ones are."""

from __future__ import annotations

from collections import Counter

from holdfast.cluster.runtime.transport.memory import Weather
from holdfast.sim.cluster import Cluster
from holdfast.sim.schedule import protected_plan_of, simulate


def test_damaged_messages_count_as_lost() -> None:
    """With servers that die meanwhile; every row and every parity is right in the end."""
    counts: Counter[str] = Counter()
    for seed in range(10):
        weather = Weather(damage=0.05, duplication=0.05, delay_seconds=0.003)
        cluster = Cluster(protected_plan_of(seed), seed, 20, weather)
        outcome = simulate(seed, batches=20, faults=3, cluster=cluster)
        assert outcome.finished
        assert outcome.violations == []
        counts += outcome.messages
    assert counts["damaged"] > 500
    assert counts["lost"] == 0
