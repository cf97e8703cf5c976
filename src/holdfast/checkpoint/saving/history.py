"""What a store holds, as its writer keeps it in memory, and how little of it the next manifest has to repeat.

A manifest consists of segments and of what has changed since the newest of them (`format/segments.py`). When
the changes no longer fit into a manifest of some kilobytes, they become a segment of their own, together with
the newest segments if there are enough of about that size. So a version is written once in a few manifests,
and then once for each time that the history has become several times as large: a publication costs the same
however many versions there are, but for a logarithm with a small factor.

No segment is read to be merged: a merged one says, of everything that the old ones mention, what it is now.
For this a `History` keeps what each segment mentions.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import msgspec

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.entries import Era, FileEntry, Version, is_needed
from holdfast.checkpoint.format.manifest import IN_SEGMENTS, WHOLE, Head, Manifest, Stored
from holdfast.checkpoint.format.segments import EraPart, Part, Segment, pack, unpack, without_replaced
from holdfast.errors import CorruptCheckpoint

RECENT_BYTES = 16 << 10
"""Changes that stay in the manifest. More of them are written again with every version; fewer make segments
more frequent, which are two files each."""
FANOUT = 8
"""So many segments of about one size become one."""
_SHRINKS = 0.75  # what is mentioned twice makes a merged segment smaller than its sources


@dataclass
class Mentions:
    """What a part mentions; see `Part`."""

    versions: set[int] = field(default_factory=set)
    files: dict[str, int] = field(default_factory=dict)
    """Name to era, in the order of the files."""
    begun: set[int] = field(default_factory=set)
    """Eras that it defines."""
    eras: set[int] = field(default_factory=set)
    """All eras of which it says something."""
    replaced: Counter[tuple[int, int, int]] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.versions) + len(self.files) + len(self.eras)

    @classmethod
    def of(cls, part: Part) -> Mentions:
        """What a part that was read mentions."""
        files = {f.name: era.number for era in part.of_eras() for f in era.files}
        return cls(
            versions={v.version for v in part.versions}.union(part.deleted),
            files=files | dict.fromkeys(part.removed, 0),
            begun={era.number for era in part.eras},
            eras={era.number for era in part.of_eras()},
            replaced=Counter({(era, died, group): count for era, died, group, count in part.replaced}),
        )

    @classmethod
    def together(cls, several: Iterable[Mentions]) -> Mentions:
        """What some parts mention, the oldest first."""
        found = cls()
        for one in several:
            found.versions |= one.versions
            found.files |= one.files
            found.begun |= one.begun
            found.eras |= one.eras
            found.replaced.update(one.replaced)
        return found


@dataclass(frozen=True, slots=True)
class _Known:
    """A segment, what it mentions, and the newest version among that."""

    segment: Segment
    mentions: Mentions
    newest: int

    @classmethod
    def of(cls, segment: Segment, mentions: Mentions) -> _Known:
        return cls(segment, mentions, max(mentions.versions, default=0))


class History:
    """The versions, eras and files of a store, and which segments hold them.

    Changes are made to a ``draft``, a copy of which the catalog makes the current one once a manifest that
    holds it is published. A copy copies references only.

    Attributes:
        versions: by number, ascending.
        eras: by number; each has versions.
        last_version: the greatest number that any version has had.
        dropped: in a draft, the files and segments that it no longer needs.
    """

    dropped: list[str]

    def __init__(self, stored: Stored) -> None:
        manifest = stored.manifest
        self.versions: dict[int, Version] = {v.version: v for v in manifest.versions}
        self.eras: dict[int, Era] = {era.number: era for era in manifest.eras}
        self.last_version = max([manifest.last_version, *self.versions])
        mentions = [Mentions.of(part) for part in stored.parts]
        self._known = tuple(map(_Known.of, manifest.segments, mentions))
        self._recent = mentions[-1] if mentions else self._everything()
        self._recent_files = self._entries_of(self._recent)
        self._files = sum(len(era.files) for era in manifest.eras)
        self._must_rewrite = bool(stored.damaged)

    def draft(self) -> History:
        """A copy, to be changed."""
        new = History.__new__(History)
        new.versions, new.eras = self.versions.copy(), self.eras.copy()
        new.last_version, new.dropped = self.last_version, []
        new._known, new._files, new._must_rewrite = self._known, self._files, self._must_rewrite
        new._recent = Mentions.together([self._recent])
        new._recent_files = self._recent_files.copy()
        return new

    def __len__(self) -> int:
        """How many versions, eras and files there are."""
        return len(self.versions) + len(self.eras) + self._files

    @property
    def segments(self) -> list[Segment]:
        """The oldest first."""
        return [known.segment for known in self._known]

    def numbers_from(self, first: int) -> list[int]:
        """The versions from this one on, ascending."""
        numbers = list(self.versions)
        return numbers[bisect_left(numbers, first) :]

    def manifest(self, number: int, time: float, retired: Sequence[tuple[str, float]]) -> Manifest:
        """All of it as one value."""
        format_ = IN_SEGMENTS if self._known else WHOLE
        return Manifest(
            format_, number, time, list(self.eras.values()), list(self.versions.values()),
            list(retired), self.last_version, self.segments,
        )  # fmt: skip

    # Changes

    def put_version(self, version: Version) -> None:
        """Add a version, which is the newest, or change one; its era is there."""
        self.versions[version.version] = version
        self.last_version = max(self.last_version, version.version)
        self._recent.versions.add(version.version)

    def begin_era(self, era: Era) -> None:
        """Add an era without files."""
        self.eras[era.number] = era
        self._recent.begun.add(era.number)
        self._recent.eras.add(era.number)

    def add_files(self, number: int, added: Sequence[FileEntry], open_records: tuple[int, ...]) -> None:
        """Add files to an era."""
        era = self.eras[number]
        files = [*era.files, *added]
        self.eras[number] = msgspec.structs.replace(era, files=files, open_records=open_records)
        self._files += len(added)
        self._note_files(number, added)

    def replace_files(self, number: int, removed: Set[str], updated: Mapping[str, FileEntry]) -> None:
        """Remove and change files of an era; and remove those that no version needs any more."""
        era = self.eras[number]
        stay = [updated.get(f.name, f) for f in era.files if f.name not in removed]
        self.eras[number] = msgspec.structs.replace(era, files=stay)
        self._note_files(number, (f for f in stay if f.name in updated))
        self._note_removed(number, [f.name for f in era.files if f.name in removed])
        self._drop_unneeded({number})

    def replace_records(self, number: int, replaced: Sequence[tuple[int, int, int]]) -> None:
        """Versions of an era from each of these on, and versions to come, read fewer records of a group."""
        if not replaced:
            return
        affected = [self.versions[n] for n in self.numbers_from(min(died for died, _, _ in replaced))]
        changes = [(number, died, group, count) for died, group, count in replaced]
        self.versions.update((v.version, v) for v in without_replaced(affected, changes))
        era = self.eras[number]
        left = list(era.open_records)
        for died, group, count in replaced:
            self._recent.replaced[number, died, group] += count
            if left:
                left[group] -= count
        self.eras[number] = msgspec.structs.replace(era, open_records=tuple(left))
        self._recent.eras.add(number)

    def delete_versions(self, numbers: Iterable[int]) -> None:
        """Delete versions, and the files that only they need."""
        eras = set()
        for number in numbers:
            version = self.versions.pop(number, None)
            if version is not None:
                self._recent.versions.add(number)
                self.dropped.append(version.dense.name)
                eras.add(version.era)
        self._drop_unneeded(eras)

    def _drop_unneeded(self, eras: Set[int]) -> None:
        """Drop the files of some eras that no version needs; and eras without versions."""
        wanted: dict[int, list[int]] = {number: [] for number in eras}
        for number in self.numbers_from(min(eras, default=0)) if eras else ():
            era_number = self.versions[number].era
            if era_number in wanted:
                wanted[era_number].append(number)
        for number, versions in wanted.items():
            era = self.eras[number]
            if not versions:
                del self.eras[number]
                self.dropped += [f.name for f in era.files]
                self._files -= len(era.files)
                continue
            newest = versions[-1]
            stay = [
                f
                for f in era.files
                if f.first_born <= newest < f.last_died or is_needed(f.first_born, f.last_died, versions)
            ]
            if len(stay) < len(era.files):
                self.eras[number] = msgspec.structs.replace(era, files=stay)
                kept = {f.name for f in stay}
                self._note_removed(number, [f.name for f in era.files if f.name not in kept])

    def _note_files(self, era: int, entries: Iterable[FileEntry]) -> None:
        self._recent.eras.add(era)
        for entry in entries:
            self._recent.files[entry.name] = era
            self._recent_files[entry.name] = entry

    def _note_removed(self, era: int, names: Sequence[str]) -> None:
        self._recent.eras.add(era)
        self._files -= len(names)
        self.dropped += names
        for name in names:
            self._recent.files[name] = era
            self._recent_files.pop(name, None)

    # What the next manifest has in itself

    def head(self, number: int, time: float, retired: Sequence[tuple[str, float]]) -> Manifest | Head:
        """The manifest as it is to be stored; call ``condense`` first."""
        if not self._known:
            return self.manifest(number, time, retired)
        part, _ = self._part(self._recent, self._recent_files, self._known)
        return Head(IN_SEGMENTS, number, time, self.segments, part, list(retired), self.last_version)

    def adopt(self, part: Part) -> None:
        """Take over values as they will be read; CorruptCheckpoint if they will not."""
        eras = {v.era for v in part.versions} | {era.number for era in part.of_eras()}
        files = {era.number: era.files for era in part.of_eras()}
        changed = [msgspec.structs.replace(self.eras[n], files=files.get(n, [])) for n in sorted(eras)]
        problem = manifests.problem_of(
            Manifest(IN_SEGMENTS, 0, 0.0, changed, part.versions, last_version=self.last_version)
        )
        if problem:
            raise CorruptCheckpoint(f"it is invalid: {problem}")
        for version in part.versions:
            self.versions[version.version] = version
        for era in part.eras:
            self.eras[era.number] = msgspec.structs.replace(self.eras[era.number], groups=era.groups)

    def _everything(self) -> Mentions:
        return Mentions(
            versions=set(self.versions),
            files={f.name: era.number for era in self.eras.values() for f in era.files},
            begun=set(self.eras),
            eras=set(self.eras),
        )

    def _entries_of(self, mentions: Mentions) -> dict[str, FileEntry]:
        """The files that are mentioned and that are still there."""
        eras = (self.eras[number] for number in mentions.eras if number in self.eras)
        return {f.name: f for era in eras for f in era.files if f.name in mentions.files}

    def _part(
        self, mentions: Mentions, entries: Mapping[str, FileEntry], older: Sequence[_Known]
    ) -> tuple[Part, Mentions]:
        """What is true now of what is mentioned, on top of older segments; and what that part mentions."""
        below = [known.mentions for known in older]
        gone = [n for n in mentions.versions if n not in self.versions]
        files: dict[int, list[FileEntry]] = {n: [] for n in sorted(mentions.eras) if n in self.eras}
        removed: list[str] = []
        for name, era in mentions.files.items():
            if name in entries:
                if era in files:  # or the era is gone
                    files[era].append(entries[name])
            elif any(name in one.files for one in below):
                removed.append(name)
        newest = max((known.newest for known in older), default=0)
        part = Part(
            eras=[
                msgspec.structs.replace(self.eras[n], files=files[n]) for n in files if n in mentions.begun
            ],
            more=[EraPart(n, files[n], self.eras[n].open_records) for n in files if n not in mentions.begun],
            versions=[self.versions[n] for n in sorted(mentions.versions) if n in self.versions],
            deleted=sorted(n for n in gone if any(n in one.versions for one in below)),
            removed=removed,
            replaced=[
                (era, died, group, count)
                for (era, died, group), count in mentions.replaced.items()
                if died <= newest and era in self.eras
            ],
        )
        return part, Mentions.of(part)

    # Segments

    def condense(self, number: int, *, may_write: bool) -> tuple[Segment, bytes] | None:
        """Keep manifest ``number`` small: a segment that must be stored before it, or None.

        ``may_write``: whether a segment may be written.
        """
        part, self._recent = self._part(self._recent, self._recent_files, self._known)
        self._recent_files = {n: f for n, f in self._recent_files.items() if n in self._recent.files}
        if may_write and self._must_rewrite:
            return self._merge(len(self._known), number)
        recent_bytes = len(msgspec.json.encode(part))
        if recent_bytes <= RECENT_BYTES:
            return None
        if len(self) * recent_bytes <= RECENT_BYTES * len(self._recent):
            self._take_all_in()
            return None
        if not may_write:
            if len(self._recent) >= len(self):
                self._take_all_in()
            return None
        mentioned = len(self._recent) + sum(len(known.mentions) for known in self._known)
        if mentioned > 2 * len(self):  # most of it is of what is gone, or has changed since
            return self._merge(len(self._known), number)
        return self._merge(self._how_many(recent_bytes), number)

    def _take_all_in(self) -> None:
        """Let the manifest have everything in itself."""
        self._recent = self._everything()
        self._recent_files = self._entries_of(self._recent)
        self.dropped += [name for known in self._known for name in known.segment.names]
        self._known = ()

    def _how_many(self, recent_bytes: int) -> int:
        """How many of the newest segments to merge with changes of that size."""
        lengths = [known.segment.length for known in self._known]
        size, taken = recent_bytes, 0
        while True:
            level = _level(size)
            left = lengths[: len(lengths) - taken]
            alike = 0
            while alike < len(left) and _level(left[-1 - alike]) <= level:
                alike += 1
            if alike < FANOUT - 1:
                return taken
            size += sum(left[len(left) - alike :])
            taken += alike

    def _merge(self, count: int, number: int) -> tuple[Segment, bytes]:
        """Make one segment of the changes and of the newest ``count`` segments."""
        older, merged = self._known[: len(self._known) - count], self._known[len(self._known) - count :]
        if older:
            mentions = Mentions.together([*(known.mentions for known in merged), self._recent])
        else:
            mentions = self._everything()
        part, mentions = self._part(mentions, self._entries_of(mentions), older)
        segment, data = pack(part, number)
        self.adopt(unpack(segment, data, "its segment"))
        self.dropped += [name for known in merged for name in known.segment.names]
        self._known = (*older, _Known.of(segment, mentions))
        self._recent, self._recent_files, self._must_rewrite = (
            Mentions(),
            {},
            bool(older) and self._must_rewrite,
        )
        return segment, data


def _level(size: int) -> int:
    """Each level's segments are ``FANOUT`` times as large as those of the one below."""
    return int(math.log(max(size / (_SHRINKS * RECENT_BYTES), 1.0), FANOUT))
