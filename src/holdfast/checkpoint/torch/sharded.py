"""Tensors of which each rank has a part: PyTorch's ``DTensor``, also as FSDP2 (``fully_shard``) makes it.

A *table* may be sharded by rows over all ranks (``Shard(0)``): each rank has contiguous rows, or none. Any
other tensor may be sharded in any dimension. No call here communicates: parts of other ranks come with their
reports, and a restored tensor is cut out of the whole one.

To import DTensor takes a second. Whoever has one has imported it, so nothing here does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.checkpoint.format.dense import DENSE_ELEMENT_BYTES, Array, map_tree
from holdfast.checkpoint.memory.shares import Share
from holdfast.errors import CorruptCheckpoint, UnsupportedState

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether this rank may have only a part of it."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The tensor that is in this process's memory."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def version(tensor: Tensor) -> int:
    """PyTorch's count of what was written to it."""
    count = int(tensor._version)
    return count + int(tensor._local_tensor._version) if is_sharded(tensor) else count


def rows_here(name: str, tensor: Tensor) -> Share | None:
    """The rows that this rank has of a table or of an optimizer's state of it; None: all.

    Raises UnsupportedState if it is sharded in any other way than by rows over one dimension of ranks.
    """
    if not is_sharded(tensor):
        return None
    if len(tensor.placements) != 1 or not _is_by_rows(tensor.placements[0]):
        raise UnsupportedState(
            f"{name} is a DTensor with placements {tuple(tensor.placements)}: expected (Shard(dim=0),), rows "
            "over all ranks; distribute the table so, or leave it whole on every rank"
        )
    shape, offset = _place(tensor)
    return Share(offset[0], shape[0], tensor.shape[0])


def ranks_of(tensor: Tensor) -> list[int]:
    """The ranks that have a part of it, in this order."""
    assert is_sharded(tensor)
    ranks: list[int] = tensor.device_mesh.mesh.flatten().tolist()
    return ranks


def cut(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, distributed as another tensor of its shape is."""
    if not is_sharded(like):
        return whole
    shape, offset = _place(like)
    part = whole[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))]
    return _distributed(part.contiguous(), like)


def empty_rows(like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Zeros with as many rows as a table, distributed as that is."""
    rows = torch.zeros((len(local(like)), width), dtype=dtype)
    return _distributed(rows, like, (like.shape[0], width)) if is_sharded(like) else rows


def reshard(modules: Iterable[nn.Module]) -> None:
    """Let FSDP2 put its sharded parameters in place again, which a forward pass without a backward pass, of
    an evaluation for example, has replaced by whole ones."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for model in modules if fsdp is not None else ():
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):  # type: ignore[union-attr]
                module.reshard()


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """A copy of what is here of a tensor, on its way into a tree."""

    copy: Tensor
    like: Tensor


@dataclass(frozen=True, slots=True)
class ArrayPart:
    """This rank's part of an array that is stored whole, in the tree of a state.

    Attributes:
        array: the part.
        shape: of the whole.
        offset: where the part begins in it.
    """

    array: Array
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, array: Array, path: str) -> ArrayPart:
        """Of a DTensor, with a copy of what is here."""
        assert is_sharded(tensor)
        kinds = {type(placement).__name__ for placement in tensor.placements}
        if not kinds <= {"Shard", "Replicate"}:
            raise UnsupportedState(
                f"{path} is a DTensor with placements {tuple(tensor.placements)}: expected Shard and "
                "Replicate"
            )
        return cls(array, tuple(tensor.shape), _place(tensor)[1])

    def joined(self, others: Sequence[ArrayPart], where: str) -> Array:
        """The whole array, of this part and those of all other ranks."""
        itemsize = DENSE_ELEMENT_BYTES[self.array.dtype]
        whole = np.zeros((*self.shape, itemsize), np.uint8)
        found = np.zeros(self.shape, np.bool_)
        for part in (self, *others):
            if part.shape != self.shape or part.array.dtype != self.array.dtype:
                raise CorruptCheckpoint(f"{where} is not of the same shape and type on all ranks")
            at = tuple(
                slice(begin, begin + size) for begin, size in zip(part.offset, part.array.shape, strict=True)
            )
            whole[at] = part.array.data.reshape(*part.array.shape, itemsize)
            found[at] = True
        if not found.all():
            raise CorruptCheckpoint(f"{where} is not complete on all ranks together")
        return Array(self.array.dtype, self.shape, whole.reshape(-1), "tensor")


def without_parts(tree: Any) -> Any:
    """A tree that can be encoded, to see whether the rest of it can."""
    return map_tree(tree, lambda value, path: value.array if isinstance(value, ArrayPart) else value)


def _is_by_rows(placement: Any) -> bool:
    return type(placement).__name__ == "Shard" and placement.dim == 0


def _place(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offset of what is here."""
    found = sys.modules["torch.distributed.tensor._utils"].compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(found[0]), tuple(found[1])


def _distributed(part: Tensor, like: DTensor, shape: tuple[int, ...] | None = None) -> Tensor:
    size = torch.Size(shape or like.shape)
    stride: Any = torch.empty(size, device="meta").stride()
    return type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=size, stride=stride
    )
