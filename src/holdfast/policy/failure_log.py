"""Failure logs, one failure per line.

Two kinds of files, told apart by their first line:

    time,server               when which server failed: a date (2026-03-01T12:30:00) or hours since a start
    hours,failed              how long a job ran, and whether (1) or not (0) it ended in a failure

``server`` may be left out. Empty lines and lines that begin with ``#`` are passed over.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from holdfast.errors import BadLine, DataError


@dataclass(frozen=True, slots=True)
class FailureLog:
    """The content of a failure log."""

    failed_hours: tuple[float, ...]
    """Durations that ended in a failure: between two failures, or of a job."""
    unfailed_hours: tuple[float, ...] = ()
    """Durations that ended without a failure."""
    trace: tuple[tuple[float, int | None], ...] = ()
    """(hours since the first, server) of each failure in order; empty if the file is one of jobs."""


def read_failures(path: Path) -> FailureLog:
    """Read a failure log. Raises ``DataError`` with file and line if it is invalid."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise DataError(f"the failure log {path} cannot be read: {reason}") from None
    lines = _lines(text)
    number, header = next(lines, (0, []))
    names = [name.lower() for name in header]
    if names in (["time"], ["time", "server"]):
        return _events(path, lines)
    if names in (["hours"], ["hours", "failed"]):
        return _jobs(path, lines)
    raise BadLine(
        str(path),
        number,
        "expected the names of the columns, 'time,server' or 'hours,failed', as the first line",
    )


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, [field.strip() for field in next(csv.reader([line]))]


def _events(path: Path, lines: Iterator[tuple[int, list[str]]]) -> FailureLog:
    failures = []
    for number, fields in lines:
        server = fields[1] if len(fields) > 1 else ""
        if len(fields) > 2 or (server and not server.isdecimal()):
            raise BadLine(
                str(path), number, f"expected a time and a server's number, got {','.join(fields)!r}"
            )
        failures.append((_time(path, number, fields[0]), int(server) if server else None))
    failures.sort(key=lambda failure: failure[0])
    if not failures:
        raise DataError(f"the failure log {path} contains no failure")
    first = failures[0][0]
    return FailureLog(
        failed_hours=tuple(b - a for (a, _), (b, _) in pairwise(failures)),
        trace=tuple((time - first, server) for time, server in failures),
    )


def _time(path: Path, number: int, text: str) -> float:
    """A time of the log in hours."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadLine(
            str(path),
            number,
            f"{text!r} is not a time: expected a date such as 2026-03-01T12:30:00, or hours",
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() / 3600


def _jobs(path: Path, lines: Iterator[tuple[int, list[str]]]) -> FailureLog:
    failed: list[float] = []
    unfailed: list[float] = []
    for number, fields in lines:
        try:
            hours = float(fields[0])
        except ValueError:
            raise BadLine(str(path), number, f"{fields[0]!r} is not a number of hours") from None
        if not 0 <= hours < float("inf"):
            raise BadLine(str(path), number, f"{fields[0]} hours: expected 0 or more")
        flag = fields[1] if len(fields) > 1 else "1"
        if len(fields) > 2 or flag not in ("0", "1"):
            raise BadLine(str(path), number, f"expected hours and 1 or 0, got {','.join(fields)!r}")
        (failed if flag == "1" else unfailed).append(hours)
    if not failed:
        raise DataError(f"the failure log {path} contains no failure")
    return FailureLog(tuple(failed), tuple(unfailed))
