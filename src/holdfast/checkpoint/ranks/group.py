"""Which job of many ranks this process belongs to."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from holdfast.checkpoint.ranks.link import Link
from holdfast.errors import ConfigError


def link_of(process_group: Any, silent_seconds: float) -> Link | None:
    """The link to the other ranks of a process group, by default of the default one; None if there are none.

    Raises:
        ConfigError: this is one process of several that have no process group.
    """
    if not silent_seconds > 0:
        raise ConfigError(f"rank_timeout_seconds is {silent_seconds!r}: expected a number above 0")
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise ConfigError("process_group was given, but torch.distributed is not initialized")
        _refuse_uncoordinated()
        return None
    size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    if rank < 0:
        raise ConfigError(
            "this process is no member of the process_group: make the Checkpointer in its members alone"
        )
    if size == 1:
        return None
    members = dist.get_process_group_ranks(process_group)
    return Link(_store_of(process_group), rank, size, silent_seconds, members)


def _refuse_uncoordinated() -> None:
    """Raise ConfigError in one of several processes that a launcher has started and nobody has connected."""
    size, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    if rank.isdigit() and size.isdigit() and int(size) > 1:
        raise ConfigError(
            f"this is rank {rank} of {size} (by RANK and WORLD_SIZE), but torch.distributed is not "
            "initialized, so the ranks cannot agree on a version: call "
            "torch.distributed.init_process_group() before you make the Checkpointer, on every rank"
        )


def _store_of(process_group: Any) -> Any:
    """The store through which the members of a group found each other; PyTorch has no public name for it."""
    group: Any = process_group if process_group is not None else dist.group.WORLD
    return dist.distributed_c10d._world.pg_map[group][1]
