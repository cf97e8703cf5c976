"""What a message names is checked before anything changes."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.cluster.protocol.messages import Part
from holdfast.cluster.server.requests import pulled_rows, pushed_rows, shard_of
from holdfast.coding.placement import Placement
from holdfast.tables.plan import GroupPlan, OptimizerPlan, TablePlan
from holdfast.tables.shard import GroupShard

GROUP = GroupPlan(name="t", dim=2, tables=(TablePlan("t", 5),), optimizer=OptimizerPlan(name="sgd", lr=0.1))
SHARDS = [GroupShard(GROUP, Placement(1), 0, 1) for _ in range(2)]
PLACES = np.array([3, 1], np.uint32).tobytes()
VALUES = np.arange(4, dtype=np.float32).tobytes()


def test_a_part_is_of_a_group_that_there_is() -> None:
    assert [shard_of(SHARDS, Part(group, 1)) for group in (0, 1)] == SHARDS
    for group in (-1, 2):
        with pytest.raises(ValueError, match=f"group {group}: there are 2"):
            shard_of(SHARDS, Part(group, 1))


def test_a_pull_has_places() -> None:
    ((group, places, gradients),) = pulled_rows([Part(1, 2)], [PLACES])
    assert (group, places.tolist(), gradients.size) == (1, [3, 1], 0)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        pulled_rows([Part(1, 2)], [])
    with pytest.raises(ValueError, match="3"):
        pulled_rows([Part(1, 3)], [PLACES])


def test_a_push_has_places_and_gradients_for_each_part() -> None:
    found = pushed_rows(SHARDS, [Part(1, 2), Part(0, 2)], [PLACES, VALUES, PLACES, VALUES])
    assert [group for group, _, _ in found] == [1, 0]
    for _, places, gradients in found:
        assert places.tolist() == [3, 1]
        assert gradients.tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "frames", [[PLACES], [PLACES, VALUES, PLACES], [VALUES, PLACES], [PLACES, VALUES[:-4]], []]
)
def test_frames_that_do_not_fit(frames: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"match|shape|bytes|expected"):
        pushed_rows(SHARDS, [Part(0, 2)], frames)


@pytest.mark.parametrize("places", [[5, 1], [1, 1]])
def test_places_that_are_not_there_or_named_twice(places: list[int]) -> None:
    with pytest.raises(ValueError, match=r"."):
        pushed_rows(SHARDS, [Part(0, 2)], [np.array(places, np.uint32).tobytes(), VALUES])
