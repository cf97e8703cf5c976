"""Going on from a checkpoint, with as many servers and workers as one likes.

``find_resume`` chooses the version before anything is started; each server then reads its own rows of it with
``restore_rows``. Nothing here loads torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from holdfast.checkpoint.dense import decode_tree
from holdfast.checkpoint.manifest import Manifest, Version, raise_if_unreachable, read_newest
from holdfast.checkpoint.records import Rows
from holdfast.checkpoint.restore import VersionReader, open_version
from holdfast.checkpoint.shard import Shard
from holdfast.checkpoint.store import Store, open_store
from holdfast.cluster.messages import Redundancy
from holdfast.cluster.plan import JobPlan, Resume
from holdfast.cluster.stored import check_fit, encoder_of, job_state, network_records, saving_of
from holdfast.errors import CorruptCheckpoint, NoSuchVersion, StoreError
from holdfast.options import Full
from holdfast.tables.shard import GroupShard

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
        store.lock_writer().release()  # now, rather than in a process that nobody sees
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
        same_servers=(state.servers, state.k, state.r) == (plan.servers, plan.k, plan.r),
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


def restore_rows(
    plan: JobPlan, shards: Sequence[GroupShard], store: Store, version: int, *, own_files: bool = False
) -> Version:
    """Read the rows of one server, whatever servers saved them; all of them count as changed then.

    With ``own_files``, all of them are known to be in files of its own slot.
    """
    with open_version(store, version) as reader:
        tree = read_tree(reader)
        check_fit(plan, reader.groups, tree)
        if own_files or (plan.resume is not None and plan.resume.same_servers):
            reader.files = [f for f in reader.files if f.entry.shard == shards[0].server]
        reader.read_rows(lambda group, rows: _put(shards[group], rows))
        network = network_records(plan, tree)
        if network is not None:
            _put(shards[-1], Rows(np.arange(len(network)), (network.view(np.uint8),)))
        for shard in shards:
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
            restore_rows(plan, shards, store, version.version, own_files=own)
            return Redundancy(
                recovered=rows, version=version.version, version_samples=version.metadata.get("samples", 0)
            )
        except (CorruptCheckpoint, NoSuchVersion, StoreError) as error:
            raise_if_unreachable(store, error)
            log.warning("version %d is passed over: %s", version.version, error)
    for shard in shards:
        shard.records[:] = 0
        shard.fill()
    return Redundancy(recovered=rows, version=0)


def _put(shard: GroupShard, rows: Rows) -> None:
    mine = np.flatnonzero(shard.placement.owner(rows.ids) == shard.server)
    if len(mine):
        records = np.concatenate([np.take(field, mine, 0) for field in rows.fields], axis=1)
        shard.write(shard.placement.place(rows.ids[mine]), records.view(np.uint32))
