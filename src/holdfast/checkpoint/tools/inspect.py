"""Inspect and clean up a store from outside of a training run, for ``holdfast ckpt``.

All but ``collect_garbage`` only read. A writer may be at work meanwhile: what it replaces between the
manifest and the files that it names is looked up again in the newer manifest.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.chunk import Piece
from holdfast.checkpoint.format.dense import Array, TablePlace, decode_tree
from holdfast.checkpoint.format.manifest import (
    DATA_FOLDERS,
    Era,
    FileEntry,
    Manifest,
    Version,
    read_newest,
)
from holdfast.checkpoint.format.records import Group
from holdfast.checkpoint.layout.pruning import is_prunable, prune
from holdfast.checkpoint.reading.stretches import open_file
from holdfast.checkpoint.reading.version import open_version
from holdfast.checkpoint.saving.catalog import Catalog
from holdfast.checkpoint.store import Store
from holdfast.errors import (
    CheckpointError,
    CorruptCheckpoint,
    HoldfastError,
    NoSuchVersion,
    ObjectMissing,
    StoreError,
)
from holdfast.options import Policy

# What versions are made of; segments come and go with manifests.
_OF_VERSIONS = ("chunks/", "dense/")
_OPEN_AT_ONCE = 8
_TRIES = 5
_LONGEST_VALUE = 60
_DEAD_FRACTION = 0.5


@dataclass(frozen=True, slots=True)
class VersionLine:
    """One version in a listing."""

    version: int
    step: int
    time: float
    strategy: str
    kind: str
    rows: int
    bytes_written: int
    bytes_to_restore: int
    metadata: dict[str, Any]
    unverified: str
    """Why the version may miss changes of rows; normally empty."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The versions of a store, oldest first; ``complaints`` say what was wrong with manifests or headers."""

    url: str
    versions: tuple[VersionLine, ...]
    stored_bytes: int
    complaints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileUse:
    """A file that a version reads, and how much of it."""

    name: str
    kind: str
    bytes: int
    needed_bytes: int
    pieces: int
    needed_pieces: int


@dataclass(frozen=True, slots=True)
class TableLine:
    """A table of a version; ``bytes`` are those of all its rows as they are stored."""

    name: str
    rows: int
    fields: tuple[tuple[str, str, int, int | None], ...]
    """Name, type, width and, if they are quantized, bits."""
    bytes: int
    tracking: str
    """How its changed rows were found, and why; empty if the version does not say."""


@dataclass(frozen=True, slots=True)
class StateLine:
    """A leaf of an object's state: a tensor with dtype and shape, or a plain value as text."""

    key: str
    dtype: str
    shape: tuple[int, ...] | None
    value: str | None


@dataclass(frozen=True, slots=True)
class Description:
    """The content of a version."""

    url: str
    version: int
    step: int
    time: float
    era: int
    strategy: str
    kind: str
    bytes_to_restore: int
    write_speed: int
    """Bytes a second, as its writer knew it; 0: not known."""
    read_speed: int
    metadata: dict[str, Any]
    unverified: str
    tables: tuple[TableLine, ...]
    files: tuple[FileUse, ...]
    objects: dict[str, tuple[StateLine, ...]]


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """The result of ``collect_garbage``: what was deleted, or would be.

    ``rewritten_files`` were replaced by shorter ones, without what only deleted versions needed.
    ``freed_bytes`` is the difference that the store's listing shows; a dry run leaves out what rewriting
    frees.
    """

    url: str
    dry_run: bool
    deleted_versions: tuple[int, ...]
    kept_versions: tuple[int, ...]
    deleted_files: tuple[str, ...]
    leftovers: tuple[str, ...]
    rewritten_files: tuple[str, ...]
    complaints: tuple[str, ...]
    freed_bytes: int
    stored_bytes: int


# Looking


