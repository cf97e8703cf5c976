"""The store as its one writer sees it: versions, retention, and the order in which things become true.

``_publish`` is the only place where a version comes to exist or ceases to: everything it names is durable
before its manifest is published, and nothing is deleted before that manifest, and the one after it, stand.

**Why a stale writer harms nothing.** Locks may fail: a lease runs out while its holder sleeps, and some
network file systems keep locks to one host. So no lock is relied upon, only that one name is published once.

1. Manifests are deleted, and their numbers become free names: a writer that sleeps may publish below the
   newest. But the highest number in a store never goes down: a manifest is deleted by one whose own is two
   above it, or by its own writer, who has seen a higher one. And it goes up by one at a time.
2. So a writer that sees no number above its own, after it has published, knows that its manifest was the
   newest when it was published, and that the one it is made from was the newest before (but for those of its
   own of which it was told that they failed). Such manifests form one line. Who sees a higher number deletes
   the manifest it has just published, and nothing else, and is *fenced off* for good.
3. A file that a manifest of the line does not name is not named by any after it: a writer names what the
   manifest before has, and files of its own, whose names are random. Whoever deletes such a file does no
   harm, however long it has slept since it checked that its manifest is of the line.
4. Files that no manifest names may be another writer's, to be named by its next. So a writer *takes over*
   before it puts its first file: it publishes a manifest of its own, with nothing new in it. And whoever
   deletes such files lists them first and looks for a higher number then: if there is none, they are of
   writers that are fenced off, or its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from types import MappingProxyType
from typing import NoReturn

import msgspec

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.chunk import OPEN, checksum
from holdfast.checkpoint.format.manifest import (
    DATA_FOLDERS,
    EMPTY,
    FORMAT,
    Era,
    FileChange,
    Manifest,
    Version,
)
from holdfast.checkpoint.format.records import Group
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

# An object store cannot keep an open file for a restore that is under way: it gets this long.
_REMOTE_DELETION_DELAY_SECONDS = 600.0
_TRIES = 100


class Catalog:
    """Reads the newest manifest and publishes the next ones. Hold the store's writer lock.

    Attributes:
        manifest: what stands in the store.
        complaints: what was wrong with newer manifests that had to be passed over.
        problem: why files that no version needs could not be deleted, when that was tried last.
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
        self._previous = self._read_previous()
        # A damaged manifest may have had later versions. Their files are there, as nothing was deleted since.
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
        """Read the manifest to go on from; returns the highest number that is taken."""
        highest = self._highest_taken()
        for _ in range(_TRIES):
            self.complaints = []
            self.manifest: Manifest = manifests.read_newest(self.store, self.complaints)
            before, highest = highest, self._highest_taken()
            if highest == before:  # else a newer one may have come after the one that was read
                return highest
        raise StoreLocked(f"another writer is at work in {self.store.url}: stop it", "unknown", 0)

    def _highest_taken(self) -> int:
        return max([0, *manifests.numbers(self.store), *manifests.misplaced(self.store)])

    def _read_previous(self) -> Manifest:
        older = [n for n in manifests.numbers(self.store) if n < self.manifest.number]
        if not older:
            return EMPTY
        try:
            return manifests.read(self.store, older[0])
        except Exception as error:
            self.complaints.append(str(error))
            return EMPTY

    @property
    def newest(self) -> Version | None:
        """The newest version, if there is one."""
        return self.manifest.versions[-1] if self.manifest.versions else None

    def next_version(self) -> int:
        """The number of the next version: never one that was used before."""
        used = [v.version for v in self.manifest.versions]
        return max([*used, self.manifest.last_version, self._last_seen]) + 1

    def take_over(self, *, without: Iterable[int] = ()) -> list[str]:
        """Become the store's writer: call it before the first file is put. Later calls do nothing.

        Publishes what stands, without the versions that are named, under a number that fences off the writer
        before this one. Then deletes what that one has left behind, and returns it.

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
        except StoreError as error:  # the next one clears it away
            log.warning("what writers have left in %s stays: %s", self.store.url, error)
            return []

    def _leave_alone_what_is_there(self) -> None:
        """Without a manifest, the folder may be somebody else's, or a copy that is not complete yet."""
        found = self._data_files() if not self.manifest.number else []
        if found and not self._found_before:
            log.warning(
                "%s has no manifest, but %d files in the folders of a store, such as %s: they are left alone",
                self.store.url, len(found), found[0],
            )  # fmt: skip
        self._found_before |= set(found)

    def _data_files(self) -> list[str]:
        return [info.name for folder in DATA_FOLDERS for info in self.store.list(folder)]

    def delete_leftovers(self) -> list[str]:
        """Delete files that no manifest names: what writers that died, or failed saves, have left behind.

        Does nothing if a manifest was damaged: what it named may be all that is left of a version. Nor if
        one may have been published without our knowing, nor before ``take_over``.
        """
        self.raise_if_fenced_off()
        if self.complaints or self._attempts or self._own is None:
            return []
        named = self.manifest.file_names() | self._previous.file_names()
        named |= {name for name, _ in self.manifest.retired} | self._found_before
        leftovers = [n for n in self._data_files() if n not in named and manifests.is_written_name(n)]
        # After the listing: a successor takes over before it puts anything, so none of these are its own.
        self._look_for_others()
        if leftovers:
            self.store.delete(leftovers)
        return leftovers

    def commit_version(
        self,
        version: Version,
        groups: Sequence[Group],
        strategy: str,
        changes: Iterable[FileChange],
        unverified: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Make a version exist, with the files of all shards' changes; older ones go by the policy.

        ``unverified``: see ``flag_versions``.
        """
        changes = list(changes)
        added = [f for change in changes for f in change.added]
        eras = [e for e in self.manifest.eras if e.number != version.era]
        if version.baseline:
            era = Era(version.era, strategy, [g.to_json() for g in groups], [], (0,) * len(groups))
        else:
            era = self.manifest.era(version.era)
        records = _with_written(era.open_records, changes)
        # What a differential version writes is of no other: nobody reads it after this one.
        stay = records if all(f.last_died == OPEN for f in added) else era.open_records
        eras.append(msgspec.structs.replace(era, files=[*era.files, *added], open_records=stay))
        version = msgspec.structs.replace(version, records=records)
        versions = self._retained(_flagged([*self.manifest.versions, version], unverified))
        self._publish(eras, versions)

    def flag_versions(self, unverified: Mapping[int, str]) -> None:
        """Note why versions, by number, may lack changes."""
        self._publish(self.manifest.eras, _flagged(self.manifest.versions, unverified))

    def commit_round(self, era_number: int, changes: Iterable[FileChange]) -> None:
        """Replace files of an era by rearranged ones with the same rows."""
        changes = list(changes)
        removed = {name for change in changes for name in change.removed}
        added = [f for change in changes for f in change.added]
        updated = {f.name: f for change in changes for f in change.updated}
        replaced = [died for change in changes for died in change.replaced]
        eras = []
        for era in self.manifest.eras:
            if era.number == era_number:
                stay = [updated.get(f.name, f) for f in era.files if f.name not in removed]
                left = _without_replaced(era.open_records, replaced, OPEN)
                eras.append(msgspec.structs.replace(era, files=[*stay, *added], open_records=left))
            else:
                eras.append(era)
        versions = [
            msgspec.structs.replace(v, records=_without_replaced(v.records, replaced, v.version))
            if v.era == era_number
            else v
            for v in self.manifest.versions
        ]
        self._publish(eras, versions)

    def free_replaced(self) -> None:
        """Publish the same once more, so that the manifest before it does not need replaced files either.

        They are deleted with it, rather than with the next version.
        """
        self.delete_versions(())

    def delete_versions(self, numbers: Iterable[int]) -> None:
        """Make versions cease to exist, and delete what only they needed.

        A shard that has written the newest version cannot go on when that is among them: resume it.
        """
        gone = set(numbers)
        versions = [v for v in self.manifest.versions if v.version not in gone]
        self._publish(self.manifest.eras, versions, from_reserve=True)

    def make_room(self, needed: Set[int] = frozenset()) -> bool:
        """On a full disk, delete now what else would go with the next version; False if there is nothing.

        ``needed`` are versions to be kept whatever the policy says: one that is known to be whole should stay
        until there is another.
        """
        kept = {v.version for v in self.retained()}
        doomed = [v.version for v in self.manifest.versions if v.version not in kept | needed]
        if not doomed and not self._due(time.time()):
            return False
        self.delete_versions(doomed)
        if self._due(time.time()):
            self.free_replaced()
        return True

    def with_advice(self, error: BaseException, setting: str = "Policy(keep=N)") -> BaseException:
        """The same error; if there is no space left and deleting versions would help, it says so.

        ``setting`` is what limits their number from now on.
        """
        if not isinstance(error, StoreFull) or len(self.manifest.versions) < 2:
            return error
        advised = StoreFull(
            f"{error}, or keep fewer versions (holdfast ckpt gc {self.store.url} --keep N, or {setting})"
        )
        advised.__cause__ = error
        return advised

    def _due(self, now: float) -> list[str]:
        """Retired files that may be deleted as soon as a manifest stands after this one."""
        # What was retired far in the future was by a clock that was ahead: it would stay until that comes.
        return [n for n, since in self.manifest.retired if abs(now - since) >= self.deletion_delay_seconds]

    def retained(self, now: float | None = None) -> list[Version]:
        """What the policy would keep of the present versions."""
        return self._retained(self.manifest.versions, now)

    def _retained(self, versions: Sequence[Version], now: float | None = None) -> list[Version]:
        policy = self.policy
        if policy.keep is None and policy.keep_every is None and policy.keep_seconds is None:
            return list(versions)
        now = time.time() if now is None else now
        newest = versions[-max(policy.keep or 1, 1) :]
        kept = {v.version for v in newest}
        for v in versions:
            if policy.keep_every and v.version % policy.keep_every == 0:
                kept.add(v.version)
            if policy.keep_seconds is not None and now - v.time < policy.keep_seconds:
                kept.add(v.version)
        return [v for v in versions if v.version in kept]

    def _publish(
        self, eras: Sequence[Era], versions: Sequence[Version], *, from_reserve: bool = False
    ) -> None:
        """Only what frees space may take it ``from_reserve``: it would not last for what adds more."""
        now = time.time()
        before = self.manifest
        trimmed = manifests.without_unneeded_files(eras, versions)
        last_version = max([before.last_version, *(v.version for v in versions)])
        draft = Manifest(FORMAT, 0, now, trimmed, list(versions), last_version=last_version)
        needed = draft.file_names()
        due = [name for name in self._due(now) if name not in needed]
        gone = needed.union(due)
        retired = [(n, since) for n, since in before.retired if n not in gone]
        retired += [(n, now) for n in sorted(before.file_names() - needed)]
        complete = self._publish_next(msgspec.structs.replace(draft, retired=retired), from_reserve)
        self._previous, self.manifest = before, complete
        # Only now, and only what neither this manifest nor the one before it names.
        self._delete_outdated(before.number, due)
        self.store.keep_reserve(len(self._own or b""))

    def _publish_next(self, draft: Manifest, from_reserve: bool) -> Manifest:
        """Publish a manifest under the next number, and make sure that it is the newest."""
        self.raise_if_fenced_off()
        self.store.sync()  # apart from publishing: if this fails, it is certain that nothing was published
        self._look_for_others()
        while True:
            number = self._last_number + 1
            data = manifests.encode(msgspec.structs.replace(draft, number=number))
            complete = _as_it_will_be_read(data, self.store.url)
            try:
                # The manifest comes last: whoever sees it may rely on every file that it names.
                if self._create(number, data, from_reserve):
                    self._make_sure(number, data)
                    break
            except StoreLocked:
                raise
            except BaseException:
                if self._may_exist(number):
                    self._attempts.add(checksum(data))
                raise
            self._last_number = number  # an attempt of ours has it
        self._last_number = number
        self._own = data
        self._attempts.clear()
        return complete

    def _may_exist(self, number: int) -> bool:
        """Whether a manifest may be there that was said to have failed: its name was not synced, say.

        It is left there: whoever has read it goes on from its number, so that number is never used again.
        """
        try:
            return self.store.may_publish_late or number in manifests.numbers(self.store)
        except StoreError:
            return True

    def _create(self, number: int, data: bytes, from_reserve: bool) -> bool:
        """Publish; False if one of ours stands there that was said to have failed, and so it did."""
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
            # It is ours: a request was carried out, repeated as its answer was lost, and refused.
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
        """Raise StoreLocked if another writer has published since we have, or since we read the store."""
        newest = max(manifests.numbers(self.store), default=0)
        tried = self._attempts and newest == self._last_number + 1
        if tried and checksum(self._content(newest)) in self._attempts:
            self._last_number = newest  # it is ours, though it was said to have failed
        elif newest > self._last_number:
            self._fence_off(newest)
        elif self._own is not None and not self.store.publishes_exclusively:
            self._raise_if_replaced(self._last_number, self._own)

    def _make_sure(self, number: int, data: bytes) -> None:
        """Withdraw what has just been published if it is not the newest."""
        found = manifests.numbers(self.store)
        if found and found[0] > number:
            # If that fails: below the newest it is read by nobody, and the next writer deletes it.
            with suppress(StoreError):
                self.store.delete([manifests.name_of(number)])
            self._fence_off(found[0])
        if not self.store.publishes_exclusively:
            self._raise_if_replaced(number, data)
        self._stored = set(found)

    def _raise_if_replaced(self, number: int, own: bytes) -> None:
        """Where a name can be published twice, the later one stands."""
        with suppress(ObjectMissing):
            if self._content(number) != own:
                self._fence_off(number)

    def _fence_off(self, newest: int) -> NoReturn:
        self._fenced_off = (
            f"another writer has taken {self.store.url} over (it has published manifest {newest}, and "
            f"{self._last_number} is the last that this one knows): this one saves and deletes nothing any "
            "more, stop one of the two"
        )
        raise StoreLocked(self._fenced_off, "unknown", 0)

    def raise_if_fenced_off(self) -> None:
        """Raise StoreLocked if another writer is known to have taken the store over. Asks nobody."""
        if self._fenced_off:
            raise StoreLocked(self._fenced_off, "unknown", 0)

    def _content(self, number: int) -> bytes:
        with self.store.open(manifests.name_of(number)) as reader:
            return reader.read() if reader.size <= manifests.LARGEST_MANIFEST else b""

    def _delete_outdated(self, before: int, due: Iterable[str]) -> None:
        """Delete what nobody needs; what cannot be is tried again next time, and by the next writer."""
        outdated = sorted(n for n in self._stored if n < before)
        names = [*map(manifests.name_of, outdated), *self._undeleted, *due]
        try:
            self.store.delete(names)
        except BaseException as error:
            # The manifest stands all the same: whoever waits for it must not be told that it failed.
            log.warning("files of %s that no version needs cannot be deleted: %r", self.store.url, error)
            self.problem = error
            self._undeleted = names[len(outdated) :]
            return
        self._stored.difference_update(outdated)
        self._undeleted = []
        self.problem = None


def _flagged(versions: Iterable[Version], unverified: Mapping[int, str]) -> list[Version]:
    return [
        msgspec.structs.replace(v, unverified=v.unverified or unverified.get(v.version, "")) for v in versions
    ]


def _with_written(open_records: tuple[int, ...], changes: Sequence[FileChange]) -> tuple[int, ...]:
    """How many records of each group a new version reads: all that nothing has replaced, and its own."""
    if not open_records:
        return ()
    records = list(open_records)
    for change in changes:
        for group, rows in change.written:
            records[group] += rows
    return tuple(records)


def _without_replaced(
    records: tuple[int, ...], replaced: Sequence[tuple[int, int, int]], version: int
) -> tuple[int, ...]:
    """How many are left for a version, now that files say when some of them died."""
    if not records:
        return ()
    left = list(records)
    for died, group, count in replaced:
        if died <= version:
            left[group] -= count
    return tuple(left)


def _as_it_will_be_read(data: bytes, url: str) -> Manifest:
    """What a reader makes of a manifest; one that none can read would take the whole store with it."""
    try:
        return manifests.decode(data, "its manifest")
    except CorruptCheckpoint as error:
        raise CheckpointError(
            f"what is to be saved to {url} could not be read again, so nothing was published: {error}; "
            "check the step and the metadata"
        ) from None
