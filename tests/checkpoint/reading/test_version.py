"""One version: which pieces it needs, what is said of the way, and how its files are held open."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from holdfast.checkpoint.format.manifest import Manifest, encode, name_of, read_newest
from holdfast.checkpoint.format.records import Rows
from holdfast.checkpoint.reading import stretches
from holdfast.checkpoint.reading import version as reading
from holdfast.checkpoint.reading.loader import RowLoader
from holdfast.checkpoint.reading.pipelines import in_order
from holdfast.checkpoint.reading.stretches import open_file
from holdfast.checkpoint.reading.version import find_version, open_version
from holdfast.checkpoint.store import ObjectReader, Store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import CorruptCheckpoint, NoSuchVersion, ObjectMissing
from holdfast.options import Chunked, Incremental, Policy
from tests.checkpoint.lineage import (
    GROUPS,
    QUANTIZED,
    Lineage,
    QuickFiles,
    blank,
    dense,
    same,
    state_after,
    touched,
)

VERSIONS = 6


@pytest.fixture(scope="module", params=[{}, QUANTIZED], ids=["raw", "quantized"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    with LocalStore(root, create=True, files=QuickFiles()) as store:
        line = Lineage(store, Policy(strategy=Incremental(), **request.param))
        for _ in range(VERSIONS):
            line.train()
            line.save()
        line.writer.close()
    return root


@pytest.fixture
def store(saved: Path) -> Iterator[LocalStore]:
    with LocalStore(saved, create=False, files=QuickFiles()) as store:
        yield store


class Collected:
    """A sink that keeps the rows."""

    def __init__(self) -> None:
        self.rows: dict[int, set[int]] = {number: set() for number in range(len(GROUPS))}

    def __call__(self, group: int, rows: Rows) -> None:
        self.rows[group] |= set(rows.ids.tolist())


def loader() -> RowLoader:
    fields = blank()
    return RowLoader(GROUPS, lambda table: fields[table])


class TestReading:
    @pytest.mark.parametrize("sink", [Collected, loader])
    def test_progress_is_told_and_counted(self, store: Store, sink: Any) -> None:
        told: list[int] = []
        with open_version(store) as reader:
            total = reader.total_bytes()
            assert total == sum(piece.length for _, piece in reader.pieces())
            reader.read_rows(sink(), on_progress=told.append)
            assert told == sorted(told)
            assert told[0] > 0
            assert told[-1] == total
            assert reader.bytes_read == total
            data = reader.dense()
            assert reader.bytes_read == total + len(data)

    def test_verifying_reads_everything(self, store: Store) -> None:
        with open_version(store) as reader:
            assert reader.verify() == reader.total_bytes() + len(dense(VERSIONS))
            assert reader.verify() == 2 * (reader.total_bytes() + len(dense(VERSIONS)))

    def test_only_what_changed_since_a_version(self, store: Store) -> None:
        changed: dict[int, set[int]] = {0: set(), 1: set()}
        for step in (5, 6):
            for name, ids in touched(step).items():
                number, table = next((n, t) for n, g in enumerate(GROUPS) for t in g.tables if t.name == name)
                changed[number] |= set((ids + table.first).tolist())
        sink = Collected()
        with open_version(store) as reader:
            reader.read_rows(sink, born_after=4)
            assert sink.rows == changed
            assert reader.bytes_read < reader.total_bytes()
            assert all(piece.last_born > 4 for _, piece in reader.pieces(born_after=4))

    def test_only_what_changed_since_the_full_version(self, store: Store) -> None:
        sink, all_of_it = Collected(), Collected()
        with open_version(store) as reader:
            reader.read_rows(sink, baseline=False)
            reader.read_rows(all_of_it)
            kinds = {file.entry.kind for file, _ in reader.pieces(baseline=False)}
        assert kinds == {"increment"}
        assert all(len(sink.rows[number]) < group.rows for number, group in enumerate(GROUPS))
        assert all_of_it.rows == {n: set(range(g.rows)) for n, g in enumerate(GROUPS)}

    def test_pieces_come_in_order_of_rank(self, store: Store) -> None:
        with open_version(store, 4) as reader:
            ranks = [piece.rank for _, piece in reader.pieces()]
            assert ranks == sorted(ranks)
            assert all(piece.first_born <= 4 < piece.last_died for _, piece in reader.pieces())

    def test_one_shard_alone_need_not_be_complete(self, store: Store) -> None:
        with open_version(store) as reader:
            files = reader.files
            reader.keep_shard(0)
            assert reader.files == files
            reader.keep_shard(1)
            assert reader.files == []
            reader.read_rows(Collected())
            reader.read_rows(loader())

    def test_pieces_of_many_files_that_take_turns(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are read file by file, and handed on by rank."""
        ranks: list[int] = []
        with LocalStore(tmp_path, create=True, files=QuickFiles()) as store:
            line = Lineage(store, Policy(strategy=Chunked(layout="2d", threshold=0.3), keep=None))
            for _ in range(12):
                line.train()
                line.save()
            line.writer.close()
            with open_version(store, 12) as reader:
                for decoded in in_order(reader.pieces(), reader.stored_groups):
                    ranks.append(decoded.piece.rank)
                assert ranks == sorted(ranks)
                assert len(ranks) == len(reader.pieces())


