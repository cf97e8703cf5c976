"""What all nodes of a job agree on before it starts. It never changes while the job runs."""

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
    """How long nodes wait for each other."""

    beat_seconds: float = 0.25
    """Between two signs of life."""
    silent_seconds: float = 10.0
    """A node that has given none for so long is taken for dead."""
    start_seconds: float = 180.0
    """A process that was started has so long to give its first: it may have to compile its loops before."""
    retry_seconds: float = 1.0
    """Before a message that was not answered is sent again; doubled each time."""
    stuck_seconds: float = 10.0
    """A worker or server that has waited so long for a server reports it."""
    hopeless_seconds: float = 300.0
    """If servers lack rows or cannot reach each other, and for so long nothing comes back and no batch
    counts, the job goes back to its checkpoint. Longer than a process may take to start."""


CHUNK_BYTES = 1 << 20
"""Of records that are recovered at a time, if nobody says how many rows."""


class LaneOptions(Struct, frozen=True, kw_only=True):
    """How changes go to parity servers, and how what is lost comes back."""

    pushes: int = 32
    """A server tells parity servers of its changes after so many pushes, whoever's they are, …"""
    seconds: float = 4.0
    """… or after so long, …"""
    idle_seconds: float = 0.5
    """… or when nothing was pushed for so long, …"""
    most_bytes: int = 32 << 20
    """… or when changes have so many bytes. What is more by itself goes in several messages: the transport
    takes no larger ones than 256 MB."""
    window: int = 32
    """How many pushes of a worker may be waiting for that; after half of them parity servers are told."""
    chunk_rows: int | None = None
    """Rows that are recovered at a time behind the training's back; None: see ``chunk``."""
    share: float = 0.2
    """How much of the time the recovery behind its back may take; 1: as fast as it can. With a fifth,
    training keeps nine tenths of its speed though recovery takes the processors from workers."""
    scrub_seconds: float = 0.0
    """How long checking all stripes is to take, over and over; 0: they are not checked."""

    def chunk(self, words: int) -> int:
        """How many records of so many words are recovered at a time: fewer would cost more messages, more
        would keep those waiting for longer that somebody needs at once."""
        return self.chunk_rows or max(1, CHUNK_BYTES // (4 * words))


class NetworkPart(Struct, frozen=True):
    """Where a parameter lies in the network's flat vector."""

    name: str
    """As the single-process model's ``state_dict`` calls it: "network.top.0.weight"."""
    first: int
    shape: tuple[int, ...]


class SavePlan(Struct, frozen=True, kw_only=True):
    """How a job's state looks in a store."""

    config: CheckpointConfig
    table_optimizer: str = "optim"
    """The object that the tables' optimizer state belongs to."""
    parts: tuple[NetworkPart, ...] = ()
    template: bytes = b""
    """The dense part of a version with places for what training changes (see ``saving.layout``). Without it,
    the last group is stored like all others."""


class Resume(Struct, frozen=True, kw_only=True):
    """The version that a job goes on from."""

    version: int
    steps: int
    """Batches that count already, and their samples."""
    samples: int = 0
    layouts: tuple[Layout, ...] = ()
    """Which batches those are."""
    restores: int = 0
    same_servers: bool = False
    """Whether each server finds all of its rows in files of its own slot."""
    continues: bool = False
    """Whether the next version may hold only what has changed since."""
    problems: tuple[str, ...] = ()
    """Why newer versions were passed over."""


class JobPlan(Struct, frozen=True, kw_only=True, dict=True):  # a dict for what is computed once
    """A job's shape."""

    job: str
    """A random name."""
    seed: int
    groups: tuple[GroupPlan, ...]
    """The tables' groups; the last one is the network's."""
    servers: int
    workers: int
    k: int = 1
    r: int = 0
    """Data and parity records of a stripe of the tables' rows; r = 0: nothing protects them."""
    rings: int = 1
    """Rings of servers that keep stripes of their own."""
    dense: Literal["replicate", "workers", "none"] = "none"
    """What becomes of the network's rows if servers are protected: as many copies as rows of tables have
    parities, or what a worker used last, or nothing."""
    lanes: LaneOptions = LaneOptions()
    partial: Literal["", "partial", "full"] = ""
    """What becomes of the tables' rows if nothing protects them in memory: "partial" puts a dead server's
    back to what was last saved, "full" those of all servers; otherwise the job ends."""
    server_processors: tuple[int, ...] = ()
    """Processors that servers have for themselves, and workers have not; none: all share all."""
    beyond: Literal["job", "rows"] = "job"
    """What goes back to what was last saved if more servers die than a code covers: everything, or only rows
    that are lost."""
    partial_reason: str = ""
    """Why it is the one or the other."""
    compare_recovered: bool = False
    """Whether what is recovered is compared with what the dead server's memory held (see ``witness``)."""
    atomic: bool = False
    """Whether a batch counts at all servers or at none (two phases)."""
    staleness: int = 1
    """How many of its own batches the tables' rows that a worker uses may lack: 1 lets it pull the next
    batch's while it computes; 0 is synchronous. The network's rows lack none."""
    timing: Timing = Timing()
    most_deaths: int = 4
    """A worker that dies more often than this without finishing a batch in between ends the job."""
    saving: SavePlan | None = None
    resume: Resume | None = None
    training: dict[str, Any] = {}
    """The configuration of the run, for the workers."""

    def __repr__(self) -> str:
        return redact(super().__repr__())

    @cached_property
    def first_installed(self) -> tuple[int, ...]:
        """Groups whose rows have values before anybody pushes: those that draw them, and all of a job that
        goes on from a version."""
        resumed = self.resume is not None
        return tuple(g for g, group in enumerate(self.groups) if resumed or group.initial == "uniform")

    @cached_property
    def placement(self) -> Placement:
        """Where the tables' rows lie."""
        return Placement(self.servers, self.k, self.r, self.rings)

    @cached_property
    def neighbours(self) -> tuple[frozenset[int], ...]:
        """Of each server, those that it is connected to: those that it has stripes in common with, and the
        two beside it, so that there is a way round a broken link without a code, too."""
        coded = [placement for placement in self.placements if placement.r]
        found = []
        for slot in range(self.servers):
            beside = {(slot - 1) % self.servers, (slot + 1) % self.servers}
            near = {other for placement in coded for other in placement.neighbours(slot)}
            found.append(frozenset((beside | near) - {slot}))
        return tuple(found)

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """Where the rows of each group lie."""
        copies = self.r if self.dense == "replicate" else 0
        network = Placement(self.servers, 1, copies, self.rings if copies else 1)
        return (*[self.placement] * (len(self.groups) - 1), network)
