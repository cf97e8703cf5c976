"""Parse the rows of workers' messages into arrays of validated size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.cluster.protocol.envelope import Frame, as_array
from holdfast.cluster.protocol.messages import Part
from holdfast.tables.shard import GroupShard

Update = tuple[int, NDArray[np.uint32], NDArray[np.float32]]
"""A group, places of its rows, and their gradients."""
_NOTHING: NDArray[np.float32] = np.empty((0, 0), np.float32)


def shard_of(shards: Sequence[GroupShard], part: Part) -> GroupShard:
    """The shard of a part's group."""
    if not 0 <= part.group < len(shards):
        raise ValueError(f"group {part.group}: there are {len(shards)}")
    return shards[part.group]


def pulled_rows(parts: Sequence[Part], frames: Sequence[Frame]) -> list[Update]:
    """Parse the parts of a pull, which have no gradients."""
    return [
        (part.group, as_array(frame, np.uint32, (part.rows,)), _NOTHING)
        for part, frame in zip(parts, frames, strict=True)
    ]


def pushed_rows(shards: Sequence[GroupShard], parts: Sequence[Part], frames: Sequence[Frame]) -> list[Update]:
    """Parse the parts of a push. Validates all of them first: a partly applied push cannot be undone."""
    if len(frames) != 2 * len(parts):
        raise ValueError("the frames of a push do not match its parts")
    updates: list[Update] = []
    for number, part in enumerate(parts):
        shard = shard_of(shards, part)
        places = as_array(frames[2 * number], np.uint32, (part.rows,))
        values = as_array(frames[2 * number + 1], np.float32, (part.rows, shard.plan.dim))
        shard.check(places)
        updates.append((part.group, places, values))
    return updates
