"""The wire's values. A message is a small header and raw arrays (*frames*) that belong to it.

Data goes between workers and servers: ``Pull`` → ``PulledRows``; ``Push`` (→ ``Pushed``, then ``Commit``) →
``Pushed``. Control is of two kinds, and both say how things *are*, not what to do, so that one that is lost,
repeated or late does no harm: a node's beat (``ServerBeat``, ``WorkerBeat``, ``LauncherBeat``) tells the
supervisor where it stands, the supervisor's ``View`` tells a node how the job is to be. A node
whose beat shows an old view gets the new one again. Only what a server has saved is asked for (``Collect`` →
``Saved``), again and again until it is there.

What servers tell each other is in ``stripe_messages``; ``wire`` makes bytes of it all.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

Role = Literal["server", "worker", "supervisor", "launcher"]


class Peer(Struct, frozen=True, array_like=True):
    """A node: which slot it fills, and the how-manieth process it is to fill it.

    What an older incarnation of a slot sends no longer counts once a newer one is in the view.
    """

    role: Role
    slot: int = 0
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.slot}" if self.role in ("server", "worker") else self.role


class Position(Struct, frozen=True, array_like=True, order=True):
    """A batch: its epoch and its index in the stream; (0, -1) is before the first."""

    epoch: int = 0
    index: int = -1


START = Position()


class Part(Struct, frozen=True, array_like=True):
    """Some rows of one group; the frames hold their places at the server (uint32) and their values."""

    group: int
    rows: int


class Pull(Struct, frozen=True, array_like=True, tag="pull"):
    """Worker → server: the weights of these rows. Frames: each part's places. Asking twice does no harm."""

    request: int
    parts: tuple[Part, ...]
    after: int = 0
    """The worker's push that they must contain: the server waits for it, if it is still on its way."""


class PulledRows(Struct, frozen=True, array_like=True, tag="rows"):
    """The answer. Frames: each part's weights, float32 [rows, dim].

    ``not_installed`` names groups whose first values have not come yet: of those there is no frame.
    """

    request: int
    parts: tuple[Part, ...]
    not_installed: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    """Where workers have the only copies of the network, and it is among the rows: the newest push of each
    worker that they contain."""


class Install(Struct, frozen=True, array_like=True, tag="install"):
    """Worker → server: first values of a group. Frames: places, weights. Only the first one counts.

    A server that takes over from one whose network
    only workers have copies of takes the newest copy (see
    ``server.initial_values``).
    """

    parts: tuple[Part, ...]
    marks: tuple[int, ...] = ()
    """A copy of the network: the newest push of each worker that it contains; …"""
    pushed: int = 0
    """… the sender's own one if it contains that, too, though the server had not applied it yet."""
    kept: int = 0
    """The sender's newest push that it can no longer send again."""


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """Worker → server: a server can only speak to whom it has heard, and it may have to ask something."""


class Lacks(Struct, frozen=True, array_like=True, tag="lacks"):
    """Server → worker, unasked: only workers can have the values of these groups. The answer is ``Install``
    or ``NoCopy``."""

    groups: tuple[int, ...]


class NoCopy(Struct, frozen=True, array_like=True, tag="no_copy"):
    """Worker → server: the answer to ``Lacks`` of a worker that has no such values."""

    kept: int = 0
    """As in ``Install``."""


class AskKept(Struct, frozen=True, array_like=True, tag="ask_kept"):
    """Server → worker, unasked: which pushes can you still send again? The answer is ``CanResend``."""


class CanResend(Struct, frozen=True, array_like=True, tag="can_resend"):
    """Worker → server: all pushes behind this one."""

    kept: int


class Push(Struct, frozen=True, array_like=True, tag="push"):
    """Worker → server: the gradients of a batch. Frames: for each part places (all different), gradients.

    ``sequence`` counts a worker's batches from 1. With ``stage`` the server keeps the gradients and applies
    them at ``Commit``.
    """

    sequence: int
    batch: Position
    samples: int
    parts: tuple[Part, ...]
    stage: bool = False
    returns: int = -1
    """The group of which the answer is to hold the new weights; -1: none. They save a pull."""


