"""Inject faults into a running job, each as soon as the code covers it.

No more servers are taken at once than the code has parities, and a further one only when everything that is
lost has been brought back; a server that is taken again and again counts once. ``Injector.step`` is the main
path, called many times a second.
"""

from __future__ import annotations

import heapq
import itertools
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.chaos.processes import Processes
from holdfast.chaos.schedule import (
    BEYOND_KINDS,
    SERVER_KINDS,
    TAKES_ANY,
    TWO_KINDS,
    Fault,
    Moment,
    Shape,
    other_faults,
    server_faults,
)
from holdfast.cluster.protocol.messages import NodeStatus, Peer, Role, Status
from holdfast.cluster.runtime.transport.links import Links

_FRESH_SECONDS = 1.0
"""Reports are no older than this when a server is taken."""
_MARGIN_SECONDS = 1.0
"""That reports are behind: so long after a fault they say nothing about it."""
_NEAR_MISS_SECONDS = 5.0
"""A replacement that does not come to the moment at which it was to die is killed at any other."""
_BATCHES_BETWEEN = 20
_LATE_SECONDS = 3.0
"""That messages are late."""


@dataclass
class _Chase:
    """A slot whose replacements are to be killed."""

    slot: int
    last: Peer
    moments: list[Moment]
    since: float


@dataclass
class _Stream:
    faults: Iterator[Fault]
    next: Fault
    at: float


