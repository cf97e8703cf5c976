"""PyTorch's tensors and random states as bits, and back."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from holdfast.checkpoint.format.dense import Array, map_tree, unsupported
from holdfast.checkpoint.format.records import ELEMENT_BYTES, Field
from holdfast.checkpoint.torch.sharded import ArrayPart, LocalCopy, is_sharded, local
from holdfast.errors import CorruptCheckpoint, UnsupportedState

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
WIDEST_ROW = 1 << 20
"""Maximum number of elements in a row of a field."""


def why_no_rows(tensor: Tensor) -> str | None:
    """What keeps a tensor from being seen as rows of bytes, to follow its name in a sentence; or None."""
    if tensor.layout != torch.strided:
        return f"is {tensor.layout}, expected a dense tensor"
    if tensor.device.type != "cpu":
        return f"is on {tensor.device}: so far only tensors in main memory can be saved row by row"
    if ELEMENT_BYTES.get(DTYPE_NAMES.get(tensor.dtype, "")) is None:
        return f"has elements of type {tensor.dtype}, expected one of {', '.join(ELEMENT_BYTES)}"
    if not tensor.is_contiguous() or tensor.is_neg():
        return "is not contiguous: make it so with .contiguous()"
    if not tensor.dim() or not 0 < tensor.numel() <= WIDEST_ROW * len(tensor):
        return f"has shape {tuple(tensor.shape)}, expected rows of 1 to {WIDEST_ROW} elements"
    return None


def row_field(name: str, tensor: Tensor) -> Field:
    """The record field of this tensor, which must be viewable as rows."""
    return Field(name, DTYPE_NAMES[tensor.dtype], tensor.numel() // len(tensor))


def row_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """A tensor's memory as [rows, bytes], a view: writes to it change the tensor."""
    width = tensor.itemsize * math.prod(tensor.shape[1:])
    view: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy().reshape(-1, width)
    return view


def is_plain_memory(tensor: Tensor) -> bool:
    """Whether its elements are contiguous in memory, starting at its address."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def memory_key(tensor: Tensor) -> tuple[Any, ...] | None:
    """A key that is equal for tensors that view the same memory in the same way; None without memory."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.numel():
        return None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def plain_leaf(value: Any, path: str) -> Any:
    """A copy of a tensor, array or shape as a tree may hold it; UnsupportedState for anything else."""
    if isinstance(value, LocalCopy):
        return ArrayPart.of(value.like, _array_of(value.copy, path), path)
    if isinstance(value, Tensor):
        if is_sharded(value):
            return ArrayPart.of(value, _array_of(local(value), path), path)
        return _array_of(value, path)
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return Array.of(value) or unsupported(value, f"{path} (of type {value.dtype})")
    if isinstance(value, torch.Size):
        return tuple(value)
    unsupported(value, path)


def _array_of(tensor: Tensor, path: str) -> Array:
    if type(tensor) not in (Tensor, nn.Parameter):
        unsupported(tensor, path)
    if tensor.layout != torch.strided:
        raise UnsupportedState(
            f"{path} is a tensor of layout {tensor.layout}, not a dense one: torch.optim.SGD with momentum "
            "makes such tensors of sparse gradients, holdfast.training.optimizers.RowMomentum does not"
        )
    name = DTYPE_NAMES.get(tensor.dtype)
    if name is None or tensor.is_meta:
        unsupported(tensor, f"{path} ({tensor.dtype} on {tensor.device})")
    # One copy whatever the tensor's strides and device are, and never a view of live memory.
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return Array(name, tuple(tensor.shape), copy.reshape(-1).view(torch.uint8).numpy(), "tensor")


def live_leaf(value: Any) -> Any:
    """The tensor, array or NumPy scalar of an ``Array``, with its own memory."""
    if not isinstance(value, Array):
        raise CorruptCheckpoint(f"a checkpoint's state holds a {type(value).__name__}")
    if value.kind != "tensor":
        return value.to_numpy()
    # Memory of PyTorch's own is aligned as its kernels like it; a file's is not.
    tensor = torch.empty(value.shape, dtype=TORCH_DTYPES[value.dtype])
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = value.data
    return tensor


def copy_random_states() -> tuple[Any, Any, Any]:
    """Copy the states of the global random generators of PyTorch, NumPy and Python."""
    return torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()


def random_states(copied: tuple[Any, Any, Any]) -> dict[str, Any]:
    """Convert the result of ``copy_random_states`` to a tree."""
    torch_state, numpy_state, (version, words, gauss) = copied
    return {
        "torch": _array_of(torch_state, "rng.torch"),
        "numpy": map_tree(numpy_state, plain_leaf, "rng.numpy"),
        "python": {"version": version, "words": Array.of(np.array(words, np.uint32)), "gauss": gauss},
    }


def reseed(numbers: Sequence[int]) -> None:
    """Seed the global random generators by what they would draw next and these numbers."""
    drawn = torch.randint(1 << 62, (2,)).tolist()
    words = np.random.SeedSequence([*drawn, *numbers]).generate_state(4, np.uint64).tolist()
    torch.default_generator.manual_seed(words[0] >> 1)
    np.random.seed(np.array(words[1:3], np.uint64).view(np.uint32))
    random.seed(words[3])


def set_random_states(states: Any) -> None:
    """Restore the states from the result of ``random_states``."""
    try:
        python = states["python"]
        words = tuple(live_leaf(python["words"]).tolist())
        numpy_state = map_tree(states["numpy"], lambda leaf, path: live_leaf(leaf))
        torch.set_rng_state(live_leaf(states["torch"]))
        np.random.set_state(numpy_state)
        random.setstate((python["version"], words, python["gauss"]))
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CorruptCheckpoint(f"the checkpoint's random states cannot be restored: {error}") from error