class Commit(Struct, frozen=True, array_like=True, tag="commit"):
    """Worker → server: all servers have staged this push; apply it."""

    sequence: int


class Pushed(Struct, frozen=True, array_like=True, tag="pushed"):
    """The answer to ``Push`` and ``Commit``. Frame, if it has rows: their new weights, or those that a push
    which is only staged will leave."""

    sequence: int
    applied: bool
    """False: staged only."""
    kept: int = 0
    """The newest push of this worker that no failure which the code covers can undo."""
    rows: int = 0
    marks: tuple[int, ...] = ()
    """As in ``PulledRows``. The rows of a push that is only staged contain that one, too."""


class Kept(Struct, frozen=True, array_like=True, tag="kept"):
    """Server → worker, unasked: what ``Pushed.kept`` would say now."""

    sequence: int


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """The answer to a message that does not count.

    "stale": the sender has been replaced, or means a server that has been. "not staged": a commit of what is
    not here, send it again. "not installed": a push to rows whose first values have not come, as happens to a
    server that was replaced. "gap": a push before it is missing. "malformed": not what the plan says.
    """

    reason: Literal["stale", "not staged", "not installed", "gap", "malformed"]
    sequence: int = 0
    request: int = 0


class Relay(Struct, frozen=True, array_like=True, tag="relay"):
    """Worker or server → server → server or worker: a message whose sender cannot reach its target directly
    (see ``routes``). Frames: the message's."""

    header: bytes
    """As ``wire`` encodes it, with source and target."""


class WorkerMark(Struct, frozen=True, array_like=True):
    """What a server knows of a worker's pushes."""

    slot: int
    incarnation: int = 0
    sequence: int = 0
    """The last one that was applied."""
    batch: Position = Position()
    """Which batch that was."""
    samples: int = 0
    """Of all batches that were applied."""
    staged: int = 0
    """The one that waits for its commit; 0: none."""
    kept: int = 0
    """The last one that no failure which the code covers can undo."""
    contained: int = 0
    """The last one that is in the server's rows of the network, where it took those from a worker."""


class Instant(Struct, frozen=True, array_like=True):
    """How far a server had come when it made a flush."""

    flush: int = 0
    marks: tuple[WorkerMark, ...] = ()
    """The pushes that are in this flush or before it."""
    installed: tuple[int, ...] = ()
    """The groups that have their first values."""


class LaneState(Struct, frozen=True, array_like=True):
    """How far a lane has come."""

    slot: int
    """The owner's."""
    incarnation: int
    now: Instant = Instant()
    first: Instant = Instant()
    """The oldest that it could go back to."""


class Redundancy(Struct, frozen=True, array_like=True):
    """What a server still has to bring back."""

    rows: int = 0
    """Rows that it lacks, and how many it recovered."""
    recovered: int = 0
    parities: int = 0
    """Parity records that it lacks, and how many it rebuilt."""
    rebuilt: int = 0
    lost: str = ""
    """Rows that cannot be recovered."""
    scrubbed: int = 0
    """Stripes that were checked, found wrong, and put right."""
    wrong: int = 0
    repaired: int = 0
    compared: int = 0
    """Rows that were compared with the dead server's memory (see ``witness``), and those that differ."""
    unequal: int = 0
    went_back: int = 0
    """Rows that were lost and went back to what was last saved of them, …"""
    version: int = -1
    """… the version that they went back to (0: first values; -1: none did), …"""
    version_samples: int = 0
    """… and the samples that the job had been trained on by then."""
    not_installed: int = 0
    """Rows whose first values have not come; if the server took over, ``rows`` counts them, too."""
    network_lost: bool = False
    """Whether rows of the network are lost that only workers had copies of, or that no version has."""
    updates_lost: int = 0
    """Pushes that the network lacks for good: the worker that had the only newer copy died, too."""
    updates_ahead: int = 0
    """Pushes that the network contains and that do not count yet: their workers will send them again."""


