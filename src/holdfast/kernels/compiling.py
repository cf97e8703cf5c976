"""Compiling once for all processes of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_MOST_SECONDS = 60.0
_LOOK_SECONDS = 0.05


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Whoever comes first compiles; the others wait, and find the loops in numba's cache.

    The first time that loops are used on a machine, all processes of a job would compile the same ones side
    by side, for as long as all of that takes. Nobody waits for more than a minute: then each does it itself.
    """
    folder = os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        give_up_at = time.monotonic() + _MOST_SECONDS
        while time.monotonic() < give_up_at:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets it go with the process
                break
            except OSError:
                time.sleep(_LOOK_SECONDS)
        yield
    finally:
        os.close(folder)
