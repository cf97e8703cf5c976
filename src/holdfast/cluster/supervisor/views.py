"""The views that everybody is told, in order, and the epochs in their numbers: those are durable before use.

A supervisor that comes back begins an epoch beyond all that were ever told, and every incarnation gets one.
So of two views the newer one can be told by its number, whoever made them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from holdfast.cluster.protocol.messages import ServerInView, View, ViewNumber, WorkerInView
from holdfast.cluster.protocol.plan import JobPlan

_Entry = TypeVar("_Entry", ServerInView, WorkerInView)


class Durable(Struct, frozen=True, kw_only=True):
    """What a supervisor must know again after a crash."""

    epoch: int = 0
    servers: tuple[int, ...] = ()
    """The incarnation of each slot."""
    workers: tuple[int, ...] = ()
    endpoint: str = ""
    began: bool = False
    """Whether servers have begun: from then on what they hold is more than first values."""
    started: tuple[ServerInView, ...] = ()
    """Replacements that have taken over: who has heard of one has forgotten how far the dead server came."""


class Storage(Protocol):
    """Keeps the durable state."""

    def load(self) -> Durable | None:
        """What was saved last; None the first time."""

    def save(self, state: Durable) -> None:
        """Keep it: when this returns, a crash no longer loses it."""


class Views:
    """The views of one supervisor; ``now`` is the newest.

    Args:
        plan: the job's.
        storage: where epochs are kept.
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
        self.now = View(ViewNumber(known.epoch), "starting", servers, workers)

    @property
    def began(self) -> bool:
        """Whether servers have begun."""
        return self._durable.began

    def change(self, **changes: Any) -> None:
        """The next view."""
        self.now = replace(self.now, number=self.next_number(), **changes)
        self._tell(self.now)

    def change_server(self, slot: int, **changes: Any) -> None:
        """The next view, in which only a server differs."""
        self.change(servers=_with(self.now.servers, replace(self.now.servers[slot], **changes)))

    def change_worker(self, slot: int, **changes: Any) -> None:
        """The next view, in which only a worker differs."""
        self.change(workers=_with(self.now.workers, replace(self.now.workers[slot], **changes)))

    def next_number(self) -> ViewNumber:
        """The number of the next view, if no epoch begins before it."""
        old, epoch = self.now.number, self._durable.epoch
        return ViewNumber(epoch, old.revision + 1 if old.epoch == epoch else 0)

    def begin(self) -> None:
        """The first servers of all slots are about to begin."""
        if not self.began:
            self._raise_epoch(began=True)

    def start_server(self, slot: int, endpoint: str) -> None:
        """A replacement takes its slot over; a supervisor that comes after this one will say the same."""
        since = ViewNumber(self._durable.epoch + 1)
        entry = replace(self.now.servers[slot], endpoint=endpoint, starts=True, since=since)
        others = (other for other in self._durable.started if other.slot != slot)
        self._raise_epoch(started=(*others, entry))
        self.change(servers=_with(self.now.servers, entry))

    def replace_server(self, slot: int) -> None:
        """A server no longer counts: another incarnation is to take its slot over."""
        servers = _with(self.now.servers, ServerInView(slot, self.now.servers[slot].incarnation + 1))
        self._raise_epoch(servers=tuple(entry.incarnation for entry in servers))
        self.change(servers=servers)

    def replace_worker(self, slot: int) -> None:
        """A worker no longer counts: another incarnation is to take its slot over."""
        old = self.now.workers[slot]
        workers = _with(self.now.workers, WorkerInView(slot, old.incarnation + 1, test=old.test))
        self._raise_epoch(workers=tuple(entry.incarnation for entry in workers))
        self.change(workers=workers)

    def _raise_epoch(self, **changes: Any) -> None:
        """A new epoch, durable with what begins with it before anybody hears of either."""
        self._durable = replace(self._durable, epoch=self._durable.epoch + 1, **changes)
        self._storage.save(self._durable)


def _with(entries: tuple[_Entry, ...], changed: _Entry) -> tuple[_Entry, ...]:
    return tuple(changed if entry.slot == changed.slot else entry for entry in entries)
