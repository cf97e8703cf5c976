"""The format of chunk files: a header and pieces of records, as one safetensors file.

A **piece** holds records of one group that were written (*born*) in some range of versions and replaced
(*died*) in some range, with their row ids. It is the unit that is read and checksummed. A file (a
*bundle*, when it has several) puts pieces one after the other, each contiguous: ids, then versions of birth
and of death where they differ within the piece, then each field.

The header is safetensors' own, so other tools can read the arrays; what they mean stands in its metadata.
The manifest holds the header's length and checksum, the header each piece's: whatever is read has been
vouched for from above before it is used.

    8 bytes   length of the JSON, little-endian
    JSON      names, types, shapes and offsets of all arrays; the pieces under __metadata__
    pieces
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.checkpoint.format.header import ALIGNMENT, describe, encode_header, json_bytes
from holdfast.checkpoint.format.ids import decode_ids, encode_ids
from holdfast.checkpoint.format.records import Field, Group, Rows
from holdfast.errors import CorruptCheckpoint
from holdfast.kernels.ids import living_rows

OPEN = 2**31 - 1
"""The version in which a record dies that nothing has replaced yet."""
LAST = 2**31 - 1
"""The rank of pieces whose rows no piece of lower rank may override."""
LARGEST_HEADER = 64 << 20
FORMAT = "1"
_FIRST_FIELD = 4  # in Piece.lengths


@dataclass(frozen=True)
class Piece:
    """The position of a piece and the versions that need it.

    Version *v* needs the piece if ``first_born <= v < last_died``, and of it the records that were
    born at or before *v* and died after it. Pieces are applied by ascending ``rank``: where two hold
    the same row, the later one is right.
    """

    group: int
    rank: int
    rows: int
    first_born: int
    last_born: int
    first_died: int
    last_died: int
    ids: str
    """How the row ids are encoded (see ``ids.py``)."""
    first_id: int
    last_id: int
    offset: int
    """Of its first byte, from the end of the header."""
    lengths: tuple[int, ...]
    """Bytes of its arrays: ids, born, died, padding, then each field, and padding again."""
    index_checksum: str
    """Of ids, born and died."""
    fields_checksum: str

    @cached_property
    def length(self) -> int:
        """Bytes of the whole piece."""
        return sum(self.lengths)

    @property
    def is_run(self) -> bool:
        """Whether its rows are neighbours of the same birth and death: nothing needs to be decoded."""
        return (
            self.index_length == 0
            and self.ids == "range"
            and self.last_id - self.first_id == self.rows - 1
            and self.first_born == self.last_born
            and self.first_died == self.last_died
        )

    @cached_property
    def index_length(self) -> int:
        """Bytes of ids, born and died, which come first: enough to know which rows it holds."""
        return sum(self.lengths[:_FIRST_FIELD])


@dataclass(frozen=True, slots=True)
class NewPiece:
    """A piece to be written. ``born`` and ``died`` are one version, or one for each row."""

    group: int
    rank: int
    rows: Rows
    born: int | NDArray[np.int32]
    died: int | NDArray[np.int32] = OPEN


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoded file: its parts and its manifest entry."""

    parts: list[Any]
    bytes: int
    header_bytes: int
    header_checksum: str
    pieces: tuple[Piece, ...]


def checksum(*parts: Any) -> str:
    """The 128-bit XXH3 checksum of some buffers."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def check_checksum(data: Any, expected: str, where: str, offset: int | None = None) -> None:
    """Raise CorruptCheckpoint unless the data, at this offset of a file's pieces, has this checksum."""
    found = checksum(data)
    if found != expected:
        at = "" if offset is None else f" at byte {offset:,}"
        raise CorruptCheckpoint(
            f"{where}: checksum mismatch{at} (expected {expected[:8]}…, got {found[:8]}…)"
        )


def encode_file(pieces: Sequence[NewPiece], fields_of_group: Sequence[Sequence[Field]]) -> Encoded:
    """Encode a file with these pieces, without copying their records."""
    described: list[Piece] = []
    arrays: dict[str, Any] = {}
    parts: list[Any] = []
    at = 0
    for number, new in enumerate(pieces):
        piece, buffers = _encode_piece(new, at)
        described.append(piece)
        own = fields_of_group[new.group]
        names = ["ids", "born", "died", "pad", *(f.name for f in own), "end"]
        fields = (None, None, None, None, *own, None)
        begin = at
        for name, field, length in zip(names, fields, piece.lengths, strict=True):
            if length or field is not None:
                dtype = "U8" if field is None or field.codec is not None else field.dtype
                shape = _shape(piece, field, length)
                arrays[f"{number}.{name}"] = describe(dtype, shape, begin, begin + length)
            begin += length
        parts += buffers
        at += piece.length
    metadata = {"holdfast": FORMAT, "pieces": json.dumps([_pack(p) for p in described])}
    header = encode_header(arrays, metadata)
    return Encoded([header, *parts], len(header) + at, len(header), checksum(header), tuple(described))


