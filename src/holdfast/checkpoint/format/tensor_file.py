"""Writing a safetensors file of any size in little memory: its tensors are views of the mapped file."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.dense import DENSE_ELEMENT_BYTES
from holdfast.checkpoint.format.header import describe, encode_header
from holdfast.errors import ConfigError, StoreError

_LARGEST_HEADER = 100_000_000  # readers of safetensors refuse more


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor of a file: ``dtype`` by safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return DENSE_ELEMENT_BYTES[self.dtype] * math.prod(self.shape)


class TensorFile:
    """A file under a temporary name with room for all of its tensors; made by ``new_tensor_file``."""

    def __init__(
        self, header: bytes, places: Mapping[str, tuple[int, int]], memory: NDArray[np.uint8]
    ) -> None:
        self._places = places
        self._data = memory[len(header) :]
        memory[: len(header)] = np.frombuffer(header, np.uint8)

    def bytes(self, name: str) -> NDArray[np.uint8]:
        """A tensor's bytes, in C order; what is written into them is in the file."""
        begin, end = self._places[name]
        return self._data[begin:end]

    def rows(self, name: str, rows: int) -> NDArray[np.uint8]:
        """The same as [rows, bytes]."""
        data = self.bytes(name)
        return data.reshape(rows, -1) if rows else data.reshape(0, 0)


@contextlib.contextmanager
def new_tensor_file(
    out: Path, specs: Sequence[Spec], metadata: Mapping[str, str], *, force: bool
) -> Iterator[TensorFile]:
    """A file to be filled in the ``with`` block; at its end, it gets its name, whole and durable.

    Raises ConfigError if ``out`` exists and ``force`` is not set. An error in the block leaves nothing.
    """
    check_free(out, force=force)
    header, places = _layout(specs, metadata)
    size = len(header) + sum(spec.bytes for spec in specs)
    with new_file(out, force=force) as handle, mapped(handle, size, str(out)) as memory:
        yield TensorFile(header, places, memory)


def check_free(out: Path, *, force: bool) -> None:
    """Raise ConfigError if a file must not be written there: before the work, not after it."""
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: name a file")
    if out.exists() and not force:
        raise ConfigError(f"{out} exists: name another file, or overwrite it with --force")
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent} for {out.name}: make it first")


@contextlib.contextmanager
def new_file(out: Path, *, force: bool) -> Iterator[int]:
    """A file descriptor that becomes ``out`` at the end of the block, and nothing if that fails."""
    start = os.fsencode(out.name)[:100].decode(errors="ignore")  # 255 bytes may be used
    partial = out.with_name(f".{start}.partial-{secrets.token_hex(6)}")
    try:
        handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                yield handle
                os.fsync(handle)
            finally:
                os.close(handle)
            if force:
                os.replace(partial, out)
            else:
                os.link(partial, out)  # unlike a rename it does not overwrite what came meanwhile
            _sync_folder(out.parent)
        finally:
            partial.unlink(missing_ok=True)
    except FileExistsError:
        raise ConfigError(f"{out} exists: name another file, or overwrite it with --force") from None
    except OSError as error:
        raise StoreError(f"could not write {out}: {error.strerror or error}") from error


@contextlib.contextmanager
def mapped(handle: int, size: int, what: str) -> Iterator[NDArray[np.uint8]]:
    """The file's memory, made ``size`` bytes long; written back by the system when it needs the room."""
    try:
        if size:
            # Not truncate: on a full disk a write into a hole of a mapped file kills the process.
            os.posix_fallocate(handle, 0, size)
    except OSError as error:
        raise StoreError(f"no room for the {size} bytes of {what}: {error.strerror or error}") from error
    if not size:
        yield np.empty(0, np.uint8)
        return
    memory = mmap.mmap(handle, size)
    yield np.frombuffer(memory, np.uint8)
    memory.flush()
    # Not closed here: arrays may still show it. It goes with the last of them.


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _layout(specs: Sequence[Spec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    # Whole words first, then by element: so each tensor is aligned though the format allows no gaps.
    ordered = sorted(specs, key=lambda s: (s.bytes % 8 != 0, -DENSE_ELEMENT_BYTES[s.dtype]))
    described: dict[str, dict[str, Any]] = {}
    places: dict[str, tuple[int, int]] = {}
    at = 0
    for spec in ordered:
        if spec.name in places:
            raise ValueError(f"two tensors are named {spec.name}")
        places[spec.name] = (at, at + spec.bytes)
        described[spec.name] = describe(spec.dtype, spec.shape, at, at + spec.bytes)
        at += spec.bytes
    header = encode_header(described, metadata)
    if len(header) > _LARGEST_HEADER:
        raise ConfigError(
            f"the state has {len(header)} bytes outside of tensors, and a safetensors file takes at most "
            f"{_LARGEST_HEADER}: export one object alone"
        )
    return header, places