@pytest.mark.parametrize("layout", ["rounds", "2d"])
def test_rows_that_no_codec_could_hold_are_handed_on_last(tmp_path: Path, layout: Any) -> None:
    """Their quantized records, which only say so, may come after them in rank."""
    strategy = Chunked(layout=layout, round_versions=2, dead_fraction=0.0, reset="never")
    with LocalStore(tmp_path, create=True, files=QuickFiles()) as store:
        line = Lineage(store, Policy(strategy=strategy, **QUANTIZED))
        for _ in range(8):
            line.train()
            line.save()
        line.writer.close()
        for version in range(1, 9):
            live, handed = blank(), blank()
            with open_version(store, version) as reader:
                assert any(group.raw_rows_of is not None for group in reader.stored_groups)
                reader.read_rows(RowLoader(GROUPS, lambda table: live[table]))  # noqa: B023
                into = RowLoader(GROUPS, lambda table: handed[table])  # noqa: B023
                reader.read_rows(into.__call__)
            assert same(live, state_after(version, on_grids=True))
            assert same(handed, live)


@pytest.mark.parametrize("header_bytes", [0, 8, 10**6, 1 << 40])
def test_a_header_size_that_cannot_be(store: LocalStore, header_bytes: int) -> None:
    """It is refused before memory is taken for it."""
    manifest = read_newest(store)
    era = manifest.eras[-1]
    entry = msgspec.structs.replace(era.files[0], header_bytes=header_bytes)
    with pytest.raises(CorruptCheckpoint, match=f"invalid header size, {header_bytes} bytes"):
        open_file(store, entry, era.decoded_groups())


