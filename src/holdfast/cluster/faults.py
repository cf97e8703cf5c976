"""Ends a worker by force at a named point of a push, so that tests can go through all of them.

A fault is written ``ACTION@POINT:SEQUENCE`` or ``ACTION@POINT:SEQUENCE:COUNT``. Actions: "kill" (SIGKILL),
"stop" (SIGSTOP: whoever tests it lets it go on). Points: "pulled" (the rows of a batch are here),
"computed" (its gradients are, and nothing was sent), "push" and "commit" (so many of these messages are
out), "pushed" (all servers have applied it). ``SEQUENCE`` is the number of the worker's push, from 1.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.cluster.messages import Commit, Message, Push
from holdfast.errors import ConfigError

POINTS = ("pulled", "computed", "push", "commit", "pushed")
_ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_ON_ITS_WAY_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, where."""

    action: str
    point: str
    sequence: int
    count: int = 0

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read one; ConfigError if it is none."""
        action, _, place = text.partition("@")
        point, *numbers = place.split(":")
        if action not in _ACTIONS or point not in POINTS or not 1 <= len(numbers) <= 2:
            raise ConfigError(
                f"fault {text!r}: expected ACTION@POINT:SEQUENCE[:COUNT] with an action of "
                f"{', '.join(_ACTIONS)} and a point of {', '.join(POINTS)}"
            )
        if not all(number.isdecimal() for number in numbers):
            raise ConfigError(f"fault {text!r}: {place.partition(':')[2]!r} is not made of numbers")
        return cls(action, point, *(int(number) for number in numbers))


class Faults:
    """The faults of one process; without any it costs nothing."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._faults = [Fault.parse(text) for text in texts]
        self._sent: Counter[tuple[str, int]] = Counter()

    def __bool__(self) -> bool:
        return bool(self._faults)

    def reach(self, point: str, sequence: int, count: int = 0) -> None:
        """A point has been reached; this may not return."""
        for fault in self._faults:
            if (fault.point, fault.sequence, fault.count) == (point, sequence, count):
                time.sleep(_ON_ITS_WAY_SECONDS)  # what was sent leaves the process from another thread
                self._faults.remove(fault)
                os.kill(os.getpid(), _ACTIONS[fault.action])

    def before(self, message: Message) -> None:
        """A message is about to be sent."""
        kind = _kind(message)
        if kind:
            sequence = message.sequence  # type: ignore[union-attr]
            self.reach(kind, sequence, self._sent[kind, sequence])

    def after(self, message: Message) -> None:
        """A message has been handed to the transport."""
        kind = _kind(message)
        if kind:
            sequence = message.sequence  # type: ignore[union-attr]
            self._sent[kind, sequence] += 1
            self.reach(kind, sequence, self._sent[kind, sequence])


def _kind(message: Message) -> str:
    return "push" if isinstance(message, Push) else "commit" if isinstance(message, Commit) else ""
