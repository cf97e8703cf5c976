"""Manifests: the JSON files that make versions exist.

A store's newest manifest is the store: it lists every version that can be restored and every file that
they are made of. A save, a tidying of files and a deletion each end in a new manifest, published under
the next number; files are written before it and deleted after it. The manifest before the newest is kept,
with all of its files, so that damage to the newest costs one version at most.

A manifest with few versions has everything in itself (format 1). One with more names **segments**, which
have what is older (``segments.py``), and has in itself what has changed since they were written (format 2,
`Head`). Both are read as a `Manifest`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import msgspec
from msgspec import Struct

from holdfast.checkpoint.format.chunk import OPEN, checksum
from holdfast.checkpoint.format.entries import (
    DenseEntry,
    Era,
    FileChange,
    FileEntry,
    FileKind,
    Version,
    is_needed,
    without_unneeded_files,
)
from holdfast.checkpoint.format.segments import FOLDER as SEGMENT_FOLDER
from holdfast.checkpoint.format.segments import NAME_PATTERN, Part, Segment, fold, unpack
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

__all__ = [
    "DATA_FOLDERS", "EMPTY", "DenseEntry", "Era", "FileChange", "FileEntry", "FileKind", "Head", "Manifest",
    "Stored", "Version", "damaged_segments", "decode", "decode_head", "encode", "encode_head", "is_needed",
    "is_written_name", "misplaced", "name_of", "names_in", "numbers", "problem_of", "raise_if_unreachable",
    "read", "read_newest", "read_newest_stored", "read_stored", "version_of", "without_unneeded_files",
]  # fmt: skip

WHOLE, IN_SEGMENTS = 1, 2  # formats
FOLDER = "manifests/"
DATA_FOLDERS = ("chunks/", "dense/", SEGMENT_FOLDER)
LARGEST_MANIFEST = 1 << 30
_TRIES = 100
_NAME = re.compile(r"manifests/(\d{10})\.json")

# Most names; `is_name`, which allows more, takes ten times as long, and there may be tens of thousands.
_IN_FOLDER = re.compile(r"(chunks|dense|segments)/[a-z0-9][a-z0-9_.-]{0,199}")

_WRITTEN = re.compile(
    rf"(chunks/\d{{8,}}-\d{{4,}}-({'|'.join(get_args(FileKind))})|dense/\d{{8,}})-[0-9a-f]{{12}}\.safetensors"
    rf"|{NAME_PATTERN}"
)


class Manifest(Struct, frozen=True, omit_defaults=True):
    """The content of a store at one time, wherever it is stored."""

    format: int
    number: int
    time: float
    eras: list[Era]
    versions: list[Version]
    retired: list[tuple[str, float]] = []
    """Files that this manifest no longer needs, and since when: deleted when nobody can be reading them."""
    last_version: int = 0
    """The greatest number that any version has had, also of versions that are gone."""
    segments: list[Segment] = []

    def era(self, number: int) -> Era:
        """An era by number; a manifest that was read has one for each of its versions."""
        return next(era for era in self.eras if era.number == number)

    def file_names(self) -> set[str]:
        """All files that its versions need, and its segments."""
        names = {f.name for era in self.eras for f in era.files} | {v.dense.name for v in self.versions}
        return names.union(*(segment.names for segment in self.segments))


class Head(Struct, frozen=True, omit_defaults=True):
    """A manifest as it is stored, if it names segments."""

    format: int
    number: int
    time: float
    segments: list[Segment]
    """The oldest first."""
    recent: Part
    """What has changed since they were written."""
    retired: list[tuple[str, float]] = []
    last_version: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """A manifest that was read, and what it is made of."""

    manifest: Manifest
    parts: tuple[Part, ...] = ()
    """Its segments' and its own; none if it has everything in itself."""
    damaged: tuple[str, ...] = ()
    """What is wrong with objects of segments whose other copy is whole."""


class _AnyFormat(Struct):
    format: int


EMPTY = Manifest(format=WHOLE, number=0, time=0.0, eras=[], versions=[])


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
    """Its bytes, with everything in itself."""
    return _framed(msgspec.structs.replace(manifest, format=WHOLE, segments=[]))


def encode_head(head: Head) -> bytes:
    """Its bytes; its segments are stored already."""
    return _framed(head)


