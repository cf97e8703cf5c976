"""What a job's rows are, compared with what they must be: in versions of its store, in its servers' memory,
and by what workers were told that counts.

*Lost* is an update that was acknowledged and is not there, one for each row that it touched; *wrong* is a row
whose bits are not those of a twin to which nothing happened, for any other reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.chaos.counting import SAMPLES, TABLE_ROWS, Twin, counted
from holdfast.checkpoint.reading.version import open_version
from holdfast.checkpoint.store import Store
from holdfast.cluster.protocol.messages import Status
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.saving.layout import job_state
from holdfast.cluster.saving.resume import open_saving, read_tree, restore_rows
from holdfast.cluster.worker.faults import acknowledged_path
from holdfast.coding.placement import Placement
from holdfast.tables.shard import GroupShard, digest

ROWS_OF_A_BATCH = SAMPLES * len(TABLE_ROWS)


@dataclass
class Checker:
    """Checks successive jobs with one store.

    Args:
        plan: of the job; ``follow`` takes the next one's.
    """

    plan: JobPlan
    lost: int = 0
    wrong: int = 0
    problems: list[str] = field(default_factory=list)
    """In words."""
    versions: int = 0
    """That were read and compared."""
    batches: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Those that the newest version contains."""
    network_lost: Counter[int] = field(default_factory=Counter)
    """Of each server, the pushes of which it said that its network lost them with a worker's copy."""

    def __post_init__(self) -> None:
        self.plan = msgspec.structs.replace(self.plan, resume=None)  # it is to read all servers' rows
        self._twin = Twin(self.plan)

    @property
    def updates(self) -> int:
        """Of rows, in the newest version, all of which were compared."""
        return sum(int(counts.sum()) for counts in self._twin.counts)

    def check_version(self, number: int | None = None) -> None:
        """Read a version, by default the newest, and compare each row with its expected value."""
        with open_saving(self.plan, create=False) as store:
            version, batches = self._batches(store, number)
            shards = [
                GroupShard(group, Placement(1), 0, self.plan.seed, empty=True) for group in self.plan.groups
            ]
            alone = msgspec.structs.replace(self.plan, servers=1, k=1, r=0, rings=1)
            restore_rows(alone, shards, store, version)
        self.versions += 1
        self.batches = batches
        self._go_to(batches)
        where = f"version {version}"
        for group, (found, mine) in enumerate(
            zip(counted(shards, self._twin.first), self._twin.counts, strict=True)
        ):
            rows = len(mine)
            short = np.maximum(0, mine - found[:rows])
            if self.network_lost and group == len(shards) - 1:
                said = self._said_to_be_lost()
                exact = (short == 0) | (short > said)
                short = np.where(exact, short, 0)
                shards[group].records[:rows][~exact] = self._twin.shards[group].records[:rows][~exact]
            self._lose(
                int(short.sum()), f"{where}: updates of {int((short > 0).sum())} rows of group {group}"
            )
            same = (shards[group].records[:rows] == self._twin.shards[group].records[:rows]).all(1)
            self._find_wrong(where, group, np.flatnonzero(~same & (short == 0)), found, mine)

    def check_memory(self, status: Status, steps: int) -> bool:
        """Compare what servers had in memory at the end, of which the newest version was made.

        False: one did not say it in time, or nobody knows its bits, so that only the version was compared.
        """
        if steps != len(self.batches):
            self.complain(f"the job says {steps} batches, its newest version has {len(self.batches)}")
        if self.network_lost:
            return False
        said = {n.peer.slot: n.figures.digest for n in status.nodes if n.peer.role == "server"}
        for slot in range(self.plan.servers):
            if said.get(slot) and said[slot] != self.expected_digest(slot):
                self.complain(f"server {slot} ended with other bits than its twin")
        return all(said.values()) and len(said) == self.plan.servers

    def check_acknowledged(self, folder: Path) -> int:
        """See that all batches are there of which workers were told that they count; how many those are."""
        told = 0
        there = set(self.batches.tolist())
        for worker in range(self.plan.workers):
            last = last_acknowledged(folder, worker)
            batches = range(worker, last + 1, self.plan.workers)
            told += len(batches)
            missing = [batch for batch in batches if batch not in there]
            self._lose(
                len(missing) * ROWS_OF_A_BATCH,
                f"worker {worker} was told that {len(missing)} batches count, from {missing[:1]} on",
            )
        return told

    def _batches(self, store: Store, number: int | None) -> tuple[int, NDArray[np.int64]]:
        with open_version(store, number) as reader:
            state = job_state(read_tree(reader), reader.version, store.url)
            parts = [
                np.arange(worker, position.index + 1, layout.workers)
                for layout in state.layouts
                for worker, position in enumerate(layout.positions)
            ]
            batches = np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)
            if len(batches) != reader.version.step + 1:
                self.complain(f"version {reader.version.version} names {len(batches)} batches, not its steps")
            return reader.version.version, batches

    def _go_to(self, batches: NDArray[np.int64]) -> None:
        if not self._twin.go_to(batches):  # from an older version, or one that contradicts the last
            self._twin = Twin(self.plan)
            self._twin.go_to(batches)

    def _said_to_be_lost(self) -> NDArray[np.int64]:
        """Of each row of the network, the batches that it may lack."""
        rows = np.arange(self.plan.groups[-1].rows)
        lost = np.array([self.network_lost[slot] for slot in range(self.plan.servers)])
        return lost[self.plan.placements[-1].owner(rows)]

    def _find_wrong(self, where: str, group: int, rows: NDArray[Any], found: Any, mine: Any) -> None:
        self.wrong += len(rows)
        if len(rows):
            row = int(rows[0])
            self.problems.append(
                f"{where}: {len(rows)} rows of group {group} have wrong bits, the first of them row {row}, "
                f"which counted {found[row]} batches of {mine[row]}"
            )

    def expected_digest(self, slot: int) -> str:
        """What a server says of its records if they are those of the newest version that was checked."""
        shards = []
        for group, placement, twin in zip(
            self.plan.groups, self.plan.placements, self._twin.shards, strict=True
        ):
            shard = GroupShard(group, placement, slot, self.plan.seed, empty=True)
            rows = shard.rows_of(np.arange(len(shard.records)))
            real = np.flatnonzero(rows < group.rows)
            shard.records[real] = twin.records[rows[real]]
            shards.append(shard)
        return digest(shards)

    def _lose(self, updates: int, text: str) -> None:
        self.lost += updates
        if updates:
            self.problems.append(f"{text} are not there ({updates} updates)")

    def complain(self, text: str) -> None:
        """Record a problem that does not concern a row."""
        self.wrong += 1
        self.problems.append(text)


def last_acknowledged(folder: Path, worker: int) -> int:
    """The newest batch of a worker of which it was told that it counts; -1: none."""
    path = acknowledged_path(folder, worker)
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return max((int(line.split()[2]) for line in lines), default=-1)
