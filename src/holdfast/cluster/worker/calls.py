"""A worker's pulls and pushes: one request to several servers, retried until all have answered.

No clock and no socket: ``receive`` processes answers, ``tick`` handles time, and outgoing messages are in
``outbox``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.cluster.protocol.envelope import Envelope, Frame, as_array
from holdfast.cluster.protocol.messages import (
    START,
    AskKept,
    CanResend,
    Commit,
    Hello,
    Install,
    Kept,
    Lacks,
    NoCopy,
    Part,
    Peer,
    Position,
    Pull,
    PulledRows,
    Push,
    Pushed,
    Refused,
    ServerInView,
)
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.protocol.retry import Retry
from holdfast.cluster.protocol.routes import Routes
from holdfast.cluster.protocol.wire import Message


@dataclass(frozen=True, slots=True)
class Copy:
    """A server's part of the network, as of one instant."""

    incarnation: int
    places: NDArray[np.uint32]
    weights: NDArray[np.float32]
    marks: tuple[int, ...]
    """Each worker's newest push that it contains."""
    pushed: int = 0
    """This worker's own push, if it is contained although the server had only staged it."""


class NetworkCopies:
    """A worker's copies of the network, if only workers have copies (``dense="workers"``).

    Servers send the network's rows in answers to pulls and pushes. The worker keeps the last rows of each
    server, with marks of the pushes that they contain. ``server.initial_values`` describes how the
    replacement of a dead server uses them.

    Args:
        me: the worker.
        plan: the job's plan.
    """

    def __init__(self, me: Peer, plan: JobPlan) -> None:
        self._me = me
        rows = np.arange(plan.groups[-1].rows)
        owners = np.unique(plan.placements[-1].owner(rows)) if plan.dense == "workers" else ()
        self.holders = frozenset(int(server) for server in owners)
        """Servers with rows of the network; empty if there are other copies of it."""
        self._copies: dict[int, Copy] = {}

    def take(self, server: int, copy: Copy) -> None:
        """Store a copy, unless it is older than the stored one."""
        old = self._copies.get(server)
        if old is None or (copy.incarnation, sum(copy.marks)) >= (old.incarnation, sum(old.marks)):
            self._copies[server] = copy

    def get(self, server: int) -> Copy | None:
        """The newest copy of a server's part."""
        return self._copies.get(server)

    @property
    def contain(self) -> int:
        """This worker's newest push that all copies contain, and that servers had applied by then."""
        if len(self._copies) < len(self.holders):
            return 0
        return min(copy.marks[self._me.slot] for copy in self._copies.values())


Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RowSpread:
    """Rows of one group, spread over servers: server ``s`` has ``places[starts[s]:starts[s + 1]]``."""

    places: NDArray[np.uint32]
    starts: NDArray[np.int64]

    def at(self, server: int) -> slice:
        """The indices of the rows that a server has."""
        return slice(int(self.starts[server]), int(self.starts[server + 1]))


@dataclass
class _Question:
    """A request to one server that it has not answered yet."""

    message: Message
    frames: Sequence[Frame]
    asked: float
    retry: Retry
    refused: float = -math.inf
    """When the server last refused it."""
    carrier: int = 0
    """Of a commit: the request of the pull that carries it; 0: none does."""


@dataclass
class Call:
    """A request to several servers; ``done`` when all have answered."""

    questions: dict[int, _Question] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether all servers have answered."""
        return not self.questions


@dataclass
class PullCall(Call):
    """A pull in progress; ``rows[group]`` is filled as answers arrive."""

    request: int = 0
    spreads: Sequence[RowSpread] = ()
    rows: list[Floats] = field(default_factory=list)


@dataclass
class PushCall(Call):
    """A push in progress."""

    sequence: int = 0
    batch: Position = START
    samples: int = 0
    frames: dict[int, tuple[tuple[Part, ...], Sequence[Frame]]] = field(default_factory=dict)
    staged: bool = False
    """Whether some server waits for a commit."""
    committing: bool = False
    """Whether all servers have staged it, so that it counts everywhere, whatever happens."""
    returned: Floats | None = None
    """The new weights of the last group's rows, filled by answers; None: not requested."""
    lacking: set[int] = field(default_factory=set)
    """Servers that have not sent theirs."""
    spread: RowSpread | None = None

    @property
    def certain(self) -> bool:
        """Whether it counts everywhere, whatever happens."""
        return self.done or self.committing