def _framed(content: Manifest | Head) -> bytes:
    """The checksum first, so that it stands at a fixed place."""
    body = msgspec.json.encode(content)
    return b'{"checksum":"' + checksum(body).encode() + b'","manifest":' + body + b"}\n"


def decode(data: bytes, where: str) -> Manifest:
    """What ``encode`` gave; CorruptCheckpoint if these are not its bytes."""
    found = decode_head(data, where)
    if isinstance(found, Head):
        raise CorruptCheckpoint(f"{where} does not have everything in itself")
    return _checked(found, where)


def decode_head(data: bytes, where: str) -> Manifest | Head:
    """What ``encode`` or ``encode_head`` gave. Of its versions and files nothing is checked but the types."""
    try:
        head, tail = data[:13], data[45:58]
        body = data[58:-2]
        if (head, tail, data[-2:]) != (b'{"checksum":"', b'","manifest":', b"}\n"):
            raise ValueError("it is not framed as a manifest")
        if checksum(body).encode() != data[13:45]:
            raise ValueError("its checksum does not match")
        format_ = msgspec.json.decode(body, type=_AnyFormat).format
        found: Manifest | Head
        if format_ == IN_SEGMENTS:
            found = msgspec.json.decode(body, type=Head)
        elif format_ == WHOLE:
            found = msgspec.json.decode(body, type=Manifest)
        else:
            raise CorruptCheckpoint(
                f"{where} has format {format_}; this Holdfast reads formats {WHOLE} and {IN_SEGMENTS}"
            )
    except (ValueError, msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise CorruptCheckpoint(f"{where} is damaged: {error}") from None
    problem = _problem_of_segments(found)
    if problem:
        raise CorruptCheckpoint(f"{where} is invalid: {problem}")
    return found


def _problem_of_segments(head: Manifest | Head) -> str | None:
    if isinstance(head, Manifest):
        return "it has segments" if head.segments else None
    names = [segment.name for segment in head.segments]
    if len(set(names)) != len(names):
        return "it names a segment twice"
    for segment in head.segments:
        if not segment.is_named_right():
            return f"it names the segment {segment.name[:200]!r}"
        if min(segment.bytes, segment.length) < 0:
            return f"{segment.name!r} has an invalid number"
    if sum(segment.bytes + segment.length for segment in head.segments) > LARGEST_MANIFEST:
        return f"its segments have more than {LARGEST_MANIFEST} bytes"
    return None


def assemble(head: Head, parts: Sequence[Part], where: str) -> Manifest:
    """The manifest that a head and its segments' parts are; CorruptCheckpoint if no writer writes such."""
    try:
        eras, versions = fold([*parts, head.recent])
    except ValueError as error:
        raise CorruptCheckpoint(f"{where} is invalid: {error}") from None
    return _checked(
        Manifest(
            head.format, head.number, head.time, eras, versions,
            head.retired, head.last_version, head.segments,
        ),
        where,
    )  # fmt: skip


def _checked(manifest: Manifest, where: str) -> Manifest:
    problem = problem_of(manifest)
    if problem:
        raise CorruptCheckpoint(f"{where} is invalid: {problem}")
    return manifest


def problem_of(manifest: Manifest) -> str | None:
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
    listed = [f.name for era in manifest.eras for f in era.files]
    # Names are opened, and deleted when nobody needs them: only those that a writer chooses may be here.
    for names, folders in (
        (listed, DATA_FOLDERS[:1]),
        ([v.dense.name for v in manifest.versions], DATA_FOLDERS[1:2]),
        ([name for name, _ in manifest.retired], DATA_FOLDERS),
    ):
        bad = next(
            (n for n in names if not (n.startswith(folders) and (_IN_FOLDER.fullmatch(n) or is_name(n)))),
            None,
        )
        if bad is not None:
            return f"it names the file {bad[:200]!r}"
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
    return read_stored(store, number).manifest


def read_stored(store: Store, number: int) -> Stored:
    """Read one manifest and its segments.

    Raises ObjectMissing if it is not there, or a segment that may have been merged with others since.
    """
    found, where = _read_head(store, number)
    if isinstance(found, Manifest):
        return Stored(_checked(found, where))
    damaged: list[str] = []
    parts = [_read_segment(store, number, segment, damaged) for segment in found.segments]
    return Stored(assemble(found, parts, where), (*parts, found.recent), tuple(damaged))


def names_in(store: Store, number: int, besides: Manifest) -> set[str]:
    """All names in a manifest and its segments, save for segments of another manifest. Reads only these."""
    found, _ = _read_head(store, number)
    if isinstance(found, Manifest):
        return found.file_names()
    others = [segment for segment in found.segments if segment not in besides.segments]
    parts = [found.recent, *(_read_segment(store, number, segment, []) for segment in others)]
    names = {f.name for part in parts for era in part.of_eras() for f in era.files}
    names.update(version.dense.name for part in parts for version in part.versions)
    return names.union(*(segment.names for segment in found.segments))


def damaged_segments(store: Store, manifest: Manifest) -> Iterator[str]:
    """What is wrong with the objects of a manifest's segments, both copies of each."""
    for segment in manifest.segments:
        for name in segment.names:
            try:
                _read_copy(store, segment, name)
            except (CorruptCheckpoint, StoreError) as error:
                raise_if_unreachable(store, error)
                if not _may_be_merged(store, manifest.number, [error]):
                    yield str(error)


def _read_head(store: Store, number: int) -> tuple[Manifest | Head, str]:
    """A manifest as it is stored, and how to name it."""
    name = name_of(number)
    where = f"{store.url}: {name}"
    with store.open(name) as reader:
        if reader.size > LARGEST_MANIFEST:
            raise CorruptCheckpoint(f"{where} has {reader.size} bytes: no manifest is that large")
        found = decode_head(reader.read(), where)
    if found.number != number:
        raise CorruptCheckpoint(f"{where} holds manifest {found.number}: files were swapped")
    return found, where


def _read_segment(store: Store, number: int, segment: Segment, damaged: list[str]) -> Part:
    """A segment of a manifest, from the first of its two objects that is whole."""
    errors: list[HoldfastError] = []
    for name in segment.names:
        try:
            part = _read_copy(store, segment, name)
        except (CorruptCheckpoint, StoreError) as error:
            raise_if_unreachable(store, error)
            errors.append(error)
        else:
            damaged += map(str, errors)
            return part
    if _may_be_merged(store, number, errors):
        raise errors[0]
    raise CorruptCheckpoint(f"{store.url}: {name_of(number)} cannot be read: {'; '.join(map(str, errors))}")


def _may_be_merged(store: Store, number: int, errors: Sequence[HoldfastError]) -> bool:
    """Whether a segment of a manifest may be missing because a newer manifest does not need it."""
    missing = all(isinstance(error, ObjectMissing) for error in errors)
    return missing and max(numbers(store), default=0) > number


def _read_copy(store: Store, segment: Segment, name: str) -> Part:
    with store.open(name) as reader:
        data = reader.read(0, min(reader.size, segment.bytes + 1))
    return unpack(segment, data, f"{store.url}: {name}")


def read_newest(store: Store, complaints: list[str] | None = None) -> Manifest:
    """The newest manifest that is whole; EMPTY for a store with none at all.

    What is wrong with newer ones is appended to ``complaints``. Raises CorruptCheckpoint if there are
    manifests and none can be read, or none but one without versions; StoreError if it is the store that does
    not answer.
    """
    return read_newest_stored(store, complaints).manifest


def read_newest_stored(store: Store, complaints: list[str] | None = None) -> Stored:
    """The same, with what it is made of."""
    for _ in range(_TRIES):
        problems: list[str] = []
        missing = False
        strange = misplaced(store)
        for number in sorted({*numbers(store), *strange}, reverse=True):
            if number in strange:
                problems.append(strange[number])
                continue
            try:
                stored = read_stored(store, number)
            except ObjectMissing as error:  # deleted by a writer since the listing: there are newer ones
                problems.append(str(error))
                missing = True
                break
            except (CorruptCheckpoint, StoreError) as error:
                raise_if_unreachable(store, error)
                problems.append(str(error))
                continue
            if problems and not stored.manifest.versions:
                break  # of a writer that had just begun: what has come since is damaged, not nothing
            if complaints is not None:
                complaints += problems
            return stored
        if not missing:
            break
    if problems:
        raise CorruptCheckpoint(f"{store.url} has no manifest that can be read: {'; '.join(problems)}")
    return Stored(EMPTY)