class TestCompleteness:
    def without_a_file(self, store: LocalStore, tmp_path: Path) -> LocalStore:
        """A copy whose manifest leaves out the newest file."""
        copy = LocalStore(tmp_path / "copy", create=True, files=QuickFiles())
        manifest = read_newest(store)
        era = manifest.eras[-1]
        newest = max(era.files, key=lambda file: file.first_born)
        eras = [msgspec.structs.replace(era, files=[f for f in era.files if f is not newest])]
        for info in store.list():
            with store.open(info.name) as reader:
                copy.put(info.name, [reader.read()])
        forged = msgspec.structs.replace(manifest, eras=eras, number=manifest.number + 1)
        copy.publish(name_of(forged.number), encode(forged))
        return copy

    def test_headers_tell_of_a_file_that_is_left_out(self, store: LocalStore, tmp_path: Path) -> None:
        with self.without_a_file(store, tmp_path) as broken, open_version(broken) as reader:
            for check in (reader.check_complete, reader.count_rows, reader.verify):
                with pytest.raises(CorruptCheckpoint, match=f"version {VERSIONS} of .* records are missing"):
                    check()
            handed: list[int] = []
            with pytest.raises(CorruptCheckpoint):
                reader.read_rows(lambda group, rows: handed.append(group))
            assert not handed
            reader.read_rows(Collected(), baseline=False)  # what is left out by choice is not counted
        with open_version(store) as reader:
            reader.check_complete()
            reader.count_rows()
            assert reader.bytes_read == 0

    @pytest.mark.parametrize("sink", [Collected, loader])
    def test_raw_rows_that_are_missing(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, sink: Any
    ) -> None:
        """Rows that no codec can hold say so in their place, and come after all others."""
        with open_version(store) as reader:
            if not any(group.raw_rows_of is not None for group in reader.stored_groups):
                pytest.skip("nothing is quantized")
            pieces = [p for p in reader.pieces() if reader.stored_groups[p[1].group].raw_rows_of is None]
            monkeypatch.setattr(reader, "pieces", lambda **_: pieces)
            monkeypatch.setattr(reader, "_is_whole", False)
            with pytest.raises(
                CorruptCheckpoint,
                match=r"incomplete: \d+ raw rows are missing, .* row \d+ of the group of table a",
            ):
                reader.read_rows(sink())


class TestDense:
    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            (lambda data: data + b"x", r"has \d+ bytes, expected \d+"),
            (lambda data: data[:-1] + b"?", "checksum"),
        ],
    )
    def test_a_damaged_file_is_named(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, change: Any, problem: str
    ) -> None:
        class Damaged(ObjectReader):
            def __init__(self, reader: ObjectReader) -> None:
                self.name = reader.name
                self.data = change(reader.read())
                self.size = len(self.data)

            def _fill(self, requests: list[Any]) -> None:
                for request in requests:
                    request.into[:] = self.data[request.offset : request.end]

            def close(self) -> None:
                pass

        with open_version(store, 3) as reader:
            reader._dense = Damaged(reader._dense)
            with pytest.raises(CorruptCheckpoint, match=rf"dense/.* \(version 3\).*{problem}"):
                reader.dense()


