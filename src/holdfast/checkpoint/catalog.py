"""The store as its one writer sees it: versions, retention, and the order in which things become true.

``commit`` is the only place where a version comes to exist or ceases to: everything it names is durable
before its manifest is published, and nothing is deleted before that manifest, and the one after it, stand.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import msgspec

from holdfast.checkpoint import manifest as manifests
from holdfast.checkpoint.chunk import OPEN, checksum
from holdfast.checkpoint.manifest import DATA_FOLDERS, EMPTY, FORMAT, Era, FileEntry, Manifest, Version
from holdfast.checkpoint.records import Group
from holdfast.checkpoint.store import Store
from holdfast.errors import AlreadyExists, CheckpointError, CorruptCheckpoint
from holdfast.options import Policy

log = logging.getLogger("holdfast.checkpoint")

# An object store cannot keep an open file for a restore that is under way: it gets this long.
_REMOTE_DELETION_DELAY_SECONDS = 600.0


class FileChange(Protocol):
    """What changes in the files of a shard, as ``bundles.Change`` says it."""

    @property
    def added(self) -> tuple[FileEntry, ...]:
        """New files."""

    @property
    def removed(self) -> tuple[str, ...]:
        """Files of which nothing is needed any more."""

    @property
    def updated(self) -> tuple[FileEntry, ...]:
        """What is to be said from now on of files that stay."""

    @property
    def written(self) -> tuple[tuple[int, int], ...]:
        """(group, rows) of what is in new files."""

    @property
    def replaced(self) -> tuple[tuple[int, int, int], ...]:
        """(version, group, how many) of records that versions from this one on no longer read."""


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
        self.manifest: Manifest = manifests.read_newest(store, self.complaints)
        existing = manifests.numbers(store)
        self._stored = set(existing)
        self._last_number = max([0, *existing, *manifests.misplaced(store)])
        self._attempts: set[str] = set()
        self._undeleted: list[str] = []
        self._found_before: set[str] = set()
        self._previous = self._read_previous(existing)
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

    def _read_previous(self, existing: Sequence[int]) -> Manifest:
        older = [n for n in existing if n < self.manifest.number]
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

    def delete_leftovers(self, *, of_others: bool = True) -> list[str]:
        """Delete files that no manifest names: what writers that died, or failed saves, have left behind.

        Does nothing if a manifest was damaged: what it named may be all that is left of a version. Nor if
        one may have been published without our knowing. What was there before the first manifest is left
        alone: the folder may be somebody else's, or a copy of a store that is not complete yet.

        A writer does so at its start (``of_others``), and that fences off the one before it: a writer that
        lost its lease may be asleep with its files written and its manifest not yet published. Taking that
        manifest's number makes sure that it never will be, before anything of it is deleted or built upon.
        """
        if self.complaints or self._attempts:
            return []
        named = self.manifest.file_names() | self._previous.file_names()
        named |= {name for name, _ in self.manifest.retired}
        found = [info.name for folder in DATA_FOLDERS for info in self.store.list(folder)]
        if of_others and found and not self.manifest.number:
            log.warning(
                "%s has no manifest, but %d files in the folders of a store, such as %s: they are left alone",
                self.store.url, len(found), found[0],
            )  # fmt: skip
            self._found_before = set(found)
            return []
        leftovers = [
            name
            for name in found
            if name not in named and name not in self._found_before and manifests.is_written_name(name)
        ]
        if of_others and (leftovers or self.store.lock_can_run_out):
            self._publish(self.manifest.eras, self.manifest.versions)
        elif not of_others and self._is_fenced_off():
            return []  # these may be a successor's; asked after the listing, which knows none that came later
        if leftovers:
            self.store.delete(leftovers)
        return leftovers

    def _is_fenced_off(self) -> bool:
        return max(manifests.numbers(self.store), default=0) != self._last_number

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
        self._publish(self.manifest.eras, self.manifest.versions)

    def delete_versions(self, numbers: Iterable[int]) -> None:
        """Make versions cease to exist, and delete what only they needed.

        A shard that has written the newest version cannot go on when that is among them: resume it.
        """
        gone = set(numbers)
        self._publish(self.manifest.eras, [v for v in self.manifest.versions if v.version not in gone])

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

    def _publish(self, eras: Sequence[Era], versions: Sequence[Version]) -> None:
        now = time.time()
        before = self.manifest
        trimmed = manifests.without_unneeded_files(eras, versions)
        last_version = max([before.last_version, *(v.version for v in versions)])
        draft = Manifest(FORMAT, 0, now, trimmed, list(versions), last_version=last_version)
        needed = draft.file_names()
        # What was retired far in the future was by a clock that was ahead: it would stay until that comes.
        due = [
            name
            for name, since in before.retired
            if abs(now - since) >= self.deletion_delay_seconds and name not in needed
        ]
        gone = needed.union(due)
        retired = [(n, since) for n, since in before.retired if n not in gone]
        retired += [(n, now) for n in sorted(before.file_names() - needed)]
        complete = self._publish_next(msgspec.structs.replace(draft, retired=retired))
        self._previous, self.manifest = before, complete
        # Only now, and only what neither this manifest nor the one before it names.
        self._delete_outdated(before.number, due)

    def _publish_next(self, draft: Manifest) -> Manifest:
        """Publish a manifest under the next number that is free."""
        while True:
            number = self._last_number + 1
            data = manifests.encode(msgspec.structs.replace(draft, number=number))
            complete = _as_it_will_be_read(data, self.store.url)
            taken = False
            try:
                # The manifest comes last: whoever sees it may rely on every file that it names.
                try:
                    self.store.publish(manifests.name_of(number), data)
                except AlreadyExists:
                    found = self._content(number)
                    if found == data:
                        # It is ours: a request was carried out, repeated as its answer was lost, and refused.
                        self.store.sync()
                    elif checksum(found) in self._attempts:
                        taken = True  # whoever waited for it was told that it failed, and so it did
                    else:
                        raise
            except AlreadyExists:
                raise
            except BaseException:
                # It may exist all the same: an answer was lost, or it could not be taken away again.
                self._attempts.add(checksum(data))
                raise
            self._stored.add(number)
            self._last_number = number
            if not taken:
                self._attempts.clear()
                return complete

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
