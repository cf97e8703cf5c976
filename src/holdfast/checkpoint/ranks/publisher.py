"""What ranks do in place of a ``Publisher`` that publishes alone: rank 0 leads, the others follow.

Rank 0 has the store's lock, its catalog and every decision. Of each version:

1. ``begin``, in the trainers' threads: rank 0 decides whether it is a baseline, and says so (the
   *order*, which ``agreement.py`` brings to the others).
2. ``enter``, in the background: nobody writes a file before rank 0 has cleared away what earlier
   versions have left.
3. ``commit``: each rank *reports* that its files are durable, with what only it has (its random states, its
   loader). Rank 0 puts the manifest over all of them and gives the *verdict*.
4. ``replace_all``: the same again for files that were rearranged.

A rank that fails reports that, and the verdict is an error on all ranks. One that is lost makes ``Link.hear``
raise RankLost. In both cases no manifest was published: earlier versions are what they were.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.checkpoint.format.manifest import FileChange, Manifest, Version, read_newest
from holdfast.checkpoint.format.records import Group
from holdfast.checkpoint.ranks.link import Link
from holdfast.checkpoint.saving.catalog import Catalog
from holdfast.checkpoint.saving.publisher import NewVersion, Publisher
from holdfast.checkpoint.saving.shard_rows import SaveCancelled
from holdfast.checkpoint.store import Store
from holdfast.errors import (
    CheckpointError,
    CorruptCheckpoint,
    ObjectMissing,
    SaveVoid,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreUnreachable,
    message_of,
)
from holdfast.options import Policy


class Order(Struct):
    """What rank 0 has decided, when all ranks met."""

    call: str
    """What it was called for, such as "step": the others must have been called for the same."""
    step: int
    version: int = 0
    """The number of the version to save; 0: none."""
    baseline: bool = False
    tables: str = ""
    """Fingerprint of the tables as rank 0 has them."""
    next_step: int | None = None
    """When ranks meet again; None: when they are told to save."""


class Report(Struct):
    """A rank's part of a version."""

    change: FileChange | None = None
    own: bytes = b""
    """The encoded tree of what only this rank has."""
    unverified: dict[int, str] = {}
    witness: str = ""
    """Of what all ranks should have alike."""
    error: str = ""
    kind: str = ""
    needs_baseline: bool = False


class Verdict(Struct):
    """What became of a version."""

    version: Version | None = None
    kept: list[int] = []
    """The versions that must stay restorable when files are rearranged."""
    error: str = ""
    kind: str = ""


class Tidied(Struct):
    """What a rank has rearranged after a version."""

    change: FileChange | None = None
    live_bytes: int = 0
    is_damaged: bool = False
    error: str = ""


_KINDS: dict[str, Callable[[str], BaseException]] = {
    "cancelled": lambda text: SaveCancelled(),
    "void": SaveVoid,
    "full": StoreFull,
    "unreachable": StoreUnreachable,
    "locked": lambda text: StoreLocked(text, "unknown", 0),
}
_ERRORS: dict[str, type[BaseException]] = {
    "cancelled": SaveCancelled, "void": SaveVoid, "full": StoreFull, "unreachable": StoreUnreachable,
    "locked": StoreLocked,
}  # fmt: skip


def kind_of(error: BaseException) -> str:
    """The kind of an error, by which another rank raises one like it."""
    return next((kind for kind, type_ in _ERRORS.items() if isinstance(error, type_)), "")


def error_of(text: str, kind: str) -> BaseException:
    """An error like that of another rank."""
    return _KINDS.get(kind, CheckpointError)(text)


def fingerprint(groups: Sequence[Group]) -> str:
    """The same on two ranks that have the same tables with the same fields, in the same order."""
    text = json.dumps([group.to_json() for group in groups])
    return hashlib.sha256(text.encode()).hexdigest()


_encode = msgspec.msgpack.encode
_MOST_SAID = 64


