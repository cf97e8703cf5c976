"""The sequence of views, and the epochs in their numbers, which are durable before use.

A restarted supervisor starts an epoch beyond all published ones, and every incarnation gets a new one.
So the number of a view tells which of two is newer, whoever made them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from holdfast.cluster.protocol.messages import Board, ServerInView, View, ViewNumber, WorkerInView
from holdfast.cluster.protocol.plan import JobPlan

_Entry = TypeVar("_Entry", ServerInView, WorkerInView)


class Durable(Struct, frozen=True, kw_only=True):
    """The state that a supervisor must recover after a crash."""

    epoch: int = 0
    servers: tuple[int, ...] = ()
    """The incarnation in each slot."""
    workers: tuple[int, ...] = ()
    launcher: int = 0
    """Its incarnation."""
    endpoint: str = ""
    vaults: Board = ()
    """Where this lies, if it does not lie in a file: the next supervisor asks them for it."""
    began: bool = False
    """Whether servers have started: from then on they may hold more than initial values."""
    started: tuple[ServerInView, ...] = ()
    """Replacements that have taken over: nodes that saw one no longer know how far the dead server came."""


class Storage(Protocol):
    """Stores the durable state."""

    def load(self) -> Durable | None:
        """Read the last saved state; None the first time."""

    def save(self, state: Durable) -> None:
        """Save the state: once this returns, a crash does not lose it."""


class Views:
    """The views of one supervisor; ``now`` is the newest.

    Args:
        plan: the job's plan.
        storage: stores epochs durably.
        tell: called with each view after the first.
    """

    def __init__(self, plan: JobPlan, storage: Storage, tell: Callable[[View], None]) -> None:
        self._storage = storage
        self._tell = tell
        self._durable = storage.load() or Durable(servers=(1,) * plan.servers, workers=(1,) * plan.workers)
        self._raise_epoch()
        known = self._durable
        servers = tuple(ServerInView(slot, incarnation) for slot, incarnation in enumerate(known.servers))
        for entry in known.started:
            if entry.incarnation == known.servers[entry.slot]:
                servers = _with(servers, entry)
        workers = tuple(WorkerInView(slot, incarnation) for slot, incarnation in enumerate(known.workers))
        self.now = View(ViewNumber(known.epoch), "starting", servers, workers, launcher=known.launcher)

    @property
    def began(self) -> bool:
        """Whether servers have started."""
        return self._durable.began

    def change(self, **changes: Any) -> None:
        """Publish the next view."""
        self.now = replace(self.now, number=self.next_number(), **changes)
        self._tell(self.now)

    def change_server(self, slot: int, **changes: Any) -> None:
        """Publish the next view, with a change of one server."""
        self.change(servers=_with(self.now.servers, replace(self.now.servers[slot], **changes)))

    def change_worker(self, slot: int, **changes: Any) -> None:
        """Publish the next view, with a change of one worker."""
        self.change(workers=_with(self.now.workers, replace(self.now.workers[slot], **changes)))

    def next_number(self) -> ViewNumber:
        """The number of the next view, unless a new epoch starts first."""
        old, epoch = self.now.number, self._durable.epoch
        return ViewNumber(epoch, old.revision + 1 if old.epoch == epoch else 0)

    def begin(self) -> None:
        """Record that the first servers of all slots are about to start."""
        if not self.began:
            self._raise_epoch(began=True)

    def start_server(self, slot: int, endpoint: str) -> None:
        """Publish that a replacement takes over its slot, durably: a restarted supervisor repeats it."""
        since = ViewNumber(self._durable.epoch + 1)
        entry = replace(self.now.servers[slot], endpoint=endpoint, starts=True, since=since)
        others = (other for other in self._durable.started if other.slot != slot)
        self._raise_epoch(started=(*others, entry))
        self.change(servers=_with(self.now.servers, entry))

    def replace_server(self, slot: int) -> None:
        """Request a new incarnation for a server's slot."""
        servers = _with(self.now.servers, ServerInView(slot, self.now.servers[slot].incarnation + 1))
        self._raise_epoch(servers=tuple(entry.incarnation for entry in servers))
        self.change(servers=servers)

    def replace_worker(self, slot: int) -> None:
        """Request a new incarnation for a worker's slot."""
        old = self.now.workers[slot]
        workers = _with(self.now.workers, WorkerInView(slot, old.incarnation + 1, test=old.test))
        self._raise_epoch(workers=tuple(entry.incarnation for entry in workers))
        self.change(workers=workers)

    def replace_launcher(self, incarnation: int) -> None:
        """Note that another launcher has taken over, durably: no earlier one may start anything any more."""
        self._raise_epoch(launcher=incarnation)
        self.change(launcher=incarnation)

    def _raise_epoch(self, **changes: Any) -> None:
        """Start a new epoch, durable together with these changes before either is published."""
        self._durable = replace(self._durable, epoch=self._durable.epoch + 1, **changes)
        self._storage.save(self._durable)


def _with(entries: tuple[_Entry, ...], changed: _Entry) -> tuple[_Entry, ...]:
    return tuple(changed if entry.slot == changed.slot else entry for entry in entries)
