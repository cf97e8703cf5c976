"""Going on from a checkpoint, with as many servers and workers as one likes.

``find_resume`` chooses the version before anything is started; each server then reads its own rows of it with
``restore_rows`` (``open_rows``). Nothing here loads torch.
"""

from __future__ import annotations

import logging
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
    """The store that a job is saved in."""
    return open_store(saving_of(plan).config.path, create=create)


def find_resume(plan: JobPlan, on_progress: Callable[[int], None] = lambda done: None) -> Resume | None:
    """The newest version that is whole, every byte of it read and checked; None if there is none at all.

    Raises:
        ModelMismatch: it is of another model, or was not saved by a job.
        CorruptCheckpoint: there are versions, and none is whole.
        StoreLocked: another writer is at work.
        StoreError: the store cannot be reached, or not be written.
    """
    with open_saving(plan) as store:
        # Now, rather than in a process that nobody sees.
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
    # With other servers, rows that have moved would be moved about by two, neither knowing of the other.
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
    """The dense part of a version."""
    return decode_tree(reader.dense(), f"{reader.store.url}: {reader.version.dense.name}")


def restore_rows(plan: JobPlan, shards: Sequence[GroupShard], store: Store, version: int) -> Version:
    """Read the rows of one server, whatever servers saved them; all of them count as changed then.

    Raises:
        CorruptCheckpoint: some are not there: nothing may stand for them.
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
        # What the version itself says: an older one than the job goes on from may be of other servers.
        if job_state(tree, reader.version, store.url).has_servers_of(plan):
            if plan.resume is None or version != plan.resume.version:
                reader.count_rows()  # while it has all files; of the other version find_resume has done it
            reader.keep_shard(shards[0].server)
        reader.read_rows(put)
        network = network_records(plan, tree)
        if network is not None:
            put(len(shards) - 1, Rows(np.arange(len(network)), (network.view(np.uint8),)))
        for shard, found in zip(shards, read, strict=True):
            lacking = shard.rows - int(found.sum())
            if lacking:
                raise CorruptCheckpoint(
                    f"version {version} of {store.url} lacks {lacking:,} of the {shard.rows:,} rows that "
                    f"server {shard.server} has of group {shard.plan.name}"
                )
            shard.installed = True
        return reader.version


def roll_back(plan: JobPlan, shards: Sequence[GroupShard], store: Store) -> Redundancy:
    """Put a server's rows back to what was last saved of them, or else to their first values, and say so.

    Versions that are damaged are passed over. What is passed over, and why, goes to the server's log.

    Raises:
        StoreUnreachable: the store does not answer.
    """
    rows = sum(shard.rows for shard in shards[:-1])
    for version in reversed(read_newest(store).versions):
        own = version.metadata.get("job") == plan.job
        if not own and (plan.resume is None or version.version > plan.resume.version):
            continue  # of another job's that has begun since
        try:
            restore_rows(plan, shards, store, version.version)
            samples = version.metadata.get("samples", 0)
            return Redundancy(went_back=rows, version=version.version, version_samples=samples)
        except (CorruptCheckpoint, NoSuchVersion, StoreError) as error:
            raise_if_unreachable(store, error)
            log.warning("version %d is passed over: %s", version.version, error)
    for shard in shards:
        shard.records[:] = 0
        shard.fill()
    return Redundancy(went_back=rows, version=0)


class SavedRows:
    """What was last saved of a server's rows: read when it is first asked for, in the background.

    Args:
        plan: the job's.
        slot: the server's.
        store: where they were saved.
        runs: reads them.
    """

    def __init__(self, plan: JobPlan, slot: int, store: Store, runs: Runs) -> None:
        self._plan, self._slot, self._store, self._runs = plan, slot, store, runs
        self._asked = False
        self._found: tuple[Sequence[Records], Redundancy] | None = None
        self._error: Exception | None = None

    def get(self) -> tuple[Sequence[Records], Redundancy] | None:
        """The records of each group, and which version they are of; None: not yet.

        Raises:
            StoreError: they cannot be read.
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
    """Open a server's store, and read what rows there are into its shards.

    Nobody else may use the shards meanwhile. Raises whatever goes wrong with a store.
    """
    store = open_saving(plan)
    runs = ThreadPoolExecutor(1, "holdfast-save")
    saver = ShardSaver(plan, me.slot, shards, store, runs)
    rolled_back, saved = Redundancy(), None
    if plan.resume is not None and me.incarnation == 1:
        version = restore_rows(plan, shards, store, plan.resume.version)
        if plan.resume.continues:
            saver.resume(version)
    if me.incarnation > 1:
        if plan.partial:
            rolled_back = roll_back(plan, shards, store)
        saved = SavedRows(plan, me.slot, store, runs)
        for shard in shards:  # what its predecessor had marked went with it
            shard.mark_all()
    return Opened(saver, rolled_back, saved)