class _Once:
    """Posts the first message under each key: whoever has read it acts upon it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._said: dict[str, None] = {}

    def __call__(self, key: str, message: bytes) -> bool:
        """Post, unless something was; whether this was the first."""
        if key in self._said:
            return False
        self._said[key] = None
        self._link.post(key, message)
        for old in list(self._said)[:-_MOST_SAID]:
            del self._said[old]
        return True


class Leader(Publisher):
    """The publisher of rank 0.

    Attributes:
        announce: brings a version that is begun, whether it is a baseline, and its tables' fingerprint to the
            other ranks.
        version: that was entered last.
        witness: of what all ranks should have alike, in the version that was begun.
    """

    is_alone = False

    def __init__(self, catalog: Catalog, link: Link) -> None:
        super().__init__(catalog)
        self.announce: Callable[[int, bool, str], None] = lambda version, baseline, tables: None
        self._link = link
        self._begun = self.version = 0
        self.witness = ""
        self._live_bytes: dict[int, int] = {}
        self._reports: tuple[int, list[Report]] = 0, []
        self._once = _Once(link)
        self._is_shared = False
        self._spent: tuple[list[str], list[str]] = [], []

    def note_spent(self, keys: Iterable[str]) -> None:
        """Messages that everybody has read by the time of the version after the next one."""
        self._spent[1].extend(keys)

    def begin(self, version: int, groups: Sequence[Group], live_bytes: int) -> bool:
        """Decide, and tell the others."""
        baseline = self.baseline_is_due(live_bytes + sum(self._live_bytes.values()))
        self._begun = version
        self.announce(version, baseline, fingerprint(groups))
        return baseline

    def enter(self, version: int) -> None:
        """Take over the store; then the others may write, too."""
        self.catalog.take_over()
        self.version = version
        self._post(f"go/{version}", b"yes")

    def reports(self, version: int) -> list[Report]:
        """What the others have written for a version; raises the error of a rank that could not."""
        if self._reports[0] == version:
            return self._reports[1]
        keys = [f"report/{version}/{rank}" for rank in self._link.others]
        reports = [
            msgspec.msgpack.decode(self._link.hear(key, rank), type=Report)
            for rank, key in zip(self._link.others, keys, strict=True)
        ]
        self._link.forget(self._spent[0])
        self._spent = self._spent[1], keys
        if any(report.needs_baseline for report in reports):
            self.leave_era()
        for rank, report in zip(self._link.others, reports, strict=True):
            if report.error or report.kind:
                raise error_of(f"rank {rank}: {report.error}", report.kind)
        self._reports = version, reports
        return reports

    def commit(
        self,
        new: NewVersion,
        groups: Sequence[Group],
        layout_name: str,
        changes: Sequence[FileChange],
        dense_parts: Sequence[Any],
        *,
        check: Callable[[], None] = lambda: None,
        unverified: Mapping[int, str] = MappingProxyType({}),
    ) -> Version:
        """One manifest over the files of all ranks, which are durable by now."""
        reports = self.reports(new.number)
        self._check_shared(reports)
        self._check_alike(reports)
        flags = {number: why for report in reports for number, why in report.unverified.items()}
        version = super().commit(
            new,
            groups,
            layout_name,
            [*changes, *(report.change for report in reports if report.change is not None)],
            dense_parts,
            check=check,
            unverified={**flags, **unverified},
        )
        kept = self.catalog.versions_from(version.era)
        self._post(f"verdict/{new.number}", _encode(Verdict(version, kept)))
        return version

    def _check_shared(self, reports: Sequence[Report]) -> None:
        """Once: raise StoreError if files of others are not here. A local folder may be of one machine."""
        files = {r: report.change.added for r, report in enumerate(reports, 1) if report.change is not None}
        if self._is_shared or not any(files.values()):
            return
        there = {info.name for info in self.catalog.store.list("chunks/")}
        for rank, added in files.items():
            if any(file.name not in there for file in added):
                raise StoreError(
                    f"{self.catalog.store.url} does not have the files that rank {rank} has written to it: "
                    "give a path that is the same folder on every machine, or the URL of an object store"
                )
        self._is_shared = True

    def _check_alike(self, reports: Sequence[Report]) -> None:
        """Raise CheckpointError if a rank has trained another model: each saves a share of the rows."""
        for rank, report in enumerate(reports, 1):
            if report.witness != self.witness:
                raise CheckpointError(
                    f"rank {rank} has other weights than rank 0, or got other gradients: wrap the model in "
                    "DistributedDataParallel, or average gradients and change weights on all ranks alike"
                )

    def failed(self, version: int, error: BaseException) -> None:
        """Tell the others, unless none of them has heard of the version."""
        if version == self._begun:
            self._post(f"verdict/{version}", _encode(Verdict(None, [], message_of(error), kind_of(error))))
            self._post(f"go/{version}", b"no")

    def replace_all(self, version: int, change: FileChange | None, live_bytes: int) -> None:
        """One manifest over what all ranks have rearranged, if any has."""
        changes = [change] if change is not None else []
        for rank in self._link.others:
            key = f"tidy/{version}/{rank}"
            tidied = msgspec.msgpack.decode(self._link.hear(key, rank), type=Tidied)
            self.note_spent([key])
            self._live_bytes[rank] = tidied.live_bytes
            if tidied.is_damaged:
                self.leave_era()
            if tidied.change is not None:
                changes.append(tidied.change)
        if changes:
            self.replace(changes)
        self._post(f"tidied/{version}", b"")
        if changes and change is None:
            self.catalog.free_replaced()

    def tidying_failed(self, version: int, error: BaseException) -> None:
        """Then no rank's files are rearranged."""
        self._post(f"tidied/{version}", message_of(error).encode() or b"it failed")

    def _post(self, key: str, message: bytes) -> None:
        if self._once(key, message):
            self.note_spent([key])


