"""Compiling once for all processes of a user on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numba

_MOST_SECONDS = 60.0
_LOOK_SECONDS = 0.05
_NAME = "compiling.lock"


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Let one process compile while the others wait and then load the loops from Numba's cache.

    The first time that loops are used on a machine, all processes of a job would compile the same ones side
    by side. A process waits at most one minute, then it compiles by itself.
    Processes of other users neither wait nor make us wait.
    """
    lock = _open_lock()
    try:
        give_up_at = time.monotonic() + _MOST_SECONDS
        while lock is not None and time.monotonic() < give_up_at:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets it go with the process
                break
            except OSError:
                time.sleep(_LOOK_SECONDS)
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _open_lock() -> int | None:
    """Open a lock file that only this user can open; None if no folder is writable."""
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            status = os.fstat(lock)
            if status.st_uid == os.geteuid():
                os.fchmod(lock, 0o600)
                return lock
            os.close(lock)
    return None


def _folders() -> list[Path]:
    """Folders for the lock file: next to Numba's cache, else the user's own cache."""
    chosen: str = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    folders = [Path(chosen) if chosen else Path(__file__).parent / "__pycache__"]
    with contextlib.suppress(RuntimeError):  # a user without a home
        folders.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast")
    return folders
