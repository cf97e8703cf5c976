"""The interface of engines, which start the processes of a job and report which have ended."""

from __future__ import annotations

from typing import Protocol

from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.runtime.node import Assignment


class Engine(Protocol):
    """Starts and monitors processes."""

    def warm(self, role: str) -> None:
        """Start a spare process of this role before it is needed."""

    def start(self, assignment: Assignment) -> None:
        """Start a process, or assign a spare one."""

    def signal(self, peer: Peer, number: int) -> None:
        """Send a signal to a process, unless it has ended."""

    def pids(self) -> dict[Peer, int]:
        """The pids of the processes that have an assignment."""

    def exited(self) -> list[tuple[Peer, int]]:
        """The processes that have ended since the last call, with exit code or negative signal."""

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End all processes and wait for them."""
