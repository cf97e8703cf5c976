"""Compare the rows that a replacement recovers with the dead server's memory, bit for bit.

A witnessed server memory-maps its records from a file. When it is killed, at whatever instant, the file holds
the content of its memory. A second file holds the *age* of each record: the flush (see
``redundancy.replicator``) that last changed it, written before the record is. Recovered records are as of the
flush that the supervisor chose, so records that are no newer must be equal.
Newer ones were not kept yet; workers push those changes again.

For demonstrations and tests only: recovery does not need it.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.redundancy.replicator import Replicator
from holdfast.tables.shard import Floats, GroupShard, Places, Records

ROWS_FOLDER = "rows"
_NOT_HERE = 2**32 - 1


class Witness:
    """Creates the shards of a witnessed server, and counts comparisons.

    Args:
        folder: the run's folder.
        me: the server.

    Attributes:
        replicator: the server's replicator; set it before rows change.
        counts_until: the last flush of its predecessor that counts; set it before rows are recovered.
        compared: recovered records compared with the predecessor's.
        unequal: those that differed.
    """

    def __init__(self, folder: Path, me: Peer) -> None:
        self.replicator: Replicator | None = None
        self.counts_until = 0
        self.compared = 0
        self.unequal = 0
        self._me = me
        self._folder = folder / ROWS_FOLDER
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._shards = 0

    def shard(self, *args: Any, **options: Any) -> GroupShard:
        """Create a shard of the next group; takes the arguments of ``GroupShard``."""
        group, self._shards = self._shards, self._shards + 1
        return _WitnessedShard(self, group, *args, **options)

    def next_flush(self) -> int:
        """The number of the flush that will contain changes made now."""
        assert self.replicator is not None
        return self.replicator.flushes + 1

    def new_file(self, group: int, what: str, size: int) -> NDArray[np.uint32]:
        """Create a file of zeros for this incarnation, mapped into memory."""
        with open(self._path(group, what, self._me.incarnation), "x+b") as file:
            file.truncate(max(4 * size, 1))
            return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint32, size)

    def old_file(self, group: int, what: str) -> NDArray[np.uint32] | None:
        """Read the predecessor's file; None if there is none."""
        path = self._path(group, what, self._me.incarnation - 1)
        return np.fromfile(path, np.uint32) if path.exists() else None

    def _path(self, group: int, what: str, incarnation: int) -> Path:
        return self._folder / f"server-{self._me.slot}-{incarnation}.group-{group}.{what}"


class _WitnessedShard(GroupShard):
    def __init__(self, witness: Witness, group: int, *args: Any, empty: bool = False, **options: Any) -> None:
        self._witness = witness
        self._group = group
        super().__init__(*args, empty=empty, **options)
        self._ages = witness.new_file(group, "ages", len(self.records))
        self._old_records = self._old_ages = None
        if empty:
            self._ages[:] = _NOT_HERE
            self._old_records = witness.old_file(group, "records")
            self._old_ages = witness.old_file(group, "ages")

    def space(self, count: int, words: int) -> Records:
        return self._witness.new_file(self._group, "records", count * words).reshape(count, words)

    def push(self, places: Places, gradients: Floats) -> None:
        self._ages[places] = self._witness.next_flush()
        super().push(places, gradients)

    def install(self, places: Places, weights: Floats) -> bool:
        if not self.installed:
            self._ages[places] = self._witness.next_flush()
        return super().install(places, weights)

    def write(self, places: Places, records: Records) -> None:
        super().write(places, records)
        if self._old_records is not None and self._old_ages is not None:
            old = self._old_records.reshape(self.records.shape)[places]
            comparable = self._old_ages[places] <= self._witness.counts_until
            self._witness.compared += int(comparable.sum())
            self._witness.unequal += int((comparable & (old != records).any(1)).sum())
        self._ages[places] = 0
