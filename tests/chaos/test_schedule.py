"""Which faults a seed gives."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from holdfast.chaos.schedule import (
    BEYOND_KINDS,
    DESCRIPTIONS,
    OTHER_KINDS,
    SERVER_KINDS,
    TWO_KINDS,
    Fault,
    Shape,
    other_faults,
    points_of_pushes,
    server_faults,
)
from holdfast.cluster.protocol.plan import Timing
from holdfast.cluster.worker.faults import POINTS
from holdfast.cluster.worker.faults import PushFault as Point

SHAPE = Shape(servers=4, workers=2, r=1, timing=Timing(silent_seconds=2.0, stuck_seconds=3.0))
PAIRS = ("servers_apart", "servers_apart_for_good", "two_servers_kill")
TWO = Shape(servers=5, workers=3, r=2, timing=SHAPE.timing, beyond=True)


def faults(seed: int, shape: Shape, count: int = 400) -> list[Fault]:
    return [*islice(server_faults(seed, shape), count), *islice(other_faults(seed, shape), count)]


def test_a_seed_decides_everything() -> None:
    assert faults(1, SHAPE) == faults(1, SHAPE)
    assert faults(1, SHAPE) != faults(2, SHAPE)
    points = [*islice(points_of_pushes(1, SHAPE, 0, atomic=True), 50)]
    assert points == [*islice(points_of_pushes(1, SHAPE, 0, atomic=True), 50)]
    assert points != [*islice(points_of_pushes(1, SHAPE, 1, atomic=True), 50)]


@pytest.mark.parametrize(
    ("shape", "kinds"),
    [(SHAPE, SERVER_KINDS | OTHER_KINDS), (TWO, SERVER_KINDS | OTHER_KINDS | TWO_KINDS | BEYOND_KINDS)],
    ids=["2+1", "beyond 3+2"],
)
def test_all_kinds_come_and_their_targets_are_there(shape: Shape, kinds: dict[str, int]) -> None:
    found = faults(3, shape)
    assert set(Counter(fault.kind for fault in found)) == set(kinds) <= set(DESCRIPTIONS)
    for fault in found:
        assert len(set(fault.servers)) == len(fault.servers)
        assert set(fault.servers) <= set(range(shape.servers))
        assert 0 <= fault.worker < shape.workers
        assert fault.takes_servers == (fault.kind not in OTHER_KINDS)
    assert all(len(f.servers) == 2 for f in found if f.kind in PAIRS)
    assert all(len(f.servers) == shape.r + 1 for f in found if f.kind == "too_many_servers_kill")


def test_a_short_run_sees_most_kinds() -> None:
    assert len({fault.kind for fault in faults(1, SHAPE, 10)}) > len(SERVER_KINDS | OTHER_KINDS) // 2


def test_pauses_are_shorter_than_the_time_out_and_freezes_longer() -> None:
    found = faults(4, SHAPE)
    silent = SHAPE.timing.silent_seconds
    assert all(f.seconds < silent for f in found if f.kind.endswith("_pause"))
    assert all(f.seconds > silent for f in found if f.kind.endswith(("_freeze", "_cut_off")))
    apart = [f.seconds for f in found if f.kind.endswith("_apart")]
    assert min(apart) < SHAPE.timing.stuck_seconds < max(apart)


def test_workers_die_at_every_point() -> None:
    points = [Point.parse(text) for text in islice(points_of_pushes(1, SHAPE, 0, atomic=True), 200)]
    assert {point.point for point in points} == set(POINTS)
    assert {point.count for point in points if point.point == "push"} == set(range(SHAPE.servers))
    plain = {Point.parse(text).point for text in islice(points_of_pushes(1, SHAPE, 0, atomic=False), 200)}
    assert plain == set(POINTS) - {"commit"}