def _shape(piece: Piece, field: Field | None, length: int) -> list[int]:
    if field is None:
        return [length]
    return [piece.rows, field.width if field.codec is None else field.bytes]


def _encode_piece(new: NewPiece, offset: int) -> tuple[Piece, list[Any]]:
    rows = new.rows
    encoding, id_bytes = encode_ids(rows.ids)
    first_born, last_born, born_bytes = _encode_versions(new.born)
    first_died, last_died, died_bytes = _encode_versions(new.died)
    buffers: list[Any] = [id_bytes, born_bytes, died_bytes]
    buffers.append(_padding(buffers))
    buffers += [np.ascontiguousarray(field).reshape(-1) for field in rows.fields]
    buffers.append(_padding(buffers))
    piece = Piece(
        group=new.group,
        rank=new.rank,
        rows=len(rows),
        first_born=first_born,
        last_born=last_born,
        first_died=first_died,
        last_died=last_died,
        ids=encoding,
        first_id=int(rows.ids[0]) if len(rows) else 0,
        last_id=int(rows.ids[-1]) if len(rows) else -1,
        offset=offset,
        lengths=tuple(memoryview(b).nbytes for b in buffers),
        index_checksum=checksum(*buffers[:_FIRST_FIELD]),
        fields_checksum=checksum(*buffers[_FIRST_FIELD:]),
    )
    return piece, [b for b in buffers if memoryview(b).nbytes]


def _padding(buffers: list[Any]) -> NDArray[np.uint8]:
    return np.zeros(-sum(memoryview(b).nbytes for b in buffers) % ALIGNMENT, np.uint8)


def _encode_versions(versions: int | NDArray[np.int32]) -> tuple[int, int, NDArray[np.uint8]]:
    """Least and greatest, and how far above the least each row's is, in as few bytes as that takes."""
    nothing = np.empty(0, np.uint8)
    if not isinstance(versions, np.ndarray):
        return versions, versions, nothing
    low, high = (int(versions.min()), int(versions.max())) if len(versions) else (0, 0)
    if low == high:
        return low, high, nothing
    dtype = np.uint8 if high - low < 1 << 8 else np.uint16 if high - low < 1 << 16 else np.uint32
    return low, high, (versions - low).astype(dtype).view(np.uint8)


