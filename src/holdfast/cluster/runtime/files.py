"""Files that are copied from machine to machine while they grow."""

from __future__ import annotations

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


class FileNews(Struct, frozen=True, array_like=True):
    """A part of a file."""

    name: str
    """Relative to the run's folder."""
    offset: int
    data: bytes


def written(folder: Path, offsets: Mapping[str, int], most_bytes: int = _MOST_BYTES) -> list[FileNews]:
    """What a reader does not have yet, of all files, up to so many bytes; the rest the next time.

    Args:
        folder: a run's folder.
        offsets: how much of each file the reader has.
        most_bytes: in total.
    """
    left, found = most_bytes, []
    paths: Iterable[Path] = sorted({path for pattern in PATTERNS for path in folder.glob(pattern)})
    for path in paths:
        name = str(path.relative_to(folder))
        offset = offsets.get(name, 0)
        try:
            if _UNNAMED in name or path.stat().st_size <= offset:
                continue
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(left)
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