class Calls:
    """All calls of one worker.

    Args:
        me: the worker.
        plan: the job's plan.
        first_values: returns the initial weights of an "installed" group, and their spread.
    """

    def __init__(
        self,
        me: Peer,
        plan: JobPlan,
        first_values: Callable[[int], tuple[RowSpread, Floats]],
    ) -> None:
        self.me = me
        self.outbox: list[Envelope] = []
        self.stale = False
        """Whether a server said that this worker has been replaced."""
        self.kept_sequence = 0
        """The last push that all servers have kept: no failure covered by the code can undo it."""
        self.kept_batch: Position = START
        self._copies = NetworkCopies(me, plan)
        """Copies of the network, for a server that has lost it."""
        self._plan = plan
        self._first_values = first_values
        self._servers: dict[int, ServerInView] = {}
        self._pulls: dict[int, PullCall] = {}
        self._pushes: deque[PushCall] = deque()
        self._uncommitted: set[int] = set()
        """Servers to which the last push's commit has not been sent yet."""
        self._kept = [0] * plan.servers
        self._installed_groups = [g for g, group in enumerate(plan.groups) if group.initial == "installed"]
        self._ask_kept = Retry(plan.timing.retry_seconds)
        self._refresh = PullCall()
        self.routes = Routes(me, plan, self._started_servers)
        self._spreads: Sequence[RowSpread] = ()
        self._requests = 0
        self._now = 0.0
        self._ticked = 0.0

    @property
    def unkept(self) -> int:
        """The number of pushes that are not kept everywhere: their gradients may be needed again."""
        return len(self._pushes)

    @property
    def applied(self) -> bool:
        """Whether all pushes are applied everywhere."""
        return all(call.done for call in self._pushes)

    def start(self, sequence: int, batch: Position) -> None:
        """Resume after a push that all servers have kept."""
        self.kept_sequence, self.kept_batch = sequence, batch

    def adopt(self, servers: Sequence[ServerInView]) -> None:
        """Follow a view: resend to a replacement what its predecessor did not answer, or may have lost."""
        for server in servers:
            known = self._servers.get(server.slot)
            if not server.starts:
                if known is not None and server.incarnation > known.incarnation:
                    del self._servers[server.slot]
                continue
            self._servers[server.slot] = server
            if known is not None and known.incarnation == server.incarnation:
                continue
            self._post(server.slot, Hello(), ())
            if self._plan.dense == "workers" and self._has_moved(server.slot):
                self._install(server.slot, (len(self._plan.groups) - 1,))  # now: it may be the last copy
            for push in self._pushes:
                if push.committing:  # its predecessor had staged it
                    self._post(server.slot, *self._push_message(push, server.slot))
                self._ask_push(push, server.slot)
            for pull in self._pulls.values():
                if server.slot in pull.questions:
                    pull.questions[server.slot].asked = self._now
                    pull.questions[server.slot].refused = -math.inf
                    self._send(server.slot, pull.questions[server.slot])

    def copy_of(self, server: int) -> Copy | None:
        """This worker's copy of a server's part of the network, for a server that has lost it."""
        return self._copies.get(server)

    @property
    def certain(self) -> int:
        """The last push that counts everywhere, whatever happens."""
        pushes = (call.sequence for call in self._pushes if call.certain)
        return max(pushes, default=self.kept_sequence)

    def pull(self, spreads: Sequence[RowSpread], now: float, after: int = 0) -> PullCall:
        """Pull the weights of these rows, one spread for each group, as of a push that is ``certain``."""
        self._requests += 1
        self._now = now
        dims = [group.dim for group in self._plan.groups]
        rows = [np.empty((len(s.places), dim), np.float32) for s, dim in zip(spreads, dims, strict=True)]
        call = PullCall(request=self._requests, spreads=spreads, rows=rows)
        for server in range(self._plan.servers):
            wanted = [(g, s.places[s.at(server)]) for g, s in enumerate(spreads)]
            parts = tuple(Part(g, len(places)) for g, places in wanted if len(places))
            if parts:
                commits = server in self._uncommitted and after == self._pushes[-1].sequence
                if commits:
                    self._uncommitted.remove(server)
                    self._pushes[-1].questions[server].carrier = call.request
                places = [places for _, places in wanted if len(places)]
                self._ask(call, server, Pull(call.request, parts, after, commits=commits), places)
        if not call.done:
            self._pulls[call.request] = call
        return call

    def push(
        self,
        sequence: int,
        batch: Position,
        spreads: Sequence[RowSpread],
        gradients: Sequence[Floats],
        now: float,
        samples: int = 0,
        *,
        returns: bool = False,
    ) -> PushCall:
        """Send gradients of these rows to all servers, even those without rows: each must count the push.

        The previous push must be done: a server recognizes duplicates by their number alone. With
        ``returns``, answers include the new weights of the last group's rows (``returned``), unless one is
        lost.
        """
        assert self.applied
        self._now = now
        call = PushCall(sequence=sequence, batch=batch, samples=samples)
        if returns:
            call.spread, call.returned = spreads[-1], np.empty_like(gradients[-1])
            call.lacking = {
                s for s in range(self._plan.servers) if len(call.spread.places[call.spread.at(s)])
            }
        self._pushes.append(call)
        self._spreads = spreads
        self._ask_kept.begin(now)
        for server in range(self._plan.servers):
            parts: list[Part] = []
            frames: list[Frame] = []
            for group, (spread, values) in enumerate(zip(spreads, gradients, strict=True)):
                here = spread.at(server)
                if here.stop > here.start:
                    parts.append(Part(group, here.stop - here.start))
                    frames += [spread.places[here], values[here]]
            call.frames[server] = tuple(parts), frames
            self._ask_push(call, server)
        return call

    def send_commits(self) -> None:
        """Send the commits of a push that all servers have staged, except those that pulls have carried since
        then."""
        while self._uncommitted:
            server = self._uncommitted.pop()
            self._send(server, self._pushes[-1].questions[server])

    def receive(self, envelope: Envelope, now: float) -> None:
        """Process a server's answer; unexpected ones are dropped. Call ``send_commits`` after the pulls that
        it makes possible."""
        self._now = now
        server, message = envelope.source.slot, envelope.message
        known = self._servers.get(server)
        if known is None or known.incarnation != envelope.source.incarnation:
            return
        if not isinstance(message, Lacks | AskKept):  # these do not answer a request
            self.routes.trust(envelope.source, now)
        if isinstance(message, PulledRows):
            self._take_rows(server, message, envelope.frames)
        elif isinstance(message, Pushed):
            self._take_pushed(server, message, envelope.frames)
            self._keep(server, message.kept)
        elif isinstance(message, Kept):
            self._keep(server, message.sequence)
        elif isinstance(message, Refused):
            self._take_refusal(server, message)
        elif isinstance(message, Lacks):
            if not self._install(server, message.groups):
                self._post(server, NoCopy(self.kept_sequence), ())
        elif isinstance(message, AskKept):
            self._post(server, CanResend(self.kept_sequence), ())

    def tick(self, now: float) -> None:
        """Retry overdue requests."""
        self._now = now
        stood_still = now - self._ticked
        self._ticked = now
        if stood_still > self._plan.timing.stuck_seconds / 2:
            # Time in which this worker was suspended is not time waited.
            for call in self._open():
                for question in call.questions.values():
                    question.asked += stood_still
        if self._pushes and self.applied and self._ask_kept.is_due(now):
            # Servers announce kept pushes unsolicited, but only once. Asking again is cheap.
            self._ask_kept.again(now)
            for server, kept in enumerate(self._kept):
                if kept < self._pushes[-1].sequence:
                    self._doubt(server)
                    self._post(server, Commit(self._pushes[-1].sequence), ())
            self._pull_copies()
        for call in self._open():
            for server, question in call.questions.items():
                if question.retry.is_due(now):
                    self._doubt(server)
                    question.retry.again(now)
                    self._send(server, question)

    def waiting_since(self) -> dict[int, float]:
        """For each server that owes an answer, since when; a server being replaced owes none."""
        waiting: dict[int, float] = {}
        for call in self._open():
            for server, question in call.questions.items():
                if server in self._servers:
                    waiting[server] = min(question.asked, waiting.get(server, question.asked))
        return waiting

    def _open(self) -> list[Call]:
        return [*self._pulls.values(), *(call for call in self._pushes if not call.done)]

    def _numbered(self, sequence: int) -> PushCall | None:
        return next((call for call in self._pushes if call.sequence == sequence), None)

    def _keep(self, server: int, sequence: int) -> None:
        """Note that a server has kept all pushes up to this one; pushes that all have kept can be dropped."""
        self._kept[server] = max(self._kept[server], sequence)
        self._drop_kept()

    def _drop_kept(self) -> None:
        kept = min(*self._kept, self._copies.contain) if self._copies.holders else min(self._kept)
        while self._pushes and self._pushes[0].sequence <= kept and self._pushes[0].done:
            call = self._pushes.popleft()
            self.kept_sequence, self.kept_batch = call.sequence, call.batch

    def _take_rows(self, server: int, message: PulledRows, frames: Sequence[Frame]) -> None:
        call = self._pulls.get(message.request)
        if call is None or server not in call.questions:
            return
        if message.not_installed:
            unanswered = call.questions[server]
            wait = self._plan.timing.retry_seconds if self._has_moved(server) else 0.0
            if self._now >= unanswered.refused + wait:  # the server may wait for another worker's copy
                unanswered.refused = self._now
                if self._install(server, message.not_installed):
                    self._send(server, unanswered)
            return
        question = call.questions[server].message
        assert isinstance(question, Pull)
        if message.parts != question.parts or len(frames) != len(message.parts):
            return
        for part, frame in zip(message.parts, frames, strict=True):
            dim = self._plan.groups[part.group].dim
            call.rows[part.group][call.spreads[part.group].at(server)] = as_array(
                frame, np.float32, (part.rows, dim)
            )
        del call.questions[server]
        if call.done:
            del self._pulls[message.request]
        if question.commits:
            self._take_commit(server, message.request)
        here = call.spreads[-1].at(server)
        self._copy(server, message.marks, call.spreads[-1].places[here], call.rows[-1][here])

    def _install(self, server: int, groups: Sequence[int]) -> bool:
        """Send values of groups to a server: initial ones, or a copy of the network that it has lost. False:
        this worker has none."""
        network = len(self._plan.groups) - 1
        moved = server in self._copies.holders and self._has_moved(server)
        copy = self._copies.get(server) if moved else None
        if moved and network in groups and copy is None:
            return False  # initial values would undo training
        parts: list[Part] = []
        frames: list[Frame] = []
        for group in groups:
            if copy is not None and group == network:
                places, values = copy.places, copy.weights
            else:
                spread, first = self._first_values(group)
                places, values = spread.places[spread.at(server)], first[spread.at(server)]
            parts.append(Part(group, len(places)))
            frames += [places, values]
        nothing = (0,) * self._plan.workers if self._copies.holders else ()
        marks, pushed = (copy.marks, copy.pushed) if copy is not None else (nothing, 0)
        self._post(server, Install(tuple(parts), marks, pushed, self.kept_sequence), frames)
        return True

    def _copy(
        self, server: int, marks: tuple[int, ...], places: NDArray[np.uint32], rows: Floats, pushed: int = 0
    ) -> None:
        """Store a server's rows of the network as a copy, if copies are needed."""
        if len(marks) == self._plan.workers and server in self._copies.holders:
            incarnation = self._servers[server].incarnation
            self._copies.take(server, Copy(incarnation, places, rows, marks, pushed))
            self._drop_kept()

    def _pull_copies(self) -> None:
        """Pull copies of the network that contain the last push, if no other request does."""
        if self._copies.holders and self._refresh.done and self._copies.contain < self._pushes[-1].sequence:
            *others, network = self._spreads
            nothing = [empty_spread(self._plan.servers)] * len(others)
            self._refresh = self.pull([*nothing, network], self._now, self._pushes[-1].sequence)

    def _has_moved(self, server: int) -> bool:
        """Whether a server's rows differed from the initial values when its last incarnation died."""
        until = self._servers[server].counts_until
        resumed = self._plan.resume is not None
        return until is not None and (resumed or any(mark.sequence for mark in until.marks))

    def _take_pushed(self, server: int, message: Pushed, frames: Sequence[Frame]) -> None:
        call = self._numbered(message.sequence)
        if call is None or server not in call.questions:
            return
        if not call.committing and call.returned is not None and call.spread is not None and frames:
            here = call.spread.at(server)
            shape = (here.stop - here.start, call.returned.shape[1])
            if len(frames) == 1 and message.rows == shape[0]:
                rows = call.returned[here] = as_array(frames[0], np.float32, shape)
                call.lacking.discard(server)
                pushed = 0 if message.applied else message.sequence
                self._copy(server, message.marks, call.spread.places[here], rows, pushed)
        if message.applied:
            del call.questions[server]
        elif not call.committing and isinstance(call.questions[server].message, Push):
            del call.questions[server]
            call.staged = True
        if call.done and call.staged and not call.committing:
            # All servers have the gradients: from here on the push must count everywhere. A server that had
            # applied it already, sent by an older incarnation, may answer last.
            call.committing = True
            for each in call.frames:
                call.questions[each] = self._question(Commit(call.sequence), ())
            self._uncommitted = set(call.frames)

    def _take_commit(self, server: int, request: int) -> None:
        """A pull that carried a commit was answered: the push is applied there."""
        call = self._pushes[-1] if self._pushes else None
        commit = call.questions.get(server) if call is not None else None
        if call is not None and commit is not None and commit.carrier == request:
            del call.questions[server]
            self._drop_kept()

    def _take_refusal(self, server: int, message: Refused) -> None:
        call = self._numbered(message.sequence)
        if message.reason == "stale":
            self.stale = True
        elif message.reason in ("not staged", "not installed") and call and server in call.questions:
            # The server has been replaced: send everything again, to it alone. Not at every refusal: many may
            # be in transit.
            question = call.questions[server]
            if self._now >= question.refused + self._plan.timing.retry_seconds:
                question.refused = self._now
                if message.reason == "not installed":
                    self._install(server, self._installed_groups)
                if call.committing:
                    self._post(server, *self._push_message(call, server))
                self._send(server, question)

    def _ask_push(self, call: PushCall, server: int) -> None:
        self._uncommitted.discard(server)
        if call.committing:
            self._ask(call, server, Commit(call.sequence), ())
        else:
            self._ask(call, server, *self._push_message(call, server))

    def _push_message(self, call: PushCall, server: int) -> tuple[Push, Sequence[Frame]]:
        parts, frames = call.frames[server]
        returns = -1 if call.returned is None else len(self._plan.groups) - 1
        stage = self._plan.atomic
        return Push(call.sequence, call.batch, call.samples, parts, stage=stage, returns=returns), frames

    def _ask(self, call: Call, server: int, message: Message, frames: Sequence[Frame]) -> None:
        call.questions[server] = self._question(message, frames)
        self._send(server, call.questions[server])

    def _question(self, message: Message, frames: Sequence[Frame]) -> _Question:
        question = _Question(message, frames, self._now, Retry(self._plan.timing.retry_seconds, factor=2))
        question.retry.begin(self._now)
        return question

    def _send(self, server: int, question: _Question) -> None:
        self._post(server, question.message, question.frames)

    def _post(self, server: int, message: Message, frames: Sequence[Frame]) -> None:
        known = self._servers.get(server)
        if known is not None:  # else it is sent when a view contains the server
            target = Peer("server", server, known.incarnation)
            self.outbox.extend(self.routes.ways_to(Envelope(self.me, target, message, frames), self._now))

    def _doubt(self, server: int) -> None:
        known = self._servers.get(server)
        if known is not None:
            self.routes.doubt(Peer("server", server, known.incarnation), self._now)

    def _started_servers(self) -> list[Peer]:
        return [Peer("server", s.slot, s.incarnation) for s in self._servers.values()]


def empty_spread(servers: int) -> RowSpread:
    """A spread without rows."""
    return RowSpread(np.empty(0, np.uint32), np.zeros(servers + 1, np.int64))


def spread_by(
    owners: NDArray[Any], places: NDArray[Any], servers: int
) -> tuple[RowSpread, NDArray[np.int64]]:
    """Sort rows by server. Returns the spread, and the order of the rows in it."""
    order = np.argsort(owners, kind="stable")
    starts = np.searchsorted(owners[order], np.arange(servers + 1))
    return RowSpread(places[order].astype(np.uint32), starts.astype(np.int64)), order