class Figures(Struct, frozen=True, array_like=True):
    """What the live view shows of a node; counts are of this incarnation."""

    samples: int = 0
    steps: int = 0
    loss: float = 0.0
    progress: float = 0.0
    """Of this worker's part of the run, 0 to 1."""
    rows: int = 0
    """Rows that a server holds."""
    bytes_in: int = 0
    bytes_out: int = 0
    memory_bytes: int = 0
    cpu_seconds: tuple[tuple[str, float], ...] = ()
    """Processor time by part of the work."""
    dropped: int = 0
    """Messages that came in and did not count: malformed, damaged, or not from who may send them."""
    bad_lines: int = 0
    """Lines of the data that a worker has skipped."""
    stepped_at: float = 0.0
    """When all servers had applied a worker's last push, by its machine's monotonic clock."""
    digest: str = ""
    """Servers, once the job is over: a checksum over all records."""


class Evaluation(Struct, frozen=True, array_like=True):
    """How a worker's test came out."""

    number: int
    auc: float
    log_loss: float
    samples: int
    step: int = 0
    """Of the job when the test was asked for; the supervisor adds it."""


class ViewNumber(Struct, frozen=True, array_like=True, order=True):
    """Views are ordered by epoch, then by revision. An epoch is durable before it is used, and never used
    twice."""

    epoch: int = 0
    revision: int = 0


class Exit(Struct, frozen=True, array_like=True):
    """A process that ended: with an exit code, or by a signal (negative)."""

    peer: Peer
    code: int


class ServerBeat(Struct, frozen=True, array_like=True, tag="server_beat"):
    """Server → supervisor, every so often and at every change: where it stands."""

    state: Literal["restoring", "ready", "failed"]
    view: ViewNumber
    """The newest that it has seen."""
    endpoint: str = ""
    """Where it listens."""
    marks: tuple[WorkerMark, ...] = ()
    """Of every worker."""
    stuck_on: tuple[int, ...] = ()
    """Servers that have not answered for long."""
    cut: int = 0
    """The newest version of which the rows are copied."""
    saved: int = 0
    """The newest version of which the files are durable, or could not be written."""
    started: ViewNumber = ViewNumber()
    """The view by which this incarnation took its slot over; before that its marks mean nothing."""
    lanes: tuple[LaneState, ...] = ()
    """How far the lanes came whose owners are gone and have no successor yet."""
    redundancy: Redundancy = Redundancy()
    error: str = ""
    figures: Figures = Figures()


class WorkerBeat(Struct, frozen=True, array_like=True, tag="worker_beat"):
    """Worker → supervisor: the same."""

    state: Literal["ready", "working", "held", "done", "failed"]
    view: ViewNumber
    endpoint: str = ""
    batch: Position = Position()
    """The last one that all servers have applied."""
    sequence: int = 0
    stuck_on: tuple[int, ...] = ()
    tested: Evaluation | None = None
    error: str = ""
    figures: Figures = Figures()


class LauncherBeat(Struct, frozen=True, array_like=True, tag="launcher_beat"):
    """Launcher → supervisor: what it wants, and which processes have ended."""

    state: Literal["ready", "held", "done"]
    """Held: workers are to finish their batch and wait. Done: the job is to end."""
    view: ViewNumber
    exited: tuple[Exit, ...] = ()


class ServerInView(Struct, frozen=True, array_like=True):
    """A server as the others are to see it.

    A new incarnation takes its slot over once ``starts`` is set: all servers have refused the old one from
    then on, and agree on its last flush that counts.
    """

    slot: int
    incarnation: int
    endpoint: str = ""
    starts: bool = False
    since: ViewNumber = ViewNumber()
    """The first view in which it was."""
    counts_until: Instant | None = None
    """What the last incarnation did up to then counts; None: that is not decided yet."""


