"""Files that are copied from machine to machine while they grow."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from holdfast.errors import UnsafeName

PATTERNS: Final = ("*.jsonl", "lost/*", "logs/*.log", "logs/*/*.log")
"""What processes of a job write to a run's folder, and others want to read."""
_UNNAMED: Final = "-warm-"
"""Logs of processes without an assignment are renamed once they have one."""
_MOST_BYTES: Final = 1 << 20
_PART_BYTES: Final = 256 << 10


class FileNews(Struct, frozen=True, array_like=True):
    """A part of a file."""

    name: str
    """Relative to the run's folder."""
    offset: int
    data: bytes


def written(
    folder: Path,
    offsets: Mapping[str, int],
    most_bytes: int = _MOST_BYTES,
    ends: Mapping[str, int] | None = None,
) -> list[FileNews]:
    """What a reader does not have yet, of all files, up to so many bytes; the rest the next time.

    Args:
        folder: a run's folder.
        offsets: how much of each file the reader has.
        most_bytes: in total.
        ends: how much of each file it may have; others whole.
    """
    left, found = most_bytes, []
    paths: Iterable[Path] = sorted({path for pattern in PATTERNS for path in folder.glob(pattern)})
    for path in paths:
        name = str(path.relative_to(folder))
        offset = offsets.get(name, 0)
        try:
            end = min(path.stat().st_size, (ends or {}).get(name, sys.maxsize))
            if _UNNAMED in name or end <= offset:
                continue
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(min(left, end - offset))
        except FileNotFoundError:  # renamed meanwhile
            continue
        left -= len(data)
        if data:
            found.append(FileNews(name, offset, data))
    return found


def write_part(folder: Path, part: FileNews) -> None:
    """Append a part to the copy of its file. Raises UnsafeName for one that would be elsewhere."""
    path = Path(part.name)
    if path.is_absolute() or ".." in path.parts or not any(path.match(pattern) for pattern in PATTERNS):
        raise UnsafeName(f"{part.name!r} is not the name of a file that a job writes")
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("ab") as file:
        file.write(part.data)


class Journal:
    """A file that others keep copies of, so that it outlives its machine. Readers get only what a majority of
    them has: whoever goes on from the longest copy in a majority has all that anybody has read.

    Args:
        path: the file; it may only grow.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._copies: dict[object, int] = {}
        self._lock = threading.Lock()

    def missing(self, keeper: object) -> tuple[int, bytes]:
        """What the copy of this keeper lacks, up to some size, and its offset."""
        offset = self._copies.get(keeper, 0)
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(offset)
            return offset, file.read(_PART_BYTES)
        return offset, b""

    def note(self, keeper: object, length: int) -> None:
        """Note how long a keeper's copy is."""
        with self._lock:
            self._copies[keeper] = length

    def forget(self, keeper: object) -> None:
        """Note that a keeper is lost."""
        with self._lock:
            self._copies.pop(keeper, None)

    def kept(self) -> int:
        """How much a majority of the keepers has; without keepers, everything."""
        with self._lock:
            lengths = sorted(self._copies.values(), reverse=True)
        return lengths[len(lengths) // 2] if lengths else sys.maxsize


class JournalCopy:
    """A copy of a journal elsewhere.

    Args:
        path: where to keep it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def length(self) -> int:
        """Its length."""
        return self._path.stat().st_size if self._path.exists() else 0

    def take(self, offset: int, data: bytes) -> None:
        """Append a part that begins where the copy ends; any other is late, or came twice."""
        if data and offset == self.length:
            with self._path.open("ab") as file:
                file.write(data)

    def read(self, offset: int) -> bytes:
        """A part; b"" at the end."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(offset)
            return file.read(_PART_BYTES)
        return b""
