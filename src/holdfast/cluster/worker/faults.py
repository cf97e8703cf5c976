"""Fault injection: kill or suspend a worker at a named point of a push.

A fault is written ``ACTION@POINT:SEQUENCE`` or ``ACTION@POINT:SEQUENCE:COUNT``. Actions: "kill" (SIGKILL),
"stop" (SIGSTOP; the test resumes it). Points: "pulled" (the rows of a batch have arrived), "computed" (its
gradients are computed, and nothing was sent), "push" and "commit" (COUNT of these messages are sent; a pull
may carry a commit), "pushed" (all servers have applied it). ``SEQUENCE`` is the number of the worker's push,
from 1; "*" is the next one after the process received SIGUSR1.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.cluster.protocol.messages import Commit, Position, Pull, Push
from holdfast.cluster.protocol.wire import Message
from holdfast.errors import ConfigError

POINTS = ("pulled", "computed", "push", "commit", "pushed")
_ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_ON_ITS_WAY_SECONDS = 0.05
_ANY = -1


@dataclass(frozen=True, slots=True)
class PushFault:
    """A fault: an action at a point."""

    action: str
    point: str
    sequence: int
    """-1: any, once the process received SIGUSR1."""
    count: int = 0

    @classmethod
    def parse(cls, text: str) -> PushFault:
        """Parse a fault. Raises ConfigError if it is malformed."""
        action, _, place = text.partition("@")
        point, *numbers = place.split(":")
        if action not in _ACTIONS or point not in POINTS or not 1 <= len(numbers) <= 2:
            raise ConfigError(
                f"fault {text!r}: expected ACTION@POINT:SEQUENCE[:COUNT] with an action of "
                f"{', '.join(_ACTIONS)} and a point of {', '.join(POINTS)}"
            )
        sequence, *count = numbers
        if not all(number.isdecimal() for number in count) or not (sequence == "*" or sequence.isdecimal()):
            raise ConfigError(f"fault {text!r}: {place.partition(':')[2]!r} must consist of numbers")
        return cls(action, point, _ANY if sequence == "*" else int(sequence), *map(int, count))


class Faults:
    """The faults of one process; without any, checks cost nothing."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._faults = [PushFault.parse(text) for text in texts]
        self._armed = False
        if any(fault.sequence == _ANY for fault in self._faults):
            signal.signal(signal.SIGUSR1, self._arm)
        self._sent: Counter[tuple[str, int]] = Counter()

    def __bool__(self) -> bool:
        return bool(self._faults)

    def _arm(self, number: int, frame: Any) -> None:
        self._armed = True

    def reach(self, point: str, sequence: int, count: int = 0) -> None:
        """Trigger the fault of this point, if there is one; this may not return."""
        for fault in self._faults:
            due = self._armed if fault.sequence == _ANY else fault.sequence == sequence
            if due and (fault.point, fault.count) == (point, count):
                time.sleep(_ON_ITS_WAY_SECONDS)  # another thread sends the messages out
                self._faults.remove(fault)
                os.kill(os.getpid(), _ACTIONS[fault.action])

    def before(self, message: Message) -> None:
        """Note that a message is about to be sent."""
        kind, sequence = _kind(message)
        if kind:
            self.reach(kind, sequence, self._sent[kind, sequence])

    def after(self, message: Message) -> None:
        """Note that a message has been handed to the transport."""
        kind, sequence = _kind(message)
        if kind:
            self._sent[kind, sequence] += 1
            self.reach(kind, sequence, self._sent[kind, sequence])


class Acknowledged:
    """Records which pushes all servers have kept, so that a checker can verify them.

    Each time the worker learns of kept pushes, it writes one line, "SEQUENCE EPOCH INDEX": the newest one and
    its batch; all earlier ones are kept, too. Without a folder nothing is written.
    """

    def __init__(self, folder: str, worker: int) -> None:
        self._file = -1
        self._sequence = 0
        if folder:
            path = acknowledged_path(Path(folder), worker)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, sequence: int, batch: Position) -> None:
        """Record the last push that all servers have kept."""
        if self._file >= 0 and sequence != self._sequence:
            self._sequence = sequence
            os.write(self._file, b"%d %d %d\n" % (sequence, batch.epoch, batch.index))


def acknowledged_path(folder: Path, worker: int) -> Path:
    """The file that ``Acknowledged`` writes."""
    return folder / f"acknowledged-{worker}"


def _kind(message: Message) -> tuple[str, int]:
    """What a message does to which push; "": nothing."""
    if isinstance(message, Push):
        return "push", message.sequence
    if isinstance(message, Commit):
        return "commit", message.sequence
    if isinstance(message, Pull) and message.commits:
        return "commit", message.after
    return "", 0
