"""The message types. A message is a small header and raw arrays (*frames*) that belong to it.

Data flows between workers and servers: ``Pull`` → ``PulledRows``; ``Push`` (→ ``Pushed``, then ``Commit``) →
``Pushed``. Control messages describe state instead of giving orders, so a lost, duplicated or late one does
no harm: a node's beat (``ServerBeat``, ``WorkerBeat``, ``LauncherBeat``) reports its state to the supervisor,
the supervisor's ``View`` tells a node the desired state of the job. A node whose beat shows an old view is
sent the new one again. The only exception is ``Collect`` → ``Saved``, a request for what a server has saved,
which is retried until it is answered.

``Claim`` → ``Claimed``, ``Deposit`` → ``Deposited``, each or ``Denied``, keep the supervisor's durable state
on several machines (see ``vault``). Messages between servers are in ``stripe_messages``; ``wire`` encodes
all of them.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

Role = Literal["server", "worker", "supervisor", "launcher", "vault"]


class Peer(Struct, frozen=True, array_like=True):
    """A node: its slot, and its incarnation in that slot.

    Messages of an older incarnation no longer count once a newer one is in the view.
    """

    role: Role
    slot: int = 0
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.slot}" if self.role in ("server", "worker") else self.role


class Position(Struct, frozen=True, array_like=True, order=True):
    """A batch: its epoch and its index in the stream; (0, -1) is before the first batch."""

    epoch: int = 0
    index: int = -1


START = Position()


class Part(Struct, frozen=True, array_like=True):
    """Some rows of one group; frames: their places at the server (uint32) and their values."""

    group: int
    rows: int


class Pull(Struct, frozen=True, array_like=True, tag="pull"):
    """Worker → server: request the weights of these rows. Frames: each part's places. Idempotent."""

    request: int
    parts: tuple[Part, ...]
    after: int = 0
    """A push of this worker that the rows must contain; the server waits until it has applied it."""
    commits: bool = False
    """Whether this is the ``Commit`` of that push, too; the rows answer both."""


class PulledRows(Struct, frozen=True, array_like=True, tag="rows"):
    """The answer to ``Pull``. Frames: each part's weights, float32 [rows, dim].

    ``not_installed`` lists groups whose initial values have not arrived yet; they have no frame.
    """

    request: int
    parts: tuple[Part, ...]
    not_installed: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    """Where only workers have copies of the network, and the rows include it: each worker's newest push that
    the rows contain."""


class Install(Struct, frozen=True, array_like=True, tag="install"):
    """Worker → server: initial values of a group. Frames: places, weights. Only the first message counts.

    If only workers have copies of the network, the replacement of a server uses the newest copy (see
    ``server.initial_values``).
    """

    parts: tuple[Part, ...]
    marks: tuple[int, ...] = ()
    """For a copy of the network: each worker's newest push that it contains."""
    pushed: int = 0
    """The sender's own newest push, if the copy contains it although the server had not applied it yet."""
    kept: int = 0
    """The sender's newest push that it can no longer resend."""


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """Worker → server: a server can only send to workers it has heard from, and may have to ask something."""


class Lacks(Struct, frozen=True, array_like=True, tag="lacks"):
    """Server → worker, unsolicited: only workers can have the values of these groups. The answer is
    ``Install`` or ``NoCopy``."""

    groups: tuple[int, ...]


class NoCopy(Struct, frozen=True, array_like=True, tag="no_copy"):
    """Worker → server: the answer to ``Lacks`` from a worker without such values."""

    kept: int = 0
    """As in ``Install``."""


class AskKept(Struct, frozen=True, array_like=True, tag="ask_kept"):
    """Server → worker, unsolicited: which pushes can you still resend? The answer is ``CanResend``."""


class CanResend(Struct, frozen=True, array_like=True, tag="can_resend"):
    """Worker → server: the sender can resend all pushes after ``kept``."""

    kept: int


class Push(Struct, frozen=True, array_like=True, tag="push"):
    """Worker → server: the gradients of a batch. Frames: for each part places (all distinct), gradients.

    ``sequence`` numbers a worker's pushes from 1. With ``stage`` the server stores the gradients and applies
    them at ``Commit``.
    """

    sequence: int
    batch: Position
    samples: int
    parts: tuple[Part, ...]
    stage: bool = False
    returns: int = -1
    """The group whose new weights the answer should include, which saves a pull; -1: none."""


class Commit(Struct, frozen=True, array_like=True, tag="commit"):
    """Worker → server: all servers have staged this push; apply it. Usually a pull does this
    (``Pull.commits``)."""

    sequence: int


