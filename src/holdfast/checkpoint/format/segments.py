"""Segments: immutable objects with what a manifest says of older versions and files.

A manifest of a store with many versions is a short list of changes on top of its segments, and a segment is a
list of changes on top of the segments before it. Such a list is a **part**. ``fold`` reads parts from the
oldest to the newest: of each version and of each file, the newest part that mentions it tells what it is, or
that it is gone. Only counts of records are changed by difference (``Part.replaced``): a round would otherwise
mention every version of its era.

A segment is stored twice, under two names with the same bytes, since versions of months depend on it: one
damaged object costs nothing.
"""

from __future__ import annotations

import gzip
import re
import secrets
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TypeVar

import msgspec
from msgspec import Struct

from holdfast.checkpoint.format.chunk import checksum
from holdfast.checkpoint.format.entries import Era, FileEntry, Version
from holdfast.errors import CorruptCheckpoint

FOLDER = "segments/"
_SUFFIX = ".json.gz"
_COPY = "-copy"
_STEM = rf"{FOLDER}[0-9]{{10}}-[0-9a-f]{{12}}"
_TAG = re.compile("[0-9a-f]{12}")
NAME_PATTERN = rf"{_STEM}({_COPY})?\.json\.gz"
_K = TypeVar("_K")
_V = TypeVar("_V")
_LEVEL = 1  # what is repeated is found at once: higher levels take longer and gain little


class Segment(Struct, frozen=True, array_like=True):
    """What a manifest says of a segment. Short, since all manifests repeat it."""

    manifest: int
    """The first manifest that named it."""
    tag: str
    """What tells it from other segments that a writer may have written for that manifest."""
    bytes: int
    """As it is stored."""
    checksum: str
    """Of the bytes as they are stored."""
    length: int
    """Bytes of its JSON, which is compressed."""

    def is_named_right(self) -> bool:
        """Whether its name is one that writers give."""
        return 0 <= self.manifest < 10**10 and _TAG.fullmatch(self.tag) is not None

    @property
    def name(self) -> str:
        """The object that holds it."""
        return f"{FOLDER}{self.manifest:010}-{self.tag}{_SUFFIX}"

    @property
    def names(self) -> tuple[str, str]:
        """The two objects that hold it."""
        return self.name, self.name.removesuffix(_SUFFIX) + _COPY + _SUFFIX


class EraPart(Struct, frozen=True):
    """Changes of an era that an older part defines."""

    number: int
    files: list[FileEntry]
    """New files, and new entries of files that older parts have."""
    open_records: tuple[int, ...] = ()


class Part(Struct, frozen=True, omit_defaults=True):
    """Changes of versions, eras and files, on top of what older parts say."""

    eras: list[Era] = []
    """New eras, with their files."""
    more: list[EraPart] = []
    versions: list[Version] = []
    """New and changed ones, ascending."""
    deleted: list[int] = []
    """Versions of older parts that are gone. An era goes with its last version, and its files with it."""
    removed: list[str] = []
    """Files of older parts that are gone, though not their eras."""
    replaced: list[tuple[int, int, int, int]] = []
    """(era, version, group, how many) of records that versions of older parts no longer read, from this
    version on."""

    def of_eras(self) -> list[Era | EraPart]:
        """All that it says of eras, new and old."""
        return [*self.eras, *self.more]


def fold(parts: Iterable[Part]) -> tuple[list[Era], list[Version]]:
    """What some parts, the oldest first, say together: the eras that have versions, and the versions.

    Files are in the order in which parts mention them first. Raises ValueError for parts that no writer
    writes; what they say together is not checked.
    """
    versions: dict[int, Version] = {}
    eras: dict[int, Era] = {}
    open_records: dict[int, tuple[int, ...]] = {}
    files: dict[str, tuple[int, FileEntry]] = {}
    for part in parts:
        for version in without_replaced(list(versions.values()) if part.replaced else (), part.replaced):
            versions[version.version] = version
        for number in part.deleted:
            versions.pop(number, None)
        versions.update(_distinct((version.version, version) for version in part.versions))
        for era in part.eras:
            if era.number in eras:
                raise ValueError("two eras have one number")
            eras[era.number] = era
        mentioned = _distinct(
            (entry.name, (era.number, entry)) for era in part.of_eras() for entry in era.files
        )
        for name, (number, _) in mentioned.items():
            if files.get(name, (number,))[0] != number:
                raise ValueError(f"two eras have the file {name[:200]!r}")
        files.update(mentioned)
        for more in part.of_eras():
            if more.number not in eras:
                raise ValueError(f"it has files of era {more.number}, which is not there")
            open_records[more.number] = more.open_records
        for name in part.removed:
            files.pop(name, None)
    by_era: dict[int, list[FileEntry]] = {version.era: [] for version in versions.values()}
    for number, entry in files.values():
        if number in by_era:
            by_era[number].append(entry)
    kept = [
        msgspec.structs.replace(era, files=by_era[number], open_records=open_records[number])
        for number, era in eras.items()
        if number in by_era
    ]
    return kept, list(versions.values())


def _distinct(pairs: Iterable[tuple[_K, _V]]) -> dict[_K, _V]:
    listed = list(pairs)
    found = dict(listed)
    if len(found) != len(listed):
        raise ValueError("it has a version or names a file twice")
    return found


def without_replaced(
    versions: Iterable[Version], replaced: Iterable[tuple[int, int, int, int]]
) -> Iterator[Version]:
    """The versions that read fewer records now that these are replaced, with their new counts."""
    deaths: dict[tuple[int, int], dict[int, int]] = {}
    for era, died, group, count in replaced:
        counts = deaths.setdefault((era, group), {})
        counts[died] = counts.get(died, 0) + count
    # For each era and group: the versions of the deaths, ascending, and how many there are up to each.
    sums: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for key, counts in deaths.items():
        ordered = sorted(counts.items())
        sums[key] = [died for died, _ in ordered], [0, *accumulate(count for _, count in ordered)]
    eras = {era for era, _ in sums}
    for version in versions:
        if version.era not in eras or not version.records:
            continue
        left = list(version.records)
        for group in range(len(left)):
            if (version.era, group) in sums:
                deadlines, dead = sums[version.era, group]
                left[group] -= dead[bisect_right(deadlines, version.version)]
        if left != list(version.records):
            yield msgspec.structs.replace(version, records=tuple(left))


def pack(part: Part, number: int) -> tuple[Segment, bytes]:
    """A part as a segment: what manifest ``number`` will say of it, and its bytes."""
    body = msgspec.json.encode(part)
    data = gzip.compress(body, _LEVEL, mtime=0)
    return Segment(number, secrets.token_hex(6), len(data), checksum(data), len(body)), data


def unpack(segment: Segment, data: bytes, where: str) -> Part:
    """What ``pack`` was given; CorruptCheckpoint if these are not its bytes."""
    if len(data) != segment.bytes:
        raise CorruptCheckpoint(f"{where} has {len(data)} bytes, expected {segment.bytes}")
    if checksum(data) != segment.checksum:
        raise CorruptCheckpoint(f"{where} is damaged: its checksum does not match")
    try:
        # Whatever the data says, no more than what was announced is unpacked.
        inflating = zlib.decompressobj(zlib.MAX_WBITS | 16)
        body = inflating.decompress(data, segment.length + 1)
        if len(body) != segment.length or not inflating.eof or inflating.unused_data:
            raise ValueError(f"it does not hold {segment.length} bytes")
        return msgspec.json.decode(body, type=Part)
    except (ValueError, zlib.error, msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise CorruptCheckpoint(f"{where} is damaged: {error}") from None
