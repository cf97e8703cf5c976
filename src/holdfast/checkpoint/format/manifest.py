"""Manifests: the JSON files that make versions exist.

A store's newest manifest is the store: it lists every version that can be restored and every file that
they are made of. A save, a tidying of files and a deletion each end in a new manifest, published under
the next number; files are written before it and deleted after it. The manifest before the newest is kept,
with all of its files, so that damage to the newest costs one version at most.

Versions that share a full version (a *baseline*) form an **era**. Within an era, files say which versions
need them by when their rows were born and died; see ``chunk.py``.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from holdfast.checkpoint.format.chunk import OPEN, checksum
from holdfast.checkpoint.format.records import Group
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.store.base import is_name
from holdfast.errors import (
    CorruptCheckpoint,
    HoldfastError,
    ObjectMissing,
    StoreError,
    StoreUnreachable,
    UnsafeName,
)

FORMAT = 1
FOLDER = "manifests/"
DATA_FOLDERS = ("chunks/", "dense/")
LARGEST_MANIFEST = 1 << 30
_TRIES = 100
_NAME = re.compile(r"manifests/(\d{10})\.json")

FileKind = Literal["baseline", "increment", "live", "history"]

_WRITTEN = re.compile(
    rf"(chunks/\d{{8,}}-\d{{4,}}-({'|'.join(get_args(FileKind))})|dense/\d{{8,}})-[0-9a-f]{{12}}\.safetensors"
)


class FileEntry(Struct, frozen=True, omit_defaults=True):
    """A chunk file, and which versions of its era need it: ``first_born <= version < last_died``."""

    name: str
    bytes: int
    header_bytes: int
    header_checksum: str
    kind: FileKind
    shard: int
    first_rank: int
    first_born: int
    last_died: int
    rows: int
    dead_pieces: tuple[int, ...] = ()
    """Numbers of pieces that no version reads from this file any more, ascending: their records have been
    moved to other files, or belong to no version that was kept."""


class FileChange(Struct, frozen=True):
    """What a manifest must say of files that a shard has written, and of those that they replace."""

    added: tuple[FileEntry, ...] = ()
    removed: tuple[str, ...] = ()
    """Files that are no longer needed."""
    updated: tuple[FileEntry, ...] = ()
    """New entries of files that stay."""
    written: tuple[tuple[int, int], ...] = ()
    """(group, rows) of each piece of the added files."""
    replaced: tuple[tuple[int, int, int], ...] = ()
    """(version, group, how many) of records that versions from this one on no longer read."""

    @property
    def bytes(self) -> int:
        """Bytes of the added files."""
        return sum(f.bytes for f in self.added)

    @property
    def rows(self) -> int:
        """Rows in the added files."""
        return sum(f.rows for f in self.added)


class DenseEntry(Struct, frozen=True):
    """The file with the dense state."""

    name: str
    bytes: int
    checksum: str


class Version(Struct, frozen=True):
    """One saved state."""

    version: int
    era: int
    step: int
    time: float
    baseline: bool
    rows: int
    """Rows written for it."""
    bytes: int
    """Bytes written for it, dense file included."""
    dense: DenseEntry
    metadata: dict[str, Any] = {}
    restores: int = 0
    """How often the run that saved it had been restored from a version with quantized rows."""
    unverified: str = ""
    """Why it may lack changes of rows: they were found to have changed unseen, after it was saved."""
    records: tuple[int, ...] = ()
    """How many records of each group a restore reads, as its writer has counted them; nothing: not known."""
    write_speed: int = 0
    """Bytes a second that its writer had measured when it saved this; 0: not known."""
    read_speed: int = 0
    """The same of a restore."""


class Era(Struct, frozen=True):
    """A baseline and all versions based on it."""

    number: int
    strategy: str
    groups: list[dict[str, Any]]
    files: list[FileEntry]
    open_records: tuple[int, ...] = ()
    """How many records of each group are in its files of which it is not said when they died: what the next
    version reads of them. Nothing: not known."""

    def decoded_groups(self) -> tuple[Group, ...]:
        """The groups as values."""
        groups = tuple(Group.from_json(group) for group in self.groups)
        names = [table.name for group in groups if group.raw_rows_of is None for table in group.tables]
        if len(set(names)) != len(names):
            raise CorruptCheckpoint(f"a manifest has a table twice: {sorted(names)}")
        if any(len({field.name for field in group.fields}) != len(group.fields) for group in groups):
            raise CorruptCheckpoint("a manifest has a field of a table twice")
        # Pieces name groups by number, and readers leave the raw ones out: only at the end does that shift
        # no other. Their rows are written into tables as they are stored, so no codec may be theirs.
        others = sum(group.raw_rows_of is None for group in groups)
        for number, group in enumerate(groups):
            of = group.raw_rows_of
            if (of is not None) != (number >= others):
                raise CorruptCheckpoint("a manifest has a group for raw rows before other groups")
            if of is None:
                continue
            if not (0 <= of < others and replace(group, raw_rows_of=None) == groups[of].live()):
                raise CorruptCheckpoint(
                    f"a manifest has a group for rows of group {of}, which is not like it"
                )
        return groups

    def files_of(self, version: int) -> list[FileEntry]:
        """The files that a version needs."""
        return [f for f in self.files if f.first_born <= version < f.last_died]


class Manifest(Struct, frozen=True):
    """The content of a store at one time."""

    format: int
    number: int
    time: float
    eras: list[Era]
    versions: list[Version]
    retired: list[tuple[str, float]] = []
    """Files that this manifest no longer needs, and since when: deleted when nobody can be reading them."""
    last_version: int = 0
    """The greatest number that any version has had, also of versions that are gone."""

    def era(self, number: int) -> Era:
        """An era by number; a manifest that was read has one for each of its versions."""
        return next(era for era in self.eras if era.number == number)

    def file_names(self) -> set[str]:
        """All files that its versions need."""
        return {f.name for era in self.eras for f in era.files} | {v.dense.name for v in self.versions}


EMPTY = Manifest(format=FORMAT, number=0, time=0.0, eras=[], versions=[])


def name_of(number: int) -> str:
    """The object that holds manifest ``number``."""
    return f"{FOLDER}{number:010}.json"


def version_of(name: str) -> int:
    """The version for which a writer has made a file; 0 if the name is not one that writers give."""
    return int(name.rpartition("/")[2].split("-")[0]) if is_written_name(name) else 0


def is_written_name(name: str) -> bool:
    """Whether a file has a name that writers give: others in their folders are not theirs to delete."""
    return _WRITTEN.fullmatch(name) is not None


def encode(manifest: Manifest) -> bytes:
    """Its bytes: the checksum first, so that it stands at a fixed place."""
    body = msgspec.json.encode(manifest)
    return b'{"checksum":"' + checksum(body).encode() + b'","manifest":' + body + b"}\n"


def decode(data: bytes, where: str) -> Manifest:
    """What ``encode`` gave; CorruptCheckpoint if these are not its bytes."""
    try:
        head, tail = data[:13], data[45:58]
        body = data[58:-2]
        if (head, tail, data[-2:]) != (b'{"checksum":"', b'","manifest":', b"}\n"):
            raise ValueError("it is not framed as a manifest")
        if checksum(body).encode() != data[13:45]:
            raise ValueError("its checksum does not match")
        manifest = msgspec.json.decode(body, type=Manifest)
    except (ValueError, msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise CorruptCheckpoint(f"{where} is damaged: {error}") from None
    if manifest.format != FORMAT:
        raise CorruptCheckpoint(f"{where} has format {manifest.format}; this Holdfast reads format {FORMAT}")
    problem = _problem(manifest)
    if problem:
        raise CorruptCheckpoint(f"{where} is invalid: {problem}")
    return manifest


def _problem(manifest: Manifest) -> str | None:
    """What no writer writes, whatever the checksum says: later on these numbers and names are trusted."""
    eras = [era.number for era in manifest.eras]
    if len(set(eras)) != len(eras):
        return "two eras have one number"
    known = set(eras)
    if not 0 <= manifest.last_version < OPEN or not 0 <= manifest.number < 10**10:
        return "its number or its last version cannot be"
    last = 0
    for version in manifest.versions:
        if not last < version.version < OPEN or version.era not in known:
            return f"version {version.version} of era {version.era} after version {last}"
        last = version.version
    for era in manifest.eras:
        for f in era.files:
            whole = (f.bytes, f.header_bytes, f.shard, f.first_rank, f.first_born, f.rows)
            if not 0 <= min(whole) <= max(whole) < 1 << 62 or f.first_born > OPEN or f.last_died > OPEN:
                return f"{f.name!r} has an invalid number"
    return _problem_of_records(manifest) or _problem_of_names(manifest)


def _problem_of_records(manifest: Manifest) -> str | None:
    groups = {era.number: len(era.groups) for era in manifest.eras}
    counts = [(v.era, v.records) for v in manifest.versions]
    for number, records in (*counts, *((era.number, era.open_records) for era in manifest.eras)):
        if records and (len(records) != groups[number] or not 0 <= min(records) <= max(records) < 1 << 62):
            return f"era {number} has an invalid number of records"
    return None


def _problem_of_names(manifest: Manifest) -> str | None:
    names = manifest.file_names() | {name for name, _ in manifest.retired}
    # Names are opened, and deleted when nobody needs them: only those that a writer chooses may be here.
    bad = next((n for n in names if not (is_name(n) and n.startswith(DATA_FOLDERS))), None)
    if bad is not None:
        return f"it names the file {bad[:200]!r}"
    listed = [f.name for era in manifest.eras for f in era.files]
    return "it names a file twice" if len(set(listed)) != len(listed) else None


def numbers(store: Store) -> list[int]:
    """The numbers of all manifests in a store, newest first."""
    found = (_NAME.fullmatch(info.name) for info in store.list(FOLDER))
    return sorted((int(match[1]) for match in found if match), reverse=True)


def misplaced(store: Store) -> dict[int, str]:
    """By number, what is wrong with names of manifests that are taken by something else."""
    found = ((_NAME.fullmatch(name), name) for name in store.misplaced(FOLDER))
    return {
        int(match[1]): f"{store.url}: {name} is a folder, expected a manifest: remove it"
        for match, name in found
        if match
    }


def raise_if_unreachable(store: Store, error: HoldfastError) -> None:
    """Raise what went wrong with an object if it is the store that does not answer.

    An object that is missing or cannot be read is damage: something older may do in its place. A store that
    is out of reach may be whole, and to go on with something older would lose what it holds.
    """
    if isinstance(error, StoreUnreachable):
        raise error
    if not isinstance(error, StoreError) or isinstance(error, ObjectMissing | UnsafeName):
        return
    try:
        store.list(FOLDER)
    except StoreError:
        raise error from None


def read(store: Store, number: int) -> Manifest:
    """Read one manifest."""
    name = name_of(number)
    with store.open(name) as reader:
        if reader.size > LARGEST_MANIFEST:
            raise CorruptCheckpoint(f"{store.url}: {name} has {reader.size} bytes: no manifest is that large")
        manifest = decode(reader.read(), f"{store.url}: {name}")
    if manifest.number != number:
        raise CorruptCheckpoint(f"{store.url}: {name} holds manifest {manifest.number}: files were swapped")
    return manifest


def read_newest(store: Store, complaints: list[str] | None = None) -> Manifest:
    """The newest manifest that is whole; EMPTY for a store with none at all.

    What is wrong with newer ones is appended to ``complaints``. Raises CorruptCheckpoint if there are
    manifests and none can be read, or none but one without versions; StoreError if it is the store that does
    not answer.
    """
    for _ in range(_TRIES):
        problems: list[str] = []
        missing = False
        strange = misplaced(store)
        for number in sorted({*numbers(store), *strange}, reverse=True):
            if number in strange:
                problems.append(strange[number])
                continue
            try:
                manifest = read(store, number)
            except ObjectMissing as error:  # deleted by a writer since the listing: there are newer ones
                problems.append(str(error))
                missing = True
                break
            except (CorruptCheckpoint, StoreError) as error:
                raise_if_unreachable(store, error)
                problems.append(str(error))
                continue
            if problems and not manifest.versions:
                break  # of a writer that had just begun: what has come since is damaged, not nothing
            if complaints is not None:
                complaints += problems
            return manifest
        if not missing:
            break
    if problems:
        raise CorruptCheckpoint(f"{store.url} has no manifest that can be read: {'; '.join(problems)}")
    return EMPTY


def without_unneeded_files(eras: Iterable[Era], versions: Iterable[Version]) -> list[Era]:
    """The eras with only those files that one of the versions needs; eras of no version are left out."""
    kept: list[Era] = []
    by_era: dict[int, list[int]] = {}
    for version in versions:
        by_era.setdefault(version.era, []).append(version.version)
    for era in eras:
        wanted = sorted(by_era.get(era.number, []))
        if wanted:
            files = [f for f in era.files if is_needed(f.first_born, f.last_died, wanted)]
            kept.append(msgspec.structs.replace(era, files=files))
    return kept


def is_needed(born: int, died: int, versions: Sequence[int]) -> bool:
    """Whether one of the versions (ascending) reads what was born and died in these."""
    at = bisect_left(versions, born)
    return at < len(versions) and versions[at] < died