class Pushed(Struct, frozen=True, array_like=True, tag="pushed"):
    """The answer to ``Push`` and ``Commit``. Frame, if ``rows`` > 0: their new weights; for a staged push,
    the weights that it will produce."""

    sequence: int
    applied: bool
    """False: only staged."""
    kept: int = 0
    """This worker's newest kept push: no failure that the code covers can undo it."""
    rows: int = 0
    marks: tuple[int, ...] = ()
    """As in ``PulledRows``. The rows of a staged push contain that push, too."""


class Kept(Struct, frozen=True, array_like=True, tag="kept"):
    """Server → worker, unsolicited: the current value of ``Pushed.kept``."""

    sequence: int


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """The answer to a message that does not count.

    "stale": the sender, or the addressed server, has been replaced. "not staged": a commit of a push that is
    not staged here; send the push again. "not installed": a push to rows whose initial values have not
    arrived, which happens to a replacement. "gap": an earlier push is missing. "malformed": the message does
    not match the plan.
    """

    reason: Literal["stale", "not staged", "not installed", "gap", "malformed"]
    sequence: int = 0
    request: int = 0


class Relay(Struct, frozen=True, array_like=True, tag="relay"):
    """Worker or server → server → server or worker: a message on a detour, as its sender cannot reach the
    target directly (see ``routes``). Frames: those of the message."""

    header: bytes
    """The header of the message as ``wire`` encodes it, with source and target."""


class WorkerMark(Struct, frozen=True, array_like=True):
    """A server's state of one worker's pushes."""

    slot: int
    incarnation: int = 0
    sequence: int = 0
    """The last applied push."""
    batch: Position = Position()
    """The batch of that push."""
    samples: int = 0
    """Total samples of all applied pushes."""
    staged: int = 0
    """The push that waits for its commit; 0: none."""
    kept: int = 0
    """The last kept push: no failure that the code covers can undo it."""
    contained: int = 0
    """The last push in the server's rows of the network, if it got those from a worker."""


class Instant(Struct, frozen=True, array_like=True):
    """A server's state when it made a flush."""

    flush: int = 0
    marks: tuple[WorkerMark, ...] = ()
    """The pushes contained in this flush and earlier ones."""
    installed: tuple[int, ...] = ()
    """The groups that have their initial values."""


class LaneState(Struct, frozen=True, array_like=True):
    """The state of a lane at its parity server."""

    slot: int
    """The owner's slot."""
    incarnation: int
    now: Instant = Instant()
    first: Instant = Instant()
    """The oldest instant that the lane can be undone to."""


class Redundancy(Struct, frozen=True, array_like=True):
    """A server's missing records, and its recovery so far."""

    rows: int = 0
    """Missing rows, and rows recovered so far."""
    recovered: int = 0
    parities: int = 0
    """Missing parities, and parities rebuilt so far."""
    rebuilt: int = 0
    lost: str = ""
    """A description of rows that cannot be recovered."""
    scrubbed: int = 0
    """Stripes checked, found wrong, and repaired."""
    wrong: int = 0
    repaired: int = 0
    compared: int = 0
    """Rows compared with the dead server's memory (see ``witness``), and those that differ."""
    unequal: int = 0
    went_back: int = 0
    """Rows that were lost and went back to their last saved values."""
    version: int = -1
    """The version that they went back to; 0: initial values, -1: no row went back."""
    version_samples: int = 0
    """Samples that the job had trained on at that version."""
    not_installed: int = 0
    """Rows whose initial values have not arrived; in a replacement, ``rows`` includes them."""
    network_lost: bool = False
    """Whether rows of the network are lost of which only workers had copies, or which no version contains."""
    updates_lost: int = 0
    """Pushes that the network lacks for good: the worker with the only newer copy died, too."""
    updates_ahead: int = 0
    """Pushes that the network contains before they count: their workers will resend them."""


class Figures(Struct, frozen=True, array_like=True):
    """Metrics of a node for the live view; counts are of this incarnation."""

    samples: int = 0
    steps: int = 0
    loss: float = 0.0
    progress: float = 0.0
    """Completed part of this worker's batches, 0 to 1."""
    rows: int = 0
    """Rows that a server holds."""
    bytes_in: int = 0
    bytes_out: int = 0
    memory_bytes: int = 0
    cpu_seconds: tuple[tuple[str, float], ...] = ()
    """Processor time by kind of work."""
    dropped: int = 0
    """Messages received and dropped: malformed, damaged, or from a sender that may not send them."""
    bad_lines: int = 0
    """Lines of the data that a worker skipped."""
    stepped_at: float = 0.0
    """When all servers had applied a worker's last push, by its machine's monotonic clock."""
    digest: str = ""
    """For servers, after the job has ended: a checksum of all records."""


class Evaluation(Struct, frozen=True, array_like=True):
    """The result of a worker's test."""

    number: int
    auc: float
    log_loss: float
    samples: int
    step: int = 0
    """The job's step when the test was requested; the supervisor adds it."""


