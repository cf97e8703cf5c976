"""A reader of stores made from docs/checkpoints-format.md, and the page on quantization that it names, alone.

Slow, obvious, and without Holdfast's code.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from numpy.typing import NDArray

import holdfast as hf
from holdfast.checkpoint.saving import history
from tests.checkpoint.test_checkpointer import STRATEGIES, Run
from tests.checkpoint.test_quantized_checkpoints import Tables


def checksum(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def read_manifest(store: Path) -> dict[str, Any]:
    data = max((store / "manifests").iterdir()).read_bytes()
    assert data[:13] == b'{"checksum":"'
    assert data[45:58] == b'","manifest":'
    assert data[-2:] == b"}\n"
    assert checksum(data[58:-2]).encode() == data[13:45]
    body: dict[str, Any] = json.loads(data[58:-2])
    if body["format"] == 1:
        return body
    assert body["format"] == 2
    return read_parts(store, body)


def read_parts(store: Path, head: dict[str, Any]) -> dict[str, Any]:
    versions: dict[int, dict[str, Any]] = {}
    eras: dict[int, dict[str, Any]] = {}
    for part in [*(read_segment(store, *segment) for segment in head["segments"]), head["recent"]]:
        for era, died, group, count in part.get("replaced", []):
            for v in versions.values():
                if v["era"] == era and v["version"] >= died and v["records"]:
                    v["records"][group] -= count
        for number in part.get("deleted", []):
            del versions[number]
        versions |= {v["version"]: v for v in part.get("versions", [])}
        for era in part.get("eras", []):
            eras[era["number"]] = era | {"files": {f["name"]: f for f in era["files"]}}
        for more in part.get("more", []):
            eras[more["number"]]["open_records"] = more["open_records"]
            eras[more["number"]]["files"] |= {f["name"]: f for f in more["files"]}
        for name in part.get("removed", []):
            for era in eras.values():
                era["files"].pop(name, None)
    kept = {v["era"] for v in versions.values()}
    found = [era | {"files": list(era["files"].values())} for n, era in eras.items() if n in kept]
    return {**head, "versions": list(versions.values()), "eras": found}


def read_segment(
    store: Path, manifest: int, tag: str, size: int, expected: str, length: int
) -> dict[str, Any]:
    name = f"segments/{manifest:010}-{tag}.json.gz"
    data = (store / name).read_bytes()
    copy = store / (name.removesuffix(".json.gz") + "-copy.json.gz")
    assert copy.read_bytes() == data
    assert (len(data), checksum(data)) == (size, expected)
    body = gzip.decompress(data)
    assert len(body) == length
    found: dict[str, Any] = json.loads(body)
    return found


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


def read_rows(store: Path, version: int) -> dict[tuple[str, str], bytes]:
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
    return join_tables(era["groups"], records)


def join_tables(
    groups: list[dict[str, Any]], records: list[dict[int, list[bytes]]]
) -> dict[tuple[str, str], bytes]:
    """Records by group and row, decoded; those that are marked come from the group of raw rows."""
    raw_rows = {
        g["raw_rows_of"]: records[n] for n, g in enumerate(groups) if g.get("raw_rows_of") is not None
    }
    found = {}
    for n, group in enumerate(groups):
        if group.get("raw_rows_of") is not None:
            continue
        rows = {}
        for row, stored in records[n].items():
            values = [decode(data, *field[1:]) for data, field in zip(stored, group["fields"], strict=True)]
            rows[row] = raw_rows[n][row] if None in values else values
        at = 0
        for table, count in group["tables"]:
            for number, (field, *_) in enumerate(group["fields"]):
                parts = [rows[row][number] for row in range(at, at + count)]
                found[table, field] = b"".join(p for p in parts if p is not None)
            at += count
    return found


def decode(data: bytes, dtype: str, width: int, codec: dict[str, Any] | None = None) -> bytes | None:
    """A row of a field as it was, or about; None if there is a mark in its place."""
    if codec is None:
        return data
    kind = {"uniform": decode_uniform, "float": decode_float, "log": decode_log}[codec["codec"]]
    values = kind(data, width, codec)
    if values is None:
        return None
    assert values.dtype == np.float32
    assert values.shape == (width,)
    if dtype == "F16":
        halves: NDArray[np.float16] = np.clip(values, -65504, 65504).astype(np.float16)
        return halves.tobytes()
    assert dtype == "F32"
    return values.tobytes()


def decode_uniform(data: bytes, width: int, codec: dict[str, Any]) -> NDArray[np.float32] | None:
    bits, header = codec["bits"], codec["grid_bits"] // 4
    assert len(data) == header + (width * bits + 7) // 8
    stream = int.from_bytes(data[header:], "little")
    codes = np.array([stream >> (bits * j) & (2**bits - 1) for j in range(width)])
    if codec["grid_bits"] == 16:
        word = int.from_bytes(data[:2], "little")
        exponent, mantissa = word >> 9, word & 511
        if exponent == 127:
            if word != 0xFFFE:
                return None
            return np.full(width, np.frombuffer(data[2:6], np.float32)[0])
        scale = 0.0 if word == 0 else 2.0 ** (exponent - 63) * (1 + mantissa / 512)
        parts = {2: 256, 3: 128, 4: 64, 8: 16}[bits]
        zero = int.from_bytes(data[2:4], "little", signed=True) / parts
        return ((codes + zero) * scale).astype(np.float32)  # exact in float64, rounded once
    scale_32, zero_32 = np.frombuffer(data[:8], np.float32)
    if not np.isfinite(scale_32) or not np.isfinite(zero_32):
        return None
    if 2.0**-62 < scale_32 < 2.0**62 and abs(float(zero_32)) <= 2.0**16 * float(scale_32):
        values_32: NDArray[np.float32] = codes.astype(np.float32) * scale_32 + zero_32
        return values_32
    largest = float(np.finfo(np.float32).max)
    values: NDArray[np.float64] = float(zero_32) + float(scale_32) * codes.astype(np.float64)
    return np.clip(values, -largest, largest).astype(np.float32)


def decode_float(data: bytes, width: int, codec: dict[str, Any]) -> NDArray[np.float32] | None:
    assert codec["bits"] == 16
    words = np.frombuffer(data, np.uint16)
    if words[0] & 0x7F80 == 0x7F80:
        return None
    return (words.astype(np.uint32) << 16).view(np.float32)


def decode_log(data: bytes, width: int, codec: dict[str, Any]) -> NDArray[np.float32] | None:
    assert codec["bits"] == 8
    word = int.from_bytes(data[:2], "little")
    if word & 0x7F80 == 0x7F80:
        return None
    scale = np.array([(word & 0x7FFF) << 16], np.uint32).view(np.float32)[0]
    values = np.zeros(width, np.float32)
    for j, code in enumerate(data[2:]):
        top, parts = (127, 4) if word & 0x8000 else (255, 8)
        magnitude = code & top
        if magnitude:
            value = scale * np.float32(2.0 ** -((top - magnitude) / parts))
            value = max(value, np.float32(2.0**-149))
            values[j] = -value if code > top else value
    return values


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("format_", [1, 2])
def test_a_reader_made_from_the_page(
    tmp_path: Path, strategy: Any, format_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if format_ == 2:  # segments at almost every save
        monkeypatch.setattr(history, "RECENT_BYTES", 1500)
        monkeypatch.setattr(history, "FANOUT", 2)
    run = Run()
    truth = {}
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(strategy=strategy)) as ckpt:
        for step in range(8):
            run.train(4)
            version = ckpt.save(step)
            truth[version] = [p.detach().clone().numpy() for p in run.model.tables.parameters()]
    assert read_manifest(tmp_path)["format"] == format_
    for version, tables in truth.items():
        assert version is not None
        found = read_rows(tmp_path, version)
        for number, table in enumerate(tables):
            assert found[f"model.tables.{number}.weight", "weight"] == table.tobytes()


def odd_rows(run: Tables, ckpt: hf.Checkpointer) -> None:
    """Rows for every case of the page: equal values, zeros, denormals, huge ones."""
    for name in ("a", "b"):
        ckpt.mark(f"model.{name}.weight", np.arange(12))
        for row, value in enumerate((1.5, 0.0, -0.0, 65000.0)):
            run.weight(name)[row] = value
        run.weight(name)[4, 3] = torch.nan
        run.weight(name)[5] *= 1e-40
        run.sums(name)[6] = 0
        run.sums(name)[7, 1] = torch.inf
        run.sums(name)[8, :3] = torch.tensor([1e-41, 3e-39, 1e-38])
        run.sums(name)[9, 2] = -0.25
        if run.weight(name).dtype == torch.float32:
            run.weight(name)[10] *= 1e37
            run.sums(name)[11] = 1e-42


QUANTIZED = [
    (2, 8, torch.float32, 0.0),
    (3, 16, torch.float32, 0.0),
    (4, None, torch.float32, 0.0),
    (8, 8, torch.float32, 0.0),
    (4, 8, torch.float32, 1000.0),
    (8, 16, torch.float32, 1e6),
    (4, 16, torch.float16, 0.0),
]


@pytest.mark.parametrize(("bits", "state_bits", "dtype", "offset"), QUANTIZED)
@pytest.mark.parametrize(
    "strategy", [hf.Differential("one-shot"), hf.Chunked("rounds", 2, reset="never")], ids=str
)
def test_a_reader_of_quantized_rows(
    tmp_path: Path, strategy: Any, bits: Any, state_bits: Any, dtype: torch.dtype, offset: float
) -> None:
    """It finds what a restore gives, bit for bit: raw rows, rounded rows and rounded state."""
    run = Tables(dtype)
    policy = hf.Policy(strategy=strategy, quantize=bits, quantize_state=state_bits)
    for name in ("a", "b"):
        run.weight(name).add_(offset)
    with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
        versions = [ckpt.save(0)]
        for step in range(1, 5):
            run.change(ckpt)
            odd_rows(run, ckpt)
            versions.append(ckpt.save(step))
    (codec,) = {
        field[3]["grid_bits"]
        for group in read_manifest(tmp_path)["eras"][-1]["groups"]
        for field in group["fields"]
        if field[0] == "weight" and len(field) > 3
    }
    assert codec == (32 if offset else 16)
    for version in (versions[0], versions[-1]):
        assert version is not None
        fresh = Tables(dtype)
        with hf.Checkpointer(tmp_path, fresh.objects) as ckpt:
            ckpt.restore(version)
        found = read_rows(tmp_path, version)
        for name, (weight, sums) in fresh.state().items():
            assert found[f"model.{name}.weight", "weight"] == weight.numpy().tobytes()
            assert found[f"model.{name}.weight", "optim.sum"] == sums.numpy().tobytes()
