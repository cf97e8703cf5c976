"""Manifests: what is written is read, everything else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.checkpoint.codecs.quantize import UniformCodec
from holdfast.checkpoint.format.chunk import OPEN, checksum
from holdfast.checkpoint.format.manifest import (
    EMPTY,
    DenseEntry,
    Era,
    FileEntry,
    Manifest,
    Version,
    decode,
    encode,
    name_of,
    read,
    read_newest,
    without_unneeded_files,
)
from holdfast.checkpoint.store import Store, open_store
from holdfast.errors import CorruptCheckpoint, ObjectMissing

GROUPS = [{"fields": [["weight", "F32", 4]], "tables": [["a", 10], ["b", 20]]}]


def file(name: str, born: int, died: int = OPEN) -> FileEntry:
    return FileEntry(f"chunks/{name}", 100, 40, "0" * 32, "increment", 0, born, born, died, 3)


def version(number: int, era: int = 1) -> Version:
    dense = DenseEntry(f"dense/{number}", 5, "0" * 32)
    return Version(number, era, number * 10, 0.5, number == era, 3, 105, dense, {"auc": [0.5, None]})


WHOLE = Manifest(
    format=1,
    number=7,
    time=1.5,
    eras=[Era(1, "Chunked", GROUPS, [file("a", 1), file("b", 2, 3)])],
    versions=[version(1), version(2)],
    retired=[("chunks/old", 3.5)],
)


def test_there_and_back() -> None:
    assert decode(encode(WHOLE), "here") == WHOLE
    assert decode(encode(EMPTY), "here") == EMPTY
    (group,) = WHOLE.eras[0].decoded_groups()
    assert [(t.name, t.rows, t.first) for t in group.tables] == [("a", 10, 0), ("b", 20, 10)]


def test_every_cut_and_every_flipped_bit_is_seen() -> None:
    data = encode(WHOLE)
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpoint, match="here is damaged"):
            decode(data[:length], "here")
    for i in range(len(data)):
        for bit in (0, 3, 7):
            with pytest.raises(CorruptCheckpoint, match="here is damaged"):
                decode(data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :], "here")
    with pytest.raises(CorruptCheckpoint):
        decode(data + b" ", "here")


def framed(body: bytes) -> bytes:
    """A body with a checksum that is right."""
    return b'{"checksum":"' + checksum(body).encode() + b'","manifest":' + body + b"}\n"


def changed(**values: Any) -> bytes:
    content: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(WHOLE))
    for path, value in values.items():
        place: Any = content
        *way, last = path.split("__")
        for step in way:
            place = place[int(step) if step.isdigit() else step]
        place[last] = value
    return framed(msgspec.json.encode(content))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"format":1,"number":7,"time":0,"eras":[{"number":1,"strategy":"x","files":[],"groups":[{"x":'
        + b"[" * 100_000,
        b'{"format":1,"number":1e999,"time":0,"eras":[],"versions":[]}',
        b'{"format":1,"number":' + b"9" * 5000 + b',"time":0,"eras":[],"versions":[]}',
        b"\xff",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_content_that_makes_no_sense(body: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match="here is damaged"):
        decode(framed(body), "here")


FILE, VERSION = "eras__0__files__0__", "versions__0__"
HOSTILE: list[dict[str, Any]] = [
    *({FILE + "name": name} for name in (
        "../../etc/passwd", "/etc/passwd", "chunks/../../x", "chunks/", "chunks//x", "chunks/\x00", "",
        "manifests/0000000001.json", "writer.lock", "chunks/.partial-1", "chunks/" + "x" * 600, "CHUNKS/x",
    )),
    {VERSION + "dense": {"name": "../x", "bytes": 5, "checksum": ""}},
    {VERSION + "dense": {"name": "manifests/0000000007.json", "bytes": 5, "checksum": ""}},
    {"retired": [["../../x", 0.0]]},
    {"retired": [["manifests/0000000007.json", 0.0]]},
    {FILE + "bytes": -1},
    {FILE + "bytes": 2**70},
    {FILE + "rows": -1},
    {FILE + "header_bytes": -8},
    {FILE + "first_born": 2**40},
    {FILE + "last_died": 2**40},
    {FILE + "shard": -1},
    {VERSION + "version": 0},
    {VERSION + "version": -1},
    {VERSION + "version": 2},
    {VERSION + "version": 2**31},
    {VERSION + "era": 9},
    {"versions__1__version": 1},
    {"eras": [msgspec.to_builtins(WHOLE.eras[0])] * 2},
    {"eras": []},
    {"eras__0__files": [msgspec.to_builtins(file("a", 1))] * 2},
    {VERSION + "records": [1, 2]},
    {VERSION + "records": [-1]},
    {VERSION + "records": [2**62]},
    {"eras__0__open_records": [1, 2]},
    {"eras__0__open_records": [-1]},
]  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE, ids=lambda c: str(c)[:60])
def test_what_no_writer_writes(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"here (is invalid|is damaged): "):
        decode(changed(**change), "here")


@pytest.mark.parametrize("kind", ["increments", "", None, 5, "Baseline"])
def test_an_unknown_kind_of_file(kind: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match="here is damaged"):
        decode(changed(**{FILE + "kind": kind}), "here")


def test_another_format() -> None:
    with pytest.raises(CorruptCheckpoint, match="has format 3; this Holdfast reads formats 1 and 2"):
        decode(changed(format=3), "here")


CODED: dict[str, Any] = {"fields": [["w", "F32", 4, UniformCodec(8, 32).to_json()]], "tables": [["a", 1]]}
RAW: dict[str, Any] = {"fields": [["w", "F32", 4]], "tables": [["a", 1]], "raw_rows_of": 0}


def test_groups_of_raw_rows() -> None:
    groups = Era(1, "Chunked", [CODED, RAW], []).decoded_groups()
    assert [g.raw_rows_of for g in groups] == [None, 0]


@pytest.mark.parametrize(
    "groups",
    [
        [{}],
        [{"fields": 5, "tables": []}],
        [{"fields": [], "tables": []}],
        [{"fields": [["w", "F32"]], "tables": []}],
        [{"fields": [["w", "F31", 1]], "tables": []}],
        [{"fields": [["w", "F32", 0]], "tables": []}],
        [{"fields": [["w", "F32", 2**40]], "tables": []}],
        [{"fields": [["w", "F32", None]], "tables": []}],
        [{"fields": [["w", "F32", "1e9"]], "tables": []}],
        [{"fields": [["w", "F32", 4]]}],
        [{"fields": [["w", "F32", 4]], "tables": [["a"]]}],
        [{"fields": [["w", "F32", 4]], "tables": [["a", -1]]}],
        [{"fields": [["w", "F32", 4]], "tables": [["a", 2**60]]}],
        [{"fields": [["w", "F32", 4]], "tables": [["a", 2**47], ["b", 2**47]]}],
        [{"fields": [["w", "F32", 4]], "tables": [["a", 1], ["a", 1]]}],
        [{"fields": [["w", "F32", 4]], "tables": [["a", 1]]}] * 2,
        [{"fields": [["w", "F32", 4], ["w", "F32", 4]], "tables": [["a", 1]]}],
        [{"fields": [["w", "F32", 4], ["w", "F16", 4]], "tables": [["a", 1]]}],
        # Rows that are kept raw: not last, coded like their group, of another width, of raw ones.
        [CODED, RAW, {"fields": [["w", "F32", 4]], "tables": [["b", 1]]}],
        [CODED, CODED | {"raw_rows_of": 0}],
        [CODED, RAW | {"fields": [["w", "F32", 8]]}],
        [CODED, RAW | {"tables": [["a", 2]]}],
        [CODED, RAW, RAW | {"raw_rows_of": 1}],
        [CODED, RAW | {"raw_rows_of": -1}],
        [RAW],
    ],
    ids=lambda groups: str(groups)[:70],
)
def test_groups_that_cannot_be(groups: Any) -> None:
    era = decode(changed(eras__0__groups=groups), "here").eras[0]
    with pytest.raises(CorruptCheckpoint, match="a manifest"):
        era.decoded_groups()


def test_the_newest_that_is_whole(tmp_path: Path) -> None:
    with open_store(tmp_path, create=True) as store:
        assert read_newest(store) == EMPTY
        for number in (3, 4, 5):
            store.publish(name_of(number), encode(msgspec.structs.replace(WHOLE, number=number)))
        store.publish("manifests/notes.txt", b"not a manifest")
        assert read_newest(store).number == 5
        (tmp_path / name_of(5)).write_bytes(encode(msgspec.structs.replace(WHOLE, number=4)))
        with pytest.raises(CorruptCheckpoint, match=r"0000000005.json holds manifest 4: files were swapped"):
            read(store, 5)
        complaints: list[str] = []
        assert read_newest(store, complaints).number == 4
        assert len(complaints) == 1
        for number in (3, 4):
            (tmp_path / name_of(number)).write_bytes(b"")
        with pytest.raises(
            CorruptCheckpoint, match=r"no manifest that can be read: .*0000000005.*0000000003"
        ):
            read_newest(store)


def test_a_manifest_that_is_listed_and_never_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a store whose listings lag behind: an error in the end, not a search without one."""
    with open_store(tmp_path, create=True) as store:
        store.publish(name_of(3), encode(msgspec.structs.replace(WHOLE, number=3)))
        asked = []

        def gone(self: Store, name: str) -> Any:
            asked.append(name)
            raise ObjectMissing(f"no {name}")

        monkeypatch.setattr(type(store), "open", gone)
        with pytest.raises(CorruptCheckpoint, match="no manifests/0000000003"):
            read_newest(store)
        assert asked


def test_files_that_no_version_needs_are_left_out() -> None:
    files = [file("base", 1), file("old", 2, 3), file("between", 4, 5), file("new", 6)]
    eras = [Era(1, "x", GROUPS, files), Era(9, "x", GROUPS, [file("other", 9)])]
    (kept,) = without_unneeded_files(eras, [version(3), version(5)])
    assert [f.name for f in kept.files] == ["chunks/base"]
    (kept,) = without_unneeded_files(eras, [version(2), version(4), version(6)])
    assert [f.name for f in kept.files] == ["chunks/base", "chunks/old", "chunks/between", "chunks/new"]
