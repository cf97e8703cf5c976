"""Messages that arrived too early: a server keeps them until it can process them.

Senders retry unanswered messages, so none has to be kept for good.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Peer

Kind = Literal["pull", "push", "commit"]

_MOST_EARLY = 256
_MOST_AHEAD = 8


class Waiting:
    """The deferred messages of one server."""

    def __init__(self) -> None:
        self._early: list[Envelope] = []
        self._for_rows: dict[tuple[Peer, Kind, int], Envelope] = {}
        self._for_push: dict[Peer, dict[int, Envelope]] = {}

    def until_start(self, envelope: Envelope) -> None:
        """Defer a message that arrived before the server has started: its sender saw the view first."""
        if len(self._early) < _MOST_EARLY:
            self._early.append(envelope)

    def at_start(self) -> list[Envelope]:
        """Take the deferred messages when the server has started."""
        early, self._early = self._early, []
        return early

    def until_rows(self, envelope: Envelope, kind: Kind, number: int) -> None:
        """Defer a message that refers to rows which are not recovered yet."""
        self._for_rows[envelope.source, kind, number] = envelope

    def push_waits(self, source: Peer, sequence: int | None = None) -> bool:
        """Whether this push, or any push of this worker, waits for rows: later messages must wait, too."""
        if sequence is not None:
            return (source, "push", sequence) in self._for_rows
        return any(key[:2] == (source, "push") for key in self._for_rows)

    def at_rows(self) -> Iterator[Envelope]:
        """Yield messages when rows are recovered: by the workers' numbers, commits after their pushes."""
        waiting, self._for_rows = self._for_rows, {}
        for key in sorted(waiting, key=lambda key: (key[2], key[1] == "commit")):
            yield waiting[key]

    def until_push(self, envelope: Envelope, request: int) -> None:
        """Defer a pull that has overtaken the push whose effect it must see."""
        ahead = self._for_push.setdefault(envelope.source, {})
        if len(ahead) < _MOST_AHEAD:
            ahead[request] = envelope

    def at_push(self, source: Peer) -> list[Envelope]:
        """Take the pulls of this worker that waited for a push, when one was applied."""
        return list(self._for_push.pop(source, {}).values()) if self._for_push else []

    def forget_others(self, workers: Collection[Peer]) -> None:
        """Drop the pulls of replaced workers, who no longer wait for answers."""
        self._for_push = {source: pulls for source, pulls in self._for_push.items() if source in workers}
