"""A store made by someone who means harm: every checksum is right, and what it says is not (holes 34, 35)."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.checkpoint.format.chunk import LAST, OPEN, NewPiece, checksum, encode_file
from holdfast.checkpoint.format.manifest import FileEntry, Manifest, encode, name_of, read_newest
from holdfast.checkpoint.format.records import Rows
from holdfast.checkpoint.layout.shard import Shard
from holdfast.checkpoint.reading.loader import RowLoader
from holdfast.checkpoint.reading.version import open_version
from holdfast.checkpoint.saving.catalog import Catalog
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import CorruptCheckpoint, StoreError
from tests.checkpoint.lineage import GROUPS, Lineage, QuickFiles, blank

ROUNDS = hf.Chunked(round_versions=3, dead_fraction=0.0, reset="never")
MOST_BYTES = 32 << 20
REFUSED = (CorruptCheckpoint, StoreError)
PLACES = [
    "group", "rank", "rows", "first_born", "last_born", "first_died", "last_died", "ids", "first_id",
    "last_id", "offset", "lengths", "index_checksum", "fields_checksum",
]  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    with LocalStore(tmp_path / "store", create=True, files=QuickFiles()) as found:
        line = Lineage(found, hf.Policy(strategy=ROUNDS))
        for _ in range(5):
            line.train()
            line.save()
        line.writer.close()
        yield found


def publish(store: LocalStore, manifest: Manifest) -> None:
    path = Path(store.url) / name_of(manifest.number)
    path.write_bytes(encode(manifest))


def replace_file(store: LocalStore, entry: FileEntry, header: bytes, body: bytes) -> None:
    """Put other bytes in a file's place, and let the manifest vouch for them."""
    (Path(store.url) / entry.name).write_bytes(header + body)
    manifest = read_newest(store)
    (era,) = manifest.eras
    forged = msgspec.structs.replace(
        entry, bytes=len(header + body), header_bytes=len(header), header_checksum=checksum(header)
    )
    files = [forged if f.name == entry.name else f for f in era.files]
    publish(store, msgspec.structs.replace(manifest, eras=[msgspec.structs.replace(era, files=files)]))


