"""Resume from a checkpoint, with any number of servers and workers.

``find_resume`` chooses the version before anything is started; each server then reads its own rows of it with
``restore_rows`` (``open_rows``). Nothing here imports torch.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from holdfast.checkpoint.format.dense import decode_tree
from holdfast.checkpoint.format.manifest import Manifest, Version, raise_if_unreachable, read_newest
from holdfast.checkpoint.format.records import Rows
from holdfast.checkpoint.layout.shard import Shard
from holdfast.checkpoint.reading.version import VersionReader, open_version
from holdfast.checkpoint.store import Store, open_store
from holdfast.cluster.protocol.messages import Peer, Redundancy
from holdfast.cluster.protocol.plan import JobPlan, Resume
from holdfast.cluster.saving.layout import check_fit, encoder_of, job_state, network_records, saving_of
from holdfast.cluster.saving.shard_saver import Runs, ShardSaver
from holdfast.cluster.server.machine import Opened
from holdfast.errors import CorruptCheckpoint, NoSuchVersion, StoreError, message_of
from holdfast.options import Full
from holdfast.tables.shard import GroupShard, Records

log = logging.getLogger("holdfast.checkpoint")


def open_saving(plan: JobPlan, *, create: bool = True) -> Store:
    """Open the store that a job is saved in."""
    return open_store(saving_of(plan).config.path, create=create)


def find_resume(plan: JobPlan, on_progress: Callable[[int], None] = lambda done: None) -> Resume | None:
    """Find the newest intact version: every byte of it is read and checked. None if there is no version.

    Raises:
        ModelMismatch: it has another model, or was not saved by a job.
        CorruptCheckpoint: there are versions, but none is intact.
        StoreLocked: another writer holds the store.
        StoreError: the store is unreachable, or cannot be written.
    """
    with open_saving(plan) as store:
        # Check the lock here, not in a process whose errors are only logged.
        store.lock_writer(saving_of(plan).config.policy.lock_wait_seconds).release()
        complaints: list[str] = []
        manifest = read_newest(store, complaints)
        problems = list(complaints)
        for version in reversed(manifest.versions):
            try:
                with open_version(store, version.version) as reader:
                    tree = read_tree(reader)
                    check_fit(plan, reader.groups, tree)
                    reader.verify(on_progress)
                    return _resume(plan, reader, tree, manifest, problems)
            except (CorruptCheckpoint, NoSuchVersion, StoreError) as error:
                raise_if_unreachable(store, error)
                problems.append(f"version {version.version}: {error}")
        if problems:
            raise CorruptCheckpoint(f"no version of {store.url} can be restored: {'; '.join(problems)}")
    return None


def _resume(
    plan: JobPlan, reader: VersionReader, tree: Any, manifest: Manifest, problems: Sequence[str]
) -> Resume:
    version = reader.version
    state = job_state(tree, version, reader.store.url)
    lossy = any(group.is_coded for group in reader.stored_groups)
    resume = Resume(
        version=version.version,
        steps=version.step + 1,
        samples=state.samples,
        layouts=state.layouts,
        restores=version.restores + lossy,
        problems=tuple(problems),
        same_servers=state.has_servers_of(plan),
    )
    # With other servers, two shards would rearrange files with the same rows, neither knowing of the other.
    continues = resume.same_servers and not problems and _fits_era(plan, resume, reader, manifest)
    return msgspec.structs.replace(resume, continues=continues)


def _fits_era(plan: JobPlan, resume: Resume, reader: VersionReader, manifest: Manifest) -> bool:
    strategy: Any = saving_of(plan).config.policy.strategy
    stored = encoder_of(msgspec.structs.replace(plan, resume=resume)).stored
    return (
        not isinstance(strategy, Full)
        and manifest.last_version == resume.version
        and reader.era.strategy == Shard(0, stored, strategy).layout_name
        and reader.stored_groups == stored
    )


def read_tree(reader: VersionReader) -> Any:
    """Read the dense state of a version."""
    return decode_tree(reader.dense(), f"{reader.store.url}: {reader.version.dense.name}")


def restore_rows(
    plan: JobPlan,
    shards: Sequence[GroupShard],
    store: Store,
    version: int,
    on_read: Callable[[int], None] = lambda bytes_: None,
) -> Version:
    """Read the rows of one server, whichever servers saved them; then all of them count as changed.

    ``on_read`` is told how many bytes were read.

    Raises:
        CorruptCheckpoint: rows are missing; they are never filled in.
    """
    read = [np.zeros(len(shard.records), np.bool_) for shard in shards]

    def put(group: int, rows: Rows) -> None:
        shard = shards[group]
        mine = np.flatnonzero(shard.placement.owner(rows.ids) == shard.server)
        if len(mine):
            places = shard.placement.place(rows.ids[mine])
            records = np.concatenate([np.take(field, mine, 0) for field in rows.fields], axis=1)
            shard.write(places, records.view(np.uint32))
            read[group][places] = True

    with open_version(store, version) as reader:
        tree = read_tree(reader)
        check_fit(plan, reader.groups, tree)
        # Ask the version itself: other servers may have saved it if it is older than the one resumed from.
        if job_state(tree, reader.version, store.url).has_servers_of(plan):
            if plan.resume is None or version != plan.resume.version:
                reader.count_rows()  # before files are left out; find_resume did it for the other
            reader.keep_shard(shards[0].server)
        reader.read_rows(put)
        on_read(reader.bytes_read)
        network = network_records(plan, tree)
        if network is not None:
            put(len(shards) - 1, Rows(np.arange(len(network)), (network.view(np.uint8),)))
        for shard, found in zip(shards, read, strict=True):
            lacking = shard.rows - int(found.sum())
            if lacking:
                raise CorruptCheckpoint(
                    f"version {version} of {store.url} lacks {lacking:,} of the {shard.rows:,} rows that "
                    f"server {shard.server} needs of group {shard.plan.name}"
                )
            shard.installed = True
        return reader.version


def roll_back(plan: JobPlan, shards: Sequence[GroupShard], store: Store) -> Redundancy:
    """Reset a server's rows to their last saved values, or else to their initial ones. Returns what was done.

    Damaged versions are skipped, and logged to the server's log.

    Raises:
        StoreUnreachable: the store does not answer.
    """
    rows = sum(shard.rows for shard in shards[:-1])
    for version in reversed(read_newest(store).versions):
        own = version.metadata.get("job") == plan.job
        if not own and (plan.resume is None or version.version > plan.resume.version):
            continue  # of another job that has started since
        try:
            restore_rows(plan, shards, store, version.version)
            samples = version.metadata.get("samples", 0)
            return Redundancy(went_back=rows, version=version.version, version_samples=samples)
        except (CorruptCheckpoint, NoSuchVersion, StoreError) as error:
            raise_if_unreachable(store, error)
            log.warning("version %d is skipped: %s", version.version, error)
    for shard in shards:
        shard.records[:] = 0
        shard.fill()
    return Redundancy(went_back=rows, version=0)


class SavedRows:
    """The last saved values of a server's rows, read in the background when first requested.

    Args:
        plan: the job's plan.
        slot: the server's slot.
        store: the store to read from.
        runs: runs the read in the background.
    """

    def __init__(self, plan: JobPlan, slot: int, store: Store, runs: Runs) -> None:
        self._plan, self._slot, self._store, self._runs = plan, slot, store, runs
        self._asked = False
        self._found: tuple[Sequence[Records], Redundancy] | None = None
        self._error: Exception | None = None

    def get(self) -> tuple[Sequence[Records], Redundancy] | None:
        """The records of each group, and their version; None: not read yet.

        Raises:
            StoreError: the store cannot be read.
        """
        if not self._asked:
            self._asked = True
            self._runs.submit(self._read)
        if self._error is not None:
            raise StoreError(message_of(self._error)) from self._error
        return self._found

    def _read(self) -> None:
        plan = self._plan
        try:
            shards = [
                GroupShard(group, placement, self._slot, plan.seed, empty=True)
                for group, placement in zip(plan.groups, plan.placements, strict=True)
            ]
            back = roll_back(plan, shards, self._store)
            self._found = [shard.records for shard in shards], back
        except Exception as error:
            traceback.print_exc()
            self._error = error


def open_rows(plan: JobPlan, me: Peer, shards: Sequence[GroupShard]) -> Opened:
    """Open a server's store, and read its rows into its shards, if there are any.

    Nothing else may use the shards meanwhile. Raises the errors of stores.
    """
    store = open_saving(plan)
    runs = ThreadPoolExecutor(1, "holdfast-save")
    saver = ShardSaver(plan, me.slot, shards, store, runs)
    rolled_back, saved = Redundancy(), None
    if plan.resume is not None and me.incarnation == 1:
        started = time.perf_counter()
        version = restore_rows(
            plan, shards, store, plan.resume.version,
            on_read=lambda bytes_: saver.note_restored(bytes_, time.perf_counter() - started),
        )  # fmt: skip
        if plan.resume.continues:
            saver.resume(version)
    if me.incarnation > 1:
        if plan.partial:
            rolled_back = roll_back(plan, shards, store)
        saved = SavedRows(plan, me.slot, store, runs)
        for shard in shards:  # its predecessor's marks are lost
            shard.mark_all()
    return Opened(saver, rolled_back, saved)
