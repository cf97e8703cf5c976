"""A job on virtual time that is saved to a real store on disk, with an oracle for every version in it.

Writing takes virtual time too, so that nodes die while it is under way. What a dead node had submitted is
never done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from holdfast.checkpoint.format.manifest import read_newest
from holdfast.checkpoint.reading.version import open_version
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.store.local_files import Files
from holdfast.cluster.protocol.batches import Layout
from holdfast.cluster.protocol.messages import Peer, Position
from holdfast.cluster.protocol.plan import JobPlan, SavePlan
from holdfast.cluster.runtime.transport.memory import Network
from holdfast.cluster.saving.coordinator import SaveCoordinator
from holdfast.cluster.saving.layout import job_state
from holdfast.cluster.saving.resume import read_tree, restore_rows
from holdfast.cluster.saving.shard_saver import ShardSaver
from holdfast.cluster.server.machine import Saver, Server
from holdfast.coding.placement import Placement
from holdfast.sim.cluster import Cluster, SimSupervisor, counts
from holdfast.tables.shard import GroupShard
from holdfast.training.saving import CheckpointConfig

WRITE_SECONDS = 0.02
_BEAT_SECONDS = 0.05
_RESTART_SECONDS = 0.2


class Died(BaseException):
    """A process ends in the middle of an operation on a file."""


class QuickFiles(Files):
    """Files that are not synced: no machine loses its power here."""

    def fsync(self, handle: int) -> None:
        """Nothing."""

    def fsync_dir(self, path: str) -> None:
        """Nothing."""


class MortalFiles(QuickFiles):
    """Files of a process that ends before its ``at``-th change of a folder, counted from 1."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._left = at
        self.died = False

    def _arrive(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self.died = True
            raise Died

    def create(self, path: str) -> int:
        """End, or make a file."""
        self._arrive()
        return super().create(path)

    def link(self, source: str, target: str) -> None:
        """End, or give a second name."""
        self._arrive()
        super().link(source, target)

    def unlink(self, path: str) -> None:
        """End, or take a name away."""
        self._arrive()
        super().unlink(path)


class Later:
    """Does jobs of a node one after the other, each after a while, if the node still lives then."""

    def __init__(self, network: Network, alive: Callable[[], bool], on_death: Callable[[], None]) -> None:
        self._network = network
        self._alive = alive
        self._on_death = on_death
        self._free_at = 0.0

    def submit(self, job: Callable[[], None]) -> None:
        """Take a job."""
        start = max(self._network.now, self._free_at)
        self._free_at = start + self._network.random.expovariate(1 / WRITE_SECONDS)
        self._network.at(self._free_at, lambda: self._run(job))

    def _run(self, job: Callable[[], None]) -> None:
        if self._alive():
            try:
                job()
            except Died:
                self._on_death()


def saved_plan(plan: JobPlan, config: CheckpointConfig) -> JobPlan:
    """The plan of a job that is saved; its nodes are talkative, so that versions come quickly."""
    timing = msgspec.structs.replace(plan.timing, beat_seconds=_BEAT_SECONDS)
    return msgspec.structs.replace(plan, timing=timing, saving=SavePlan(config=config))


@dataclass
class SavedCluster(Cluster):
    """A job on virtual time with checkpoints in ``plan.saving.config.path``.

    Args:
        server_files: makes what each server writes to its store with.
        supervisor_files: likewise, of each supervisor.
    """

    server_files: Callable[[], Files] = QuickFiles
    supervisor_files: Callable[[], Files] = QuickFiles
    compute_seconds: float = 0.05
    keepers: list[SaveCoordinator] = field(default_factory=list)

    def saver_of(self, server: Server) -> Saver:
        """A real one, over a store of its own."""
        plan = self.plan
        store = self._store(self.server_files())
        runs = Later(self.network, lambda: server.me in self.network.nodes, lambda: None)
        saver = ShardSaver(plan, server.me.slot, server.shards, store, runs)
        if plan.resume is not None:
            version = restore_rows(plan, server.shards, store, plan.resume.version)
            if plan.resume.continues:
                saver.resume(version)
        return saver

    def start_supervisor(self) -> None:
        """Start it, or start it again: the lock of one that died is free."""
        for keeper in self.keepers:
            keeper.close()
        files = self.supervisor_files()
        runs = Later(self.network, lambda: self.keepers[-1] is keeper and self._alive(), self._end_supervisor)
        keeper = SaveCoordinator(self.plan, lambda: self._store(files), runs, self.network.now)
        self.keepers.append(keeper)
        self.supervisor = self.supervisor_class(self.plan, self.storage, self.network.now, keeper=keeper)
        self.network.add(SimSupervisor(self.supervisor))

    def cut(self) -> None:
        """Whoever saves the job decides."""

    def collect_cuts(self) -> None:
        """Likewise."""

    def close(self) -> None:
        """Everything dies."""
        for keeper in self.keepers:
            keeper.close()

    def events(self, name: str) -> int:
        """How often something happened, over all supervisors."""
        return sum(said == name for keeper in self.keepers for said, _ in keeper.events)

    def _alive(self) -> bool:
        return Peer("supervisor") in self.network.nodes

    def _end_supervisor(self) -> None:
        self.network.kill(Peer("supervisor"))
        self.network.at(self.network.now + _RESTART_SECONDS, self.start_supervisor)

    def _store(self, files: Files) -> LocalStore:
        assert self.plan.saving is not None
        return LocalStore(self.plan.saving.config.path, create=True, files=files)


def wrong_versions(plan: JobPlan, batches: int, servers: int) -> tuple[list[int], list[str]]:
    """The versions of a job's store, and what is wrong with them when they are restored onto so many servers.

    Each must be what exactly the batches make of the rows that it says are done.
    """
    assert plan.saving is not None
    other = msgspec.structs.replace(plan, servers=servers, k=1, r=0, resume=None)
    wrong: list[str] = []
    with LocalStore(plan.saving.config.path, create=False) as store:
        versions = [v.version for v in read_newest(store).versions]
        for version in versions:
            with open_version(store, version) as reader:
                state = job_state(read_tree(reader), reader.version, store.url)
                steps = reader.version.step + 1
            done = [b for b in range(batches) if is_done(state.layouts, b)]
            if len(done) != steps:
                wrong.append(f"version {version} has {len(done)} batches and counts {steps}")
            shards = [
                [GroupShard(group, Placement(servers), slot, 0) for group in plan.groups]
                for slot in range(servers)
            ]
            for mine in shards:
                restore_rows(other, mine, store, version)
            for number, right in enumerate(counts(plan, done)):
                found = np.full(len(right), np.nan, np.float32)
                for mine in shards:
                    rows = mine[number].rows_of(np.arange(len(mine[number].records)))
                    real = rows < len(right)
                    found[rows[real]] = mine[number].field("weight")[real, 0]
                wrong += [
                    f"version {version}: row {row} of group {number} is {found[row]}, expected {right[row]}"
                    for row in np.flatnonzero(found != right)
                ]
    return versions, wrong


def is_done(layouts: tuple[Layout, ...], batch: int) -> bool:
    """Whether a batch is among those that layouts name."""
    return any(layout.has(Position(0, batch)) for layout in layouts)
