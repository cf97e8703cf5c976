"""A worker's questions to servers."""

from __future__ import annotations

import numpy as np

from holdfast.cluster.calls import Calls, Spread
from holdfast.cluster.messages import Peer, ServerInView
from holdfast.sim.cluster import counting_plan


def test_a_worker_that_was_stopped_does_not_call_servers_stuck() -> None:
    plan = counting_plan(servers=1, workers=1, atomic=False)
    spread = Spread(np.zeros(1, np.uint32), np.array([0, 1]))
    calls = Calls(Peer("worker", 0, 1), plan, lambda group: (spread, np.zeros((1, 1), np.float32)))
    calls.adopt([ServerInView(0, 1, "there")])
    calls.tick(10.0)
    calls.pull([spread, spread], 10.0)
    calls.tick(10.1)
    calls.tick(70.1)  # stopped for a minute
    assert 70.1 - calls.waiting_since()[0] < plan.timing.stuck_seconds
    for tenth in range(1, 15):
        calls.tick(70.1 + tenth / 10)
    assert 71.5 - calls.waiting_since()[0] > plan.timing.stuck_seconds
