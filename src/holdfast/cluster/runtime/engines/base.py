"""The interface of engines, which start the processes of a job and report which have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.cluster.protocol.messages import Exit, Peer
from holdfast.cluster.runtime.keys import Keys
from holdfast.cluster.runtime.node import Assignment


class Engine(Protocol):
    """Starts and watches processes. Calls do not block."""

    vaults: int
    """How many vaults it has for the supervisor's state; 0: a restarted supervisor finds the run's folder."""

    def open_vaults(self, job: str, keys: Sequence[Keys]) -> tuple[str, ...]:
        """Open the vaults, and return their addresses."""

    def warm(self, role: str, slot: int | None = None) -> None:
        """Start a spare process of this role before it is needed; for this slot, or for any that will die."""

    def start(self, assignment: Assignment) -> None:
        """Start a process, or assign a spare one."""

    def announce(self, supervisor: str) -> None:
        """Tell all processes that the supervisor has another address now."""

    def signal(self, peer: Peer, number: int) -> None:
        """Send a signal to a process, unless it has ended."""

    def pids(self) -> dict[Peer, int]:
        """The pids of the processes that have an assignment, as far as they are known."""

    def machine(self, peer: Peer) -> str:
        """The name of the machine on which a process runs; "" if there is only one."""

    def exited(self) -> list[Exit]:
        """The processes that have ended since the last call."""

    def read(self, name: str) -> bytes | None:
        """A file that the supervisor has written to the run's folder; None if it does not exist yet."""

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End all processes and wait for them."""