class ViewNumber(Struct, frozen=True, array_like=True, order=True):
    """Views are ordered by epoch, then by revision. An epoch is durable before it is used, and never used
    twice."""

    epoch: int = 0
    revision: int = 0


class Exit(Struct, frozen=True, array_like=True):
    """A process that ended: an exit code, or a negative signal number."""

    peer: Peer
    code: int
    reason: str = ""
    """Why, if the code does not say it."""


class ServerBeat(Struct, frozen=True, array_like=True, tag="server_beat"):
    """Server → supervisor, periodically and on every change: its state."""

    state: Literal["restoring", "ready", "failed"]
    view: ViewNumber
    """The newest view it has seen."""
    endpoint: str = ""
    """The address it listens on."""
    marks: tuple[WorkerMark, ...] = ()
    """One for each worker."""
    stuck_on: tuple[int, ...] = ()
    """Servers that have not answered for a long time."""
    cut: int = 0
    """The newest version whose rows are copied."""
    saved: int = 0
    """The newest version whose files are durable, or could not be written."""
    started: ViewNumber = ViewNumber()
    """The view in which this incarnation took over its slot; before that, its marks are meaningless."""
    lanes: tuple[LaneState, ...] = ()
    """State of the lanes whose owners are dead and have no replacement yet."""
    redundancy: Redundancy = Redundancy()
    error: str = ""
    figures: Figures = Figures()


class WorkerBeat(Struct, frozen=True, array_like=True, tag="worker_beat"):
    """Worker → supervisor, periodically and on every change: its state."""

    state: Literal["ready", "working", "held", "done", "failed"]
    view: ViewNumber
    endpoint: str = ""
    batch: Position = Position()
    """The last batch that all servers have applied."""
    sequence: int = 0
    stuck_on: tuple[int, ...] = ()
    tested: Evaluation | None = None
    error: str = ""
    figures: Figures = Figures()


class LauncherBeat(Struct, frozen=True, array_like=True, tag="launcher_beat"):
    """Launcher → supervisor: the requested state, and which processes have ended."""

    state: Literal["ready", "held", "done"]
    """Held: workers should finish their batch and wait. Done: the job should end."""
    view: ViewNumber
    exited: tuple[Exit, ...] = ()


class ServerInView(Struct, frozen=True, array_like=True):
    """A server's entry in a view.

    A new incarnation takes over its slot once ``starts`` is set: from then on all servers refuse the old one,
    and agree on its last flush that counts.
    """

    slot: int
    incarnation: int
    endpoint: str = ""
    starts: bool = False
    since: ViewNumber = ViewNumber()
    """The first view that contained it."""
    counts_until: Instant | None = None
    """Everything that the last incarnation did up to then counts; None: not decided yet."""


class WorkerInView(Struct, frozen=True, array_like=True):
    """A worker's entry in a view.

    A new incarnation starts once ``starts`` is set: from then on all servers refuse the old one, and its
    unfinished pushes are settled. ``settle`` decides these: staged pushes up to this sequence are applied,
    later ones are dropped.
    """

    slot: int
    incarnation: int
    starts: bool = False
    sequence: int = 0
    """The last push that counts: the worker resumes after it."""
    batch: Position = Position()
    settle: int = -1
    """-1: nothing to settle yet."""
    owes: int = 0
    """The last push that any server has, in whatever state: the worker completes all pushes up to this one
    before it holds or ends."""
    test: int = 0
    """The number of the newest test that it should run."""


class View(Struct, frozen=True, array_like=True, tag="view"):
    """Supervisor → node: the desired state of the job."""

    number: ViewNumber
    phase: Literal["starting", "running", "holding", "ending", "stopping"]
    """Holding: workers finish their batch and wait. Ending: they finish it and stop."""
    servers: tuple[ServerInView, ...] = ()
    workers: tuple[WorkerInView, ...] = ()
    cut: int = 0
    """The version whose rows servers should copy; it changes only while all workers hold."""
    baseline: bool = False
    """Whether that version should hold all rows."""
    whole: bool = True
    """Whether an increment should hold all changed rows, instead of only those with priority."""
    committed: int = 0
    """The newest version that exists: rows marked as changed for it need not be saved again."""
    tidied: int = 0
    """The newest version after which rearranged files have replaced older ones."""
    launcher: int = 0
    """The incarnation of the launcher, the only one that may start what this view asks for."""


class Collect(Struct, frozen=True, array_like=True, tag="collect"):
    """Supervisor → server: report your files for the manifest. Sent again until answered.

    With ``tidy``: the version exists; rearrange files and report the changes.
    """

    version: int
    tidy: bool = False
    kept: tuple[int, ...] = ()
    """With ``tidy``: the versions since the last baseline that must stay restorable, ascending."""


