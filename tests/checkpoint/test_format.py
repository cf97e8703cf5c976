"""A reader of stores made from docs/checkpoints-format.md alone: slow, obvious, without Holdfast's code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import holdfast as hf
from tests.checkpoint.test_checkpointer import STRATEGIES, Run


def checksum(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def read_manifest(store: Path) -> dict[str, Any]:
    data = max((store / "manifests").iterdir()).read_bytes()
    assert data[:13] == b'{"checksum":"'
    assert data[45:58] == b'","manifest":'
    assert data[-2:] == b"}\n"
    assert checksum(data[58:-2]).encode() == data[13:45]
    body: dict[str, Any] = json.loads(data[58:-2])
    assert body["format"] == 1
    return body


def decode_ids(encoding: str, data: bytes, rows: int, first: int, last: int) -> list[int]:
    if encoding == "range":
        return list(range(first, last + 1))
    bits = [byte >> i & 1 for byte in data for i in range(8)]
    at = 0

    def number(width: int) -> int:
        nonlocal at
        at += width
        return sum(bit << i for i, bit in enumerate(bits[at - width : at]))

    ids = [first]
    k = 0
    for gap in range(rows - 1):
        if gap % 128 == 0:
            k = number(8)
        q = 0
        while number(1):
            q += 1
        ids.append(ids[-1] + (q << k) + number(k) + (encoding == "rice"))
    assert ids[-1] == last
    return ids


def versions_of(data: bytes, rows: int, first: int) -> list[int]:
    if not data:
        return [first] * rows
    width = len(data) // rows
    return [first + int.from_bytes(data[i * width : (i + 1) * width], "little") for i in range(rows)]


def read_rows(store: Path, version: int) -> dict[tuple[str, str], np.ndarray[Any, Any]]:
    """(table, field): the bytes of all rows."""
    manifest = read_manifest(store)
    (entry,) = (v for v in manifest["versions"] if v["version"] == version)
    (era,) = (e for e in manifest["eras"] if e["number"] == entry["era"])
    pieces = []
    for file in era["files"]:
        if file["first_born"] <= version < file["last_died"]:
            data = (store / file["name"]).read_bytes()
            header, body = data[: file["header_bytes"]], data[file["header_bytes"] :]
            assert len(data) == file["bytes"]
            assert checksum(header) == file["header_checksum"]
            described = json.loads(json.loads(header[8:])["__metadata__"]["pieces"])
            dead = set(file.get("dead_pieces", []))
            pieces += [(piece, body) for number, piece in enumerate(described) if number not in dead]
    records: list[dict[int, list[bytes]]] = [{} for _ in era["groups"]]
    for piece, body in sorted(pieces, key=lambda p: p[0][1]):
        group, _, rows, first_born, _, first_died, last_died, encoding, first, last = piece[:10]
        offset, lengths, index_checksum, fields_checksum = piece[10:]
        if not first_born <= version < last_died:
            continue
        parts = []
        for length in lengths:
            parts.append(body[offset : offset + length])
            offset += length
        assert checksum(b"".join(parts[:4])) == index_checksum
        assert checksum(b"".join(parts[4:])) == fields_checksum
        born, died = versions_of(parts[1], rows, first_born), versions_of(parts[2], rows, first_died)
        for i, row in enumerate(decode_ids(encoding, parts[0], rows, first, last)):
            if born[i] <= version < died[i]:
                widths = [len(part) // rows for part in parts[4:-1]]
                values = zip(parts[4:-1], widths, strict=True)
                records[group][row] = [part[i * width : (i + 1) * width] for part, width in values]
    found = {}
    for group, rows_of in zip(era["groups"], records, strict=True):
        at = 0
        for table, rows in group["tables"]:
            for number, (field, _, _) in enumerate(group["fields"]):
                raw = b"".join(rows_of[row][number] for row in range(at, at + rows))
                found[table, field] = np.frombuffer(raw, np.float32)
            at += rows
    return found


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_reader_made_from_the_page(tmp_path: Path, strategy: Any) -> None:
    run = Run()
    truth = {}
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(strategy=strategy)) as ckpt:
        for step in range(8):
            run.train(4)
            version = ckpt.save(step)
            truth[version] = [p.detach().clone().numpy() for p in run.model.tables.parameters()]
    for version, tables in truth.items():
        assert version is not None
        found = read_rows(tmp_path, version)
        for number, table in enumerate(tables):
            assert found[f"model.tables.{number}.weight", "weight"].tobytes() == table.tobytes()