class TestOpenFiles:
    @pytest.fixture
    def opened(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> set[str]:
        """Names of files that are open now."""
        names: set[str] = set()
        plain = store.open

        def open_one(name: str) -> ObjectReader:
            reader = plain(name)
            names.add(name)
            close = reader.close

            def closed() -> None:
                names.discard(name)
                close()

            reader.close = closed  # type: ignore[method-assign]
            return reader

        monkeypatch.setattr(store, "open", open_one)
        return names

    def test_all_are_held_open_until_the_end(self, store: LocalStore, opened: set[str]) -> None:
        with open_version(store) as reader:
            assert opened == {f.entry.name for f in reader.files} | {reader.version.dense.name}
        assert not opened

    @pytest.mark.parametrize("most", [0, 2])
    def test_of_very_many_some_are_opened_for_each_read(
        self, store: LocalStore, opened: set[str], monkeypatch: pytest.MonkeyPatch, most: int
    ) -> None:
        monkeypatch.setattr(reading, "MOST_OPEN", most)
        with open_version(store) as reader:
            assert len(opened) == most + 1
            assert [file.reader.size for file in reader.files] == [file.entry.bytes for file in reader.files]
            found = blank()
            reader.read_rows(RowLoader(GROUPS, lambda table: found[table]))
            assert len(opened) == most + 1
        assert not opened
        on_grids = any(group.is_coded for group in reader.stored_groups)
        for name, fields in state_after(VERSIONS, on_grids).items():
            for expected, values in zip(fields, found[name], strict=True):
                assert np.array_equal(expected, values)

    @pytest.mark.parametrize(
        ("limit", "held"), [(12, 3), (8, 2), (resource.RLIM_INFINITY, VERSIONS), (4 * VERSIONS, VERSIONS)]
    )
    def test_a_quarter_of_what_a_process_may_have(
        self, store: LocalStore, opened: set[str], monkeypatch: pytest.MonkeyPatch, limit: int, held: int
    ) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, 10**6))
        with open_version(store) as reader:
            assert len(reader.files) == VERSIONS
            assert len(opened) == held + 1
        assert 4 * reading.MOST_OPEN == 1024, "what a process may have as a rule"

    def test_a_damaged_file_is_not_left_open(
        self, store: LocalStore, opened: set[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def damaged(data: bytes, where: str) -> None:
            assert opened
            raise CorruptCheckpoint(f"{where} is damaged")

        monkeypatch.setattr(stretches, "decode_header", damaged)
        with pytest.raises(CorruptCheckpoint, match="is damaged"):
            open_version(store)
        assert not opened

    def test_a_failure_leaves_none_open(
        self, store: LocalStore, opened: set[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counted = store.open

        def no_dense(name: str) -> ObjectReader:
            if name.startswith("dense/"):
                raise OSError("gone")
            return counted(name)

        monkeypatch.setattr(store, "open", no_dense)
        with pytest.raises(OSError, match="gone"):
            open_version(store)
        assert not opened


class TestOpening:
    def test_by_number_or_the_newest(self, store: LocalStore) -> None:
        manifest = read_newest(store)
        assert find_version(manifest, None, "s").version == VERSIONS
        assert find_version(manifest, 2, "s").version == 2
        with pytest.raises(NoSuchVersion, match=r"s has no version 9: it has 1 to 6 \(6 in all\)"):
            find_version(manifest, 9, "s")
        few = msgspec.structs.replace(manifest, versions=manifest.versions[1:])
        with pytest.raises(NoSuchVersion, match=r"s has no version 1: it has 2, 3, 4, 5, 6$"):
            find_version(few, 1, "s")
        with pytest.raises(NoSuchVersion, match=r"s has no versions$"):
            find_version(msgspec.structs.replace(manifest, versions=[]), None, "s")

    def test_a_manifest_that_is_out_of_date_is_read_again(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file that is gone has been replaced by others that a newer manifest names."""
        manifest = read_newest(store)
        old = msgspec.structs.replace(manifest, number=manifest.number - 1)
        tried: list[int] = []
        plain = reading.VersionReader

        def gone(store: Store, manifest: Manifest, version: Any) -> Any:
            tried.append(manifest.number)
            if manifest.number == old.number:
                raise ObjectMissing("tidied away")
            return plain(store, manifest, version)

        monkeypatch.setattr(reading, "VersionReader", gone)
        with open_version(store, 3, old) as reader:
            assert reader.version.version == 3
        assert tried == [old.number, manifest.number]

    def test_a_writer_that_is_always_quicker_is_given_up_on(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        numbers = itertools.count(read_newest(store).number)
        manifest = read_newest(store)
        tried: list[int] = []

        def gone(store: Store, manifest: Manifest, version: Any) -> Any:
            tried.append(manifest.number)
            raise ObjectMissing("chunks/7 is gone")

        def newer(store: Store) -> Manifest:
            return msgspec.structs.replace(manifest, number=next(numbers))

        monkeypatch.setattr(reading, "VersionReader", gone)
        monkeypatch.setattr(reading, "read_newest", newer)
        with pytest.raises(CorruptCheckpoint, match="chunks/7 is gone"):
            open_version(store, 3)
        assert len(tried) == len(set(tried)) == 100

    def test_a_file_that_nobody_has_replaced_is_lost(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tried: list[int] = []

        def gone(store: Store, manifest: Manifest, version: Any) -> Any:
            tried.append(manifest.number)
            raise ObjectMissing("chunks/7 is gone")

        monkeypatch.setattr(reading, "VersionReader", gone)
        with pytest.raises(CorruptCheckpoint, match=r"version 3 of .* cannot be read: chunks/7 is gone"):
            open_version(store, 3)
        assert len(tried) == 1
