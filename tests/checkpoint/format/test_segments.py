"""Segments: what is written is read, everything else is refused, and one damaged object costs nothing."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.chunk import checksum
from holdfast.checkpoint.format.entries import Era, Version
from holdfast.checkpoint.format.manifest import Head, decode_head, encode_head, name_of, read, read_newest
from holdfast.checkpoint.format.segments import (
    EraPart,
    Part,
    Segment,
    fold,
    pack,
    unpack,
    without_replaced,
)
from holdfast.checkpoint.saving import history
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.tools.verify import verify_versions
from holdfast.errors import CorruptCheckpoint, ObjectMissing
from tests.checkpoint.by_hand import Rows, restored
from tests.checkpoint.format.test_manifest import GROUPS, file, framed, version

OLD = Part(
    eras=[Era(1, "Chunked", GROUPS, [file("a", 1), file("b", 2, 3)], (7,))],
    versions=[version(1), version(2)],
)
NEW = Part(
    more=[EraPart(1, [file("c", 3)], (9,))],
    versions=[version(3)],
    deleted=[1],
    removed=["chunks/b"],
)


def stored(folder: Path, *parts: Part, recent: Part = NEW, number: int = 7, **more: Any) -> Head:
    """A manifest in segments, written by hand."""
    packed = [pack(part, number) for part in parts]
    head = Head(2, number, 1.5, [segment for segment, _ in packed], recent, **more)
    for segment, data in packed:
        for name in segment.names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
    (folder / "manifests").mkdir(exist_ok=True)
    (folder / name_of(number)).write_bytes(encode_head(head))
    return head


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path, create=True)


def test_there_and_back() -> None:
    segment, data = pack(OLD, 12)
    assert unpack(segment, data, "here") == OLD
    assert gzip.decompress(data) == msgspec.json.encode(OLD), "so that others read it, too"
    assert segment.name.startswith("segments/0000000012-")
    assert pack(OLD, 12)[0].name != segment.name, "names are never used twice"


def test_the_newest_mention_counts(tmp_path: Path, store: LocalStore) -> None:
    head = stored(tmp_path, OLD, recent=NEW, last_version=9, retired=[("chunks/old", 3.5)])
    found = read(store, 7)
    assert [v.version for v in found.versions] == [2, 3]
    (era,) = found.eras
    assert [f.name for f in era.files] == ["chunks/a", "chunks/c"]
    assert (era.strategy, era.groups, era.open_records) == ("Chunked", GROUPS, (9,))
    assert (found.format, found.number, found.last_version) == (2, 7, 9)
    assert (found.retired, found.segments) == ([("chunks/old", 3.5)], head.segments)
    assert {"segments/", "chunks/"} <= {name[: name.index("/") + 1] for name in found.file_names()}


def test_files_stay_in_the_order_of_their_first_mention() -> None:
    again = Part(more=[EraPart(1, [file("c", 3), msgspec.structs.replace(file("a", 1), rows=9)], ())])
    ((era,), _) = fold([OLD, again])
    assert [(f.name, f.rows) for f in era.files] == [("chunks/a", 9), ("chunks/b", 3), ("chunks/c", 3)]


def test_an_era_goes_with_its_last_version() -> None:
    eras, versions = fold([OLD, Part(deleted=[1, 2])])
    assert (eras, versions) == ([], [])


COUNTS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(0, 2), st.integers(1, 5)))


@given(replaced=COUNTS, eras=st.lists(st.integers(1, 3), min_size=1, max_size=9))
def test_records_that_are_replaced(replaced: list[tuple[int, int, int, int]], eras: list[int]) -> None:
    versions = [
        msgspec.structs.replace(version(number, era), records=(100, 200) if number % 4 else ())
        for number, era in enumerate(eras, 1)
    ]
    found = {v.version: v for v in without_replaced(versions, replaced)}
    for v in versions:  # the slow twin: each death for each version
        left = list(v.records)
        for era, died, group, count in replaced:
            if era == v.era and died <= v.version and group < len(left):
                left[group] -= count
        assert (v.version in found) == (tuple(left) != v.records)
        assert found.get(v.version, v) == msgspec.structs.replace(v, records=tuple(left))


def test_counts_change_in_older_parts_only() -> None:
    def counted(number: int) -> Version:
        return msgspec.structs.replace(version(number), records=(50,))

    first = msgspec.structs.replace(OLD, versions=[counted(1), counted(2)])
    second = Part(more=[EraPart(1, [], (9,))], versions=[counted(3)], replaced=[(1, 2, 0, 5), (1, 3, 0, 7)])
    _, versions = fold([first, second])
    assert [v.records for v in versions] == [(50,), (45,), (50,)]


def test_every_cut_and_every_flipped_bit_is_seen() -> None:
    segment, data = pack(NEW, 1)
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpoint, match=r"here has \d+ bytes, expected"):
            unpack(segment, data[:length], "here")
    for i in range(len(data)):
        with pytest.raises(CorruptCheckpoint, match="here is damaged"):
            unpack(segment, data[:i] + bytes([data[i] ^ 8]) + data[i + 1 :], "here")
    with pytest.raises(CorruptCheckpoint, match=r"here has \d+ bytes, expected"):
        unpack(segment, data + b" ", "here")


TAG = "0123456789ab"


def of(data: bytes, length: int) -> Segment:
    return Segment(7, TAG, len(data), checksum(data), length)


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b"[" * 100_000, b"\xff", b'{"versions":[{}]}', b'{"deleted":[1e999]}'],
    ids=lambda body: repr(body[:20]),
)
def test_content_that_makes_no_sense(body: bytes) -> None:
    data = gzip.compress(body)
    with pytest.raises(CorruptCheckpoint, match="here is damaged"):
        unpack(of(data, len(body)), data, "here")


def test_no_more_is_unpacked_than_was_announced() -> None:
    bomb = gzip.compress(bytes(1 << 24), 9)
    assert len(bomb) < 1 << 16
    for length in (0, 100, (1 << 24) - 1, (1 << 24) + 1):
        with pytest.raises(CorruptCheckpoint, match=f"it does not hold {length} bytes"):
            unpack(of(bomb, length), bomb, "here")
    body = msgspec.json.encode(OLD)
    for data in (b"", b"junk", gzip.compress(body) + b"x", gzip.compress(body) * 2, gzip.compress(body)[:-3]):
        with pytest.raises(CorruptCheckpoint, match="here is damaged"):
            unpack(of(data, len(body)), data, "here")


SEGMENT = f"segments/0000000007-{TAG}.json.gz"
HEADS: list[Any] = [
    *([[7, tag, 5, "", 9]] for tag in (
        "../x", "/etc/passwd", "x", "", TAG.upper(), TAG[:-1], TAG + "x", TAG + "-copy", TAG + "\n",
    )),
    *([[number, TAG, 5, "", 9]] for number in (-1, 10**10, 1 << 70, "7", 7.5)),
    [[7, TAG, -1, "", 9]],
    [[7, TAG, 5, "", -1]],
    [[7, TAG, 5, "", 1 << 31]],
    [[7, TAG, 1 << 70, "", 9]],
    [[7, TAG, 5, "", 9], [7, TAG, 5, "", 9]],
    [[7, TAG, 5, ""]],
    [[7, TAG, "5", "", 9]],
    [[SEGMENT, 5, "", 9]],
    [7],
    SEGMENT,
]  # fmt: skip


@pytest.mark.parametrize("segments", HEADS, ids=lambda s: str(s)[:50])
def test_heads_that_no_writer_writes(segments: Any) -> None:
    body = {"format": 2, "number": 7, "time": 0.0, "segments": segments, "recent": {}}
    with pytest.raises(CorruptCheckpoint, match=r"here (is invalid|is damaged): "):
        decode_head(framed(msgspec.json.encode(body)), "here")


def test_a_manifest_of_the_first_format_has_no_segments() -> None:
    body = {
        "format": 1,
        "number": 7,
        "time": 0.0,
        "eras": [],
        "versions": [],
        "segments": [[7, TAG, 5, "", 9]],
    }
    with pytest.raises(CorruptCheckpoint, match="it has segments"):
        decode_head(framed(msgspec.json.encode(body)), "here")


PARTS: dict[str, list[Part]] = {
    "two eras of one number": [OLD, Part(eras=[Era(1, "x", GROUPS, [])])],
    "an era that is not there": [OLD, Part(more=[EraPart(4, [])])],
    "a version of no era": [OLD, Part(versions=[version(4, 4)])],
    "a version twice": [OLD, Part(versions=[version(3), version(3)])],
    "versions in no order": [OLD, Part(versions=[version(4), version(3)])],
    "a version before older ones": [
        msgspec.structs.replace(OLD, versions=[version(2)]), Part(versions=[version(1)]),
    ],
    "a file twice": [OLD, Part(more=[EraPart(1, [file("c", 3), file("c", 3)])])],
    "a file in two eras": [OLD, Part(eras=[Era(3, "x", GROUPS, [file("a", 3)])], versions=[version(3, 3)])],
    "a name that leads elsewhere": [OLD, Part(more=[EraPart(1, [file("../../x", 3)])])],
    "a segment for a file": [
        OLD, Part(more=[EraPart(1, [msgspec.structs.replace(file("x", 3), name=SEGMENT)])]),
    ],
    "a count below zero": [
        msgspec.structs.replace(OLD, versions=[msgspec.structs.replace(version(2), records=(5,))]),
        Part(replaced=[(1, 2, 0, 9)]),
    ],
    "counts of other groups": [OLD, Part(more=[EraPart(1, [], (1, 2))])],
    "a number that is too large": [
        OLD, Part(more=[EraPart(1, [msgspec.structs.replace(file("c", 3), rows=2**62)])]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("where", ["segment", "head"])
def test_parts_that_no_writer_writes(
    tmp_path: Path, store: LocalStore, parts: list[Part], where: str
) -> None:
    older, recent = (parts, Part()) if where == "segment" else (parts[:-1], parts[-1])
    stored(tmp_path, *older, recent=recent)
    with pytest.raises(CorruptCheckpoint, match="is invalid"):
        read(store, 7)


def damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "longer":
        path.write_bytes(path.read_bytes() + bytes(1 << 20))
    else:
        path.write_bytes(b"\0" + path.read_bytes()[1:])


@pytest.mark.parametrize("how", ["missing", "cut", "longer", "flipped"])
@pytest.mark.parametrize("copy", [0, 1])
def test_one_damaged_object_costs_nothing(tmp_path: Path, store: LocalStore, copy: int, how: str) -> None:
    (segment,) = stored(tmp_path, OLD).segments
    good = read(store, 7)
    damage(tmp_path / segment.names[copy], how)
    found = manifests.read_stored(store, 7)
    assert found.manifest == good
    assert len(found.damaged) == (copy == 0), "the second is read only if it has to be"
    (complaint,) = manifests.damaged_segments(store, good)
    assert segment.names[copy] in complaint


@pytest.mark.parametrize("how", ["missing", "cut", "longer", "flipped"])
def test_a_segment_that_is_lost_is_a_damaged_manifest(tmp_path: Path, store: LocalStore, how: str) -> None:
    stored(tmp_path, recent=OLD, number=6)
    (segment,) = stored(tmp_path, OLD, number=7).segments
    for name in segment.names:
        damage(tmp_path / name, how)
    with pytest.raises(CorruptCheckpoint, match=r"0000000007.json cannot be read: .*-copy"):
        read(store, 7)
    complaints: list[str] = []
    assert read_newest(store, complaints).number == 6
    assert len(complaints) == 1
    (tmp_path / name_of(6)).unlink()
    with pytest.raises(CorruptCheckpoint, match="no manifest that can be read"):
        read_newest(store)


def test_a_segment_that_was_merged_while_it_was_read(
    tmp_path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old,) = stored(tmp_path, OLD, number=7).segments
    real = LocalStore.open
    done: list[str] = []

    def merge_first(self: LocalStore, name: str) -> Any:
        if name in old.names and not done:
            done.append(name)
            for number in (8, 9):
                stored(tmp_path, OLD, NEW, recent=Part(), number=number)
            for gone in old.names:
                (tmp_path / gone).unlink()
        return real(self, name)

    monkeypatch.setattr(LocalStore, "open", merge_first)
    complaints: list[str] = []
    assert read_newest(store, complaints).number == 9
    assert done
    assert not complaints
    stored(tmp_path, OLD, number=8)
    assert not list(manifests.damaged_segments(store, read(store, 8))), "nor is that damage"
    with pytest.raises(ObjectMissing):
        manifests._read_segment(store, 7, old, [])


def test_names_of_the_manifest_before(tmp_path: Path, store: LocalStore) -> None:
    before = stored(tmp_path, OLD, number=6)
    after = msgspec.structs.replace(before, number=7, recent=Part())
    (tmp_path / name_of(7)).write_bytes(encode_head(after))
    asked = manifests.names_in(store, 6, besides=read(store, 7))
    assert asked == {"chunks/c", "dense/3", *before.segments[0].names}, "the shared segment was not read"
    everything = manifests.names_in(store, 6, besides=manifests.EMPTY)
    assert everything == asked | {"chunks/a", "chunks/b", "dense/1", "dense/2"}


def test_verify_finds_damage_that_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "RECENT_BYTES", 2000)
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(strategy="incremental")) as ckpt:
        for step in range(12):
            run.change(ckpt, step)
            ckpt.save(step)
    with open_store(tmp_path, create=False) as store:
        assert verify_versions(store).good
        segment = read_newest(store).segments[0]
        damage(tmp_path / segment.names[1], "flipped")
        report = verify_versions(store)
        assert report.whole == tuple(range(1, 13))
        assert not report.good
        (complaint, *_) = report.complaints
        assert segment.names[1] in complaint
    assert restored(tmp_path, 3)
    assert restored(tmp_path) == run.value()
