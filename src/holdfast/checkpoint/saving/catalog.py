"""The store as its only writer sees it: versions, retention, and the order of writes and deletions.

Only ``_publish`` creates and deletes versions. All files that a manifest names are durable before the
manifest is published, the segments with its older versions included. A file is deleted only after two
manifests that do not name it have been published.

**Why a stale writer does no harm.** Locks can fail: a lease expires while its holder sleeps, and some network
file systems keep locks local to a host. So safety depends on no lock, only on publishing each name once.

1. Deleting a manifest frees its number, so a writer that slept may publish a number below the newest. But the
   highest number in a store never decreases: a manifest is deleted either by a writer whose own number is two
   higher, or by its own writer after that has seen a higher number. And the highest number grows by one at a
   time.
2. So if a writer publishes and then sees no higher number, its manifest was the newest when it was published,
   and the manifest that it was derived from was the newest before (except for the writer's own attempts that
   the store reported as failed). Such manifests form one line. A writer that sees a higher number deletes the
   manifest that it has just published, and nothing else, and is *fenced off* for good.
3. If a manifest of the line does not name a file, no later one does: a writer names files of the previous
   manifest and its own new files, whose names are random. Deleting such a file is harmless, however long the
   writer has slept since it checked that its manifest is in the line.
4. Files that no manifest names may belong to another writer's next manifest. So a writer *takes over* before
   it writes its first file: it publishes a manifest without changes, with the segments that are there and
   none of its own. A writer that deletes unnamed files first lists them and then looks for a higher number:
   if there is none, the files belong to fenced-off writers or to itself.

A segment is such a file, with a random name of its own. What a manifest names is what it and its segments
name; segments never change, so this is settled when it is published.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NoReturn

import msgspec

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.chunk import OPEN, checksum
from holdfast.checkpoint.format.manifest import (
    DATA_FOLDERS,
    Era,
    FileChange,
    Head,
    Manifest,
    Version,
)
from holdfast.checkpoint.format.records import Group
from holdfast.checkpoint.format.segments import Part
from holdfast.checkpoint.saving.history import History
from holdfast.checkpoint.store import Store
from holdfast.errors import (
    AlreadyExists,
    CheckpointError,
    CorruptCheckpoint,
    ObjectMissing,
    StoreError,
    StoreFull,
    StoreLocked,
)
from holdfast.options import Policy

log = logging.getLogger("holdfast.checkpoint")

# An object store cannot keep open files for a restore in progress: the restore gets this long.
_REMOTE_DELETION_DELAY_SECONDS = 600.0
_TRIES = 100
# What a deleted version or file takes in the manifest that deletes it.
_DELETED_BYTES = 100


@dataclass(frozen=True)
class _Current:
    """The newest manifest. Threads that ask while a save publishes the next one see one of the two."""

    history: History
    number: int
    time: float
    retired: list[tuple[str, float]]

    @cached_property
    def manifest(self) -> Manifest:
        return self.history.manifest(self.number, self.time, self.retired)


class Catalog:
    """Reads the newest manifest and publishes the next ones. The caller holds the store's writer lock.

    Attributes:
        complaints: the errors of newer manifests that cannot be read.
        problem: the error of the last attempt to delete files that no version needs.
    """

    def __init__(self, store: Store, policy: Policy) -> None:
        self.store = store
        self.policy = policy
        self.complaints: list[str] = []
        self.problem: BaseException | None = None
        self._last_number = self._read_newest()
        self._stored: set[int] = set()
        self._own: bytes | None = None
        self._fenced_off = ""
        self._attempts: set[str] = set()
        self._undeleted: list[str] = []
        self._found_before: set[str] = set()
        self._leave_alone_what_is_there()
        self._only_before = self._read_previous()
        # A damaged manifest may have had later versions. Their files exist: nothing was deleted since.
        self._last_seen = max(
            (manifests.version_of(info.name) for info in (store.list("dense/") if self.complaints else ())),
            default=0,
        )
        self.deletion_delay_seconds = (
            policy.deletion_delay_seconds
            if policy.deletion_delay_seconds is not None
            else 0.0
            if store.keeps_open_files
            else _REMOTE_DELETION_DELAY_SECONDS
        )

    def _read_newest(self) -> int:
        """Read the manifest to continue from; returns the highest number in use."""
        highest = self._highest_taken()
        for _ in range(_TRIES):
            self.complaints = []
            stored = manifests.read_newest_stored(self.store, self.complaints)
            before, highest = highest, self._highest_taken()
            if highest == before:  # otherwise a newer one may have been published meanwhile
                self._take(stored)
                return highest
        raise StoreLocked(f"another writer is at work in {self.store.url}: stop it", "unknown", 0)

    def _take(self, stored: manifests.Stored) -> None:
        """Continue from a manifest that was read."""
        for problem in stored.damaged:
            log.warning("%s; a copy of it is used, and the next save writes it anew", problem)
        manifest = stored.manifest
        needed = manifest.file_names()
        retired = [(name, since) for name, since in manifest.retired if name not in needed]
        self._current = _Current(History(stored), manifest.number, manifest.time, retired)

    @property
    def manifest(self) -> Manifest:
        """The current one, with all versions; ``newest``, ``era`` and ``versions_from`` take less time."""
        return self._current.manifest

    def newest_manifest(self, complaints: list[str]) -> Manifest:
        """The store's newest manifest that is whole: the current one, unless there are others by now.

        What is wrong with newer ones is appended to ``complaints``; raises what ``manifest.read_newest``
        raises.
        """
        if self._current.number and self._highest_taken() == self._current.number:
            return self.manifest  # reading it takes the longer, the more versions there are
        return manifests.read_newest(self.store, complaints)

    @property
    def _history(self) -> History:
        return self._current.history

    def era(self, number: int) -> Era:
        """An era of the current manifest."""
        return self._history.eras[number]

    def versions_from(self, first: int) -> list[int]:
        """The numbers of the current versions from this one on, ascending."""
        return self._history.numbers_from(first)

    def _highest_taken(self) -> int:
        return max([0, *manifests.numbers(self.store), *manifests.misplaced(self.store)])

    def _read_previous(self) -> set[str]:
        """The files of the manifest before the current one that this one does not need."""
        older = [n for n in manifests.numbers(self.store) if n < self._current.number]
        if not older:
            return set()
        try:
            named = manifests.names_in(self.store, older[0], besides=self.manifest)
        except ObjectMissing:
            return set()  # of an attempt that failed, and was cleared away: nothing rests on it
        except Exception as error:
            self.complaints.append(str(error))
            return set()
        return named - self.manifest.file_names()

    @property
    def newest(self) -> Version | None:
        """The newest version, or None."""
        versions = self._history.versions
        return versions[next(reversed(versions))] if versions else None

    def next_version(self) -> int:
        """The number of the next version; numbers are never reused."""
        return max(self._history.last_version, self._last_seen) + 1

    def take_over(self, *, without: Iterable[int] = ()) -> list[str]:
        """Become the store's writer: call it before writing the first file. Later calls do nothing.

        Publishes the current manifest, without the given versions, under a number that fences off the
        previous writer. Then deletes the files that the previous writer left unnamed, and returns their
        names.

        Raises:
            StoreLocked: another writer has come after this one.
        """
        self.raise_if_fenced_off()
        if self._own is not None:
            return []
        self.store.clear_unfinished()
        self._leave_alone_what_is_there()
        self.delete_versions(without)
        try:
            return self.delete_leftovers()
        except StoreLocked:
            raise
        except StoreError as error:  # the next writer deletes them
            log.warning("files that no manifest names stay in %s: %s", self.store.url, error)
            return []

    def _leave_alone_what_is_there(self) -> None:
        """Without a manifest, the folder may belong to somebody else, or be an incomplete copy."""
        found = self._data_files() if not self._current.number else []
        if found and not self._found_before:
            log.warning(
                "%s has no manifest, but %d files in a store's folders, such as %s: they are not deleted",
                self.store.url, len(found), found[0],
            )  # fmt: skip
        self._found_before |= set(found)

    def _data_files(self) -> list[str]:
        return [info.name for folder in DATA_FOLDERS for info in self.store.list(folder)]

    def delete_leftovers(self) -> list[str]:
        """Delete files that no manifest names: leftovers of dead writers and failed saves.

        Does nothing if a manifest is damaged, since it may name them; if a manifest may have been published
        though the store reported an error; or before ``take_over``.
        """
        self.raise_if_fenced_off()
        if self.complaints or self._attempts or self._own is None:
            return []
        named = self.named_files()
        leftovers = [n for n in self._data_files() if n not in named and manifests.is_written_name(n)]
        # After the listing: a successor takes over before it writes a file, so none of these are its own.
        self._look_for_others()
        if leftovers:
            self.store.delete(leftovers)
        return leftovers

    def named_files(self) -> set[str]:
        """The files that are not leftovers: of this manifest, of the one before, and those that wait."""
        return self.manifest.file_names().union(
            self._only_before, (name for name, _ in self._current.retired), self._found_before
        )

    def commit_version(
        self,
        version: Version,
        groups: Sequence[Group],
        strategy: str,
        changes: Iterable[FileChange],
        unverified: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Publish a version with the files of all shards, and delete older versions as the policy says.

        ``unverified``: see ``flag_versions``.
        """
        changes = list(changes)
        added = [f for change in changes for f in change.added]
        draft = self._history.draft()
        if self.newest is not None and version.version <= self.newest.version:
            raise CheckpointError(
                f"{self.store.url} has a version after {version.version}: save under another"
            )
        if version.baseline:
            draft.begin_era(Era(version.era, strategy, [g.to_json() for g in groups], [], (0,) * len(groups)))
        before = draft.eras[version.era].open_records
        records = _with_written(before, changes)
        # No other version reads the files of a differential version.
        stay = records if all(f.last_died == OPEN for f in added) else before
        draft.put_version(msgspec.structs.replace(version, records=records))
        draft.add_files(version.era, added, stay)
        _flag(draft, unverified)
        draft.delete_versions(self._doomed(draft))
        self._publish(draft)

    def flag_versions(self, unverified: Mapping[int, str]) -> None:
        """Flag versions that may lack changes: number to reason."""
        draft = self._history.draft()
        _flag(draft, unverified)
        self._publish(draft)

    def commit_round(self, era_number: int, changes: Iterable[FileChange]) -> None:
        """Replace files of an era by rearranged ones with the same rows."""
        changes = list(changes)
        removed = {name for change in changes for name in change.removed}
        added = [f for change in changes for f in change.added]
        updated = {f.name: f for change in changes for f in change.updated}
        draft = self._history.draft()
        draft.replace_records(era_number, [died for change in changes for died in change.replaced])
        draft.add_files(era_number, added, draft.eras[era_number].open_records)
        draft.replace_files(era_number, removed, updated)
        self._publish(draft)

    def free_replaced(self) -> None:
        """Publish the same manifest again: then neither of the last two names replaced files; delete them.

        Otherwise the next version would do that.
        """
        self.delete_versions(())

    def delete_versions(self, numbers: Iterable[int]) -> None:
        """Delete versions, and the files that only they need.

        If the newest version is among them, the shard that wrote it must be resumed.
        """
        draft = self._history.draft()
        draft.delete_versions(numbers)
        self._publish(draft, from_reserve=True)

    def make_room(self, needed: Set[int] = frozenset()) -> bool:
        """On a full disk, delete now what the next version would make obsolete; False if there is nothing.

        ``needed`` versions are kept whatever the policy says: a version that is known to be intact should
        stay until there is another.
        """
        doomed = [number for number in self._doomed(self._history) if number not in needed]
        if not doomed and not self._due(time.time()):
            return False
        self.delete_versions(doomed)
        if self._due(time.time()):
            self.free_replaced()
        return True

    def with_advice(self, error: BaseException, setting: str = "Policy(keep=N)") -> BaseException:
        """The same error, with advice if the store is full and deleting versions would help.

        ``setting``: how the user limits the number of versions.
        """
        if not isinstance(error, StoreFull) or len(self._history.versions) < 2:
            return error
        advised = StoreFull(
            f"{error}, or keep fewer versions (holdfast ckpt gc {self.store.url} --keep N, or {setting})"
        )
        advised.__cause__ = error
        return advised

    def _due(self, now: float) -> list[str]:
        """Retired files that may be deleted once the next manifest is published."""
        # A time far in the future comes from a clock that was ahead: the file would stay until then.
        return [n for n, since in self._current.retired if abs(now - since) >= self.deletion_delay_seconds]

    def retained(self, now: float | None = None) -> list[Version]:
        """The current versions that the policy keeps."""
        doomed = set(self._doomed(self._history, now))
        return [v for v in self._history.versions.values() if v.version not in doomed]

    def _doomed(self, history: History, now: float | None = None) -> list[int]:
        """The versions that the policy does not keep."""
        policy = self.policy
        if policy.keep is None and policy.keep_every is None and policy.keep_seconds is None:
            return []
        older = list(history.versions)[: -max(policy.keep or 1, 1)]
        if policy.keep_every:
            older = [number for number in older if number % policy.keep_every]
        if policy.keep_seconds is not None:
            now = time.time() if now is None else now
            older = [n for n in older if now - history.versions[n].time >= policy.keep_seconds]
        return older

    def _publish(self, draft: History, *, from_reserve: bool = False) -> None:
        """``from_reserve``: use reserved space, for publications that free space; others would exhaust it."""
        self.raise_if_fenced_off()
        now = time.time()
        due = self._due(now)
        # Before it has taken over, a writer writes no file; nor where there may be no room for one.
        self._store_segment(draft, may_write=self._own is not None and not from_reserve)
        gone = set(due)
        retired = [(n, since) for n, since in self._current.retired if n not in gone]
        retired += [(n, now) for n in sorted(draft.dropped)]
        before = self._current.number
        number = self._publish_next(draft, now, retired, from_reserve)
        self._current = _Current(draft, number, now, retired)
        self._only_before = set(draft.dropped)
        # Only now, and only what neither this manifest nor the one before it names.
        self._delete_outdated(before, due)
        self.store.keep_reserve(len(self._own or b"") + _DELETED_BYTES * len(draft))

    def _store_segment(self, draft: History, *, may_write: bool) -> None:
        """Move what has become too much for a manifest into a segment."""
        try:
            packed = draft.condense(self._last_number + 1, may_write=may_write)
        except CorruptCheckpoint as error:
            raise _unreadable(self.store.url, error) from None
        if packed is not None:
            segment, data = packed
            for name in segment.names:
                self.store.put(name, [data])

    def _publish_next(
        self, draft: History, now: float, retired: Sequence[tuple[str, float]], from_reserve: bool
    ) -> int:
        """Publish a manifest under the next number, and verify that it is the newest; returns the number."""
        self.store.sync()  # separately: if this fails, certainly nothing was published
        self._look_for_others()
        while True:
            number = self._last_number + 1
            data = _readable(draft, draft.head(number, now, retired), self.store.url)
            try:
                # The manifest comes last: a reader that sees it can rely on every file that it names.
                if self._create(number, data, from_reserve):
                    self._make_sure(number, data)
                    break
            except StoreLocked:
                raise
            except BaseException:
                if self._may_exist(number):
                    self._attempts.add(checksum(data))
                raise
            self._last_number = number  # one of our own failed attempts has it
        self._last_number = number
        self._own = data
        self._attempts.clear()
        return number

    def _may_exist(self, number: int) -> bool:
        """Whether a manifest may exist though publishing it failed, for example because a sync failed.

        It stays: a reader may continue from its number, so the number is never reused.
        """
        try:
            return self.store.may_publish_late or number in manifests.numbers(self.store)
        except StoreError:
            return True

    def _create(self, number: int, data: bytes, from_reserve: bool) -> bool:
        """Publish; False if the name is taken by our own attempt that was reported as failed."""
        try:
            self._create_in_any_case(number, data, from_reserve)
        except AlreadyExists as taken:
            try:
                found = self._content(number)
            except ObjectMissing:
                raise taken from None
            if checksum(found) in self._attempts:
                return False
            if found != data:
                self._fence_off(number)
            # It is ours: the request succeeded, its answer was lost, and the retry was refused.
            self.store.sync()
        return True

    def _create_in_any_case(self, number: int, data: bytes, from_reserve: bool) -> None:
        while True:
            try:
                self.store.publish(manifests.name_of(number), data)
                return
            except StoreFull:
                if not from_reserve or not self.store.use_reserve():
                    raise

    def _look_for_others(self) -> None:
        """Raise StoreLocked if another writer has published since our last manifest, or since we opened."""
        newest = max(manifests.numbers(self.store), default=0)
        tried = self._attempts and newest == self._last_number + 1
        if tried and checksum(self._content(newest)) in self._attempts:
            self._last_number = newest  # it is ours, though it was reported as failed
        elif newest > self._last_number:
            self._fence_off(newest)
        elif self._own is not None and not self.store.publishes_exclusively:
            self._raise_if_replaced(self._last_number, self._own)

    def _make_sure(self, number: int, data: bytes) -> None:
        """Withdraw the manifest just published if it is not the newest."""
        found = manifests.numbers(self.store)
        if found and found[0] > number:
            # If this fails: nobody reads it below the newest, and the next writer deletes it.
            with suppress(StoreError):
                self.store.delete([manifests.name_of(number)])
            self._fence_off(found[0])
        if not self.store.publishes_exclusively:
            self._raise_if_replaced(number, data)
        self._stored = set(found)

    def _raise_if_replaced(self, number: int, own: bytes) -> None:
        """For stores in which a name can be published twice: the later one wins."""
        with suppress(ObjectMissing):
            if self._content(number) != own:
                self._fence_off(number)

    def _fence_off(self, newest: int) -> NoReturn:
        self._fenced_off = (
            f"another writer has taken over {self.store.url} (it has published manifest {newest}, the last "
            f"one known here is {self._last_number}): this writer stops saving and deleting; stop one of "
            "the two"
        )
        raise StoreLocked(self._fenced_off, "unknown", 0)

    def raise_if_fenced_off(self) -> None:
        """Raise StoreLocked if another writer is known to have taken over the store. Reads nothing."""
        if self._fenced_off:
            raise StoreLocked(self._fenced_off, "unknown", 0)

    def _content(self, number: int) -> bytes:
        with self.store.open(manifests.name_of(number)) as reader:
            return reader.read() if reader.size <= manifests.LARGEST_MANIFEST else b""

    def _delete_outdated(self, before: int, due: Iterable[str]) -> None:
        """Delete obsolete files; on failure the next call, or the next writer, tries again."""
        outdated = sorted(n for n in self._stored if n < before)
        names = [*map(manifests.name_of, outdated), *self._undeleted, *due]
        try:
            self.store.delete(names)
        except BaseException as error:
            # The manifest is published: this must not make the save fail.
            log.warning("could not delete files of %s that no version needs: %r", self.store.url, error)
            self.problem = error
            self._undeleted = names[len(outdated) :]
            return
        self._stored.difference_update(outdated)
        self._undeleted = []
        self.problem = None


