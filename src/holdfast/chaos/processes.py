"""Processes that outlive their replacement for a while, and stop and die on command."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from holdfast.cluster.protocol.messages import Peer, Role
from holdfast.cluster.runtime.engines.local import LocalLauncher

_AFTERLIFE_SECONDS = 2.0


class Processes(LocalLauncher):
    """Starts processes as any job does, but those that are replaced are woken up, not killed at once: that is
    what becomes of a machine that was cut off or stood still. Nothing that they do may count.

    Like those of ``LocalLauncher``, calls must not overlap.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._doomed: dict[Peer, float] = {}

    def signal(self, peer: Peer, number: int) -> None:
        """As a job does it: its SIGKILL comes later. A supervisor's does not: the next one listens where it
        did."""
        if number == signal.SIGKILL and peer in self.pids() and peer.role != "supervisor":
            self._doomed.setdefault(peer, time.monotonic() + _AFTERLIFE_SECONDS)
            number = signal.SIGCONT
        super().signal(peer, number)

    def kill(self, role: Role, slot: int = 0) -> Peer | None:
        """Kill -9 the newest process of a slot, which is returned; None: there is none."""
        peer = self.newest(role, slot)
        if peer is not None:
            super().signal(peer, signal.SIGKILL)
        return peer

    def newest(self, role: Role, slot: int = 0) -> Peer | None:
        """The process that fills a slot."""
        found = [peer for peer in self.pids() if (peer.role, peer.slot) == (role, slot)]
        return max(found, key=lambda peer: peer.incarnation, default=None)

    def bury(self) -> None:
        """Kill replaced processes after their grace period."""
        now = time.monotonic()
        for peer in [peer for peer, at in self._doomed.items() if now >= at]:
            del self._doomed[peer]
            super().signal(peer, signal.SIGKILL)


def orphans() -> list[int]:
    """Processes of jobs that this process has started and that still run."""
    found = []
    mine = str(os.getpid()).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if b"holdfast.cluster.runtime.node" in arguments and mine in arguments:
            found.append(int(path.parent.name))
    return found
