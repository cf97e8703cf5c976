"""Verify a store: every byte that its versions need, each file once.

Records are counted in the same pass, for all versions of an era at once (``coverage.EraCount``). Only if a
full version lacks rows are row ids read again, version by version, to tell which versions lack which rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from holdfast.checkpoint.format import chunk
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.chunk import Index, Piece, check_piece, decode_piece
from holdfast.checkpoint.format.dense import decode_tree
from holdfast.checkpoint.format.manifest import DenseEntry, FileEntry, Manifest, Version, read_newest
from holdfast.checkpoint.format.records import Group
from holdfast.checkpoint.reading.coverage import EraCount, check_places, lacking_records
from holdfast.checkpoint.reading.stretches import OpenFile, by_size, open_file
from holdfast.checkpoint.reading.version import find_version, open_version
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.tools.inspect import leftover_files
from holdfast.errors import CorruptCheckpoint, HoldfastError, NoSuchVersion, ObjectMissing, StoreError

_FILES_AT_ONCE = 4
_READ_BYTES = 16 << 20
_MOST_LOOKED_AT = 100  # versions of which it is told exactly which rows are missing
_MOST_PLANS = 100  # a writer that replaces files more often than this while one is read is not plausible


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A damaged file, and the versions that cannot be restored because of it."""

    name: str
    problem: str
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Versions whose files are intact but lack rows, and what the first of them lacks."""

    problem: str
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification. ``gone`` are versions that a writer deleted meanwhile."""

    url: str
    whole: tuple[int, ...]
    damaged: tuple[int, ...]
    gone: tuple[int, ...]
    damaged_files: tuple[DamagedFile, ...]
    incomplete: tuple[Incomplete, ...]
    complaints: tuple[str, ...]
    leftovers: dict[str, int]
    files: int
    bytes: int

    @property
    def good(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damaged_files and not self.incomplete and not self.complaints


@dataclass(frozen=True, slots=True)
class _Job:
    """A file to check: ``count.versions[begin:end]`` are the versions asked for that need it."""

    entry: FileEntry | DenseEntry
    groups: tuple[Group, ...]
    count: EraCount
    begin: int
    end: int

    def span(self, finding: _Finding) -> tuple[int, int]:
        """Where in ``count.versions`` those begin and end that a finding is about."""
        begin, end = np.searchsorted(self.count.versions, (finding.born, finding.died)).tolist()
        return max(begin, self.begin), min(end, self.end)


@dataclass(frozen=True, slots=True)
class _Finding:
    """What is wrong with a part of a file: the versions from ``born`` to before ``died`` need it."""

    problem: str
    born: int
    died: int


def bytes_to_verify(store: Store, versions: Sequence[int] = ()) -> int:
    """The number of bytes that ``verify_versions`` will read, unless a writer adds more."""
    manifest = read_newest(store)
    wanted = versions or [v.version for v in manifest.versions]
    return sum(job.entry.bytes for job in _plan(manifest, wanted, {}, 0))


def verify_versions(
    store: Store, versions: Sequence[int] = (), on_progress: Callable[[int], None] = lambda done: None
) -> VerifyReport:
    """Verify the checksums and the completeness of these versions, by default of all.

    Damage is reported, not raised; NoSuchVersion is raised for a version that is not there. ``on_progress``
    gets the bytes done.

    Each file is read once, however many versions need it. Memory: a buffer for each of four threads; some
    numbers for each piece and each version; and, for stores of jobs, one bit for each row of a few eras at a
    time.
    """
    complaints: list[str] = []
    manifest = read_newest(store, complaints)
    wanted = [find_version(manifest, v, store.url).version for v in versions]
    wanted = wanted or [v.version for v in manifest.versions]
    if not wanted:
        raise NoSuchVersion(f"{store.url} has no versions")
    complaints += manifests.damaged_segments(store, manifest)
    complaints += _older_manifests(store, manifest.number)
    stored_bytes = sum(info.size for info in store.list("chunks/"))
    findings: dict[str, list[_Finding]] = {}
    checked: dict[str, int] = {}
    counts: dict[int, EraCount] = {}
    for _ in range(_MOST_PLANS):
        jobs = _plan(manifest, wanted, counts, stored_bytes)
        missing = _check_all(store, jobs, findings, checked, on_progress)
        if not missing:
            break
        newer = read_newest(store)
        if newer.number == manifest.number:
            for name in missing:
                findings[name] = [_Finding("it is missing", 0, chunk.OPEN)]
            break
        manifest = newer  # it has been replaced since; the rest need not be read again
    damaged_files, damaged = _damaged_files(store, _plan(manifest, wanted, counts, stored_bytes), findings)
    incomplete = _incomplete(store, manifest, counts, damaged)
    damaged |= {version for one in incomplete for version in one.versions}
    present = {v.version for v in manifest.versions}
    return VerifyReport(
        url=store.url,
        whole=tuple(v for v in wanted if v in present and v not in damaged),
        damaged=tuple(v for v in wanted if v in present and v in damaged),
        gone=tuple(v for v in wanted if v not in present),
        damaged_files=damaged_files,
        incomplete=incomplete,
        complaints=tuple(complaints),
        leftovers=leftover_files(store),
        files=len(checked),
        bytes=sum(checked.values()),
    )


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


def _plan(
    manifest: Manifest, wanted: Iterable[int], counts: dict[int, EraCount], stored_bytes: int
) -> list[_Job]:
    """The files to check. ``counts`` gets what counts their rows, by era, where it is not there yet."""
    by_era: dict[int, list[Version]] = {}
    asked = set(wanted)
    for version in manifest.versions:
        if version.version in asked:
            by_era.setdefault(version.era, []).append(version)
    eras = {era.number: era for era in manifest.eras}
    jobs: list[_Job] = []
    for number, versions in by_era.items():
        era = eras[number]
        groups = era.decoded_groups()
        members = [v.version for v in versions]
        if number not in counts:
            full = sum(f.kind == "baseline" for f in era.files)
            counts[number] = EraCount(groups, members, full, stored_bytes)
        count = counts[number]
        places = {v: at for at, v in enumerate(count.versions.tolist())}
        jobs += [_Job(v.dense, groups, count, places[v.version], places[v.version] + 1) for v in versions]
        for entry in era.files:
            begin, end = np.searchsorted(count.versions, (entry.first_born, entry.last_died)).tolist()
            if begin < end:
                jobs.append(_Job(entry, groups, count, begin, end))
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
    entry = job.entry
    try:
        if isinstance(entry, DenseEntry):
            _check_dense(store, entry, job.groups)
            return []
        file = open_file(store, entry, job.groups)
        with file.reader:
            return list(_check_pieces(file, job.groups, job.count))
    except ObjectMissing:
        return None
    except (CorruptCheckpoint, StoreError) as error:
        manifests.raise_if_unreachable(store, error)
        return [_Finding(str(error), *everyone)]
    finally:
        if isinstance(entry, FileEntry) and entry.kind == "baseline":
            job.count.full_file_done()


def _check_dense(store: Store, entry: DenseEntry, groups: Sequence[Group]) -> None:
    where = f"{store.url}: {entry.name}"
    with store.open(entry.name) as reader:
        if reader.size != entry.bytes:
            raise CorruptCheckpoint(f"{where} has {reader.size} bytes, expected {entry.bytes}")
        data = reader.read()
    chunk.check_checksum(data, entry.checksum, where)
    check_places(decode_tree(data, where), groups, where)


def _check_pieces(file: OpenFile, groups: Sequence[Group], count: EraCount) -> Iterator[_Finding]:
    pieces = zip(file.numbers, file.pieces, strict=True)
    for batch in by_size(pieces, lambda numbered: numbered[1].length, _READ_BYTES):
        buffer = np.empty(sum(piece.length for _, piece in batch), np.uint8)
        file.read([piece for _, piece in batch], buffer)
        ends = list(itertools.accumulate(piece.length for _, piece in batch))
        for (number, piece), end in zip(batch, ends, strict=True):
            try:
                data = buffer[end - piece.length : end]
                check_piece(piece, data, file.where)
                index = _check_ids(file, piece, data, groups)
            except CorruptCheckpoint as error:
                yield _Finding(str(error), piece.first_born, piece.last_died)
            else:
                count.note(file.entry, number, piece, index)


def _check_ids(
    file: OpenFile, piece: Piece, data: np.ndarray[tuple[int], np.dtype[np.uint8]], groups: Sequence[Group]
) -> Index:
    """A checksum vouches for what was written; this for its being rows of the tables."""
    if piece.group >= len(groups):
        raise CorruptCheckpoint(f"{file.where}: a piece of group {piece.group}, of {len(groups)}")
    group = groups[piece.group]
    index = decode_piece(piece, data, group.fields, file.where).index
    ids = index.ids
    if len(ids) and not (ids[0] >= 0 and ids[-1] < group.rows):
        raise CorruptCheckpoint(f"{file.where}: rows {ids[0]} to {ids[-1]} of a group of {group.rows}")
    return index


def _damaged_files(
    store: Store, jobs: Sequence[_Job], findings: dict[str, list[_Finding]]
) -> tuple[tuple[DamagedFile, ...], set[int]]:
    """The files with something wrong, and all versions that cannot be restored for one of them."""
    found: list[DamagedFile] = []
    damaged: set[int] = set()
    shared: dict[
        tuple[EraCount, tuple[tuple[int, int], ...]], tuple[int, ...]
    ] = {}  # many files may harm the same versions
    for job in jobs:
        parts = findings.get(job.entry.name)
        if parts:
            spans = tuple(sorted({job.span(part) for part in parts}))
            if (job.count, spans) not in shared:
                mask = np.zeros(len(job.count.versions), np.bool_)
                for begin, end in spans:
                    mask[begin:end] = True
                shared[job.count, spans] = tuple(job.count.versions[mask].tolist())
                damaged.update(shared[job.count, spans])
            # The messages name the file for those who see nothing else; here its name stands before them.
            problem = (
                parts[0].problem.removeprefix(f"{store.url}: {job.entry.name}").removeprefix(":").strip()
            )
            found.append(DamagedFile(job.entry.name, problem, shared[job.count, spans]))
    return tuple(found), damaged


def _incomplete(
    store: Store, manifest: Manifest, counts: dict[int, EraCount], damaged: set[int]
) -> tuple[Incomplete, ...]:
    """The versions that lack rows, of those whose files are whole; those with one problem together."""
    versions = {v.version: v for v in manifest.versions}
    eras = {era.number: era for era in manifest.eras}
    problems: dict[str, list[int]] = {}
    looked_at = 0
    for number, count in counts.items():
        if number not in eras:
            continue
        records = count.records({f.name: f.dead_pieces for f in eras[number].files})
        for at, name in enumerate(count.versions.tolist()):
            if name not in versions or name in damaged:
                continue
            problem = _wrong_count(count.groups, records[:, at].tolist(), versions[name].records)
            if not count.has_all_rows:
                problem = problem or "is incomplete: rows are missing: its full version does not have all"
                if looked_at < _MOST_LOOKED_AT:
                    looked_at += 1
                    problem = _missing_rows(store, name)
            if problem:
                problems.setdefault(problem, []).append(name)
    return tuple(Incomplete(problem, tuple(names)) for problem, names in problems.items())


def _wrong_count(groups: Sequence[Group], found: Sequence[int], expected: Sequence[int]) -> str:
    for group, number, counted in zip(groups, found, expected, strict=False):
        if number != counted:
            return lacking_records(group, number, counted)
    return ""


def _missing_rows(store: Store, version: int) -> str:
    """Describe exactly which rows a version lacks."""
    try:
        with open_version(store, version) as reader:
            reader.count_rows()
    except NoSuchVersion:
        return ""  # deleted since
    except (CorruptCheckpoint, StoreError) as error:
        manifests.raise_if_unreachable(store, error)
        return str(error).removeprefix(f"version {version} of {store.url} ")
    return ""
