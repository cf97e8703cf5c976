"""The state machine of a worker: pull rows while computing with others, and make each push count once.

The computation is elsewhere: ``feed`` passes in batches, ``take`` returns one whose rows have arrived,
``finish`` passes in its gradients. No clock, no socket, no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import replace

from holdfast.cluster.protocol.admission import Admission
from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import (
    Evaluation,
    Figures,
    Peer,
    Position,
    Relay,
    View,
    ViewNumber,
    WorkerBeat,
    WorkerInView,
)
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.worker.calls import Calls, Floats, PullCall, PushCall, RowSpread, empty_spread

State = Literal["ready", "working", "held", "done", "failed"]


@dataclass
class Item:
    """One batch in progress."""

    position: Position
    spreads: Sequence[RowSpread]
    """The rows it needs, for each group."""
    payload: Any = None
    """The batch itself, for the caller."""
    samples: int = 0
    sequence: int = 0
    pull: PullCall | None = None
    """The pull of the tables' rows, and of the network's if those may be as old."""
    network: PullCall | None = None
    """The pull of the network's rows, if those must be newer."""
    gradients: Sequence[Floats] = field(default_factory=tuple)

    @property
    def rows(self) -> list[Floats]:
        """The pulled weights of each group, in the order of ``spreads``."""
        assert self.pull is not None
        return self.pull.rows if self.network is None else [*self.pull.rows[:-1], self.network.rows[-1]]


