"""One job of real processes under faults, from its start to the comparison of what it leaves.

``Trial.run`` is the main path. Its phases: the job is *starting*; *faults* happen; they no longer do, and it
is *recovering* what is lost; workers hold while servers are *checking* every stripe; the job is *ending*.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from holdfast.chaos.checker import Checker
from holdfast.chaos.injector import Injector
from holdfast.chaos.processes import Processes
from holdfast.chaos.schedule import Shape, points_of_pushes
from holdfast.cluster.protocol.messages import Peer, Status
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.report.result import JobResult
from holdfast.cluster.runner import Runner
from holdfast.cluster.runtime.loop import LINKS_FILE
from holdfast.cluster.runtime.transport.links import Links
from holdfast.errors import DataLoss, HoldfastError, NoSuchVersion
from holdfast.events import EventLog, read_events

HANG_SECONDS = 60.0
"""Nothing takes so long that is going on at all."""
_START_SECONDS = 180.0
_MOST_INCARNATIONS = 10_000
_SHOW_SECONDS = 0.25

Phase = Literal["starting", "faults", "recovering", "checking", "ending"]


class Hang(HoldfastError):
    """A job makes no progress."""


class Clock:
    """The time that is left for faults: it passes while they may happen."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self._ticked: float | None = None

    def tick(self, *, passes: bool) -> None:
        """Take note of the time."""
        now = time.monotonic()
        if self._ticked is not None:
            self.left = max(0.0, self.left - (now - self._ticked))
        self._ticked = now if passes else None