def decode_header(data: bytes, where: str) -> tuple[Piece, ...]:
    """The pieces that a header describes. ``data`` is the whole header, its checksum already checked."""
    try:
        size = json_bytes(data)
        if size != len(data) - 8:
            raise ValueError(f"the header says {size} bytes and has {len(data) - 8}")
        header = json.loads(data[8:])
        metadata = header["__metadata__"]
        if metadata["holdfast"] != FORMAT:
            raise ValueError(f"format {metadata['holdfast']}, expected {FORMAT}")
        return tuple(_unpack(values) for values in json.loads(metadata["pieces"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where} is not a chunk file of Holdfast: {error}") from None


def check_layout(pieces: Sequence[Piece], groups: Sequence[Group], data_bytes: int, where: str) -> None:
    """Raise CorruptCheckpoint unless these pieces can be all of a file with ``data_bytes`` behind its header.

    Row ids become memory addresses and sizes become allocations: none is used before it was here.
    """
    at = 0
    for piece in pieces:
        problem = _problem(piece, groups)
        if not problem and piece.offset != at:
            problem = f"it is at byte {piece.offset}, expected {at}"
        if problem:
            raise CorruptCheckpoint(f"{where} has an invalid piece: {problem}")
        at += piece.length
    if at != data_bytes:
        raise CorruptCheckpoint(f"{where} has {data_bytes} bytes of pieces, expected {at}")


def _problem(piece: Piece, groups: Sequence[Group]) -> str | None:
    if piece.group >= len(groups):
        return f"group {piece.group} of {len(groups)}"
    group, rows = groups[piece.group], piece.rows
    fields = tuple(f.bytes * rows for f in group.fields)
    if len(piece.lengths) != _FIRST_FIELD + len(fields) + 1 or piece.lengths[_FIRST_FIELD:-1] != fields:
        return f"fields of {piece.lengths[_FIRST_FIELD:-1]} bytes, expected {fields}"
    if piece.index_length % 8 or piece.length % 8:
        return "its arrays do not begin at whole words"
    # A row that has lived several times is in it as often, never more often than there are versions.
    most = (piece.last_id - piece.first_id + 1) * (piece.last_born - piece.first_born + 1)
    if rows > most or (rows and not 0 <= piece.first_id <= piece.last_id < group.rows):
        return f"{rows} rows from {piece.first_id} to {piece.last_id} of {group.rows}"
    versions = (piece.first_born, piece.last_born), (piece.first_died, piece.last_died)
    if piece.rank > LAST or any(not 0 <= low <= high <= OPEN for low, high in versions):
        return f"versions {versions}, rank {piece.rank}"
    return None


def check_piece(piece: Piece, data: NDArray[np.uint8], where: str) -> None:
    """Verify the checksums of a piece's bytes, or of its index alone. Raises CorruptCheckpoint."""
    end = piece.index_length
    if data.nbytes not in (end, piece.length):
        raise CorruptCheckpoint(
            f"{where}: the piece at byte {piece.offset} has {data.nbytes} bytes, expected {piece.length}"
        )
    check_checksum(data[:end], piece.index_checksum, where, piece.offset)
    if data.nbytes != end:
        check_checksum(data[end:], piece.fields_checksum, where, piece.offset + end)


def decode_index(piece: Piece, data: NDArray[np.uint8], where: str) -> Index:
    """Which rows a piece holds, from the first ``index_length`` of its bytes, already checked."""
    first, second, third = itertools.accumulate(piece.lengths[:3])
    return Index(
        ids=decode_ids(piece.ids, data, first, piece.rows, piece.first_id, piece.last_id, where),
        born=_decode_versions(data[first:second], piece.rows, piece.first_born, where),
        died=_decode_versions(data[second:third], piece.rows, piece.first_died, where),
    )


def decode_fields(
    piece: Piece, data: NDArray[np.uint8], fields: Sequence[Field]
) -> tuple[NDArray[np.uint8], ...]:
    """The fields of a piece of a file whose layout is checked, without copying them."""
    values: list[NDArray[np.uint8]] = []
    at = piece.index_length
    for field, size in zip(fields, piece.lengths[_FIRST_FIELD:-1], strict=True):
        values.append(data[at : at + size].reshape(piece.rows, field.bytes))
        at += size
    return tuple(values)


def decode_piece(piece: Piece, data: NDArray[np.uint8], fields: Sequence[Field], where: str) -> DecodedPiece:
    """A piece of a file whose layout is checked, from its bytes, already checked."""
    index = decode_index(piece, data, where)
    return DecodedPiece(piece, Rows(index.ids, decode_fields(piece, data, fields)), index.born, index.died)


def _decode_versions(data: NDArray[np.uint8], rows: int, low: int, where: str) -> Versions:
    if not len(data):
        return Versions(low, data)
    size = len(data) // max(rows, 1)
    if size not in (1, 2, 4) or size * rows != len(data):
        raise CorruptCheckpoint(f"{where}: {len(data)} bytes of versions for {rows} rows")
    return Versions(low, data.view(f"<u{size}"))


@dataclass(frozen=True, slots=True)
class Versions:
    """A version for each row: how far it is above the least; nothing if all are that."""

    least: int
    above: NDArray[np.unsignedinteger]

    def each(self, rows: int) -> NDArray[np.int32]:
        """For each of the rows."""
        if not len(self.above):
            return np.broadcast_to(np.int32(self.least), rows)
        versions: NDArray[np.int64] = np.add(self.above, self.least, dtype=np.int64)
        return versions.astype(np.int32)


@dataclass(frozen=True, slots=True)
class Index:
    """The rows of a piece, with the versions of birth and death of each."""

    ids: NDArray[np.int64]
    born: Versions
    died: Versions

    def positions_at(self, version: int, born_after: int = 0) -> NDArray[np.int64]:
        """Where the records are that belong to a version, of those born after another."""
        positions = np.empty(len(self.ids), np.int64)
        born, died = self.born, self.died
        found = living_rows(
            born.above,
            born_after - born.least,
            version - born.least,
            died.above,
            version - died.least,
            positions,
        )
        return positions[:found]


@dataclass(frozen=True, slots=True)
class DecodedPiece:
    """A piece's records, with the versions of birth and death of each."""

    piece: Piece
    rows: Rows
    born: Versions
    died: Versions

    @property
    def index(self) -> Index:
        """Without the records."""
        return Index(self.rows.ids, self.born, self.died)

    def positions_at(self, version: int, born_after: int = 0) -> NDArray[np.int64] | None:
        """Where the records are that belong to a version, of those born after another; None if all are."""
        piece = self.piece
        if born_after < piece.first_born and piece.last_born <= version and piece.first_died > version:
            return None
        return self.index.positions_at(version, born_after)

    def at(self, version: int, born_after: int = 0) -> Rows:
        """The records that belong to a version, of those that were born after another."""
        positions = self.positions_at(version, born_after)
        return self.rows if positions is None else self.rows.take(positions)


def _pack(piece: Piece) -> list[Any]:
    return list(asdict(piece).values())


def _unpack(values: list[Any]) -> Piece:
    *numbers, encoding, first_id, last_id, offset, lengths, index_check, fields_check = values
    group, rank, rows, first_born, last_born, first_died, last_died = numbers
    sizes = tuple(lengths)
    whole = (*numbers, first_id, last_id, offset, *sizes)
    if any(type(n) is not int or not -1 <= n < 1 << 62 for n in whole):
        raise ValueError("a piece has an invalid number")
    if min((group, rank, rows, offset, *sizes)) < 0 or len(sizes) <= _FIRST_FIELD:
        raise ValueError("a piece has an invalid size")
    return Piece(
        group, rank, rows, first_born, last_born, first_died, last_died,
        str(encoding), first_id, last_id, offset, sizes, str(index_check), str(fields_check),
    )  # fmt: skip
