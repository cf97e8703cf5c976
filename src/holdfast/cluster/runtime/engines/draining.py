"""Machines that will be taken away: whoever runs the cluster says so beforehand, and processes leave in time.

``Notices`` asks for such machines over and over. ``Evacuation`` decides which process is to leave next. To
leave is to be killed: its next incarnation starts on another machine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from holdfast.cluster.protocol.messages import Peer, Status
from holdfast.cluster.runtime.engines.base import Draining
from holdfast.coding.machines import lost_together
from holdfast.coding.placement import Placement

log = logging.getLogger(__name__)

_ASK_SECONDS = 1.0
_CALM_SECONDS = 3.0
"""If there is time, processes leave only after so long in which nothing was lacking."""
_RETURN_SECONDS = 5.0
"""How long a server is assumed to take until nothing is lacking again, before one has been seen."""
_APART_SECONDS = 1.0
"""Reports from before a process was killed may still arrive for so long."""


class Notices:
    """Asks which machines will be taken away, in a thread of its own: the answer may take long.

    Args:
        ask: returns their names and when they go, in Unix seconds; 0: at any time.
        every_seconds: how often to ask.
    """

    def __init__(self, ask: Callable[[], Mapping[str, float]], every_seconds: float = _ASK_SECONDS) -> None:
        self._ask, self._every = ask, every_seconds
        self._until: dict[str, float | None] = {}
        self._closing = threading.Event()
        self._warned = False
        threading.Thread(target=self._run, name="drain notices", daemon=True).start()

    def __call__(self) -> Mapping[str, float | None]:
        """When each of these machines goes, by the monotonic clock; None: that is not known."""
        return self._until

    def close(self) -> None:
        """Ask no more."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(self._every):
            try:
                found = self._ask()
            except Exception as error:  # the head is away: what was said last still holds
                if not self._warned:
                    log.warning("cannot ask which machines are drained (%s): trying again", error)
                self._warned = True
                continue
            self._warned = False
            ahead = time.monotonic() - time.time()
            self._until = {machine: at + ahead if at else None for machine, at in found.items()}


class Say(Protocol):
    """Logs an event."""

    def __call__(self, event: str, **figures: Any) -> None:
        """Log it, with what it says."""


class Evacuation:
    """Decides which processes leave machines that will be taken away, and when.

    Servers go first, one after the other, each when no row or parity has been lacking for a while. Then
    workers go, and the supervisor last. If the time is too short for that, those servers go at once whose
    loss the code covers, and then all workers. Whatever is left when the machine goes is lost with it, as
    without a notice.

    Args:
        placement: where rows lie. Without a code, servers stay: leaving would lose their rows.
        say: logs events.
    """

    def __init__(self, placement: Placement, say: Say) -> None:
        self._placement, self._say = placement, say
        self._emptied: dict[str, bool] = {}
        """The machines that were announced, and whether nothing of the job runs there any more."""
        self._ended: set[Peer] = set()
        """Servers and workers that were killed and have no successor yet."""
        self._moved_at = self._calm_since = float("-inf")
        self._server_moved_at: float | None = None
        self._return_seconds = _RETURN_SECONDS

    def next(self, machines: Sequence[Draining], status: Status, now: float) -> list[Peer]:
        """The processes to kill now.

        Args:
            machines: those that will be taken away.
            status: the supervisor's latest report.
            now: by the monotonic clock.
        """
        self._announce(machines, now)
        is_whole = self._is_whole(status, now)
        leaving = [peer for machine in machines if machine.elsewhere for peer in machine.peers]
        if not leaving or not is_whole:
            return []
        servers = [p for p in leaving if p.role == "server"] if self._placement.r else []
        workers = [p for p in leaving if p.role == "worker"]
        group = servers or workers or [p for p in leaving if p.role == "supervisor"]
        if self._is_urgent(machines, len(servers), now):
            if servers:
                covered = lost_together(self._placement, [peer.slot for peer in servers])
                group = [peer for peer in servers if peer.slot in covered]
        elif now < self._calm_since + _CALM_SECONDS:
            group = []
        else:
            group = group[:1]
        for peer in group:
            self._move(peer, machines, status.steps, now)
        return group

    def wait_for(self, peer: Peer, now: float) -> None:
        """Note that a process is killed for another reason: nobody leaves until its successor is there."""
        self._moved_at = self._calm_since = now
        self._ended.add(peer)

    def _announce(self, machines: Sequence[Draining], now: float) -> None:
        names = {machine.machine for machine in machines}
        self._emptied = {name: is_empty for name, is_empty in self._emptied.items() if name in names}
        for machine in machines:
            if machine.machine not in self._emptied:
                seconds = None if machine.until is None else round(max(0.0, machine.until - now), 1)
                self._say("machine_draining", machine=machine.machine, seconds_left=seconds)
                self._emptied[machine.machine] = False
            if not machine.peers and not self._emptied[machine.machine]:
                self._say("machine_drained", machine=machine.machine)
                self._emptied[machine.machine] = True

    def _is_whole(self, status: Status, now: float) -> bool:
        """Whether all processes are there and nothing is lacking, as far as reports tell."""
        up = {(n.peer.role, n.peer.slot): n.peer for n in status.nodes if n.state != "starting"}
        self._ended = {
            peer
            for peer in self._ended
            if up.get((peer.role, peer.slot), peer).incarnation <= peer.incarnation
        }
        whole = status.phase == "running" and not status.degraded and not self._ended
        whole = whole and len(up) == len(status.nodes) and now >= self._moved_at + _APART_SECONDS
        if not whole:
            self._calm_since = now
        elif self._server_moved_at is not None:
            self._return_seconds = now - self._server_moved_at
            self._server_moved_at = None
        return whole

    def _is_urgent(self, machines: Sequence[Draining], servers: int, now: float) -> bool:
        """Whether there is no time for one after the other, with as much again for all other processes."""
        until = min((m.until for m in machines if m.until is not None and m.peers), default=None)
        each = _CALM_SECONDS + self._return_seconds
        return until is not None and now + (servers + 1) * each > until

    def _move(self, peer: Peer, machines: Sequence[Draining], step: int, now: float) -> None:
        machine = next(m.machine for m in machines if peer in m.peers)
        if peer.role == "supervisor":  # there is only one, and its successor has the same number
            self._moved_at = self._calm_since = now
            self._say("supervisor_moved", machine=machine, step=step)
            return
        self.wait_for(peer, now)
        if peer.role == "server":
            self._server_moved_at = now
            self._say("server_moved", slot=peer.slot, machine=machine, step=step)
        else:
            self._say("worker_moved", slot=peer.slot, machine=machine, step=step)