class Trial:
    """One job.

    Args:
        plan: of it, with a ``Counting`` model.
        seed: seed of the faults.
        folder: of it, which is made.
        checker: of its store.
        clock: says how long faults happen.
        on_progress: called a few times a second.
        beyond: whether more servers may be taken than the code covers.

    Attributes:
        problems: what is not as it must be, in words; the checker has its own.
        acknowledged: batches of which workers were told that they count.
    """

    def __init__(
        self,
        plan: JobPlan,
        seed: int,
        folder: Path,
        checker: Checker,
        clock: Clock,
        on_progress: Callable[[Trial], None] = lambda trial: None,
        *,
        beyond: bool = False,
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.problems: list[str] = []
        self.acknowledged = 0
        self.status: Status | None = None
        self.phase: Phase = "starting"
        chaos = self._chaos = folder / "chaos"
        chaos.mkdir(parents=True)
        self._checker, self._clock = checker, clock
        self._events = EventLog(folder)
        self._processes = Processes(folder)
        shape = Shape(plan.servers, plan.workers, plan.r, plan.timing, beyond)
        links = Links(chaos / LINKS_FILE, create=True)
        self.injector = Injector(seed, shape, self._processes, links, self._events.emit)
        points = (points_of_pushes(seed, shape, w, atomic=plan.atomic) for w in range(plan.workers))
        self._points = {w: tuple(itertools.islice(p, _MOST_INCARNATIONS)) for w, p in enumerate(points)}
        self._moved = self._entered = time.monotonic()
        self._steps = 0
        self._scrubbed: dict[tuple[int, int], tuple[int, int]] = {}
        self._scrubbed_before: dict[tuple[int, int], int] = {}
        self._versions: set[int] = set()
        self._network_lost: dict[Peer, int] = {}
        self._recovered: set[float] = set()
        self._on_progress = on_progress
        self._shown = 0.0

    def run(self) -> None:
        """Raises DataLoss, another JobFailed, or Hang; no process is left behind."""
        runner = Runner(
            self.plan,
            self._processes,
            self.folder,
            self._events,
            faults=dict(self._points),
            chaos=str(self._chaos),
        )
        try:
            ended = runner.run(self._take, self._step, hold_requested=lambda: self.phase == "checking")
            self._check_end(ended)
        except DataLoss as error:
            self._check_loss(error)
            raise
        finally:
            self._clock.tick(passes=False)
            self._events.close()

    def events(self) -> Counter[str]:
        """The number of events by name."""
        found = read_events(self.folder)
        counts = Counter(event["event"] for event in found)
        counts["supervisor_started"] = sum(
            event["event"] == "process_started" and event["role"] == "supervisor" for event in found
        )
        return counts

    @property
    def recoveries(self) -> int:
        """Servers that have brought all rows back, as far as reports have said it."""
        return len(self._recovered)

    @property
    def stripes_checked(self) -> int:
        """Over all servers that there ever were."""
        return sum(scrubbed for scrubbed, _ in self._scrubbed.values())

    @property
    def loss_is_right(self) -> bool:
        """Whether the job may say that it has lost something: more was taken than the code covers, or the
        network, of which the code has no copies."""
        failure = self.status.failure if self.status is not None else None
        return self.injector.announced or (failure is not None and failure[0] == "network")

    # While it runs

    def _take(self, status: Status) -> None:
        now = time.monotonic()
        self.status = status
        self.injector.note(status)
        for node in status.nodes:
            if node.peer.role == "server":
                found = node.redundancy
                self._scrubbed[node.peer.slot, node.peer.incarnation] = found.scrubbed, found.wrong
                self._note_lost(node.peer, found.updates_lost)
        if status.steps > self._steps:
            self._steps, self._moved = status.steps, now
        self._recovered |= {h.at for h in status.happened if h.event == "server_recovered"}
        newest = status.versions[-1:]
        if newest and newest[0] not in self._versions:
            self._versions.add(newest[0])
            self._checker.check_version(newest[0])

    def _note_lost(self, server: Peer, updates: int) -> None:
        """A server has said how many pushes its network lacks for good."""
        before = self._network_lost.get(server, 0)
        if updates > before:
            self._network_lost[server] = updates
            self._checker.network_lost[server.slot] += updates - before

    def _step(self) -> bool:
        """Called many times a second: let happen what is due; says whether the job is to end."""
        self.injector.step()
        self._clock.tick(passes=self.phase == "faults")
        self._watch()
        if self.phase == "starting" and self._steps > 0:
            self._enter("faults")
            self.injector.start()
        elif self.phase == "faults" and not self._clock.left and self.injector.has_struck:
            self._enter("recovering")
            self.injector.stop()
        elif self.phase == "recovering" and not self.injector.degraded():
            self._enter("checking")
        elif self.phase == "checking" and self._has_checked_all():
            self._enter("ending")
        now = time.monotonic()
        if now - self._shown >= _SHOW_SECONDS:
            self._shown = now
            self._on_progress(self)
        return self.phase == "ending"

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._entered = time.monotonic()
        self._events.emit("phase", phase=phase)

    def _watch(self) -> None:
        """Raise Hang if there is no progress."""
        now = time.monotonic()
        where = f"see {self.folder}"
        blocked = self.injector.blocked_since
        if self.phase == "starting":
            if now - self._entered > _START_SECONDS:
                raise Hang(f"the job did not start within {_START_SECONDS:.0f} s: {where}")
        elif self.phase == "faults":
            if now - self._moved > HANG_SECONDS:
                raise Hang(f"no batch has counted for {HANG_SECONDS:.0f} s: {where}")
            if blocked is not None and now - blocked > HANG_SECONDS:
                lacking = sorted(self.injector.degraded())
                raise Hang(f"servers {lacking} were not whole again within {HANG_SECONDS:.0f} s: {where}")
        elif now - self._entered > HANG_SECONDS:
            raise Hang(f"the job was {self.phase} for {HANG_SECONDS:.0f} s: {where}")

    def _has_checked_all(self) -> bool:
        """Whether all servers have gone over all of their parities while workers hold."""
        status = self.status
        if status is None or status.phase != "holding":
            return False
        if any(n.state not in ("held", "done") for n in status.nodes if n.peer.role == "worker"):
            return False
        stripes = sum(
            placement.blocks(group.rows) * placement.r
            for group, placement in zip(self.plan.groups, self.plan.placements, strict=True)
        )
        current = {
            (n.peer.slot, n.peer.incarnation): n.redundancy.scrubbed
            for n in status.nodes
            if n.peer.role == "server"
        }
        for server, scrubbed in current.items():
            self._scrubbed_before.setdefault(server, scrubbed)
        # One chunk more: that which was under way when they held.
        enough = stripes + self.plan.lanes.chunk(1)
        return all(current[s] - self._scrubbed_before[s] >= enough for s in current)

    # When it is over

    def _check_end(self, ended: JobResult) -> None:
        if self.phase != "ending":
            self.problems.append(f"the job ended by itself while it was {self.phase}")
        assert self.status is not None
        self._checker.check_version()
        self._checker.check_memory(self.status, ended.steps)
        self.acknowledged = self._checker.check_acknowledged(self._chaos)
        for (slot, incarnation), (_, wrong) in self._scrubbed.items():
            if wrong:
                self._checker.complain(
                    f"server {slot}, incarnation {incarnation}, found {wrong} parities that do not fit"
                )

    def _check_loss(self, error: DataLoss) -> None:
        """More was lost than the code covers: right if that was done to it, and if its store is."""
        if not self.loss_is_right:
            self.problems.append(f"the code covered all that happened, but {error}")
        with contextlib.suppress(NoSuchVersion):
            self._checker.check_version()
