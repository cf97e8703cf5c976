"""What another user of the machine can do to a file."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534
CAN_BE_ANOTHER = os.geteuid() == 0
"""Only root can start a process as somebody else."""


@contextmanager
def folder_of_everybody() -> Iterator[Path]:
    """A folder that others can pass through, unlike the ones that pytest makes."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextmanager
def tries_to_lock(path: Path) -> Iterator[bool]:
    """Another user opens a file or folder for reading and locks it, and stays; whether that worked."""
    answer, answers = os.pipe()
    ends, end = os.pipe()
    child = os.fork()  # and not a new program: the interpreter may be where others cannot go
    if child == 0:
        try:
            os.close(end)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(answers, b"y")
            os.read(ends, 1)
        finally:
            os._exit(0)
    os.close(answers)
    os.close(ends)
    try:
        yield os.read(answer, 1) == b"y"
    finally:
        os.close(end)
        os.close(answer)
        os.waitpid(child, 0)
