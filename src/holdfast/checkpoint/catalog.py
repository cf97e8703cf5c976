"""The store as its one writer sees it: versions, retention, and the order in which things become true.

``commit`` is the only place where a version comes to exist or ceases to: everything it names is durable
before its manifest is published, and nothing is deleted before that manifest, and the one after it, stand.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec

from holdfast.checkpoint import manifest as manifests
from holdfast.checkpoint.bundles import Change
from holdfast.checkpoint.manifest import EMPTY, FORMAT, Era, Manifest, Version
from holdfast.checkpoint.records import Group
from holdfast.checkpoint.store import Store
from holdfast.options import Policy

# An object store cannot keep an open file for a restore that is under way: it gets this long.
_REMOTE_DELETION_DELAY_SECONDS = 600.0
_DATA_FOLDERS = ("chunks/", "dense/")


class Catalog:
    """Reads the newest manifest and publishes the next ones. Hold the store's writer lock.

    Attributes:
        manifest: what stands in the store.
        complaints: what was wrong with newer manifests that had to be passed over.
    """

    def __init__(self, store: Store, policy: Policy) -> None:
        self.store = store
        self.policy = policy
        self.complaints: list[str] = []
        self.manifest: Manifest = manifests.read_newest(store, self.complaints)
        existing = manifests.numbers(store)
        self._last_number = existing[0] if existing else 0
        self._previous = self._read_previous(existing)
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
        used = [v.version for v in self.manifest.versions] + [self.manifest.last_version]
        used += [f.first_born for era in self.manifest.eras for f in era.files]
        return max(used, default=0) + 1

    def delete_leftovers(self) -> list[str]:
        """Delete files that no manifest names: what writers that died have left behind.

        Does nothing if a manifest was damaged: what it named may be all that is left of a version.
        """
        if self.complaints:
            return []
        named = self.manifest.file_names() | self._previous.file_names()
        named |= {name for name, _ in self.manifest.retired}
        found = [info.name for folder in _DATA_FOLDERS for info in self.store.list(folder)]
        leftovers = [name for name in found if name not in named]
        if leftovers:
            self.store.delete(leftovers)
        return leftovers

    def commit_version(
        self, version: Version, groups: Sequence[Group], strategy: str, changes: Iterable[Change]
    ) -> None:
        """Make a version exist, with the files of all shards' changes; older ones go by the policy."""
        added = [f for change in changes for f in change.added]
        eras = [e for e in self.manifest.eras if e.number != version.era]
        if version.baseline:
            eras.append(Era(version.era, strategy, [g.to_json() for g in groups], added))
        else:
            era = self.manifest.era(version.era)
            eras.append(msgspec.structs.replace(era, files=[*era.files, *added]))
        versions = self._retained([*self.manifest.versions, version])
        self._publish(eras, versions)

    def commit_round(self, era_number: int, changes: Iterable[Change]) -> None:
        """Replace files of an era by rearranged ones with the same rows."""
        changes = list(changes)
        removed = {name for change in changes for name in change.removed}
        added = [f for change in changes for f in change.added]
        updated = {f.name: f for change in changes for f in change.updated}
        eras = []
        for era in self.manifest.eras:
            if era.number == era_number:
                stay = [updated.get(f.name, f) for f in era.files if f.name not in removed]
                files = [*stay, *added]
                eras.append(msgspec.structs.replace(era, files=files))
            else:
                eras.append(era)
        self._publish(eras, self.manifest.versions)
        # Once more, so that the manifest before the newest does not need the replaced files either.
        self._publish(self.manifest.eras, self.manifest.versions)

    def delete_versions(self, numbers: Iterable[int]) -> None:
        """Make versions cease to exist, and delete what only they needed."""
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
        number = self._last_number + 1
        last = max([before.last_version, *(v.version for v in (*before.versions, *versions))])
        draft = Manifest(FORMAT, number, now, trimmed, list(versions), last_version=last)
        needed = draft.file_names()
        due = [
            name
            for name, since in before.retired
            if since + self.deletion_delay_seconds <= now and name not in needed
        ]
        retired = [(n, since) for n, since in before.retired if n not in needed and n not in set(due)]
        retired += [(n, now) for n in sorted(before.file_names() - needed)]
        complete = msgspec.structs.replace(draft, retired=retired)
        # The manifest comes last: whoever sees it may rely on every file that it names.
        self.store.publish(manifests.name_of(number), manifests.encode(complete))
        self._previous, self.manifest, self._last_number = before, complete, number
        # Only now, and only what neither this manifest nor the one before it names.
        outdated = [manifests.name_of(n) for n in range(max(1, number - 3), number - 1)]
        self.store.delete([*outdated, *due])