def _flag(draft: History, unverified: Mapping[int, str]) -> None:
    for number, why in unverified.items():
        version = draft.versions.get(number)
        if version is not None and not version.unverified and why:
            draft.put_version(msgspec.structs.replace(version, unverified=why))


def _with_written(open_records: tuple[int, ...], changes: Sequence[FileChange]) -> tuple[int, ...]:
    """How many records of each group a new version reads: all that are not replaced, and its own."""
    if not open_records:
        return ()
    records = list(open_records)
    for change in changes:
        for group, rows in change.written:
            records[group] += rows
    return tuple(records)


def _readable(draft: History, head: Manifest | Head, url: str) -> bytes:
    """The bytes of a manifest, decoded as a reader will: one that nobody can read would make the whole store
    unusable."""
    try:
        data = manifests.encode_head(head) if isinstance(head, Head) else manifests.encode(head)
        found = manifests.decode_head(data, "its manifest")
        draft.adopt(found.recent if isinstance(found, Head) else Part(found.eras, versions=found.versions))
    except CorruptCheckpoint as error:
        raise _unreadable(url, error) from None
    return data


def _unreadable(url: str, error: CorruptCheckpoint) -> CheckpointError:
    return CheckpointError(
        f"the manifest for {url} could not be read back, so nothing was published: {error}; "
        "check the step and the metadata"
    )