def list_versions(store: Store) -> Listing:
    """List all versions of a store, with their sizes and the bytes to restore."""
    for attempt in range(_TRIES):
        complaints: list[str] = []
        manifest = read_newest(store, complaints)
        pieces, problems = _read_headers(store, manifest)
        gone = any(isinstance(problem, ObjectMissing) for problem in problems)
        if not gone or attempt == _TRIES - 1 or read_newest(store).number == manifest.number:
            break  # nothing is missing, or it is for good
    return Listing(
        url=store.url,
        versions=tuple(_version_lines(manifest, pieces)),
        stored_bytes=sum(stored_files(store).values()),
        complaints=(*complaints, *map(str, problems)),
    )


def describe_version(store: Store, version: int | None = None) -> Description:
    """Describe a version, by default the newest."""
    with open_version(store, version) as reader:
        found = reader.version
        where = f"{store.url}: {found.dense.name}"
        tree = decode_tree(reader.dense(), where)
        objects = tree.get("objects") if isinstance(tree, dict) else None
        tracking = tree.get("tracking") if isinstance(tree, dict) else None
        how = tracking if isinstance(tracking, dict) else {}
        files = tuple(_file_use(file.entry, file.pieces, found.version) for file in reader.files)
        tables = tuple(
            TableLine(
                name=table.name,
                rows=table.rows,
                fields=tuple(
                    (f.name, f.dtype, f.width, f.codec.bits if f.codec else None) for f in group.fields
                ),
                bytes=table.rows * group.record_bytes,
                tracking=str(how.get(table.name, "")),
            )
            for group in reader.stored_groups
            if group.raw_rows_of is None
            for table in group.tables
        )
    return Description(
        url=store.url,
        version=found.version,
        step=found.step,
        time=found.time,
        era=found.era,
        strategy=reader.era.strategy,
        kind=_kind(found),
        bytes_to_restore=sum(f.needed_bytes for f in files) + found.dense.bytes,
        write_speed=found.write_speed,
        read_speed=found.read_speed,
        metadata=found.metadata,
        unverified=found.unverified,
        tables=tables,
        files=(*files, FileUse(found.dense.name, "dense", found.dense.bytes, found.dense.bytes, 1, 1)),
        objects={name: tuple(_leaves(state, "")) for name, state in (objects or {}).items()},
    )


def stored_files(store: Store) -> dict[str, int]:
    """All files of a store with their sizes; other files in the folder are ignored."""
    folders = (*DATA_FOLDERS, manifests.FOLDER)
    return {info.name: info.size for folder in folders for info in store.list(folder)}


def leftover_files(store: Store) -> dict[str, int]:
    """Files with their bytes that no manifest names: a save under way, or what a writer left that died."""
    # Listed before the manifests are read: what a commit has named since then is no leftover.
    found = {info.name: info.size for folder in DATA_FOLDERS for info in store.list(folder)}
    named: set[str] = set()
    for number in manifests.numbers(store):
        try:
            manifest = manifests.read(store, number)
        except ObjectMissing:
            continue
        except HoldfastError:
            return {}  # what it named may be all that is left of a version
        named |= manifest.file_names() | {name for name, _ in manifest.retired}
    left = [name for name in found if name not in named and manifests.is_written_name(name)]
    if left:
        # And again after it: a writer deletes what its last manifest no longer names.
        still = {info.name for folder in DATA_FOLDERS for info in store.list(folder)}
        left = [name for name in left if name in still]
    return {name: found[name] for name in left}


def _kind(version: Version) -> str:
    return "full" if version.baseline else "increment"


def _version_lines(manifest: Manifest, pieces: dict[str, tuple[Piece, ...]]) -> Iterator[VersionLine]:
    eras = {era.number: era for era in manifest.eras}
    needed = {
        version: size
        for number, versions in _by_era(manifest.versions).items()
        for version, size in zip(versions, _needed_bytes(eras[number], versions, pieces), strict=True)
    }
    for version in manifest.versions:
        yield VersionLine(
            version=version.version,
            step=version.step,
            time=version.time,
            strategy=eras[version.era].strategy,
            kind=_kind(version),
            rows=version.rows,
            bytes_written=version.bytes,
            bytes_to_restore=needed[version.version] + version.dense.bytes,
            metadata=version.metadata,
            unverified=version.unverified,
        )


def _by_era(versions: Sequence[Version]) -> dict[int, list[int]]:
    """The versions of each era that has some, ascending."""
    found: dict[int, list[int]] = {}
    for version in versions:
        found.setdefault(version.era, []).append(version.version)
    return found


