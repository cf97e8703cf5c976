"""The plan of a job, which all nodes share. It never changes while the job runs."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from msgspec import Struct

from holdfast.cluster.protocol.batches import Layout
from holdfast.coding.placement import Placement
from holdfast.redaction import redact
from holdfast.tables.plan import GroupPlan
from holdfast.training.saving import CheckpointConfig


class Timing(Struct, frozen=True, kw_only=True):
    """Timeouts and intervals of the protocol."""

    beat_seconds: float = 0.25
    """Interval between two beats."""
    silent_seconds: float = 10.0
    """A node that sends no beat for this long is declared dead."""
    start_seconds: float = 180.0
    """Timeout for the first beat of a new process, which may have to compile its loops first."""
    retry_seconds: float = 1.0
    """Timeout before an unanswered message is sent again; doubled each time."""
    stuck_seconds: float = 10.0
    """A worker or server that has waited this long for a server reports it."""
    hopeless_seconds: float = 300.0
    """If servers lack rows or cannot reach each other, and for this long nothing is recovered and no batch
    counts, the job restarts from its checkpoint. Longer than a process may take to start."""


CHUNK_BYTES = 4 << 20
"""Bytes recovered at a time, unless ``chunk_rows`` is set."""


class LaneOptions(Struct, frozen=True, kw_only=True):
    """Options of lanes to parity servers, and of recovery."""

    pushes: int = 64
    """A server flushes its changes to parity servers after this many pushes, of any workers, …"""
    seconds: float = 4.0
    """… or after this long, …"""
    idle_seconds: float = 0.5
    """… or when no push arrived for this long, …"""
    most_bytes: int = 32 << 20
    """… or when changes have this many bytes. A larger flush is split into several messages: the transport
    accepts at most 256 MB."""
    window: int = 64
    """How many pushes of a worker may wait for a flush; half of them trigger one."""
    chunk_rows: int | None = None
    """Rows recovered at a time in the background; None: see ``chunk``."""
    share: float = 0.3
    """The share of time that background recovery may use while workers are busy and processors are scarce;
    1: always as fast as possible. With 0.3, training keeps nine tenths of its speed although recovery takes
    processors from workers."""
    scrub_seconds: float = 0.0
    """Period in which scrubbing checks all stripes, over and over; 0: no scrubbing."""

    def chunk(self, words: int) -> int:
        """How many records of this many words to recover at a time. Fewer would cost more messages; more
        would delay records that are needed at once."""
        return self.chunk_rows or max(1, CHUNK_BYTES // (4 * words))


class NetworkPart(Struct, frozen=True):
    """The position of a parameter in the network's flat vector."""

    name: str
    """Its key in the single-process model's ``state_dict``: "network.top.0.weight"."""
    first: int
    shape: tuple[int, ...]


class SavePlan(Struct, frozen=True, kw_only=True):
    """How to save a job to a store."""

    config: CheckpointConfig
    table_optimizer: str = "optim"
    """The object that holds the optimizer state of the tables."""
    parts: tuple[NetworkPart, ...] = ()
    template: bytes = b""
    """The dense state of a version, with placeholders for what training changes (see ``saving.layout``).
    Without it, the last group is stored like all others."""


class Resume(Struct, frozen=True, kw_only=True):
    """The version that a job resumes from."""

    version: int
    steps: int
    """Batches that already count, and their samples."""
    samples: int = 0
    layouts: tuple[Layout, ...] = ()
    """Which batches these are."""
    restores: int = 0
    same_servers: bool = False
    """Whether each server finds all of its rows in files of its own slot."""
    continues: bool = False
    """Whether the next version may be an increment."""
    problems: tuple[str, ...] = ()
    """Why newer versions were skipped."""


class JobPlan(Struct, frozen=True, kw_only=True, dict=True):  # dict: for cached properties
    """The shape and the options of a job."""

    job: str
    """A random name."""
    seed: int
    groups: tuple[GroupPlan, ...]
    """The tables' groups; the last one is the network's."""
    servers: int
    workers: int
    k: int = 1
    r: int = 0
    """Members and parities of a stripe of the tables' rows; r = 0: not protected."""
    rings: int = 1
    """Number of rings of servers with separate stripes."""
    dense: Literal["replicate", "workers", "none"] = "none"
    """How the network's rows are protected if servers are: as many copies as rows of tables have parities, or
    the workers' copies, or not at all."""
    lanes: LaneOptions = LaneOptions()
    partial: Literal["", "partial", "full"] = ""
    """What happens to the tables' rows of a dead server without parities: "partial" restores that server's
    rows from their last saved values, "full" those of all servers; otherwise the job ends."""
    server_processors: tuple[int, ...] = ()
    """Processors reserved for servers; empty: servers and workers share all."""
    server_threads: int = 1
    """How many threads of a server read and update rows."""
    beyond: Literal["job", "rows"] = "job"
    """What goes back to its last saved values if more servers die than the code covers: everything, or only
    the lost rows."""
    partial_reason: str = ""
    """Why ``partial`` has its value."""
    compare_recovered: bool = False
    """Whether to compare recovered rows with the dead server's memory (see ``witness``)."""
    atomic: bool = False
    """Whether a batch counts at all servers or at none (two-phase commit)."""
    staleness: int = 1
    """How many of a worker's own updates may be missing from the tables' rows it reads: 1 lets it pull the
    next batch's rows while it computes; 0 is synchronous. The network's rows lack none."""
    timing: Timing = Timing()
    most_deaths: int = 4
    """If a worker dies more often than this without finishing a batch in between, the job ends."""
    saving: SavePlan | None = None
    resume: Resume | None = None
    training: dict[str, Any] = {}
    """The configuration of the run, for the workers."""

    def __repr__(self) -> str:
        return redact(super().__repr__())

    @cached_property
    def first_installed(self) -> tuple[int, ...]:
        """Groups whose rows have values before the first push: those that draw them; when resuming from a
        version, all groups."""
        resumed = self.resume is not None
        return tuple(g for g, group in enumerate(self.groups) if resumed or group.initial == "uniform")

    @cached_property
    def placement(self) -> Placement:
        """The placement of the tables' rows."""
        return Placement(self.servers, self.k, self.r, self.rings)

    @cached_property
    def neighbours(self) -> tuple[frozenset[int], ...]:
        """For each server, the servers it connects to: those that share stripes with it, and the two next to
        it, so that detours around a broken link exist without a code, too."""
        coded = [placement for placement in self.placements if placement.r]
        found = []
        for slot in range(self.servers):
            beside = {(slot - 1) % self.servers, (slot + 1) % self.servers}
            near = {other for placement in coded for other in placement.neighbours(slot)}
            found.append(frozenset((beside | near) - {slot}))
        return tuple(found)

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The placement of each group's rows."""
        copies = self.r if self.dense == "replicate" else 0
        network = Placement(self.servers, 1, copies, self.rings if copies else 1)
        return (*[self.placement] * (len(self.groups) - 1), network)
