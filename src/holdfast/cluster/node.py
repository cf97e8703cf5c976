"""A process of a job: it loads what its role needs, waits to be told who it is, and runs.

A launcher starts processes ahead of need, so that one that is wanted has its imports behind it. Who it is
comes as one line of JSON on standard input (``Assignment``); when standard input ends, whoever started the
process is gone, and the process ends too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Final, NoReturn

import msgspec
from msgspec import Struct

from holdfast.cluster.messages import Peer
from holdfast.cluster.plan import JobPlan
from holdfast.errors import ConfigError

MODULES: Final[Mapping[str, str]] = {
    "server": "holdfast.cluster.serving",
    "worker": "holdfast.cluster.worker",
    "supervisor": "holdfast.cluster.supervisor",
}
"""Where each role's ``run(assignment)`` is, and its ``prepare()`` for processes that wait, if it has one."""
_STDIN: Final = 0
_PR_SET_PDEATHSIG: Final = 1  # of <sys/prctl.h>


class Assignment(Struct, frozen=True, kw_only=True):
    """Who a process is to be."""

    me: Peer
    plan: JobPlan
    supervisor: str
    """The supervisor's endpoint; for the supervisor itself, where to listen ("" picks a free port)."""
    folder: str
    """The run's folder."""
    bind: str = "tcp://127.0.0.1"
    keys: str = ""
    """The folder of CURVE keys; "" for none, on loopback only."""
    faults: tuple[str, ...] = ()
    """Where to end the process by force (see ``faults``)."""
    chaos: str = ""
    """The folder with which ``holdfast chaos`` breaks links and learns what was acknowledged; "" for none."""


def main(modules: Mapping[str, str] = MODULES) -> NoReturn:
    """Be a node: ``ROLE [PARENT]`` are the arguments, ``PARENT`` the process whose end ends this one.

    The exit code is 0 when the role's ``run`` returns or standard input ends, 1 after an exception, whose
    traceback goes to standard error. Threads that still run then do not keep the process.
    """
    code = 1
    try:
        gc.disable()  # while modules are loaded, which stay
        faulthandler.enable()
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # killed: nothing is flushed
        role = sys.argv[1] if len(sys.argv) > 1 else ""
        if role not in modules:
            raise ConfigError(f"the role is {role!r}: expected one of {', '.join(modules)}")
        if len(sys.argv) > 2:
            _end_with(int(sys.argv[2]))
        module = importlib.import_module(modules[role])
        run, prepare = module.run, getattr(module, "prepare", None)
        if prepare is not None and not _is_told():
            prepare()  # a spare: what would cost its first seconds is done while it waits
        gc.freeze()
        gc.enable()
        line = _read_line()
        if line:
            threading.Thread(target=_watch_stdin, name="stdin", daemon=True).start()
            assignment = msgspec.json.decode(line, type=Assignment)
            if assignment.me.role != role:
                raise ConfigError(f"a {role} process was told to be {assignment.me}: start one of that role")
            run(assignment)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when ``parent`` ends, even while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(0)


def _is_told() -> bool:
    """Whether an assignment, or the end, is there already."""
    return bool(select.select([_STDIN], [], [], 0)[0])


def _read_line() -> bytes:
    """A line of standard input; empty if it ended first. Not read ahead: the rest is ``_watch_stdin``'s."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(_STDIN, 1 << 16)
        if not data:
            return b""
        line += data
    return bytes(line)


def _watch_stdin() -> None:
    while os.read(_STDIN, 1 << 16):
        pass
    os._exit(0)


if __name__ == "__main__":
    # Not this module's own: what roles import is another copy of it, with another Assignment.
    from holdfast.cluster.node import main as imported_main

    imported_main()
