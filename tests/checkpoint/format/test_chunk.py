"""Chunk files: other tools read them, damaged and hostile ones are refused before they are used."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from holdfast.checkpoint.format.chunk import (
    OPEN,
    Encoded,
    NewPiece,
    Piece,
    check_layout,
    check_piece,
    decode_header,
    decode_index,
    decode_piece,
    encode_file,
)
from holdfast.checkpoint.format.header import ALIGNMENT
from holdfast.checkpoint.format.records import Field, Group, Rows, Table
from holdfast.errors import CorruptCheckpoint

FIELDS = (Field("weight", "F32", 3), Field("sum", "F16", 1))
GROUPS = (Group(FIELDS, (Table("a", 1000, 0),)), Group((Field("weight", "I64", 2),), (Table("b", 50, 0),)))


def new_piece(group: int, ids: Any, born: Any = 4, died: Any = OPEN, seed: int = 0) -> NewPiece:
    ids = np.asarray(ids, np.int64)
    random = np.random.default_rng(seed)
    fields = tuple(random.integers(0, 256, (len(ids), f.bytes), dtype=np.uint8) for f in GROUPS[group].fields)
    return NewPiece(group, 4, Rows(ids, fields), born, died)


PIECES = [
    new_piece(0, [1, 5, 6, 900]),
    new_piece(1, range(7, 20), seed=1),
    new_piece(0, [3, 3, 8], np.array([1, 3, 2], np.int32), np.array([3, 70_000, 5], np.int32), seed=2),
    new_piece(0, [999], np.array([2], np.int32), np.array([300], np.int32), seed=3),
]


def encode() -> tuple[Encoded, bytes]:
    encoded = encode_file(PIECES, [g.fields for g in GROUPS])
    data = b"".join(bytes(memoryview(part).cast("B")) for part in encoded.parts)
    assert len(data) == encoded.bytes
    return encoded, data


def test_what_is_written_is_read() -> None:
    encoded, data = encode()
    pieces = decode_header(data[: encoded.header_bytes], "here")
    assert pieces == encoded.pieces
    check_layout(pieces, GROUPS, len(data) - encoded.header_bytes, "here")
    for new, piece in zip(PIECES, pieces, strict=True):
        at = encoded.header_bytes + piece.offset
        assert at % ALIGNMENT == piece.index_length % ALIGNMENT == piece.length % ALIGNMENT == 0
        raw = np.frombuffer(data, np.uint8)[at : at + piece.length]
        check_piece(piece, raw, "here")
        check_piece(piece, raw[: piece.index_length], "here")
        found = decode_piece(piece, raw, GROUPS[piece.group].fields, "here")
        assert found.rows.ids.tolist() == new.rows.ids.tolist()
        for mine, theirs in zip(new.rows.fields, found.rows.fields, strict=True):
            assert np.array_equal(mine, theirs)
        for written, read in ((new.born, found.born), (new.died, found.died)):
            every = len(new.rows)
            assert np.array_equal(np.broadcast_to(written, every), read.each(every))
        index = decode_index(piece, raw[: piece.index_length], "here")
        assert np.array_equal(index.ids, new.rows.ids)


def test_records_of_a_version() -> None:
    encoded, data = encode()
    piece = encoded.pieces[2]
    at = encoded.header_bytes + piece.offset
    raw = np.frombuffer(data, np.uint8)[at : at + piece.length]
    found = decode_piece(piece, raw, FIELDS, "here")
    alive = {v: found.at(v).ids.tolist() for v in (0, 1, 2, 3, 4, 5, 69_999, 70_000)}
    assert alive == {0: [], 1: [3], 2: [3, 8], 3: [3, 8], 4: [3, 8], 5: [3], 69_999: [3], 70_000: []}
    assert np.array_equal(found.at(3).fields[0], PIECES[2].rows.fields[0][[1, 2]])


def test_safetensors_opens_it(tmp_path: Path) -> None:
    _, data = encode()
    (tmp_path / "chunk.safetensors").write_bytes(data)
    with safe_open(tmp_path / "chunk.safetensors", "numpy") as opened:
        assert opened.metadata()["holdfast"] == "1"
        weight = opened.get_tensor("0.weight")
        assert (weight.dtype, weight.shape) == (np.float32, (4, 3))
        assert weight.tobytes() == PIECES[0].rows.fields[0].tobytes()
        assert opened.get_tensor("0.sum").tobytes() == PIECES[0].rows.fields[1].tobytes()
        wide = opened.get_tensor("1.weight")
        assert (wide.dtype, wide.shape) == (np.int64, (13, 2))
        assert wide.tobytes() == PIECES[1].rows.fields[0].tobytes()
        assert opened.get_tensor("2.born").tolist() == [0, 2, 1]


@pytest.mark.parametrize("born", [1, 200, 60_000, 2**31 - 2])
def test_versions_of_any_size(born: int) -> None:
    births = np.array([1, born, 7 if born > 7 else 1], np.int32)
    new = new_piece(0, [1, 2, 3], births, np.array([OPEN, OPEN, born + 1], np.int32))
    encoded = encode_file([new], [g.fields for g in GROUPS])
    (piece,) = encoded.pieces
    raw = np.frombuffer(b"".join(bytes(memoryview(p).cast("B")) for p in encoded.parts[1:]), np.uint8)
    found = decode_piece(piece, raw, FIELDS, "here")
    assert found.born.each(3).tolist() == births.tolist()
    assert found.died.each(3).tolist() == [OPEN, OPEN, born + 1]


def test_every_changed_bit_of_a_piece_is_seen() -> None:
    encoded, data = encode()
    for piece in encoded.pieces:
        at = encoded.header_bytes + piece.offset
        raw = np.frombuffer(data, np.uint8)[at : at + piece.length].copy()
        for i in range(len(raw)):
            raw[i] ^= 1 << (i % 8)
            begin = piece.offset + (piece.index_length if i >= piece.index_length else 0)
            with pytest.raises(CorruptCheckpoint, match=f"here: checksum mismatch at byte {begin:,} "):
                check_piece(piece, raw, "here")
            raw[i] ^= 1 << (i % 8)
        for length in range(len(raw)):
            if length != piece.index_length:
                with pytest.raises(CorruptCheckpoint):
                    check_piece(piece, raw[:length], "here")


def header(change: Callable[[dict[str, Any]], Any]) -> bytes:
    encoded, data = encode()
    content = json.loads(data[8 : encoded.header_bytes])
    changed = change(content)
    text = changed if isinstance(changed, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text


def with_pieces(value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["__metadata__"]["pieces"] = value if isinstance(value, str) else json.dumps(value)

    return change


def with_number(place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        pieces = json.loads(content["__metadata__"]["pieces"])
        pieces[0][place] = value
        content["__metadata__"]["pieces"] = json.dumps(pieces)

    return change


NO_NUMBERS: list[Any] = [-5, 2**80, 1.5, float("inf"), float("nan"), None, "1", [1], {}, True]
NO_LENGTHS: list[Any] = [None, 5, [], [1, 2], [-1] * 7, [1.5] * 7, ["1"] * 7]


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.clear(),
        lambda content: b"[" * 200_000,
        lambda content: b"\xff\xfe",
        lambda content: b"[1, 2]",
        lambda content: b"1" * 5000,
        lambda content: content.update(__metadata__=None),
        lambda content: content["__metadata__"].update(holdfast="2"),
        with_pieces("[" * 200_000),
        with_pieces("{}x"),
        with_pieces(5),
        with_pieces([5]),
        with_pieces(["piece"]),
        with_pieces([[]]),
        with_pieces([[1, 2, 3]]),
        with_pieces("[[" + "1e999," * 13 + "1]]"),
        *(with_number(place, value) for place in (0, 1, 2, 3, 4, 5, 6, 8, 9, 10) for value in NO_NUMBERS),
        *(with_number(11, value) for value in NO_LENGTHS),
    ],
)
def test_headers_that_make_no_sense(change: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match="here is not a chunk file of Holdfast"):
        decode_header(header(change), "here")


def test_a_header_of_another_length() -> None:
    data = header(lambda content: None)
    decode_header(data, "here")
    for wrong in (data[:-1], data + b" ", data[:7], b"", b"\xff" * 8 + data[8:]):
        with pytest.raises(CorruptCheckpoint):
            decode_header(wrong, "here")


HOSTILE: list[dict[str, Any]] = [
    {"group": 2},
    {"group": 2**40},
    {"rows": 2**60},
    {"rows": 5},
    {"rows": 0},
    {"first_id": -1},
    {"last_id": 1000},
    {"last_id": 2**61},
    {"first_id": 901},
    {"last_id": 2, "first_id": 1},  # four rows do not fit in there
    {"offset": 8},
    {"offset": 2**61},
    {"lengths": (8, 0, 0, 0, 48)},
    {"lengths": (8, 0, 0, 0, 48, 8, 0, 0)},
    {"lengths": (8, 0, 0, 0, 48, 2**60, 0)},
    {"lengths": (7, 0, 0, 0, 48, 8, 1)},
    {"first_born": 5},
    {"first_died": 0, "last_died": OPEN + 1},
    {"last_born": OPEN + 1},
    {"rank": 2**40},
]


@pytest.mark.parametrize("change", HOSTILE, ids=str)
def test_pieces_that_cannot_be(change: dict[str, Any]) -> None:
    encoded, _ = encode()
    size = sum(p.length for p in encoded.pieces)
    check_layout(encoded.pieces, GROUPS, size, "here")
    first: Piece = replace(encoded.pieces[0], **change)
    with pytest.raises(CorruptCheckpoint, match="here has"):
        check_layout([first, *encoded.pieces[1:]], GROUPS, size, "here")


def test_pieces_that_are_not_all_of_the_file() -> None:
    encoded, _ = encode()
    size = sum(p.length for p in encoded.pieces)
    for pieces, length in [
        (encoded.pieces, size + 8),
        (encoded.pieces, size - 8),
        (encoded.pieces[:-1], size),
        (encoded.pieces[1:], size),
        ((*encoded.pieces, encoded.pieces[0]), size),
        ((), size),
    ]:
        with pytest.raises(CorruptCheckpoint, match="here has"):
            check_layout(pieces, GROUPS, length, "here")
