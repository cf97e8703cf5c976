"""From written rows to a version: the dense file, the manifest, and which era comes next."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from holdfast.checkpoint.format.chunk import checksum
from holdfast.checkpoint.format.manifest import DenseEntry, Era, FileChange, Version
from holdfast.checkpoint.format.records import Group
from holdfast.checkpoint.layout.baselines import Baselines
from holdfast.checkpoint.saving.catalog import Catalog


@dataclass(frozen=True, slots=True)
class NewVersion:
    """What is known of a version before its files are written."""

    number: int
    step: int
    baseline: bool
    metadata: Mapping[str, Any]
    restores: int


class Publisher:
    """Publishes the versions of a store, whoever writes their rows: one shard or many.

    The calls: ``baseline_is_due`` when a version begins; ``commit`` when the rows of all shards are durable;
    ``note_written`` with what that cost; ``replace`` with what tidying has rearranged. ``note_read`` at any
    time.

    A process that saves alone has nobody to agree with. ``ranks/publisher.py`` has what the ranks of a job
    do in the same places: ``begin``, ``enter``, ``commit``, ``replace_all``, and ``failed`` and
    ``tidying_failed`` instead of what is left out then.

    Args:
        catalog: of the store.

    Attributes:
        shard: the number of this process's files.
        is_alone: whether this process writes all rows.
        last_was_cancelled: whether the last version gave way to the next one. Of two in a row only one may,
            or nothing would ever become durable.
    """

    shard = 0
    is_alone = True

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.last_was_cancelled = False
        self._era = 0
        self._needs_baseline = True
        self._full_bytes = 0
        self._baselines = Baselines(catalog.policy)
        if catalog.newest is not None:
            # What another process has measured. Figures of this one take their place.
            self._baselines.write_speed = max(0, catalog.newest.write_speed)
            self._baselines.read_speed = max(0, catalog.newest.read_speed)

    def leave_era(self) -> None:
        """Let the next version be a baseline, whatever the policy says."""
        self._needs_baseline = True

    def resume(self, era: Era, groups: Sequence[Group]) -> None:
        """Go on with an era that another process began; ``groups`` as it stores them."""
        self._era = era.number
        self._needs_baseline = False
        self._full_bytes = _full_bytes(groups)
        self._baselines.resume(self.catalog.manifest, era)

    def begin(self, version: int, groups: Sequence[Group], live_bytes: int) -> bool:
        """A version of these groups begins; whether it is to hold all rows (see ``baseline_is_due``)."""
        return self.baseline_is_due(live_bytes)

    def enter(self, version: int) -> None:
        """Call before a version's first file is written."""
        self.catalog.take_over()

    def failed(self, version: int, error: BaseException) -> None:
        """A version that was begun will not be committed."""

    def replace_all(self, version: int, change: FileChange | None, live_bytes: int) -> None:
        """Publish the files that were rearranged after a version, if any; ``live_bytes`` as above."""
        if change is not None:
            self.replace([change])

    def tidying_failed(self, version: int, error: BaseException) -> None:
        """Files are not rearranged after this version."""

    def baseline_is_due(self, live_bytes: int) -> bool:
        """Whether the next version is to hold all rows.

        ``live_bytes`` is what a restore of the newest version reads beyond its baseline.
        """
        return self._needs_baseline or self._baselines.due(self._full_bytes, live_bytes)

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
        """Write the dense file, then the manifest that makes the version exist.

        All files of ``changes`` are durable. ``check`` is called right before it is too late to cancel.
        """
        dense = self._store_dense(new.number, dense_parts)
        check()
        version = Version(
            version=new.number,
            era=new.number if new.baseline else self._era,
            step=new.step,
            time=time.time(),
            baseline=new.baseline,
            rows=sum(change.rows for change in changes),
            bytes=dense.bytes + sum(change.bytes for change in changes),
            dense=dense,
            metadata=dict(new.metadata),
            restores=new.restores,
            write_speed=round(self._baselines.write_speed),
            read_speed=round(self._baselines.read_speed),
        )
        self.catalog.commit_version(version, groups, layout_name, changes, unverified)
        self._era = version.era
        self.last_was_cancelled = False
        if new.baseline:
            self._needs_baseline = False
            self._full_bytes = _full_bytes(groups)
        return version

    def note_written(self, version: Version, seconds: float) -> None:
        """The rows of a version that was committed were written in so long."""
        bytes_ = version.bytes - version.dense.bytes
        self._baselines.note(bytes_, self._full_bytes, seconds, baseline=version.baseline)

    def wants_measured(self, bytes_: int) -> bool:
        """Whether a measurement that reads so many bytes is worth it."""
        return self._baselines.wants_measured(bytes_)

    def note_read(self, bytes_: int, seconds: float) -> float:
        """So many bytes of the store were read, for a restore or to measure it; the speed known now."""
        self._baselines.note_read(bytes_, seconds)
        return self._baselines.read_speed

    def note_read_speed(self, bytes_per_second: float) -> None:
        """A restore is expected to be this quick."""
        self._baselines.read_speed = bytes_per_second

    def replace(self, changes: Sequence[FileChange]) -> None:
        """Publish files that were rearranged. The replaced ones go with the manifest after that."""
        self.catalog.commit_round(self._era, changes)
        self._baselines.note_tidied(sum(change.bytes for change in changes), self._full_bytes)

    def _store_dense(self, number: int, parts: Sequence[Any]) -> DenseEntry:
        name = f"dense/{number:08}-{secrets.token_hex(6)}.safetensors"
        return DenseEntry(name, self.catalog.store.put(name, parts), checksum(*parts))


def _full_bytes(groups: Sequence[Group]) -> int:
    """Bytes of a version that holds everything."""
    return sum(g.rows * g.record_bytes for g in groups if g.raw_rows_of is None)
