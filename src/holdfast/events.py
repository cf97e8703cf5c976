"""The structured log of a run: one JSON object a line, each figure by name.

Everything that a person sees while a run goes on stands here too, so that a plot, a test or another
program never has to read the screen. A line is written whole and flushed at once: after a crash the
file ends with the last event that happened.
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
    """Appends events to ``events.jsonl`` in a run's folder; without a folder it keeps none.

    Every event has ``time`` (Unix seconds), ``seconds`` since the run started, and ``event``, its name.
    Floats that JSON cannot hold (NaN, infinities) are written as null. Several processes may write to one
    log: each line is one write at the file's end, and all count seconds from the first event in it.
    """

    def __init__(self, folder: Path | None) -> None:
        self._started = time.monotonic()
        self._file: BinaryIO | None = None
        self._failed = False
        if folder is not None:
            self._started -= _age(folder / "events.jsonl")
            self._file = open(folder / "events.jsonl", "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def emit(self, event: str, /, **figures: Any) -> None:
        """Write one event with its figures: numbers, strings, lists, dicts; none of the names above.

        Passwords in them are replaced by ``***``.

        What cannot be written, on a full disk say, is left out: training does not need it. A warning says so
        once.
        """
        if self._file is None:
            return
        seconds = time.monotonic() - self._started
        line = {"time": time.time(), "seconds": round(seconds, 6), "event": event}
        if line.keys() & figures.keys():
            raise ValueError(f"event {event}: {', '.join(line.keys() & figures.keys())} are the log's own")
        line |= redacted(figures)
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("the event %s could not be logged, and others may not be: %s", event, error)

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
    """How long ago the run started whose log this is; 0 if it starts now."""
    try:
        with open(path, "rb") as file:
            first = msgspec.json.decode(file.readline())
    except (FileNotFoundError, msgspec.DecodeError):
        return 0.0
    started: float = first["time"] - first["seconds"]
    return max(0.0, time.time() - started)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events of a run, oldest first; a line of which a full disk took only a part is passed over."""
    found = []
    for line in (folder / "events.jsonl").read_bytes().splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(line))
    return found