def _needed_bytes(era: Era, versions: Sequence[int], pieces: dict[str, tuple[Piece, ...]]) -> Iterator[int]:
    """Bytes of an era's files that each of its versions (ascending) reads; each file is looked at once."""
    # How much more, or less, each version reads than the one before it.
    steps = [0] * (len(versions) + 1)

    def add(born: int, died: int, size: int) -> None:
        if born < died:
            steps[bisect_left(versions, born)] += size
            steps[bisect_left(versions, died)] -= size

    for entry in era.files:
        parts = pieces.get(entry.name, ())
        add(entry.first_born, entry.last_died, entry.header_bytes if parts else entry.bytes)
        for piece in parts:
            if piece.rows:
                born, died = max(piece.first_born, entry.first_born), min(piece.last_died, entry.last_died)
                add(born, died, piece.length)
    return itertools.accumulate(steps[:-1])


def _read_headers(
    store: Store, manifest: Manifest
) -> tuple[dict[str, tuple[Piece, ...]], list[HoldfastError]]:
    """The pieces of the files of which versions need parts, and what could not be read."""
    # All of a baseline and of an increment was born at once: a version needs the whole file or nothing,
    # as long as no piece of it has been moved elsewhere.
    entries = [
        (f, groups)
        for era in manifest.eras
        for groups in [era.decoded_groups()]
        for f in era.files
        if f.kind not in ("baseline", "increment") or f.dead_pieces
    ]
    pieces: dict[str, tuple[Piece, ...]] = {}
    problems: list[HoldfastError] = []

    def header(wanted: tuple[FileEntry, Sequence[Group]]) -> tuple[Piece, ...] | HoldfastError:
        try:
            file = open_file(store, *wanted)
        except HoldfastError as error:
            return error
        file.reader.close()
        return file.pieces

    with ThreadPoolExecutor(_OPEN_AT_ONCE, "holdfast-headers") as pool:
        for (entry, _), found in zip(entries, pool.map(header, entries), strict=True):
            if isinstance(found, HoldfastError):
                problems.append(found)
            else:
                pieces[entry.name] = found
    return pieces, problems


def _file_use(entry: FileEntry, pieces: Sequence[Piece], version: int) -> FileUse:
    """Without pieces, the whole file."""
    needed = [p for p in pieces if p.rows and p.first_born <= version < p.last_died]
    bytes_ = entry.header_bytes + sum(p.length for p in needed) if pieces else entry.bytes
    return FileUse(entry.name, entry.kind, entry.bytes, bytes_, len(pieces), len(needed))


def _leaves(value: Any, path: str) -> Iterator[StateLine]:
    if isinstance(value, Array):
        yield StateLine(path, value.dtype, value.shape, None)
    elif isinstance(value, TablePlace):
        yield StateLine(path, "rows", value.shape, f"{value.field} of {value.table}")
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and not all(isinstance(v, (int, float, str)) for v in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}.{number}" if path else str(number))
    else:
        text = repr(value)
        short = text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
        yield StateLine(path, type(value).__name__, None, short)


# Tidying


def collect_garbage(store: Store, policy: Policy, *, dry_run: bool = False) -> GarbageReport:
    """Delete the versions that the policy does not keep, and every file that no version needs.

    Takes the writer's lock, so it raises StoreLocked while a run is saving there; a dry run takes none and
    writes nothing. Files go at once, or after the policy's ``deletion_delay_seconds``.
    """
    if dry_run:
        return _plan_garbage(store, _open_catalog(store, policy))
    with store.lock_writer():
        catalog = _open_catalog(store, policy)
        before = stored_files(store)
        doomed = _doomed(catalog)
        store.clear_unfinished()
        leftovers: list[str] = []
        if doomed or catalog.manifest.retired or leftover_files(store):
            leftovers = catalog.take_over(without=doomed)
        _free_retired(catalog)
        # Only now, as it takes room, which may have been short.
        rewritten, problems = _rewrite_histories(catalog) if doomed else ([], [])
        _free_retired(catalog)
        after = stored_files(store)
    set_aside = set(rewritten)
    return GarbageReport(
        url=store.url,
        dry_run=False,
        deleted_versions=tuple(doomed),
        kept_versions=tuple(v.version for v in catalog.manifest.versions),
        deleted_files=tuple(
            n for n in before if n not in after and n.startswith(_OF_VERSIONS) and n not in set_aside
        ),
        leftovers=tuple(leftovers),
        rewritten_files=tuple(rewritten),
        complaints=tuple(problems),
        freed_bytes=sum(before.values()) - sum(after.values()),
        stored_bytes=sum(after.values()),
    )


