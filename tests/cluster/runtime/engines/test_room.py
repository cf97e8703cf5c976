"""What is reserved on each machine of a cluster."""

from __future__ import annotations

import pytest

import holdfast as hf
from holdfast.cluster.runtime.engines.room import room_for, room_in_words

GB = 10**9


@pytest.mark.parametrize(
    ("options", "machines", "room"),
    [
        (hf.Ray(), 3, {"CPU": 3.0}),
        (hf.Ray(server_memory=GB, worker_memory=2 * GB), 1, {"CPU": 3.0, "memory": 4.0 * GB}),
        # Two servers and a worker of a lost machine come to two others: one of each.
        (hf.Ray(server_memory=GB, worker_memory=2 * GB), 3, {"CPU": 3.0, "memory": 7.0 * GB}),
        (hf.Ray(server_memory=GB, worker_memory=2 * GB, spares=1), 3, {"CPU": 3.0, "memory": 4.0 * GB}),
        (hf.Ray(server_cpus=0.5, worker_cpus=0, server_memory=GB), 3, {"CPU": 1.0, "memory": 3.0 * GB}),
        (hf.Ray(server_cpus=0, worker_cpus=0), 3, {"CPU": 0.001}),
    ],
)
def test_room(options: hf.Ray, machines: int, room: dict[str, float]) -> None:
    assert room_for(options, servers=2, workers=1, machines=machines) == room


def test_room_in_words() -> None:
    assert room_in_words({"CPU": 3.0, "memory": 7.0 * GB}) == "3 CPUs and 7 GB of memory"
    assert room_in_words({"CPU": 0.5}) == "0.5 CPUs"
    assert room_in_words({"memory": 1.5 * GB}) == "0 CPUs and 1.5 GB of memory"
