"""Checking a store: every byte that its versions need, each file once, however many versions share it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from holdfast.checkpoint import chunk
from holdfast.checkpoint import manifest as manifests
from holdfast.checkpoint.chunk import Piece, check_piece, decode_piece
from holdfast.checkpoint.dense import decode_tree
from holdfast.checkpoint.manifest import DenseEntry, Era, FileEntry, Manifest, read_newest
from holdfast.checkpoint.records import Group
from holdfast.checkpoint.restore import find_version
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.stretches import OpenFile, by_size, open_file
from holdfast.checkpoint.tools import leftover_files
from holdfast.errors import CorruptCheckpoint, HoldfastError, NoSuchVersion, ObjectMissing, StoreError

_FILES_AT_ONCE = 4
_READ_BYTES = 16 << 20
_MOST_PLANS = 100  # a writer that replaces files more often than this while one is read is not plausible


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file that is not what was written, and the versions that cannot be restored for it."""

    name: str
    problem: str
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a check found. ``gone`` are versions that a writer deleted while it went on."""

    url: str
    whole: tuple[int, ...]
    damaged: tuple[int, ...]
    gone: tuple[int, ...]
    damaged_files: tuple[DamagedFile, ...]
    complaints: tuple[str, ...]
    leftovers: dict[str, int]
    files: int
    bytes: int

    @property
    def good(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damaged_files and not self.complaints


@dataclass(frozen=True, slots=True)
class _Job:
    """A file to check. ``wanted`` are the versions asked for that need it."""

    entry: FileEntry | DenseEntry
    groups: tuple[Group, ...]
    wanted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Finding:
    """What is wrong with a part of a file: the versions from ``born`` to before ``died`` need it."""

    problem: str
    born: int
    died: int


def bytes_to_verify(store: Store, versions: Sequence[int] = ()) -> int:
    """How many bytes ``verify_versions`` will read, unless a writer adds to them."""
    manifest = read_newest(store)
    wanted = versions or [v.version for v in manifest.versions]
    return sum(job.entry.bytes for job in _plan(manifest, wanted))


def verify_versions(
    store: Store, versions: Sequence[int] = (), on_progress: Callable[[int], None] = lambda done: None
) -> VerifyReport:
    """Check every byte that these versions need, by default all; ``on_progress`` gets the bytes done.

    Damage is reported, not raised; NoSuchVersion is raised for a version that is not there.
    """
    complaints: list[str] = []
    manifest = read_newest(store, complaints)
    wanted = [find_version(manifest, v, store.url).version for v in versions]
    wanted = wanted or [v.version for v in manifest.versions]
    if not wanted:
        raise NoSuchVersion(f"{store.url} holds no version")
    complaints += _older_manifests(store, manifest.number)
    findings: dict[str, list[_Finding]] = {}
    checked: dict[str, int] = {}
    for _ in range(_MOST_PLANS):
        jobs = _plan(manifest, wanted)
        missing = _check_all(store, jobs, findings, checked, on_progress)
        if not missing:
            break
        newer = read_newest(store)
        if newer.number == manifest.number:
            for name in missing:
                findings[name] = [_Finding("it is missing", 0, chunk.OPEN)]
            break
        manifest = newer  # it has been replaced since; the rest need not be read again
    return _report(store, manifest, wanted, findings, checked, complaints)


def _older_manifests(store: Store, newest: int) -> Iterator[str]:
    """What is wrong with the ones that stand in for the newest."""
    for number in manifests.numbers(store):
        if number < newest:
            try:
                manifests.read(store, number)
            except ObjectMissing:
                continue
            except HoldfastError as error:
                yield str(error)


def _plan(manifest: Manifest, wanted: Iterable[int]) -> list[_Job]:
    by_era: dict[int, list[int]] = {}
    asked = set(wanted)
    jobs: list[_Job] = []
    for version in manifest.versions:
        if version.version in asked:
            by_era.setdefault(version.era, []).append(version.version)
            jobs.append(_Job(version.dense, (), (version.version,)))
    for number, members in by_era.items():
        era: Era = manifest.era(number)
        groups = era.decoded_groups()
        for entry in era.files:
            users = tuple(v for v in members if entry.first_born <= v < entry.last_died)
            if users:
                jobs.append(_Job(entry, groups, users))
    return jobs


def _check_all(
    store: Store,
    jobs: Sequence[_Job],
    findings: dict[str, list[_Finding]],
    checked: dict[str, int],
    on_progress: Callable[[int], None],
) -> list[str]:
    """Check the files that were not yet; the names of those that are not there."""
    left = [job for job in jobs if job.entry.name not in checked]
    done = sum(checked.values())
    missing: list[str] = []
    with ThreadPoolExecutor(_FILES_AT_ONCE, "holdfast-verify") as pool:
        for job, found in zip(left, pool.map(lambda job: _check(store, job), left), strict=True):
            if found is None:
                missing.append(job.entry.name)
                continue
            checked[job.entry.name] = job.entry.bytes
            if found:
                findings[job.entry.name] = found
            done += job.entry.bytes
            on_progress(done)
    return missing


def _check(store: Store, job: _Job) -> list[_Finding] | None:
    """What is wrong with a file; None if there is none of its name."""
    everyone = (0, chunk.OPEN)
    try:
        if isinstance(job.entry, DenseEntry):
            _check_dense(store, job.entry)
            return []
        file = open_file(store, job.entry, job.groups)
        with file.reader:
            return list(_check_pieces(file, job.groups))
    except ObjectMissing:
        return None
    except (CorruptCheckpoint, StoreError) as error:
        manifests.raise_if_unreachable(store, error)
        return [_Finding(str(error), *everyone)]


def _check_dense(store: Store, entry: DenseEntry) -> None:
    where = f"{store.url}: {entry.name}"
    with store.open(entry.name) as reader:
        if reader.size != entry.bytes:
            raise CorruptCheckpoint(f"{where} has {reader.size} bytes, expected {entry.bytes}")
        data = reader.read()
    if chunk.checksum(data) != entry.checksum:
        raise CorruptCheckpoint(f"{where} does not have its checksum")
    decode_tree(data, where)


def _check_pieces(file: OpenFile, groups: Sequence[Group]) -> Iterator[_Finding]:
    for batch in by_size(file.pieces, lambda piece: piece.length, _READ_BYTES):
        buffer = np.empty(sum(p.length for p in batch), np.uint8)
        file.read(batch, buffer)
        ends = list(itertools.accumulate(p.length for p in batch))
        for piece, end in zip(batch, ends, strict=True):
            try:
                data = buffer[end - piece.length : end]
                check_piece(piece, data, file.where)
                _check_ids(file, piece, data, groups)
            except CorruptCheckpoint as error:
                yield _Finding(str(error), piece.first_born, piece.last_died)


def _check_ids(
    file: OpenFile, piece: Piece, data: np.ndarray[tuple[int], np.dtype[np.uint8]], groups: Sequence[Group]
) -> None:
    """A checksum vouches for what was written; this for its being rows of the tables."""
    if piece.group >= len(groups):
        raise CorruptCheckpoint(f"{file.where}: a piece of group {piece.group}, of {len(groups)}")
    group = groups[piece.group]
    ids = decode_piece(piece, data, group.fields, file.where).rows.ids
    if len(ids) and not (ids[0] >= 0 and ids[-1] < group.rows):
        raise CorruptCheckpoint(f"{file.where}: rows {ids[0]} to {ids[-1]} of a group of {group.rows}")


def _report(
    store: Store,
    manifest: Manifest,
    wanted: Sequence[int],
    findings: dict[str, list[_Finding]],
    checked: dict[str, int],
    complaints: Sequence[str],
) -> VerifyReport:
    present = {v.version for v in manifest.versions}
    damaged_files: list[DamagedFile] = []
    damaged: set[int] = set()
    for job in _plan(manifest, wanted):
        parts = findings.get(job.entry.name)
        if parts:
            harmed = tuple(v for v in job.wanted if any(p.born <= v < p.died for p in parts))
            damaged |= set(harmed)
            # The messages name the file for those who see nothing else; here its name stands before them.
            problem = (
                parts[0].problem.removeprefix(f"{store.url}: {job.entry.name}").removeprefix(":").strip()
            )
            damaged_files.append(DamagedFile(job.entry.name, problem, harmed))
    here = [v for v in wanted if v in present]
    return VerifyReport(
        url=store.url,
        whole=tuple(v for v in here if v not in damaged),
        damaged=tuple(v for v in here if v in damaged),
        gone=tuple(v for v in wanted if v not in present),
        damaged_files=tuple(damaged_files),
        complaints=tuple(complaints),
        leftovers=leftover_files(store),
        files=len(checked),
        bytes=sum(checked.values()),
    )
