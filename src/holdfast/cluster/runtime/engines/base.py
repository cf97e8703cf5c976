"""What an engine does: it starts the processes of a job where it sees fit, and says which have ended."""

from __future__ import annotations

from typing import Protocol

from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.runtime.node import Assignment


class Engine(Protocol):
    """Starts and watches processes."""

    def warm(self, role: str) -> None:
        """Have a process of this role ready before it is needed."""

    def start(self, assignment: Assignment) -> None:
        """Start a process, or give a ready one its assignment."""

    def signal(self, peer: Peer, number: int) -> None:
        """Send a signal to a process; one that has ended is left alone."""

    def pids(self) -> dict[Peer, int]:
        """The numbers of the processes that have an assignment."""

    def exited(self) -> list[tuple[Peer, int]]:
        """The processes that have ended since this was last asked, with exit code or negative signal."""

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End all processes and wait for them."""