def _open_catalog(store: Store, policy: Policy) -> Catalog:
    if not manifests.numbers(store):
        # Without a manifest nothing says that these files are Holdfast's to delete.
        raise NoSuchVersion(f"{store.url} has no versions: there is nothing to clean up")
    catalog = Catalog(store, policy)
    if policy.deletion_delay_seconds is None:
        catalog.deletion_delay_seconds = 0.0
    if catalog.complaints:
        raise CheckpointError(
            f"nothing was deleted, as the files of a damaged manifest may be all that is left of a version: "
            f"{'; '.join(catalog.complaints)}; the next save replaces it"
        )
    return catalog


def _free_retired(catalog: Catalog) -> None:
    if catalog.manifest.retired:
        # A file goes only when two manifests stand that do not name it: this publishes the second.
        catalog.delete_versions([])


def _rewrite_histories(catalog: Catalog) -> tuple[list[str], list[str]]:
    """Replace history files that are mostly of deleted versions: the old ones' names, and what went wrong."""
    rewritten: list[str] = []
    problems: list[str] = []
    by_era = _by_era(catalog.manifest.versions)
    for era in list(catalog.manifest.eras):
        kept = by_era[era.number]
        groups = era.decoded_groups()
        for entry in era.files:
            try:
                if is_prunable(catalog.store, entry, groups, kept, _DEAD_FRACTION):
                    change = prune(catalog.store, entry, groups, kept)
                    catalog.commit_round(era.number, [change])
                    rewritten.append(entry.name)
            except (CorruptCheckpoint, StoreError) as error:
                problems.append(f"{entry.name} was not rewritten: {error}")
    return rewritten, problems


def _doomed(catalog: Catalog) -> list[int]:
    kept = {v.version for v in catalog.retained()}
    return [v.version for v in catalog.manifest.versions if v.version not in kept]


def _plan_garbage(store: Store, catalog: Catalog) -> GarbageReport:
    doomed = set(_doomed(catalog))
    manifest = catalog.manifest
    left = [v for v in manifest.versions if v.version not in doomed]
    eras = manifests.without_unneeded_files(manifest.eras, left)
    needed = {f.name for era in eras for f in era.files} | {v.dense.name for v in left}
    leftovers = leftover_files(store)
    now = time.time()
    delay = catalog.deletion_delay_seconds
    waiting = {name for name, since in manifest.retired if abs(now - since) < delay}
    if delay > 0:
        waiting |= manifest.file_names() - needed
    files = stored_files(store)
    known = manifest.file_names().union(leftovers, (name for name, _ in manifest.retired))
    gone = [
        name
        for name in files
        if name.startswith(_OF_VERSIONS) and name in known and name not in needed and name not in waiting
    ]
    freed = sum(files[name] for name in gone)
    rewritten: list[str] = []
    kept = _by_era(left)
    for era in eras if doomed else ():
        groups = era.decoded_groups()
        for entry in era.files:
            with contextlib.suppress(CorruptCheckpoint, StoreError):  # it will be left as it is
                if is_prunable(store, entry, groups, kept[era.number], _DEAD_FRACTION):
                    rewritten.append(entry.name)
    return GarbageReport(
        url=store.url,
        dry_run=True,
        deleted_versions=tuple(sorted(doomed)),
        kept_versions=tuple(v.version for v in left),
        deleted_files=tuple(gone),
        leftovers=tuple(leftovers),
        rewritten_files=tuple(rewritten),
        complaints=(),
        freed_bytes=freed,
        stored_bytes=sum(files.values()) - freed,
    )