class Follower(Publisher):
    """The publisher of every other rank.

    Attributes:
        order: the last one.
        witness: of what all ranks should have alike, in the version that was begun.
    """

    is_alone = False
    catalog: FollowingCatalog

    def __init__(self, catalog: FollowingCatalog, link: Link) -> None:
        super().__init__(catalog)
        self.shard = link.rank
        self.order = Order("", 0)
        self.witness = ""
        self._link = link
        self._once = _Once(link)

    def begin(self, version: int, groups: Sequence[Group], live_bytes: int) -> bool:
        """What rank 0 has decided."""
        order = self.order
        if fingerprint(groups) != order.tables:
            raise CheckpointError(
                f"rank {self._link.rank} has other tables, or other optimizer state of them, than rank 0: "
                "train the same model with the same optimizers on every rank"
            )
        if self._needs_baseline and not order.baseline:
            raise CheckpointError(f"rank {self._link.rank} needs a baseline, which the next version will be")
        return order.baseline

    def enter(self, version: int) -> None:
        """Wait for rank 0."""
        if self._link.hear(f"go/{version}", 0) != b"yes":
            self._verdict(version)

    def commit(
        self,
        new: NewVersion,
        groups: Sequence[Group],
        layout_name: str,
        changes: Sequence[FileChange],
        dense_parts: Sequence[Any],
        *,
        check: Callable[[], None] = lambda: None,
        unverified: Mapping[int, str] = MappingProxyType({}),
    ) -> Version:
        """Report what was written, and wait for the verdict."""
        self.catalog.store.sync()  # rank 0 syncs its own files alone
        check()
        flags = {**self.catalog.flags, **unverified}
        self._report(new.number, Report(changes[0], b"".join(map(bytes, dense_parts)), flags, self.witness))
        version = self._verdict(new.number)
        for flagged in flags:
            self.catalog.flags.pop(flagged, None)
        self._era, self.last_was_cancelled = version.era, False
        if new.baseline:
            self._needs_baseline = False
        return version

    def failed(self, version: int, error: BaseException) -> None:
        """Tell rank 0."""
        report = Report(
            error=message_of(error), kind=kind_of(error) or "other", needs_baseline=self._needs_baseline
        )
        self._report(version, report)

    def replace_all(self, version: int, change: FileChange | None, live_bytes: int) -> None:
        """Report what was rearranged, and wait until it counts."""
        self.catalog.store.sync()
        self._once(f"tidy/{version}/{self._link.rank}", _encode(Tidied(change, live_bytes)))
        error = self._link.hear(f"tidied/{version}", 0).decode()
        if error:
            raise CheckpointError(f"rank 0: {error}")

    def tidying_failed(self, version: int, error: BaseException) -> None:
        """Tell rank 0, which goes on without this rank's part."""
        damaged = isinstance(error, CorruptCheckpoint | ObjectMissing)
        message = Tidied(is_damaged=damaged, error=message_of(error))
        self._once(f"tidy/{version}/{self._link.rank}", _encode(message))

    def _verdict(self, version: int) -> Version:
        verdict = msgspec.msgpack.decode(self._link.hear(f"verdict/{version}", 0), type=Verdict)
        if verdict.version is None:
            raise error_of(verdict.error, verdict.kind)
        self.catalog.kept = verdict.kept
        return verdict.version

    def _report(self, version: int, report: Report) -> None:
        self._once(f"report/{version}/{self._link.rank}", _encode(report))


class FollowingCatalog(Catalog):
    """The store as a rank sees it that publishes nothing: it reads manifests, and deletes nothing.

    Attributes:
        kept: the versions since the last baseline that must stay restorable.
        flags: versions that lack changes, which rank 0 is to flag.
    """

    def __init__(self, store: Store, policy: Policy) -> None:
        super().__init__(store, policy)
        self.kept: list[int] = []
        self.flags: dict[int, str] = {}

    @property
    def manifest(self) -> Manifest:
        """The store's newest one."""
        return read_newest(self.store)

    @property
    def newest(self) -> Version | None:
        """The newest version, or None."""
        versions = self.manifest.versions
        return versions[-1] if versions else None

    def versions_from(self, first: int) -> list[int]:
        """As rank 0 has told at the last version."""
        return [version for version in self.kept if version >= first]

    def take_over(self, *, without: Iterable[int] = ()) -> list[str]:
        """Rank 0 does."""
        return []

    def delete_leftovers(self) -> list[str]:
        """Rank 0 does."""
        return []

    def delete_versions(self, numbers: Iterable[int]) -> None:
        """Rank 0 does."""

    def make_room(self, needed: Any = frozenset()) -> bool:
        """Rank 0 does."""
        return False

    def flag_versions(self, unverified: Mapping[int, str]) -> None:
        """Have rank 0 flag them with the next version."""
        self.flags.update(unverified)
