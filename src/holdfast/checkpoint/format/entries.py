"""What manifests list: versions, eras and files.

Versions that share a full version (a *baseline*) form an **era**. Within an era, files say which versions
need them by when their rows were born and died; see ``chunk.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
from msgspec import Struct

from holdfast.checkpoint.format.records import Group
from holdfast.errors import CorruptCheckpoint

FileKind = Literal["baseline", "increment", "live", "history"]


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
