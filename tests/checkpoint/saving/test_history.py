"""Histories in segments: whatever is saved, deleted, flagged and rearranged, they say what one list would."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.chunk import OPEN, checksum
from holdfast.checkpoint.format.manifest import (
    DenseEntry,
    Era,
    FileChange,
    FileEntry,
    Manifest,
    Version,
    encode,
    name_of,
    read_newest,
    without_unneeded_files,
)
from holdfast.checkpoint.format.records import Field, make_groups
from holdfast.checkpoint.format.segments import Segment
from holdfast.checkpoint.saving import history
from holdfast.checkpoint.saving.catalog import Catalog
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import CheckpointError
from holdfast.options import Policy
from tests.checkpoint.lineage import QuickFiles

GROUPS = make_groups([("a", 100, (Field("weight", "F32", 1),)), ("b", 50, (Field("weight", "F32", 2),))])


class Plain:
    """The slow twin: all of a manifest in lists, gone through for every change."""

    def __init__(self) -> None:
        self.eras: list[Era] = []
        self.versions: list[Version] = []

    def commit(self, version: Version, change: FileChange, keep: int | None) -> None:
        if version.baseline:
            self.eras.append(Era(version.era, "x", [g.to_json() for g in GROUPS], [], (0, 0)))
        (era,) = (era for era in self.eras if era.number == version.era)
        written = dict(change.written)
        records = tuple(n + written.get(group, 0) for group, n in enumerate(era.open_records))
        stays = all(f.last_died == OPEN for f in change.added)
        self.swap(era, [*era.files, *change.added], records if stays else era.open_records)
        self.versions.append(msgspec.structs.replace(version, records=records))
        self.keep([v.version for v in self.versions][-keep if keep else 0 :])

    def swap(self, era: Era, files: list[FileEntry], records: tuple[int, ...]) -> None:
        new = msgspec.structs.replace(era, files=files, open_records=records)
        self.eras = [new if e is era else e for e in self.eras]

    def round(self, number: int, change: FileChange) -> None:
        (era,) = (era for era in self.eras if era.number == number)
        updated = {f.name: f for f in change.updated}
        files = [updated.get(f.name, f) for f in era.files if f.name not in change.removed]
        self.swap(era, [*files, *change.added], self.left(era.open_records, change, OPEN))
        self.versions = [
            msgspec.structs.replace(v, records=self.left(v.records, change, v.version))
            if v.era == number
            else v
            for v in self.versions
        ]
        self.keep([v.version for v in self.versions])

    def left(self, records: tuple[int, ...], change: FileChange, version: int) -> tuple[int, ...]:
        found = list(records)
        for died, group, count in change.replaced:
            found[group] -= count if died <= version else 0
        return tuple(found)

    def flag(self, unverified: dict[int, str]) -> None:
        self.versions = [
            msgspec.structs.replace(v, unverified=v.unverified or unverified.get(v.version, ""))
            for v in self.versions
        ]

    def keep(self, numbers: list[int]) -> None:
        self.versions = [v for v in self.versions if v.version in numbers]
        self.eras = without_unneeded_files(self.eras, self.versions)


class Store:
    """A catalog on a disk, and the twin; files are names only."""

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        self.store = LocalStore(folder, create=True, files=QuickFiles())
        self.policy = Policy(keep=keep)
        self.plain = Plain()
        self.made = 0
        self.open()

    def open(self) -> None:
        self.catalog = Catalog(self.store, self.policy)
        assert not self.catalog.complaints
        self.catalog.take_over()

    def entry(self, version: int, kind: Any, died: int = OPEN, born: int | None = None) -> FileEntry:
        self.made += 1
        name = f"chunks/{version:08}-0000-{kind}-{checksum(b'%d' % self.made)[:12]}.safetensors"
        first = version if born is None else born
        return FileEntry(name, 5, 1, "x", kind, 0, first, first, died, 3)

    def save(self, *, baseline: bool = False, differential: bool = False, files: int = 1) -> None:
        number, newest = self.catalog.next_version(), self.catalog.newest
        baseline = baseline or newest is None or self.catalog.manifest.last_version > newest.version
        era = number if baseline or newest is None else newest.era
        dense = DenseEntry(f"dense/{number:08}-{number:012x}.safetensors", 1, checksum(b"x"))
        version = Version(number, era, number, 0.5, baseline, 3, 10, dense, {"step": [number, None]})
        died = number + 1 if differential and not baseline else OPEN
        kind = "baseline" if baseline else "increment"
        added = tuple(self.entry(number, kind, died) for _ in range(files))
        change = FileChange(added, written=((0, 20), (1, 10)))
        self.catalog.commit_version(version, GROUPS, "x", [change])
        self.plain.commit(version, change, self.policy.keep)

    def round(self, data: Any) -> None:
        """Some files of an era are replaced, others lose pieces, and records are found to have died."""
        if not self.plain.eras:
            return
        era = data.draw(st.sampled_from(self.plain.eras))
        numbers = [v.version for v in self.plain.versions if v.era == era.number]
        newest = numbers[-1]
        chosen = [f for f in era.files if data.draw(st.integers(0, 2)) == 0]
        removed = tuple(f.name for f in chosen[::2])
        updated = tuple(
            msgspec.structs.replace(f, dead_pieces=(0,), last_died=data.draw(st.sampled_from([newest, OPEN])))
            for f in chosen[1::2]
        )
        added = tuple(self.entry(newest, "live", born=f.first_born) for f in chosen[::2])
        replaced = tuple(
            (data.draw(st.integers(numbers[0], newest + 1)), group, 1)
            for group in range(2)
            for _ in range(data.draw(st.integers(0, 2)))
        )
        change = FileChange(added, removed, updated, (), replaced)
        self.catalog.commit_round(era.number, [change])
        self.plain.round(era.number, change)

    def delete(self, data: Any) -> None:
        numbers = [v.version for v in self.plain.versions]
        gone = {n for n in numbers if data.draw(st.integers(0, 3)) == 0}
        self.catalog.delete_versions([*gone, 10**6])
        self.plain.keep([n for n in numbers if n not in gone])

    def flag(self, data: Any) -> None:
        chosen = {v.version: "why" for v in self.plain.versions if data.draw(st.integers(0, 3)) == 0}
        self.catalog.flag_versions(chosen | {10**6: "not there"})
        self.plain.flag(chosen)

    def check(self) -> Manifest:
        found = read_newest(self.store)
        assert found.versions == self.plain.versions
        assert found.eras == self.plain.eras
        assert found == self.catalog.manifest
        assert self.catalog.manifest.last_version == self.catalog.next_version() - 1
        segments = {info.name for info in self.store.list("segments/")}
        assert segments <= self.catalog.named_files()
        assert segments >= {name for segment in found.segments for name in segment.names}
        return found


OPERATIONS = st.lists(
    st.sampled_from(
        ["save"] * 6 + ["baseline", "differential", "several", "round", "round", "delete", "flag", "reopen"]
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    operations=OPERATIONS,
    recent=st.sampled_from([1, 700, 2000, 5000]),
    fanout=st.sampled_from([2, 3, 8]),
    keep=st.sampled_from([None, None, 1, 4]),
    data=st.data(),
)
def test_any_history_reads_as_one_list_would(
    operations: list[str], recent: int, fanout: int, keep: int | None, data: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(history, "RECENT_BYTES", recent)
        patch.setattr(history, "FANOUT", fanout)
        store = Store(Path(folder), keep)
        for operation in operations:
            if operation == "reopen":
                store.open()
            elif operation in ("round", "delete", "flag"):
                getattr(store, operation)(data)
            else:
                store.save(
                    baseline=operation == "baseline",
                    differential=operation == "differential",
                    files=3 if operation == "several" else 1,
                )
            store.check()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "RECENT_BYTES", 3000)
    monkeypatch.setattr(history, "FANOUT", 3)


def lengths(store: Store) -> list[int]:
    return [segment.length for segment in store.catalog.manifest.segments]


@pytest.mark.usefixtures("small")
def test_segments_are_merged_by_size(tmp_path: Path) -> None:
    store = Store(tmp_path)
    counts = []
    for _ in range(300):
        store.save()
        counts.append(len(lengths(store)))
    # Below each level's merge there are at most two of each size.
    assert 4 <= max(counts) <= 8
    assert lengths(store) == sorted(lengths(store), reverse=True)
    assert lengths(store)[0] > 20 * history.RECENT_BYTES
    store.check()


@pytest.mark.usefixtures("small")
def test_what_a_publication_writes_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    written: list[int] = []
    publish = store.store.publish

    def counting(name: str, data: bytes) -> None:
        written.append(len(data))
        publish(name, data)

    monkeypatch.setattr(store.store, "publish", counting)
    for _ in range(300):
        store.save()
    assert max(written[150:]) <= 1.3 * max(written[:50])


@pytest.mark.usefixtures("small")
def test_few_versions_need_no_segments(tmp_path: Path) -> None:
    """As with ``keep``: everything is in the manifest, which older releases read, too."""
    store = Store(tmp_path, keep=2)
    for number in range(40):
        store.save(baseline=number % 5 == 0)
        assert store.check().format == 1
    assert not list(tmp_path.glob("segments/*"))


@pytest.mark.usefixtures("small")
def test_garbage_in_segments_is_bounded(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=15)
    for number in range(200):
        store.save(baseline=number % 5 == 0)
        assert sum(lengths(store)) < 30_000, "about twice what is there"
    assert lengths(store)
    store.catalog.free_replaced()
    kept = len(store.catalog.manifest.segments)
    assert len(list(tmp_path.glob("segments/*"))) == 2 * kept, "and merged ones are deleted"


@pytest.mark.usefixtures("small")
def test_deleting_most_versions_takes_everything_in(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for _ in range(100):
        store.save(differential=True)
    assert lengths(store)
    store.catalog.delete_versions(range(1, 100))
    assert not lengths(store), "the rest is shorter than what would have to be said of the deleted ones"
    store.plain.keep([100])
    store.check()


@pytest.mark.usefixtures("small")
def test_no_segment_is_written_before_a_writer_has_taken_over(tmp_path: Path) -> None:
    """A writer before it would take it for a leftover, between its writing and the manifest that names it."""
    store = Store(tmp_path)
    for _ in range(40):
        store.save()
    whole = msgspec.structs.replace(store.catalog.manifest, number=10**6)
    (tmp_path / name_of(10**6)).write_bytes(encode(whole))
    before = sorted(tmp_path.glob("segments/*"))
    store.catalog = Catalog(store.store, Policy())
    store.catalog.take_over()
    assert set(tmp_path.glob("segments/*")) <= set(before)
    store.save()
    assert len(lengths(store)) == 1


@pytest.mark.usefixtures("small")
def test_deletions_write_no_segment(tmp_path: Path) -> None:
    """On a full disk, they come before there is room."""
    store = Store(tmp_path)
    for _ in range(40):
        store.save()
    put: list[str] = []
    store.store.put = lambda name, parts: put.append(name) or 0  # type: ignore[method-assign,func-returns-value]
    for number in range(1, 30):
        store.catalog.delete_versions([number])
    assert not put
    store.plain.keep(list(range(30, 41)))
    store.check()


@pytest.mark.usefixtures("small")
def test_a_store_of_the_first_format_is_converted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for _ in range(40):
        store.save()
    whole = msgspec.structs.replace(store.catalog.manifest, number=10**6)
    data = encode(whole)
    assert b'"format":1,' in data
    assert b"segments" not in data
    (tmp_path / name_of(10**6)).write_bytes(data)
    store.open()
    store.check()
    store.save()
    found = store.check()
    assert (found.format, len(found.segments)) == (2, 1)
    assert (tmp_path / name_of(found.number)).stat().st_size < 1500
    for _ in range(30):
        store.save()
    store.check()


@pytest.mark.usefixtures("small")
def test_a_damaged_copy_is_written_anew(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for _ in range(20):
        store.save()
    segment = store.catalog.manifest.segments[0]
    for name in segment.names:
        good = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"x" + good[1:])
        if name == segment.name:
            store.open()
            assert store.catalog.manifest.segments[0] == segment
            store.save()
            store.save()
            assert segment not in store.catalog.manifest.segments
            assert len(store.catalog.manifest.segments) == 1
            store.check()
            assert not (tmp_path / segment.names[1]).exists()
            break


@pytest.mark.usefixtures("small")
def test_what_could_not_be_read_is_not_stored(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for _ in range(20):
        store.save()
    dense = DenseEntry("dense/x", 1, "x")
    bad: Any = "seven"
    big = {"x": "y" * 4000}
    version = Version(store.catalog.next_version(), 1, bad, 0.5, False, 3, 10, dense, big)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="could not be read back, so nothing was published"):
        store.catalog.commit_version(version, GROUPS, "x", [])
    again = msgspec.structs.replace(version, version=3, step=3)
    with pytest.raises(CheckpointError, match="has a version after 3"):
        store.catalog.commit_version(again, GROUPS, "x", [])
    escaping = FileEntry("chunks/../../x", 5, 1, "x", "increment", 0, 1, 1, OPEN, 3)
    with pytest.raises(CheckpointError, match=r"it names the file .chunks/\.\./"):
        store.catalog.commit_version(
            msgspec.structs.replace(version, step=3), GROUPS, "x", [FileChange((escaping,))]
        )
    assert sorted(tmp_path.rglob("*")) == before
    store.check()


def test_a_retired_file_that_is_needed_stays(tmp_path: Path) -> None:
    """No writer says so; whoever forges a manifest does not make a writer delete what versions need."""
    store = Store(tmp_path)
    store.save()
    found = store.catalog.manifest
    needed = sorted(found.file_names())
    forged = msgspec.structs.replace(found, number=9, retired=[(name, 0.0) for name in needed])
    (tmp_path / name_of(9)).write_bytes(encode(forged))
    for name in needed:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    store.open()
    store.save()
    store.save()
    assert all((tmp_path / name).exists() for name in needed)


def test_levels() -> None:
    size = history.RECENT_BYTES
    assert [history._level(n) for n in (0, 1, size, 5 * size, 8 * size, 40 * size, 64 * size)] == [
        0, 0, 0, 0, 1, 1, 2,
    ]  # fmt: skip


def test_names_of_both_copies() -> None:
    segment = Segment(7, "0123456789ab", 1, "", 1)
    assert segment.names == (
        "segments/0000000007-0123456789ab.json.gz",
        "segments/0000000007-0123456789ab-copy.json.gz",
    )
    assert all(manifests.is_written_name(name) for name in segment.names)
