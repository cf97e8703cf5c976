"""The holder of a lock: which process it is, and whether it is still alive.

A process can be looked for only where its number means the same: on the same machine since the same boot, and
in the same namespace, as all containers count from 1. A number is reused when its process is gone, so the
time at which the process was started belongs to it.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

# What reading a note can raise that someone else wrote, be it by mistake or on purpose.
NONSENSE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)

_PROC = Path("/proc")
_DEAD_STATES = ("Z", "X")


def note() -> dict[str, Any]:
    """Describe this process for a lock's note."""
    found: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "machine": _machine()}
    with suppress(OSError):
        found["started"] = _started(os.getpid())
    return found


def read_holder(content: bytes) -> tuple[str, int]:
    """Return the host and process id of a lock's note; ("unknown", 0) if it is invalid."""
    try:
        found = json.loads(content)
        return str(found["host"]), int(found["pid"])
    except NONSENSE:
        return "unknown", 0


def is_alive(content: bytes) -> bool | None:
    """Whether the process of a note is alive; None if that cannot be determined from here."""
    with suppress(*NONSENSE, OSError):
        found = json.loads(content)
        pid, started = int(found["pid"]), found["started"]
        if found["machine"] != _machine() or not found["machine"] or not isinstance(started, int) or pid < 1:
            return None
        try:
            os.kill(pid, 0)  # asks the kernel: other users' processes may be hidden in /proc
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return _started(pid) == started
    return None


@cache
def _machine() -> str:
    """Where process numbers mean the same as here; "" if that is not known."""
    try:
        if os.readlink(_PROC / "self") != str(os.getpid()):
            return ""  # what is mounted there is of another namespace
        known = [
            (_PROC / "sys/kernel/random/boot_id").read_text().strip(),
            os.readlink(_PROC / "self/ns/pid"),
        ]
    except OSError:
        return ""
    with suppress(FileNotFoundError):  # older kernels have one time for all
        known.append(os.readlink(_PROC / "self/ns/time"))
    return " ".join(known)


def _started(pid: int) -> int | None:
    """Return when a process was started, in ticks since the machine was; None if it is only a corpse.

    Raises:
        OSError: nothing can be said of it.
    """
    # The name of the program comes second, in brackets, and may have any characters in it.
    fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    if fields[0] in _DEAD_STATES and len(os.listdir(_PROC / str(pid) / "task")) <= 1:
        return None
    return int(fields[19])