@dataclass
class Injector:
    """Injects the faults of one job.

    Args:
        seed: decides which.
        shape: of the job.
        processes: it runs in.
        links: between them.
        say: called with each fault as it happens.
    """

    seed: int
    shape: Shape
    processes: Processes
    links: Links
    say: Callable[..., None]
    done: Counter[str] = field(default_factory=Counter)
    """Faults that have happened, by kind."""
    announced: bool = False
    """Whether more servers were taken than the code covers."""
    blocked_since: float | None = None
    """Since when the next fault has waited for what is lost to come back."""
    _status: Status | None = None
    _heard: float = 0.0
    _taken_at: int = 0
    _killed: dict[int, int] = field(default_factory=dict)
    _touched: dict[int, float] = field(default_factory=dict)
    _timers: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _chase: _Chase | None = None
    _in_push: set[Peer] = field(default_factory=set)
    _streams: list[_Stream] = field(default_factory=list)
    _for_good: dict[str, list[tuple[Peer, Peer]]] = field(default_factory=dict)

    def start(self) -> None:
        """Start injecting faults."""
        now = time.monotonic()
        for faults in (server_faults(self.seed, self.shape), other_faults(self.seed, self.shape)):
            first = next(faults)
            self._streams.append(_Stream(faults, first, now + first.gap_seconds))

    def stop(self) -> None:
        """Stop injecting faults: resume suspended processes, and repair all links."""
        self._streams.clear()
        self._chase = None
        self.blocked_since = None
        while self._timers:
            heapq.heappop(self._timers)[2]()
        self.links.mend()
        last = time.monotonic() + self.shape.timing.stuck_seconds + _MARGIN_SECONDS
        self._touched = {slot: min(until, last) for slot, until in self._touched.items()}

    @property
    def has_struck(self) -> bool:
        """Whether a fault has happened that may take a server."""
        return any(kind in SERVER_KINDS | TWO_KINDS | BEYOND_KINDS for kind in self.done)

    def note(self, status: Status) -> None:
        """Record a progress report of the job."""
        self._status, self._heard = status, time.monotonic()

    def step(self) -> None:
        """Inject the faults that are due."""
        now = time.monotonic()
        self.processes.bury()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        self._note_deaths_in_push()
        self._go_on_chasing(now)
        waits = False
        for stream in self._streams:
            if now < stream.at:
                continue
            if not self._may(stream.next, now):
                waits = True
                continue
            self._strike(stream.next)
            stream.next = next(stream.faults)
            stream.at = time.monotonic() + stream.next.gap_seconds
        self.blocked_since = (self.blocked_since or now) if waits else None

    def degraded(self) -> set[int]:
        """The slots whose server may be gone, or has not brought everything back."""
        now = time.monotonic()
        if self._status is None or now - self._heard > _FRESH_SECONDS:
            return set(range(self.shape.servers))
        nodes = {node.peer.slot: node for node in self._status.nodes if node.peer.role == "server"}
        return {
            slot
            for slot in range(self.shape.servers)
            if slot not in nodes or not self._is_whole(nodes[slot]) or now < self._touched.get(slot, 0.0)
        }

    def _is_whole(self, node: NodeStatus) -> bool:
        lacks = node.redundancy.rows or node.redundancy.parities
        alive = node.state == "ready" and node.silent_seconds < _FRESH_SECONDS
        return alive and not lacks and node.peer.incarnation > self._killed.get(node.peer.slot, 0)

    def _may(self, fault: Fault, now: float) -> bool:
        """Whether the job must survive this fault."""
        status = self._status
        if status is None or status.phase not in ("running", "holding"):
            return False
        if fault.takes_servers:
            return self._may_take(fault, now)
        if fault.kind.startswith("worker"):  # one that is at work: else no batch would ever count
            states = {node.peer: node.state for node in status.nodes}
            worker = self.processes.newest("worker", fault.worker)
            return worker is not None and states.get(worker) == "working"
        return True

    def _may_take(self, fault: Fault, now: float) -> bool:
        """Whether the code covers this, or need not."""
        if self._chase is not None or now - self._heard > _FRESH_SECONDS or not self._has_worked():
            return False
        return self.shape.beyond or self._gone_with(fault) <= self.shape.r

    def _gone_with(self, fault: Fault) -> int:
        """How many servers may be gone at once if this happens now."""
        degraded = self.degraded()
        return len(degraded) + 1 if fault.kind in TAKES_ANY else len(degraded | set(fault.servers))

    def _has_worked(self) -> bool:
        """Whether batches have counted since a server was taken last: else there would be little to lose."""
        return self._status is not None and self._status.steps >= self._taken_at + _BATCHES_BETWEEN

    def _strike(self, fault: Fault) -> None:
        if fault.takes_servers:
            self._taken_at = self._status.steps if self._status is not None else 0
            self.announced = self.announced or self._gone_with(fault) > self.shape.r
        if fault.kind != "worker_kill_in_push":  # that one counts when it has happened
            details = {"servers": fault.servers, "worker": fault.worker, "lasts_seconds": fault.seconds}
            self._count(fault.kind, **details)
        getattr(self, f"_{fault.kind}")(fault)

    def _count(self, kind: str, **details: Any) -> None:
        self.done[kind] += 1
        self.say("fault", kind=kind, **details)

    def _kill(self, role: Role, slot: int) -> Peer | None:
        peer = self.processes.kill(role, slot)
        if role == "server" and peer is not None:
            self._killed[slot] = peer.incarnation
            self._touch(slot, 0.0)
        if peer is not None:
            self._in_push.discard(peer)
        return peer

    def _touch(self, slot: int, seconds: float) -> None:
        until = time.monotonic() + seconds + _MARGIN_SECONDS
        self._touched[slot] = max(until, self._touched.get(slot, 0.0))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), action))

    # Servers

    def _server_kill(self, fault: Fault) -> None:
        for slot in fault.servers:
            self._kill("server", slot)

    _two_servers_kill = _too_many_servers_kill = _server_kill

    def _server_and_supervisor_kill(self, fault: Fault) -> None:
        self._server_kill(fault)
        self._supervisor_kill(fault)

    def _server_and_worker_kill(self, fault: Fault) -> None:
        self._server_kill(fault)
        self._worker_kill(fault)

    def _replacement_kill(self, fault: Fault) -> None:
        (slot,) = fault.servers
        peer = self._kill("server", slot)
        if peer is not None:
            self._chase = _Chase(slot, peer, list(fault.moments), time.monotonic())

    def _go_on_chasing(self, now: float) -> None:
        chase = self._chase
        if chase is None:
            return
        peer = self.processes.newest("server", chase.slot)
        if peer is None or peer.incarnation <= chase.last.incarnation:
            return
        if not self._is_the_moment(peer, chase.moments[0]) and now - chase.since < _NEAR_MISS_SECONDS:
            return
        self._count(f"replacement_kill_{chase.moments.pop(0)}", servers=(chase.slot,))
        killed = self._kill("server", chase.slot)
        self._chase = chase if chase.moments and killed is not None else None
        chase.last, chase.since = killed or chase.last, now

    def _is_the_moment(self, peer: Peer, moment: Moment) -> bool:
        if moment == "coming":
            return True
        nodes = self._status.nodes if self._status is not None else ()
        found = next((node.redundancy for node in nodes if node.peer == peer), None)
        if found is None:
            return False
        if moment == "recovering":
            return found.rows > 0 and found.recovered > 0
        return found.rows == 0 and found.parities > 0

    def _server_pause(self, fault: Fault) -> None:
        self._stop("server", fault.servers[0], fault.seconds)

    _server_freeze = _server_pause

    def _server_cut_off(self, fault: Fault) -> None:
        self._touch(fault.servers[0], fault.seconds)
        self._break(Peer("server", fault.servers[0]), Peer("supervisor"), fault.seconds)

    def _servers_apart(self, fault: Fault) -> None:
        for slot in fault.servers:
            self._touch(slot, fault.seconds + self.shape.timing.stuck_seconds)
        one, other = (Peer("server", slot) for slot in fault.servers)
        self._break(one, other, fault.seconds)

    def _servers_apart_for_good(self, fault: Fault) -> None:
        """Until the next two, or the end: every two have a third one between them."""
        one, other = (Peer("server", slot) for slot in fault.servers)
        if self.shape.servers > 2:
            self._apart_for_good("servers", one, other, one_way=fault.one_way)
        for slot in fault.servers:
            self._touch(slot, self.shape.timing.stuck_seconds)

    def _server_slow(self, fault: Fault) -> None:
        """Changes that it keeps parities of arrive late, and so do its acknowledgements."""
        (slot,) = fault.servers
        until = time.monotonic() + _LATE_SECONDS
        for other in range(self.shape.servers):
            self._touch(other, _LATE_SECONDS + fault.seconds + self.shape.timing.stuck_seconds)
            self.links.slow_link(Peer("server", other), Peer("server", slot), until, fault.seconds)

    def _server_delay(self, fault: Fault) -> None:
        for slot in range(self.shape.servers):
            self._touch(slot, _LATE_SECONDS + self.shape.timing.stuck_seconds)
        self._slow(Peer("server", fault.servers[0]), fault.seconds)

    # All others

    def _worker_kill(self, fault: Fault) -> None:
        self._kill("worker", fault.worker)

    def _supervisor_kill(self, fault: Fault) -> None:
        self._kill("supervisor", 0)

    def _worker_kill_in_push(self, fault: Fault) -> None:
        peer = self.processes.newest("worker", fault.worker)
        if peer is not None:
            self._in_push.add(peer)
            self.processes.signal(peer, signal.SIGUSR1)

    def _note_deaths_in_push(self) -> None:
        for peer in [peer for peer in self._in_push if peer not in self.processes.pids()]:
            self._in_push.remove(peer)
            self._count("worker_kill_in_push", worker=peer.slot)

    def _worker_pause(self, fault: Fault) -> None:
        self._stop("worker", fault.worker, fault.seconds)

    _worker_freeze = _worker_pause

    def _supervisor_pause(self, fault: Fault) -> None:
        self._stop("supervisor", 0, fault.seconds)

    def _supervisor_freeze(self, fault: Fault) -> None:
        """Whoever started it must end it: it does not wake up."""
        self.processes.signal(Peer("supervisor"), signal.SIGSTOP)

    def _worker_cut_off(self, fault: Fault) -> None:
        self._break(Peer("worker", fault.worker), Peer("supervisor"), fault.seconds)

    def _worker_apart(self, fault: Fault) -> None:
        self._break(Peer("worker", fault.worker), Peer("server", fault.servers[0]), fault.seconds)

    def _worker_apart_for_good(self, fault: Fault) -> None:
        ends = Peer("worker", fault.worker), Peer("server", fault.servers[0])
        if self.shape.servers > 1:
            self._apart_for_good("worker", *ends, one_way=fault.one_way)

    def _apart_for_good(self, which: str, one: Peer, other: Peer, *, one_way: bool) -> None:
        for ends in self._for_good.pop(which, ()):
            self.links.break_link(*ends, 0.0)
        self._for_good[which] = [(one, other)]
        self.links.break_link(one, other, math.inf, one_way=one_way)

    def _worker_delay(self, fault: Fault) -> None:
        self._slow(Peer("worker", fault.worker), fault.seconds)

    def _slow(self, peer: Peer, delay_seconds: float) -> None:
        self.links.slow(peer, time.monotonic() + _LATE_SECONDS, delay_seconds)

    def _stop(self, role: Role, slot: int, seconds: float) -> None:
        peer = self.processes.newest(role, slot)
        if peer is None:
            return
        if role == "server":
            self._touch(slot, seconds)
        self.processes.signal(peer, signal.SIGSTOP)
        self._later(seconds, lambda: self.processes.signal(peer, signal.SIGCONT))

    def _break(self, one: Peer, other: Peer, seconds: float) -> None:
        self.links.break_link(one, other, time.monotonic() + seconds)
