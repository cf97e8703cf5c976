"""Which processes a test has started, they or theirs, and left running.

All that a test starts inherits the environment of this process, in which pytest says which test it runs, and
in which phase of it. So one that has lost its parent is found, and one that a fixture shares is not blamed
on the test that was first to need it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_RUN = "HOLDFAST_TESTS_OF"  # the same test may run elsewhere on this machine
_strangers: dict[str, bytes] = {}
"""Processes that are not ours, and when they began: numbers are used again."""


def mark() -> None:
    """Have what this process starts from now on say so."""
    os.environ[_RUN] = str(os.getpid())


def left_by(test: str, grace_seconds: float = 0.0) -> dict[int, str]:
    """The processes that the body of a test started and that still run, with their command lines.

    Those that are about to end are given some time for it.
    """
    deadline = time.monotonic() + grace_seconds
    while (found := _running(test)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _running(test: str) -> dict[int, str]:
    mine = f"{_RUN}={os.getpid()}".encode()
    wanted = f"PYTEST_CURRENT_TEST={test} (call)".replace("\x00", "(null)").encode()
    found = {}
    pids = {pid for pid in os.listdir("/proc") if pid.isdigit()}
    for pid in _strangers.keys() - pids:
        del _strangers[pid]
    for pid in pids:
        try:
            began = _began(pid)
            if _strangers.get(pid) == began:
                continue
            environment = Path("/proc", pid, "environ").read_bytes().split(b"\0")
            command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended, or is somebody else's
            continue
        if mine not in environment:
            if any(environment):  # an empty one may belong to a process that is just being started
                _strangers[pid] = began
        elif (
            wanted in environment and "multiprocessing.resource_tracker" not in command
        ):  # it ends with this one
            found[int(pid)] = command
    return found


def _began(pid: str) -> bytes:
    """When a process began, in ticks since the machine did."""
    return Path("/proc", pid, "stat").read_bytes().rpartition(b")")[2].split()[19]