class Worker:
    """The state machine of one worker.

    Args:
        me: the worker's slot and incarnation.
        plan: the job's plan.
        first_values: returns a group's initial values; see ``Calls``.
    """

    def __init__(
        self, me: Peer, plan: JobPlan, first_values: Callable[[int], tuple[RowSpread, Floats]]
    ) -> None:
        self.me = me
        self.plan = plan
        self.admission = Admission(me, plan)
        self.calls = Calls(me, plan, first_values)
        self.outbox = self.calls.outbox
        self.view = View(ViewNumber(), "starting")
        self._entry: WorkerInView | None = None
        """This worker's entry in the view."""
        self.started: WorkerInView | None = None
        """The entry that it resumes from, once it has started."""
        self.applied = 0
        """The last push that all servers have applied."""
        self.tested: Evaluation | None = None
        self.error = ""
        self.figures = Figures()
        self._stepped_at = 0.0
        self.endpoint = ""
        self._fed: deque[Item] = deque()
        self._ended = False
        self._computing: Item | None = None
        self._computed: Item | None = None
        self._push: PushCall | None = None
        self._network: tuple[int, Floats | None] = (0, None)
        """The network's rows after a push that is certain, and that push."""
        self._last_sequence = 0
        self._next_beat = 0.0
        self._told: State = "ready"

    @property
    def sequence(self) -> int:
        """The last push that all servers have kept."""
        return self.calls.kept_sequence

    @property
    def batch(self) -> Position:
        """The batch of the last push that all servers have kept."""
        return self.calls.kept_batch

    @property
    def over(self) -> bool:
        """Whether to end this worker: the job ends, or a newer incarnation has replaced it."""
        mine = self._mine()
        replaced = mine is not None and mine.incarnation > self.me.incarnation
        return replaced or self.calls.stale or self.view.phase == "stopping"

    @property
    def state(self) -> State:
        """The state to report to the supervisor."""
        if self.error:
            return "failed"
        if self.started is None:
            return "ready"
        idle = self._computing is None and self._computed is None and not self.calls.unkept
        if not idle or self._owes():
            return "working"
        if self.view.phase == "ending" or (self._ended and not self._fed):
            return "done"
        return "held" if self.view.phase == "holding" else "working"

    @property
    def test_due(self) -> int:
        """The number of a test that it should run; 0 if there is none."""
        mine = self._mine()
        if mine is None or self.started is None or mine.test <= (self.tested.number if self.tested else 0):
            return 0
        return mine.test

    def wants_batch(self) -> bool:
        """Whether to call ``feed``: rows are pulled as far ahead as staleness allows."""
        if self.started is None or self._ended or len(self._fed) > self.plan.staleness:
            return False
        return self.view.phase != "ending" or (not self._fed and self._owes())

    def _owes(self) -> bool:
        """Whether a predecessor left a batch that only some servers have: it must be completed first."""
        return self.started is not None and self.applied < max(self.started.settle, self.started.owes)

    def feed(self, item: Item | None, now: float) -> None:
        """Pass in the next batch; None: there are no more."""
        if item is None:
            self._ended = True
        else:
            self._last_sequence += 1
            item.sequence = self._last_sequence
            self._fed.append(item)
        self._go_on(now)

    def take(self) -> Item | None:
        """Take a batch whose rows have all arrived; None if there is nothing to compute yet."""
        blocked = self._computing is not None or self._computed is not None
        blocked = blocked or self.calls.unkept >= self.plan.lanes.window
        if blocked or not self._fed or not (self.view.phase == "running" or self._owes()):
            return None
        pull, network = self._fed[0].pull, self._fed[0].network
        if pull is None or not pull.done or (self.plan.staleness and (network is None or not network.done)):
            return None
        self._computing = self._fed.popleft()
        return self._computing

    def finish(self, gradients: Sequence[Floats], now: float) -> None:
        """Pass in the gradients of the batch from ``take``, for each group in the order of its spreads."""
        item = self._computing
        assert item is not None
        item.gradients = gradients
        self._computing, self._computed = None, item
        self._go_on(now)

    def receive(self, envelope: Envelope, now: float) -> None:
        """Process one message."""
        message = envelope.message
        if not self.admission.admits(envelope):
            return
        if isinstance(message, View):
            known = self.view
            self._adopt(message)
            if self.view is not known:
                self.beat(now)
        elif isinstance(message, Relay):
            unwrapped = self.calls.routes.unwrap(envelope)
            if unwrapped is not None and self.admission.admits(unwrapped):
                self.calls.routes.came_by(envelope.source, unwrapped.source, now)
                self.calls.receive(unwrapped, now)
        else:
            self.calls.routes.came_directly(envelope.source, now)
            self.calls.receive(envelope, now)
        self._go_on(now)

    def tick(self, now: float) -> None:
        """Retry overdue requests, and send a beat when it is time."""
        self.calls.tick(now)
        if now >= self._next_beat:
            self.beat(now)

    def beat(self, now: float) -> None:
        """Report this worker's state to the supervisor."""
        self._next_beat = now + self.plan.timing.beat_seconds
        self._told = self.state
        waiting = self.calls.waiting_since()
        stuck = tuple(s for s, since in waiting.items() if now - since > self.plan.timing.stuck_seconds)
        message = WorkerBeat(
            state=self._told,
            view=self.view.number,
            endpoint=self.endpoint,
            batch=self.batch,
            sequence=self.sequence,
            stuck_on=stuck,
            tested=self.tested,
            error=self.error,
            figures=replace(self.figures, stepped_at=self._stepped_at),
        )
        self.outbox.append(Envelope(self.me, Peer("supervisor"), message))

    def _pull(self, item: Item, now: float) -> None:
        """Pull the rows of a batch as soon as staleness allows.

        Rows of tables may lack ``staleness`` of this worker's own updates. The network may lack none: every
        batch changes all of it, and steps that do not see each other overshoot, most of all at the start.
        There is no need to wait for answers to a commit: the pull carries it, or servers process it before
        later requests.
        """
        after = item.sequence - 1 - self.plan.staleness
        if item.pull is None and after <= self.calls.certain:
            if self.plan.staleness == 0:
                item.pull = self.calls.pull(item.spreads, now, after)
            else:
                nothing = empty_spread(self.plan.servers)
                item.pull = self.calls.pull([*item.spreads[:-1], nothing], now, max(0, after))
        if self.plan.staleness and item.network is None:
            *tables, network = item.spreads
            sequence, rows = self._network
            if rows is not None and sequence == item.sequence - 1 and len(rows) == len(network.places):
                item.network = PullCall(rows=[rows])  # returned by the last push
            elif self.applied == item.sequence - 1:
                nothing = empty_spread(self.plan.servers)
                item.network = self.calls.pull([*([nothing] * len(tables)), network], now)

    def _mine(self) -> WorkerInView | None:
        return self._entry

    def _adopt(self, view: View) -> None:
        if view.number <= self.view.number:
            return
        self.view = view
        self._entry = next((w for w in view.workers if w.slot == self.me.slot), None)
        self.calls.adopt(view.servers)
        mine = self._mine()
        if mine is None or self.started is not None or mine.incarnation != self.me.incarnation:
            return
        if mine.starts:
            self.started = mine
            self.calls.start(mine.sequence, mine.batch)
            self.applied = self._last_sequence = mine.sequence

    def _go_on(self, now: float) -> None:
        """Do everything that has become possible."""
        push = self._push
        if push is not None and push.certain and push.returned is not None and not push.lacking:
            self._network = push.sequence, push.returned
        if push is not None and push.done:
            self.applied = push.sequence
            self._stepped_at = now
            self._push = None
        if self._push is None and self._computed is not None and self.calls.applied:
            item, self._computed = self._computed, None
            self._push = self.calls.push(
                item.sequence,
                item.position,
                item.spreads,
                item.gradients,
                now,
                item.samples,
                returns=self.plan.staleness > 0,
            )
        for item in self._fed:
            self._pull(item, now)
        self.calls.send_commits()
        if self.state != self._told and self.state in ("held", "done", "failed"):
            self.beat(now)