class WorkerInView(Struct, frozen=True, array_like=True):
    """A worker as the others are to see it.

    A new incarnation starts once ``starts`` is set: all servers have refused the old one from then on, and
    what it left half done is settled. ``settle`` is that: staged pushes up to this sequence are applied,
    later ones dropped.
    """

    slot: int
    incarnation: int
    starts: bool = False
    sequence: int = 0
    """The last one that counts: the worker goes on behind it."""
    batch: Position = Position()
    settle: int = -1
    """-1: nothing to settle yet."""
    owes: int = 0
    """The last one that some server has, in whatever way: the worker does all up to this one before it holds
    or ends."""
    test: int = 0
    """The number of the newest test that it is to run."""


class View(Struct, frozen=True, array_like=True, tag="view"):
    """Supervisor → node: how the job is to be."""

    number: ViewNumber
    phase: Literal["starting", "running", "holding", "ending", "stopping"]
    """Holding: workers finish their batch and wait. Ending: they finish it and are done."""
    servers: tuple[ServerInView, ...] = ()
    workers: tuple[WorkerInView, ...] = ()
    cut: int = 0
    """The version that servers are to copy; a new one is set only while all workers hold."""
    baseline: bool = False
    """Whether that version is to hold all rows, …"""
    whole: bool = True
    """… or all that have changed, not those alone that are to be saved first."""
    committed: int = 0
    """The newest version that exists: what was marked as changed for it need not be saved again."""
    tidied: int = 0
    """The newest version behind which files that were rearranged have taken the place of others."""


class Collect(Struct, frozen=True, array_like=True, tag="collect"):
    """Supervisor → server: what must the manifest say of your files? Sent again until it is answered.

    ``tidy`` asks for what comes after a version: it exists, now rearrange files and say which.
    """

    version: int
    tidy: bool = False


class Saved(Struct, frozen=True, array_like=True, tag="saved"):
    """The answer. Frames, where the network's rows do not go to files: this server's, as they were copied."""

    version: int
    tidy: bool
    change: bytes
    """JSON of what changes in the store (see ``saving.FileNote``)."""
    error: str = ""
    seconds: float = 0.0
    """That writing took."""
    live_bytes: int = 0
    """That a restore reads of this server's files, beyond the full version."""
    kind: str = ""
    """Of the error (see ``report.result.REASONS``)."""


class NodeStatus(Struct, frozen=True, array_like=True):
    """A node as the live view shows it."""

    peer: Peer
    state: str
    silent_seconds: float
    figures: Figures = Figures()
    redundancy: Redundancy = Redundancy()


class Happening(Struct, frozen=True, array_like=True):
    """An event of the run's log, for those who watch."""

    at: float
    """Unix seconds."""
    event: str
    figures: dict[str, Any] = {}


class SaveFailure(Struct, frozen=True, array_like=True):
    """Checkpoints that could not be saved, all for the same cause."""

    why: str
    """A sentence, with what helps."""
    kind: str = ""
    """"full", "locked", "denied", "unreachable", or "" for anything else."""
    count: int = 0


class Status(Struct, frozen=True, array_like=True, tag="status"):
    """Supervisor → launcher: how the job is getting on."""

    phase: str
    steps: int
    """Batches that count, and their samples."""
    samples: int
    nodes: tuple[NodeStatus, ...]
    tests: tuple[Evaluation, ...] = ()
    versions: tuple[int, ...] = ()
    """Checkpoints that this job has saved."""
    save_failures: tuple[SaveFailure, ...] = ()
    """Why others could not be."""
    replaced: int = 0
    """Workers that died and were replaced."""
    finished: bool = False
    failure: tuple[str, Peer, str] | None = None
    """What kind, who, and how."""
    happened: tuple[Happening, ...] = ()
    """The last few events, so that one report may be lost."""
    degraded: bool = False
    """Whether rows or parities are lacking."""
    unsaved: bool = False
    """Whether the last version that was to be saved was not."""
    last_version: int = 0
    """That the job can go on from, this run's or an earlier one's; 0: none."""
    saved_steps: int = 0
    """Batches that are in it."""