DAMAGED = "damaged"


class Saved(Struct, frozen=True, array_like=True, tag="saved"):
    """The answer to ``Collect``. Frames, if the network's rows are not saved to files: this server's, as
    copied."""

    version: int
    tidy: bool
    change: bytes
    """The changes to the store, as JSON (see ``saving.FileNote``)."""
    error: str = ""
    seconds: float = 0.0
    """Time that writing took."""
    live_bytes: int = 0
    """Bytes of this server's files that a restore reads, beyond the full version."""
    kind: str = ""
    """Kind of the error (see ``report.result.REASONS``); of tidying: ``DAMAGED`` if a file cannot be read."""
    read_speed: float = 0.0
    """Bytes a second that this server has read from the store, of a restore or as measured; 0: not known."""
    waited_seconds: float = 0.0
    """How long the server waited for rows to be written because copies exceeded ``max_memory``."""


class NodeStatus(Struct, frozen=True, array_like=True):
    """A node's entry in the live view."""

    peer: Peer
    state: str
    silent_seconds: float
    figures: Figures = Figures()
    redundancy: Redundancy = Redundancy()
    machine: str = ""
    """Where it runs, as the launcher knows it; "" if there is only one machine."""


class Happening(Struct, frozen=True, array_like=True):
    """An event of the run log, for the live view."""

    at: float
    """Unix time in seconds."""
    event: str
    figures: dict[str, Any] = {}


class SaveFailure(Struct, frozen=True, array_like=True):
    """Checkpoints that could not be saved, all for the same reason."""

    why: str
    """The reason and its remedy, as a sentence."""
    kind: str = ""
    """"full", "locked", "denied", "unreachable", or "" for anything else."""
    count: int = 0


class Status(Struct, frozen=True, array_like=True, tag="status"):
    """Supervisor → launcher: progress of the job."""

    phase: str
    steps: int
    """Batches that count, and their samples."""
    samples: int
    nodes: tuple[NodeStatus, ...]
    tests: tuple[Evaluation, ...] = ()
    versions: tuple[int, ...] = ()
    """Checkpoints that this job has saved."""
    save_failures: tuple[SaveFailure, ...] = ()
    """Why other checkpoints could not be saved."""
    replaced: int = 0
    """Workers that died and were replaced."""
    finished: bool = False
    failure: tuple[str, Peer, str] | None = None
    """The kind of failure, the node, and the details."""
    happened: tuple[Happening, ...] = ()
    """The last few events, repeated in case a report is lost."""
    degraded: bool = False
    """Whether any server lacks rows or parities."""
    unsaved: bool = False
    """Whether the last version that was due could not be saved."""
    last_version: int = 0
    """The version that the job can resume from, this run's or an earlier one's; 0: none."""
    saved_steps: int = 0
    """Steps contained in that version."""


class Ballot(Struct, frozen=True, array_like=True, order=True):
    """The number of a claim; the holder's random number makes it unique."""

    number: int = 0
    holder: int = 0


class VaultAt(Struct, frozen=True, array_like=True, order=True):
    """A vault, and where it listens."""

    slot: int
    endpoint: str


Board = tuple[VaultAt, ...]
"""Vaults of which a majority decides."""


class Claim(Struct, frozen=True, array_like=True, tag="claim"):
    """Supervisor → vault: the office is mine from now on. The answer is ``Claimed`` or ``Denied``."""

    ballot: Ballot


class Claimed(Struct, frozen=True, array_like=True, tag="claimed"):
    """Vault → supervisor: this ballot is the highest here. With what was stored last: by whom, its number."""

    ballot: Ballot
    by: Ballot = Ballot()
    number: int = 0
    state: bytes = b""
    boards: tuple[Board, ...] = ()
    """The boards that decide, as of that state."""


class Deposit(Struct, frozen=True, array_like=True, tag="deposit"):
    """Supervisor → vault: keep this state, and renew my lease; without a number, only that. The answer is
    ``Deposited`` or ``Denied``."""

    ballot: Ballot
    round: int
    """Numbers all messages of a holder, so that it knows when the one that is answered was sent."""
    number: int = 0
    state: bytes = b""
    boards: tuple[Board, ...] = ()
    """The boards that decide from this state on: two while one replaces the other."""


class Deposited(Struct, frozen=True, array_like=True, tag="deposited"):
    """Vault → supervisor: the state with this number or a later one is stored, the lease renewed."""

    ballot: Ballot
    round: int
    number: int


class Denied(Struct, frozen=True, array_like=True, tag="denied"):
    """Vault → supervisor: there is a higher ballot, or another holder's lease has not expired."""

    ballot: Ballot
    """The one that was denied."""
    highest: Ballot
    wait_seconds: float = 0.0
    """How long the lease lasts."""
