"""Encode a message into parts for the wire, and back: with a checksum, and split if parts must be small.

The first part begins with a checksum of everything after it and the length of the header; the header contains
the size of each array. A message with a checksum mismatch is dropped before anything of it is used, and
counts as lost: its sender retries. Arrays that the receiver reads in shared memory (``shared``) are not in
transit: the checksum does not cover them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import xxhash

from holdfast.cluster.protocol.envelope import Envelope, Frame
from holdfast.cluster.protocol.wire import Header, decode, encode

Piece = bytes | memoryview
_PREFIX: Final = struct.Struct("<QI")  # xxh3 of everything after it, bytes of the header


class Damaged(ValueError):
    """Checksum mismatch: the message was damaged in transit."""


def pack(
    job: str,
    envelope: Envelope,
    most_bytes: int = 1 << 31,
    find: Callable[[memoryview[Any]], int] | None = None,
    loan: int = 0,
) -> list[Piece]:
    """Encode a message into parts of at most ``most_bytes`` each. Arrays are not copied.

    ``find`` returns the position of an array that the receiver can read in shared memory, else -1; ``loan``
    is of these arrays.
    """
    frames = [_flat(frame) for frame in envelope.frames]
    sizes = tuple(frame.nbytes for frame in frames)
    places: tuple[int, ...] = ()
    if find is not None:
        places = tuple(map(find, frames))
        frames = [frame for frame, place in zip(frames, places, strict=True) if place < 0]
    header = encode(Header(job, envelope.source, envelope.target, envelope.message, sizes, places, loan))
    checksum = xxhash.xxh3_64(header)
    for frame in frames:
        checksum.update(frame)
    first = _PREFIX.pack(checksum.intdigest(), len(header)) + header
    if len(first) <= most_bytes and max((frame.nbytes for frame in frames), default=0) <= most_bytes:
        return [first, *frames]
    return [piece for frame in (memoryview(first), *frames) for piece in _cut(frame, most_bytes)]


def unpack(
    parts: Sequence[Piece],
    max_header_bytes: int,
    shared: Callable[[Header, int], Frame] | None = None,
) -> tuple[Header, list[Frame]]:
    """Decode a message into its header and arrays. Arrays that arrived in one part are not copied.

    ``shared`` returns an array in the sender's shared memory, given the header and the array's number. Raises
    Damaged on a checksum mismatch, and another ValueError if it is not a message.
    """
    first = memoryview(parts[0])
    if len(first) < _PREFIX.size:
        raise ValueError(f"a first part of {len(first)} bytes: expected {_PREFIX.size} or more")
    expected, length = _PREFIX.unpack_from(first)
    rest = iter(parts[1:])
    if length > max_header_bytes:
        raise ValueError(f"a header of {length} bytes: expected at most {max_header_bytes}")
    header = _join(first[_PREFIX.size :], length, rest)
    arrays = list(rest)
    checksum = xxhash.xxh3_64(header)
    for part in arrays:
        checksum.update(part)
    if checksum.intdigest() != expected:
        raise Damaged(f"checksum mismatch (expected {expected:016x}, got {checksum.intdigest():016x})")
    decoded = decode(header)
    if (
        not decoded.places
        and len(decoded.sizes) == len(arrays)
        and all(map(_has_size, arrays, decoded.sizes))
    ):
        return decoded, list(arrays)
    if decoded.places and (shared is None or len(decoded.places) != len(decoded.sizes)):
        raise ValueError("arrays in shared memory that is not known here")
    left = iter(arrays)
    frames: list[Frame] = []
    for number, size in enumerate(decoded.sizes):
        place = decoded.places[number] if decoded.places else -1
        if place >= 0 and shared is not None:
            frames.append(shared(decoded, number))
        else:
            frames.append(_join(next(left, b""), size, left))
    if next(left, None) is not None:
        raise ValueError("extra parts after the last array")
    return decoded, frames


def _has_size(part: Piece, size: int) -> bool:
    return len(part) == size


def _join(first: Piece, size: int, rest: Iterator[Piece]) -> Piece:
    """Join ``first`` and as many of the following parts as needed for ``size`` bytes."""
    if len(first) == size:
        return first
    pieces, found = [first], len(first)
    while found < size and (piece := next(rest, None)) is not None:
        pieces.append(piece)
        found += len(piece)
    if found != size:
        raise ValueError(f"an array of {size} bytes in parts of {found}")
    return memoryview(b"".join(pieces))


def _cut(frame: Piece, most_bytes: int) -> Iterator[Piece]:
    view = memoryview(frame)
    if view.nbytes <= most_bytes:
        yield view
        return
    view = view.cast("B")
    for start in range(0, len(view), most_bytes):
        yield view[start : start + most_bytes]


def _flat(frame: Frame) -> memoryview[Any]:
    view: memoryview[Any] = memoryview(frame)  # type: ignore[arg-type]  # NumPy says so from 3.12 on
    return view if view.c_contiguous else memoryview(view.tobytes())
