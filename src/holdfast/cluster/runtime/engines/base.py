"""The interface of engines, which start the processes of a job and report which have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from holdfast.cluster.protocol.messages import Board, Exit, Peer
from holdfast.cluster.runtime.keys import Keys
from holdfast.cluster.runtime.node import Assignment


class Draining(Struct, frozen=True):
    """A machine that will be taken away."""

    machine: str
    until: float | None
    """When, by the monotonic clock; None: that is not known."""
    peers: tuple[Peer, ...] = ()
    """What runs there."""
    elsewhere: bool = True
    """Whether there is another machine for it."""


class Inheritance(Struct, frozen=True):
    """What an engine leaves to that of the next launcher."""

    group: str
    """By which it finds the processes."""
    machines: int
    """How many machines are used, without spares."""
    spares: int = 0
    domains: tuple[str, ...] = ()
    """The failure domain of each machine and spare."""
    job: str = ""
    """The job's name in its messages, and all that follows, come from the launcher's charter."""
    supervisor: str = ""
    vaults: Board = ()
    vault_keys: tuple[Keys, ...] = ()


class Engine(Protocol):
    """Starts and watches processes. Calls do not block."""

    most_vaults: int
    """How many vaults for the supervisor's state it may ever open; 0: a restarted supervisor finds the run's
    folder."""

    launcher: int
    """The incarnation of the launcher that uses it; 0 where no other one can take over."""

    def keep(self, charter: bytes) -> None:
        """Keep what a launcher must know that takes over, where the end of this one does not reach it."""

    def processes(self) -> frozenset[Peer] | None:
        """The processes that run or are to start; None as long as that is not known of some machine."""

    def open_vaults(self, job: str, keys: Sequence[Keys]) -> Board:
        """Open the first vaults. ``keys`` are those of all that it may open, in the order of their slots.

        When others take their place, it tells the supervisor's process.
        """

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

    def is_spread(self) -> bool | None:
        """Whether the code covers the loss of any machine as servers run now; None: that is not known, or
        there is one machine."""

    def misplaced(self) -> Peer | None:
        """A server that should start anew on another machine, so that the code covers more; None: no one.
        Its next process starts there."""

    def draining(self) -> Sequence[Draining]:
        """The machines that will be taken away. Processes that start anew start elsewhere."""

    def exited(self) -> list[Exit]:
        """The processes that have ended since the last call. Raises JobFailed if another launcher has taken
        over: then ``close`` leaves all processes to that one."""

    def read(self, name: str) -> bytes | None:
        """A file that the supervisor has written to the run's folder; None if it does not exist yet."""

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End all processes and wait for them."""
