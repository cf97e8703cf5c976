"""Tensors of which each rank has a part, on each rank of a job in turn; nothing here communicates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast as hf
from holdfast.checkpoint.format.dense import Array
from holdfast.checkpoint.torch.sharded import (
    ArrayPart,
    cut,
    empty_rows,
    is_sharded,
    local,
    ranks_of,
    rows_here,
    version,
    without_parts,
)
from holdfast.checkpoint.torch.values import plain_leaf
from holdfast.errors import CorruptCheckpoint, UnsupportedState

ROWS = 5


@contextmanager
def being_rank(rank: int, world_size: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield DeviceMesh("cpu", list(range(world_size)))
    finally:
        dist.destroy_process_group()


def sharded(mesh: DeviceMesh, whole: torch.Tensor, *placements: Placement) -> DTensor:
    """This rank's part of a tensor, as torch.chunk makes it."""
    part = whole
    for placement in placements:
        if isinstance(placement, Shard):
            parts = whole.chunk(mesh.size(), placement.dim)
            rank = mesh.get_local_rank()
            empty = whole.narrow(placement.dim, 0, 0)
            part = parts[rank] if rank < len(parts) else empty
    return DTensor.from_local(
        part.contiguous().clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_parts_of_all_ranks_are_the_whole(world_size: int, dim: int | None) -> None:
    whole = torch.randn(ROWS, 3)
    placement = Replicate() if dim is None else Shard(dim)
    parts: list[ArrayPart] = []
    for rank in range(world_size):
        with being_rank(rank, world_size) as mesh:
            tensor = sharded(mesh, whole, placement)
            assert is_sharded(tensor)
            assert ranks_of(tensor) == list(range(world_size))
            again: Any = cut(whole, tensor)
            assert local(again).equal(local(tensor))
            assert again.placements == tensor.placements
            parts.append(plain_leaf(tensor, "here"))
            assert without_parts({"a": parts[-1]}) == {"a": parts[-1].array}
    for rank in range(world_size):
        others = parts[:rank] + parts[rank + 1 :]
        assert parts[rank].joined(others, "here") == plain_leaf(whole, "here")
    if world_size > 1 and dim is not None:
        with pytest.raises(CorruptCheckpoint, match="not complete on all ranks"):
            parts[0].joined(parts[2:], "here")


@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_rows_of_a_table(world_size: int) -> None:
    whole = torch.randn(ROWS, 3)
    found: list[int] = []
    for rank in range(world_size):
        with being_rank(rank, world_size) as mesh:
            tensor = sharded(mesh, whole, Shard(0))
            here = rows_here("t", tensor)
            assert here is not None
            assert here.of == ROWS
            assert local(tensor).equal(whole[here.first : here.first + here.rows])
            found += range(here.first, here.first + here.rows)
            state: Any = empty_rows(tensor, 2, torch.float64)
            assert (tuple(state.shape), state.dtype) == ((ROWS, 2), torch.float64)
            assert len(local(state)) == here.rows
    assert found == list(range(ROWS))
    assert rows_here("t", whole) is None


@pytest.mark.parametrize("placement", [Shard(1), Replicate()])
def test_a_table_that_is_not_sharded_by_rows(placement: Placement) -> None:
    with (
        being_rank(0, 2) as mesh,
        pytest.raises(UnsupportedState, match=r"t is a DTensor .* expected \(Shard\(dim=0\),\)"),
    ):
        rows_here("t", sharded(mesh, torch.zeros(4, 4), placement))


def test_a_sum_that_is_not_added_up_yet() -> None:
    with being_rank(0, 2) as mesh:
        tensor = DTensor.from_local(torch.zeros(2), mesh, (Partial(),), run_check=False)
        with pytest.raises(UnsupportedState, match="expected Shard and Replicate"):
            plain_leaf(tensor, "model.x")


def test_writes_are_counted() -> None:
    with being_rank(0, 2) as mesh:
        tensor = sharded(mesh, torch.zeros(4, 2), Shard(0))
        counts = [version(tensor)]
        tensor.add_(1.0)
        counts.append(version(tensor))
        local(tensor).add_(1.0)
        counts.append(version(tensor))
    assert counts == sorted(set(counts))


def test_parts_that_do_not_belong_together() -> None:
    zeros = torch.zeros(2, dtype=torch.float32)
    array = plain_leaf(zeros, "here")
    assert isinstance(array, Array)
    part = ArrayPart(array, (4,), (0,))
    with pytest.raises(CorruptCheckpoint, match="same shape and type"):
        part.joined([ArrayPart(array, (5,), (2,))], "here")


def test_loading_into_a_part_is_refused(tmp_path: Path) -> None:
    """Rows of a version would be written to where others of this rank are."""
    whole = nn.Embedding(ROWS, 4)
    with hf.Checkpointer(tmp_path, {"model": whole}, allow_without_optimizer=True) as ckpt:
        ckpt.save(0)
    with being_rank(1, 2) as mesh:
        model = nn.Embedding(ROWS, 4)
        model.weight = nn.Parameter(sharded(mesh, torch.zeros(ROWS, 4), Shard(0)))
        with pytest.raises(UnsupportedState, match="shard them afterwards"):
            hf.load(tmp_path, {"model": model})
        assert not local(model.weight).any()
