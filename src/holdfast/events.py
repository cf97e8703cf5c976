"""The run log: one JSON object per line, with named figures.

Everything that is shown during a run is logged, too, so that plots, tests and other programs never have to
parse console output. Each line is one write, flushed at once: after a crash the file ends with the last
event.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec

from holdfast.redaction import redacted

log = logging.getLogger("holdfast.events")


class EventLog:
    """Appends events to ``events.jsonl`` in a run's folder; without a folder, it does nothing.

    Every event has ``time`` (Unix seconds), ``seconds`` since the run started, and ``event``, its name.
    NaN and infinities are written as null. Several processes may write to one
    log: each line is appended by one write, and all processes count seconds from the first event.
    """

    def __init__(self, folder: Path | None) -> None:
        self._started = time.monotonic()
        self._file: BinaryIO | None = None
        self._failed = False
        if folder is not None:
            self._started -= _age(folder / "events.jsonl")
            self._file = open(folder / "events.jsonl", "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def emit(self, event: str, /, **figures: Any) -> None:
        """Write one event with its figures: numbers, strings, lists, dicts, under other names than the above.

        Passwords in them are replaced by ``***``. If an event cannot be written, for example on a full disk,
        it is dropped, with one warning.
        """
        if self._file is None:
            return
        seconds = time.monotonic() - self._started
        line = {"time": time.time(), "seconds": round(seconds, 6), "event": event}
        if line.keys() & figures.keys():
            raise ValueError(f"event {event}: {', '.join(line.keys() & figures.keys())} are reserved names")
        line |= redacted(figures)
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("could not log the event %s, and possibly later ones: %s", event, error)

    def close(self) -> None:
        """Close the file; later events are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _age(path: Path) -> float:
    """Seconds since the run of this log started; 0 if it starts now."""
    return max(0.0, time.time() - started_at(path))


def started_at(path: Path) -> float:
    """When the run of this log started, in Unix seconds; now, if it has no event yet."""
    try:
        with open(path, "rb") as file:
            first = msgspec.json.decode(file.readline())
    except (FileNotFoundError, msgspec.DecodeError):
        return time.time()
    started: float = first["time"] - first["seconds"]
    return started


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events of a run, oldest first; truncated lines (after a full disk) are skipped."""
    found = []
    for line in (folder / "events.jsonl").read_bytes().splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(line))
    return found
