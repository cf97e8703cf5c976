"""A process of a job, and the template process that it is forked from.

Imports take seconds (torch, Numba), so one process for each role, the template, does them once and forks
whenever the launcher asks for a node. Nodes are children of the launcher, not of the
template: they outlive it. Each waits for its assignment, one line of JSON on standard input
(``Assignment``), and runs it. When standard input ends, its launcher is gone, and it exits.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Final, NoReturn

import msgspec
from msgspec import Struct

from holdfast.cluster.protocol.messages import Board, Peer
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.runtime.keys import Keys
from holdfast.errors import ConfigError

MODULES: Final[Mapping[str, str]] = {
    "server": "holdfast.cluster.server.process",
    "worker": "holdfast.cluster.worker.process",
    "supervisor": "holdfast.cluster.supervisor.process",
}
"""The module with each role's ``run(assignment)``. The template calls its ``load()``, if any, before the
first fork, and its ``prepare()`` when there was no request for a while."""
COMPILE: Final = "compile"
"""In place of a role: call the ``prepare()`` of all roles, and end."""
_STDIN: Final = 0
_OUTPUTS: Final = (1, 2)
_PR_SET_PDEATHSIG: Final = 1  # of <sys/prctl.h>
_IDLE_SECONDS: Final = 3.0
"""Before that, processes that have just started need the processors."""


class Assignment(Struct, frozen=True, kw_only=True):
    """The identity and configuration of a process."""

    me: Peer
    plan: JobPlan
    supervisor: str
    """The supervisor's endpoint; "" for the first supervisor itself."""
    vaults: Board = ()
    """Where the supervisor's durable state lies; empty: in a file of the run's folder."""
    folder: str
    """The run's folder."""
    bind: str = ""
    """Where nodes listen: "ipc://" and the folder of their sockets, or a TCP address without a port."""
    keys: Keys | None = None
    """This node's keys; None: the kernel protects the sockets."""
    faults: tuple[str, ...] = ()
    """Where to kill the process (see ``worker.faults``)."""
    chaos: str = ""
    """The folder in which ``holdfast chaos`` breaks links and reads acknowledged pushes; "" for none."""


class Announcement(Struct, frozen=True):
    """What the launcher tells a process later, in a line of standard input."""

    supervisor: str = ""
    """The endpoint of a supervisor that has started on another machine."""
    vaults: Board = ()
    """The vaults that there are now; empty: those of the assignment."""


_read = bytearray()
_announced = Announcement()


def announced_supervisor() -> str:
    """The supervisor's endpoint, if the launcher has said that it moved; otherwise ""."""
    return _announced.supervisor


def announced_vaults() -> Board:
    """The vaults, if the launcher has said that there are others by now; otherwise none."""
    return _announced.vaults


def main(modules: Mapping[str, str] = MODULES) -> NoReturn:
    """Run a template, or compile. Its arguments are ``ROLE LAUNCHER``: the launcher's pid, whose end also
    ends this process. Standard input is a socket to the launcher (``SOCK_SEQPACKET``).

    A request is one byte with two open files, the node's standard input and its log; the answer is the
    node's pid. An exception ends the process with code 1; its traceback goes to standard error.
    """
    code = 1
    try:
        gc.disable()  # while importing modules, which stay
        faulthandler.enable()
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # SIGKILL flushes nothing
        role = sys.argv[1] if len(sys.argv) > 1 else ""
        if role not in (*modules, COMPILE):
            raise ConfigError(f"the role is {role!r}: expected one of {', '.join(modules)}")
        launcher = int(sys.argv[2])
        _end_with(launcher)
        if role == COMPILE:
            for path in modules.values():
                _call(importlib.import_module(path), "prepare")
            _end(0)
        module = importlib.import_module(modules[role])
        _call(module, "load")
        _fork_on_request(module, lambda: _be_a_node(role, module, launcher))
        code = 0
    except BaseException:
        traceback.print_exc()
    _end(code)


def _fork_on_request(module: ModuleType, node: Callable[[], NoReturn]) -> None:
    """Fork nodes until the launcher closes its end."""
    with socket.socket(fileno=_STDIN) as requests:
        prepared = False
        while True:
            if not prepared and not select.select([requests], [], [], _IDLE_SECONDS)[0]:
                _call(module, "prepare")
                prepared = True
            request, handles, _, _ = socket.recv_fds(requests, 1, 2)
            if not request:
                return
            number = _fork(handles, node)
            for handle in handles:
                os.close(handle)
            requests.send(str(number).encode())


def _fork(handles: list[int], node: Callable[[], NoReturn]) -> int:
    """Fork twice: an orphan becomes a child of the launcher (see ``LocalLauncher``)."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            parent = os.getpid()
            number = os.fork()
            if number == 0:
                for handle, ours in zip(
                    (handles[0], handles[1], handles[1]), (_STDIN, *_OUTPUTS), strict=True
                ):
                    os.dup2(handle, ours)
                for handle in (*handles, read, write):
                    os.close(handle)
                while os.getppid() == parent:
                    time.sleep(0.001)
                node()
            os.write(write, str(number).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(between, 0)
    answer = os.read(read, 32)
    os.close(read)
    if not answer:
        raise OSError("fork failed: the system has no process left")
    return int(answer)


def _be_a_node(role: str, module: ModuleType, launcher: int) -> NoReturn:
    """Run a node. The exit code is 0 when the role's ``run`` returns or standard input ends, 1 after an
    exception. Threads that still run then do not keep the process alive."""
    code = 1
    try:
        os.setsid()
        _end_with(launcher)
        line = _read_line()
        if line:
            threading.Thread(target=_watch_stdin, name="stdin", daemon=True).start()
            assignment = msgspec.json.decode(line, type=Assignment)
            if assignment.me.role != role:
                raise ConfigError(f"a {role} process was assigned {assignment.me}: start one of that role")
            _stay_on_processors(assignment)
            module.run(assignment)
        code = 0
    except BaseException:
        traceback.print_exc()
    _end(code)


def _stay_on_processors(assignment: Assignment) -> None:
    """Set the CPU affinity before there are threads, which inherit it."""
    servers = set(assignment.plan.server_processors)
    if servers and assignment.me.role == "server":
        os.sched_setaffinity(0, servers)
    elif servers and assignment.me.role == "worker":
        os.sched_setaffinity(0, os.sched_getaffinity(0) - servers)


def _call(module: ModuleType, name: str) -> None:
    """Call a role's function, if it exists; then exclude existing objects from garbage collection."""
    gc.disable()
    getattr(module, name, lambda: None)()
    gc.freeze()
    gc.enable()


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when ``parent`` ends, even while it is suspended."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before prctl took effect
        os._exit(0)


def _read_line() -> bytes:
    """Read a line of standard input; empty if it ended first."""
    while b"\n" not in _read:
        data = os.read(_STDIN, 1 << 16)
        if not data:
            return b""
        _read.extend(data)
    line, _, rest = bytes(_read).partition(b"\n")
    _read[:] = rest
    return line


def _watch_stdin() -> None:
    """Take announcements; when standard input ends, the launcher is gone."""
    global _announced  # noqa: PLW0603 (a process is one node)
    while line := _read_line():
        _announced = msgspec.json.decode(line, type=Announcement)
    os._exit(0)


if __name__ == "__main__":
    # Not this module's own ``main``: roles import another copy of this module, with another Assignment.
    from holdfast.cluster.runtime.node import main as imported_main

    imported_main()