def forge(store: LocalStore, kind: str, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Change the pieces of a file."""
    entry = next(f for f in read_newest(store).eras[0].files if f.kind == kind)
    content = (Path(store.url) / entry.name).read_bytes()
    header = json.loads(content[8 : entry.header_bytes])
    pieces = [dict(zip(PLACES, p, strict=True)) for p in json.loads(header["__metadata__"]["pieces"])]
    text = change(pieces)
    header["__metadata__"]["pieces"] = text or json.dumps([list(p.values()) for p in pieces])
    encoded = json.dumps(header).encode()
    replace_file(store, entry, len(encoded).to_bytes(8, "little") + encoded, content[entry.header_bytes :])


def restore_all(store: LocalStore) -> None:
    """Read every version into tables that nobody else knows of."""
    for version in read_newest(store).versions:
        with open_version(store, version.version) as reader:
            tables = blank()
            reader.read_rows(RowLoader(reader.groups, lambda table: tables[table]))  # noqa: B023


def resume(store: LocalStore) -> None:
    manifest = read_newest(store)
    shard = Shard(0, GROUPS, ROUNDS)
    shard.resume(store, manifest.eras[0])
    shard.tidy(store, 9, [v.version for v in manifest.versions])


def set_all(**values: Any) -> Callable[[list[dict[str, Any]]], None]:
    def change(pieces: list[dict[str, Any]]) -> None:
        for piece in pieces:
            piece.update(values)

    return change


def grow(pieces: list[dict[str, Any]]) -> None:
    """Rows beyond all reason, with lengths to match."""
    for piece in pieces:
        factor = 2**50
        piece["rows"] *= factor
        piece["lengths"] = [n * factor for n in piece["lengths"]]


PIECES: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "rows": set_all(rows=2**60),
    "no rows": set_all(rows=0),
    "negative rows": set_all(rows=-1),
    "all grown": grow,
    "group": set_all(group=99),
    "negative group": set_all(group=-1),
    "offset": set_all(offset=2**40),
    "negative offset": set_all(offset=-8),
    "ids beyond the table": set_all(last_id=10**6),
    "negative ids": set_all(first_id=-5),
    "huge ids": set_all(first_id=2**61, last_id=2**61 + 3),
    "a range": set_all(ids="range"),
    "another encoding": set_all(ids="../ids"),
    "too few lengths": set_all(lengths=[8]),
    "no lengths": set_all(lengths=None),
    "many lengths": set_all(lengths=[8] * 10_000),
    "huge lengths": set_all(lengths=[2**61] * 7),
    "negative lengths": set_all(lengths=[-8, 8, 0, 0, 8, 8, 0]),
    "versions": set_all(first_born=2**40),
    "rank": set_all(rank="high"),
    "nothing": lambda pieces: pieces.clear(),
    "twice": lambda pieces: pieces.extend(pieces * 1000),
    "deep": lambda pieces: "[" * 100_000,
    "infinite": lambda pieces: "[[1e999]]",
}


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("kind", ["increment", "live"])
def test_pieces(store: LocalStore, name: str, kind: str) -> None:
    restore_all(store)
    forge(store, kind, PIECES[name])
    tracemalloc.start()
    try:
        with pytest.raises(REFUSED, match=f"-{kind}-"):
            restore_all(store)
        with pytest.raises(REFUSED, match=f"-{kind}-"):
            resume(store)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def forged_ids(store: LocalStore, data: bytes, rows: int, last: int, encoding: str) -> None:
    """A live file with one piece whose ids are these bytes, every length and checksum in order."""
    entry = next(f for f in read_newest(store).eras[0].files if f.kind == "live")
    fields = tuple(np.full((rows, f.bytes), 255, np.uint8) for f in GROUPS[0].fields)
    born = np.arange(1, rows + 1, dtype=np.int32)
    new = NewPiece(0, LAST, Rows(np.zeros(rows, np.int64), fields), born % 2 + 1, OPEN)
    encoded = encode_file([new], [g.fields for g in GROUPS])
    _, versions, *rest = (bytes(memoryview(p).cast("B")) for p in encoded.parts[1:])
    (piece,) = encoded.pieces
    index = [data, versions if piece.lengths[1] else b""]
    index.append(bytes(-len(b"".join(index)) % 8))
    body = b"".join(f.tobytes() for f in fields)
    end = bytes(-len(b"".join(index) + body) % 8)
    del rest
    values = {name: getattr(piece, name) for name in PLACES} | {
        "ids": encoding, "first_id": 0, "last_id": last, "last_born": 2, "rows": rows,
        "lengths": [len(data), len(index[1]), 0, len(index[2]), *piece.lengths[4:-1], len(end)],
        "index_checksum": checksum(b"".join(index)), "fields_checksum": checksum(body + end),
    }  # fmt: skip
    metadata = {"holdfast": "1", "pieces": json.dumps([list(values.values())])}
    text = json.dumps({"__metadata__": metadata}).encode()
    replace_file(store, entry, len(text).to_bytes(8, "little") + text, b"".join(index) + body + end)


def test_ids_that_would_leave_the_tables(store: LocalStore) -> None:
    """Row ids become addresses: bytes that decode to ids that wrap around, descend or run ahead."""
    last = GROUPS[0].rows - 1
    ones = bytes([48]) + b"\xff" * (1 << 12)  # a gap of 2**63: with it ids would come round
    for data in (
        ones + bytes(64),
        bytes([40]) + b"\xff" * (1 << 20) + bytes(64),
        bytes([255] * 64),
        bytes(2),
    ):
        for encoding in ("rice", "rice0"):
            forged_ids(store, data, 5, last, encoding)
            with pytest.raises(CorruptCheckpoint, match=r"-live-.*row ids do not match the header"):
                restore_all(store)
    # Ids that repeat are in order in themselves, but the last must be the last.
    forged_ids(store, bytes(8), 5, last, "rice0")
    with pytest.raises(CorruptCheckpoint, match="-live-"):
        restore_all(store)


NAMES = ["../outside", "/etc/passwd", "chunks/../../outside", "manifests/0000000001.json", "writer.lock", ""]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere(store: LocalStore, name: str) -> None:
    outside = Path(store.url).parent / "outside"
    outside.write_bytes(b"private")
    manifest = read_newest(store)
    before = msgspec.structs.replace(manifest, number=manifest.number - 1)
    (era,) = manifest.eras
    files = [msgspec.structs.replace(f, name=name) for f in era.files]
    dense = msgspec.structs.replace(manifest.versions[-1].dense, name=name)
    for forged in (
        msgspec.structs.replace(manifest, eras=[msgspec.structs.replace(era, files=files)]),
        msgspec.structs.replace(
            manifest, versions=[msgspec.structs.replace(manifest.versions[-1], dense=dense)]
        ),
        msgspec.structs.replace(manifest, retired=[(name, 0.0)]),
    ):
        publish(store, before)
        publish(store, forged)
        catalog = Catalog(store, hf.Policy())
        assert len(catalog.complaints) == 1
        assert f"names the file {name!r}" in catalog.complaints[0]
        catalog.delete_versions([1])  # publishes and deletes
        assert outside.read_bytes() == b"private"
        assert (Path(store.url) / name_of(manifest.number)).exists()
        for path in (Path(store.url) / "manifests").iterdir():
            path.unlink()


def test_a_link_in_the_place_of_a_folder(store: LocalStore, tmp_path: Path) -> None:
    """Files are neither read nor written nor deleted through it."""
    chunks = Path(store.url) / "chunks"
    chunks.rename(tmp_path / "elsewhere")
    chunks.symlink_to(tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").iterdir())
    with pytest.raises(StoreError, match="chunks"):
        restore_all(store)
    with pytest.raises(StoreError, match="chunks"):
        Lineage(store, hf.Policy(strategy=ROUNDS))
    with pytest.raises(StoreError, match="chunks"):
        store.put("chunks/new", [b"x"])
    assert sorted((tmp_path / "elsewhere").iterdir()) == before


GROUPS_OF_OTHERS: list[Any] = [
    [],
    [{"fields": [["weight", "F32", 2**19]], "tables": [["m.weight", 2**47]]}],
    [{"fields": [["weight", "F32", 4]], "tables": [["m.weight", 11]]}],
    [{"fields": [["weight", "F32", 4]], "tables": [["m.weight", 10], ["m.weight", 10]]}],
    [{"fields": [["weight", "F32", 2]], "tables": [["m.weight", 10]]}],
    [{"fields": [["weight", "F64", 2]], "tables": [["m.weight", 10]]}],
    [{"fields": [["weight", "F32", 4], ["o.state", "F32", 2**20]], "tables": [["m.weight", 10]]}],
    [{"fields": [["weight", "F32", 4], ["weight", "F32", 4]], "tables": [["m.weight", 10]]}],
    [{"fields": [["weight", "F32", 4]], "tables": [["m.weight", 10]]}, {"fields": 1, "tables": 2}],
    [{}],
    ["no group"],
]


@pytest.mark.parametrize("groups", GROUPS_OF_OTHERS, ids=lambda g: str(g)[:70])
def test_tables_that_are_not_the_models(tmp_path: Path, groups: Any) -> None:
    """Refused before a byte of the model is overwritten, or an absurd table allocated."""
    table = nn.Embedding(10, 4)
    with hf.Checkpointer(tmp_path, {"m": table}, allow_without_optimizer=True) as ckpt:
        ckpt.save(0)
    with LocalStore(tmp_path, create=False) as store:
        manifest = read_newest(store)
        era = msgspec.to_builtins(manifest.eras[0]) | {"groups": groups}
        body = msgspec.json.encode(msgspec.to_builtins(manifest) | {"eras": [era]})
        (tmp_path / name_of(manifest.number)).write_bytes(
            b'{"checksum":"' + checksum(body).encode() + b'","manifest":' + body + b"}\n"
        )
    other = nn.Embedding(10, 4)
    before = other.weight.tolist()
    tracemalloc.start()
    try:
        with (
            pytest.raises(hf.CheckpointError),
            hf.Checkpointer(tmp_path, {"m": other}, allow_without_optimizer=True) as ckpt,
        ):
            ckpt.restore()
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert other.weight.tolist() == before


def dense_file(tree: Any) -> bytes:
    text = json.dumps(tree)
    described = json.dumps({}, separators=(",", ":")).encode()
    metadata = {"holdfast": "1", "checksum": checksum(described, text.encode()), "tree": text}
    header = json.dumps({"__metadata__": metadata}, separators=(",", ":")).encode()
    return len(header).to_bytes(8, "little") + header


TREES: list[Any] = [
    None,
    [],
    {},
    {"objects": None},
    {"objects": {}},
    {"objects": {"m": None, "o": None}},
    {"objects": {"m": {}, "o": {}}},
    {"objects": {"m": {"weight": 5}, "o": 5}, "optimizers": 5},
    {"objects": {"m": {"weight": {"$place": ["x", "y", [1]]}}, "o": {"state": 5, "param_groups": 7}}},
    {"objects": {"m": {"weight": {"$place": ["m.weight", "weight", [-1, 4]]}}, "o": {}}, "optimizers": []},
]
OPTIMIZERS: list[Any] = [
    {"state": {}, "param_groups": []},
    {"state": [], "param_groups": [{"params": [0]}]},
    {"state": {}, "param_groups": [{}]},
    {"state": {}, "param_groups": 5},
]
RANDOM: list[Any] = [None, 5, {"torch": "x"}, {"python": [1, 2]}, {"numpy": {}}]
METADATA: list[Any] = [{}, 5]
TREES += [
    {
        "objects": {"m": {"weight": {"$place": ["m.weight", "weight", shape]}}, "o": optimizer},
        "optimizers": {"o": "SGD"},
        "metadata": metadata,
        "rng": rng,
    }
    for shape in ([10, 4], [40], [2**40])
    for optimizer in OPTIMIZERS
    for metadata in METADATA
    for rng in RANDOM
]


def test_dense_state_that_is_none(tmp_path: Path) -> None:
    """Whatever plain data stand where the objects' states should: an error of ours, and no other."""
    torch.manual_seed(0)
    table = nn.Embedding(10, 4)
    objects = {"m": table, "o": torch.optim.SGD(table.parameters(), lr=0.1)}
    with hf.Checkpointer(tmp_path, objects) as ckpt:
        ckpt.save(0)
    with LocalStore(tmp_path, create=False) as store:
        manifest = read_newest(store)
    (version,) = manifest.versions
    for tree in TREES:
        data = dense_file(tree)
        (tmp_path / version.dense.name).write_bytes(data)
        dense = msgspec.structs.replace(version.dense, bytes=len(data), checksum=checksum(data))
        forged = msgspec.structs.replace(version, dense=dense)
        path = tmp_path / name_of(manifest.number)
        path.write_bytes(encode(msgspec.structs.replace(manifest, versions=[forged])))
        other = nn.Embedding(10, 4)
        mine = {"m": other, "o": torch.optim.SGD(other.parameters(), lr=0.1)}
        try:
            with hf.Checkpointer(tmp_path, mine) as ckpt:
                ckpt.restore()
        except hf.CheckpointError:
            continue
        except BaseException as error:
            raise AssertionError(f"{tree}: {error!r}") from error
        pytest.fail(f"{tree} was taken")
