"""A manifest that leaves rows out, with a valid checksum and whole files: rows would keep old values.

Whatever is left out of a store, each version that needs it is refused by everything that reads it, and each
that does not comes back right.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import holdfast as hf
from holdfast.checkpoint.format.chunk import NewPiece, Piece, decode_piece, encode_file
from holdfast.checkpoint.format.manifest import Era, FileEntry, Manifest, encode, name_of, read_newest
from holdfast.checkpoint.format.records import Group, Rows
from holdfast.checkpoint.layout import rounds
from holdfast.checkpoint.memory.parts import GroupPart
from holdfast.checkpoint.reading.loader import RowLoader
from holdfast.checkpoint.reading.stretches import open_file
from holdfast.checkpoint.reading.version import open_version
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.tools.verify import verify_versions
from holdfast.errors import CorruptCheckpoint
from tests.checkpoint.lineage import (
    QUANTIZED,
    STRATEGIES,
    Lineage,
    QuickFiles,
    blank,
    check_version,
    state_after,
)

VERSIONS = 9
CASES: list[tuple[Any, dict[str, Any], int | None]] = [(strategy, {}, 3) for strategy in STRATEGIES]
CASES += [(STRATEGIES[number], {}, None) for number in (3, 4, 6)]
CASES += [(hf.Chunked(layout="2d", threshold=0.1, reset="never"), {}, None)]
CASES += [(STRATEGIES[number], QUANTIZED, 4) for number in (0, 2, 3, 4, 6)]


@dataclass(frozen=True)
class Lives:
    """The records of one piece of a file."""

    entry: FileEntry
    number: int
    piece: Piece
    rows: Rows
    born: NDArray[np.int32]
    died: NDArray[np.int32]

    def at(self, version: int) -> NDArray[np.bool_]:
        return (self.born <= version) & (version < self.died)


@dataclass(frozen=True)
class Case:
    """A store, and the records of every piece that some version may read."""

    store: LocalStore
    manifest: Manifest
    on_grids: bool
    pieces: dict[int, list[Lives]]
    """By era."""

    @property
    def all_pieces(self) -> list[tuple[Era, Lives]]:
        return [(era, lives) for era in self.manifest.eras for lives in self.pieces[era.number]]

    def publish(self, era: Era, files: list[FileEntry], change: Callable[[Any], Any] = lambda v: v) -> None:
        """Publish a manifest with other files in an era."""
        eras = [
            msgspec.structs.replace(e, files=files) if e.number == era.number else e
            for e in self.manifest.eras
        ]
        versions = [change(version) for version in self.manifest.versions]
        forged = msgspec.structs.replace(self.manifest, eras=eras, versions=versions)
        (Path(self.store.url) / name_of(self.manifest.number)).write_bytes(encode(forged))


def read_pieces(store: LocalStore, era: Era) -> list[Lives]:
    groups = era.decoded_groups()
    found = []
    for entry in era.files:
        file = open_file(store, entry, groups)
        with file.reader:
            for number, piece in zip(file.numbers, file.pieces, strict=True):
                data = np.empty(piece.length, np.uint8)
                file.read([piece], data)
                decoded = decode_piece(piece, data, groups[piece.group].fields, "here")
                born, died = (v.each(piece.rows) for v in (decoded.born, decoded.died))
                found.append(Lives(entry, number, piece, decoded.rows, born, died))
    return found


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[2]}-{bool(case[1])}")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    strategy, quantized, keep = request.param
    root = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
        with LocalStore(root, create=True, files=QuickFiles()) as store:
            line = Lineage(store, hf.Policy(strategy=strategy, keep=keep, **quantized))
            for _ in range(VERSIONS):
                line.train()
                line.save()
            line.writer.close()
    return root, bool(quantized)


@pytest.fixture
def case(saved: tuple[Path, bool], tmp_path: Path) -> Iterator[Case]:
    shutil.copytree(saved[0], tmp_path / "store")
    with LocalStore(tmp_path / "store", create=False, files=QuickFiles()) as store:
        manifest = read_newest(store)
        yield Case(store, manifest, saved[1], {era.number: read_pieces(store, era) for era in manifest.eras})


def some(items: list[Any], count: int) -> list[Any]:
    """A few of them, the same each time."""
    return random.Random(0).sample(items, min(count, len(items)))


def check(case: Case, era: Era, lost: list[tuple[Lives, NDArray[np.bool_]]]) -> int:
    """Versions that need a record that was lost are refused, others are right; how many were refused."""
    report = verify_versions(case.store)
    refused = 0
    for version in case.manifest.versions:
        number = version.version
        needs = version.era == era.number and any(
            bool((gone & lives.at(number)).any()) for lives, gone in lost
        )
        if not needs:
            check_version(case.store, version, on_grids=case.on_grids)
            assert number in report.whole
            continue
        refused += 1
        check_parts(case, era, version, [lives for lives, gone in lost if (gone & lives.at(number)).any()])
        assert number in report.damaged
        for read in (read_live, read_in_order):
            with pytest.raises(CorruptCheckpoint, match=rf"version {number}\b.*missing"):
                read(case, version)
    assert report.good == (refused == 0)
    told = {number for one in report.incomplete for number in one.versions}
    assert len(told) == refused
    assert all("missing" in one.problem for one in report.incomplete)
    return refused


def check_parts(case: Case, era: Era, version: Any, lost: list[Lives]) -> None:
    """Whoever reads one table alone is refused if it is in a group of which something is missing."""
    groups = era.decoded_groups()
    of = {lives.piece.group: groups[lives.piece.group].raw_rows_of for lives in lost}
    affected = {number if whole is None else whole for number, whole in of.items()}
    for number, group in enumerate(groups):
        for table in group.tables if group.raw_rows_of is None else ():
            with open_version(case.store, version.version) as reader:
                parts = [GroupPart.of(g, {table.name}, {f.name for f in g.fields}) for g in reader.groups]
                reader.keep_parts(parts)
                found = blank()
                loader = RowLoader.of_parts(parts, found.__getitem__)
                if number in affected:
                    with pytest.raises(CorruptCheckpoint, match=rf"version {version.version}\b.*missing"):
                        reader.read_rows(loader)
                    continue
                reader.check_complete()
                reader.read_rows(loader)
            right = state_after(version.step, case.on_grids)[table.name]
            assert all(map(np.array_equal, found[table.name], right))


def read_live(case: Case, version: Any) -> None:
    check_version(case.store, version, on_grids=case.on_grids)


def read_in_order(case: Case, version: Any) -> None:
    with open_version(case.store, version.version) as reader:
        reader.read_rows(lambda group, rows: None)


def test_nothing_is_missing(case: Case) -> None:
    report = verify_versions(case.store)
    assert report.good
    assert report.incomplete == ()
    assert report.whole == tuple(v.version for v in case.manifest.versions)
    for version in case.manifest.versions:
        check_version(case.store, version, on_grids=case.on_grids)
        check_parts(case, case.manifest.era(version.era), version, [])


def left_out(case: Case, most: int) -> None:
    """File entries one by one."""
    files = [(era, entry) for era in case.manifest.eras for entry in era.files]
    refused = 0
    for era, entry in some(files, most):
        case.publish(era, [f for f in era.files if f.name != entry.name])
        mine = [lives for lives in case.pieces[era.number] if lives.entry.name == entry.name]
        refused += check(case, era, [(lives, np.ones(len(lives.rows), bool)) for lives in mine])
    assert refused


def hidden(case: Case, most: int) -> None:
    """Pieces that are said to be dead."""
    refused = 0
    for era, lives in some(case.all_pieces, most):
        dead = tuple(sorted({*lives.entry.dead_pieces, lives.number}))
        forged = msgspec.structs.replace(lives.entry, dead_pieces=dead)
        case.publish(era, [forged if f.name == lives.entry.name else f for f in era.files])
        refused += check(case, era, [(lives, np.ones(len(lives.rows), bool))])
    assert refused


def shortened(case: Case, most: int) -> None:
    """Pieces without one of their rows, in files that are in order in themselves."""
    refused = 0
    for era, lives in some([(e, one) for e, one in case.all_pieces if len(one.rows) > 1], most):
        at = len(lives.rows) // 2
        kept = np.delete(np.arange(len(lives.rows)), at)
        shorter = Rows(lives.rows.ids[kept], tuple(f[kept] for f in lives.rows.fields))
        new = NewPiece(lives.piece.group, lives.piece.rank, shorter, lives.born[kept], lives.died[kept])
        others = [one for one in case.pieces[era.number] if one.entry.name == lives.entry.name]
        path = Path(case.store.url) / lives.entry.name
        before = path.read_bytes()
        pieces = [
            new if one is lives else NewPiece(one.piece.group, one.piece.rank, one.rows, one.born, one.died)
            for one in others
        ]
        forged = write_file(path, lives.entry, pieces, era.decoded_groups())
        case.publish(era, [forged if f.name == forged.name else f for f in era.files])
        gone = np.zeros(len(lives.rows), bool)
        gone[at] = True
        refused += check(case, era, [(lives, gone)])
        path.write_bytes(before)
    assert refused


def write_file(path: Path, entry: FileEntry, pieces: list[NewPiece], groups: tuple[Group, ...]) -> FileEntry:
    encoded = encode_file(pieces, [g.fields for g in groups])
    path.write_bytes(b"".join(bytes(memoryview(part).cast("B")) for part in encoded.parts))
    return msgspec.structs.replace(
        entry,
        bytes=encoded.bytes,
        header_bytes=encoded.header_bytes,
        header_checksum=encoded.header_checksum,
        dead_pieces=(),
    )


@pytest.mark.parametrize("how", [left_out, hidden, shortened])
def test_rows_that_are_left_out(case: Case, how: Callable[[Case, int], None]) -> None:
    how(case, 4)


@pytest.mark.soak
@pytest.mark.parametrize("how", [left_out, hidden, shortened])
def test_all_rows_that_can_be_left_out(case: Case, how: Callable[[Case, int], None]) -> None:
    how(case, 10_000)


def test_tables_are_counted_whatever_the_manifest_counts(case: Case) -> None:
    """A full version that was never whole: its own count agrees with what is in it."""
    for era, lives in some([(e, o) for e, o in case.all_pieces if o.entry.kind == "baseline"], 4):
        if era.decoded_groups()[lives.piece.group].raw_rows_of is not None:
            continue
        forged = msgspec.structs.replace(lives.entry, dead_pieces=(lives.number,))
        files = [forged if f.name == lives.entry.name else f for f in era.files]
        case.publish(era, files, lambda version: msgspec.structs.replace(version, records=()))
        report = verify_versions(case.store)
        for version in case.manifest.versions:
            if version.era != era.number:
                continue
            lacking = set(lives.rows.ids.tolist())
            for other in case.pieces[era.number]:
                if other is not lives and other.piece.group == lives.piece.group:
                    lacking -= set(other.rows.ids[other.at(version.version)].tolist())
            assert (version.version in report.damaged) == bool(lacking)
            if not lacking:
                check_version(case.store, version, on_grids=case.on_grids)
                continue
            for read in (read_live, read_in_order):
                with pytest.raises(
                    CorruptCheckpoint, match=rf"version {version.version}\b.*missing: .* of table"
                ):
                    read(case, version)
