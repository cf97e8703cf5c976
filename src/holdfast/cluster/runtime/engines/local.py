"""An engine that runs the processes of a job on this machine.

Processes are forked from templates (``cluster.node``), one for each role, started with the first node of
their role. None outlives the launcher: each gets a pipe as standard input and exits when it is closed, and
the kernel kills it when its parent dies, even while it is suspended. Each is a session of its own, so that
Ctrl-C at the terminal reaches only the launcher, which then ends the others in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal as signals
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from holdfast.cluster.protocol.messages import Board, Exit, Peer
from holdfast.cluster.runtime.engines.base import Draining
from holdfast.cluster.runtime.keys import Keys
from holdfast.cluster.runtime.node import Announcement, Assignment
from holdfast.errors import ConfigError

NODE_COMMAND: Final = (sys.executable, "-P", "-m", "holdfast.cluster.runtime.node")
"""-P: import modules from this process's paths (PYTHONPATH), not from the current folder first."""
ONE_THREAD: Final[Mapping[str, str]] = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)
"""Many processes share the processors: none should start a thread per processor."""
_PIPE_BYTES: Final = 64 << 10  # capacity of a pipe without a reader
_TERM_SECONDS: Final = 1.0
_WAIT_SECONDS: Final = 0.01
_FORK_SECONDS: Final = 120.0
"""Timeout for a fork, after which the template counts as hung: even the first compilation takes less."""
_PR_SET_CHILD_SUBREAPER: Final = 36  # of <sys/prctl.h>


class _Template:
    """A process that forks nodes of a role, in the order of requests."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._asked: deque[_Node] = deque()
        self._since = 0.0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("wb", buffering=0) as output:
            self._popen = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )

    def ask(self, node: _Node, stdin: int) -> None:
        """Request a node that reads from ``stdin``. Returns at once: see ``look``."""
        if not self._asked:
            self._since = time.monotonic()
        self._asked.append(node)
        with node.log.open("ab", buffering=0) as output, contextlib.suppress(OSError):
            socket.send_fds(self._socket, [b"+"], [stdin, output.fileno()])  # ``look`` reports if it ended

    def look(self, seconds: float = 0.0) -> None:
        """Read the pids of forked nodes. If the template has ended, pending nodes count as ended, too."""
        while self._asked and select.select([self._socket], [], [], seconds)[0]:
            with contextlib.suppress(ConnectionError):
                if answer := self._socket.recv(32):
                    self._asked.popleft().pid = int(answer)
                    self._since = time.monotonic()
                    continue
            self._leave_out()
        if self._asked and time.monotonic() > self._since + _FORK_SECONDS:
            self._popen.kill()

    def _leave_out(self) -> None:
        """Mark pending nodes as ended, with the template's exit code."""
        code = max(0, self._popen.wait())
        for node in self._asked:
            node.returncode = code or 1
            with contextlib.suppress(OSError):
                node.log.write_bytes(self.log.read_bytes())
        self._asked.clear()

    @property
    def pid(self) -> int:
        """Pid of the template itself."""
        return self._popen.pid

    def ended(self) -> bool:
        """Whether it has ended, so that it can fork no more."""
        return self._popen.poll() is not None

    def close(self) -> None:
        """End the template; its nodes stay."""
        self._popen.kill()
        self._popen.wait()
        self.look(seconds=_TERM_SECONDS)
        self._leave_out()  # a node being forked may hold the other end longer
        self._socket.close()
        _remove_empty(self.log)


@dataclass(slots=True, eq=False)
class _Node:
    template: _Template
    stdin: int
    log: Path
    pid: int | None = None
    """None: not forked yet."""
    returncode: int | None = None
    writer: threading.Thread | None = None

    def number(self) -> int | None:
        """Wait for its pid; None if it was never forked."""
        while self.pid is None and self.returncode is None:
            self.template.look(seconds=_TERM_SECONDS)
        return self.pid

    def ended(self) -> bool:
        """Whether it has ended; if so, its process group has, too."""
        self.template.look()
        if self.returncode is None and self.pid is not None:
            try:
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return False
                # Before it is reaped: until then no other process can get its pid.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signals.SIGKILL)
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:  # other code in this process waits for all children
                self.returncode = 1
        if self.returncode is not None:
            self.close_stdin()
        return self.returncode is not None

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        pid = self.number()
        if pid is not None and self.returncode is None:  # not reaped yet, so the pid is its own
            os.kill(pid, number)

    def tell(self, line: bytes) -> None:
        """Write to its standard input without blocking; if it has died, reaping it shows that."""
        if len(line) <= _PIPE_BYTES and self.writer is None:
            self._write(line)
        else:
            self.writer = threading.Thread(target=self._write_after, args=(self.writer, line), daemon=True)
            self.writer.start()

    def _write_after(self, earlier: threading.Thread | None, line: bytes) -> None:
        if earlier is not None:
            earlier.join()
        self._write(line)

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self.stdin, line) :]

    def close_stdin(self) -> None:
        if self.writer is not None and self.returncode is None and self.writer.is_alive():
            return  # it does not read: only a signal can end it
        if self.writer is not None:
            self.writer.join()
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1


class LocalLauncher:
    """Starts, monitors and ends processes. Calls must not overlap; they may come from any thread.

    The output of a process goes to ``folder/logs/ROLE-SLOT-INCARNATION.log`` (until it has an assignment, to
    ``ROLE-warm-N.log``), the output of imports to ``ROLE-template.log``.

    While a launcher is open, this process is a subreaper: the kernel makes it the parent of orphaned
    descendants. That is how nodes that a template forks become its children.

    Args:
        folder: the run's folder.
        command: the command of a template; role and parent are appended.
        environment: variables for the processes, in addition to this one's.
    """

    most_vaults = 0
    launcher = 0

    def __init__(
        self,
        folder: Path,
        command: Sequence[str] = NODE_COMMAND,
        environment: Mapping[str, str] = ONE_THREAD,
    ) -> None:
        self._folder = Path(folder)
        self._logs = self._folder / "logs"
        self._command = list(command)
        self._environment = dict(environment)
        self._templates: dict[str, _Template] = {}
        self._warm: dict[str, list[_Node]] = {}
        self._running: dict[Peer, _Node] = {}
        self._spawned = 0
        # With PR_SET_PDEATHSIG, "parent" is the thread that started a process, not its process: this thread
        # lives until ``close``.
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="launcher")

    def warm(self, role: str, slot: int | None = None) -> None:
        """Start a process that does the imports of this role and waits for the next ``start``, of any
        slot."""
        self._warm.setdefault(role, []).append(self._spawn(role))

    def start(self, assignment: Assignment) -> None:
        """Assign the spare process that has waited longest, or start a new one.

        Returns at once: a process that came up sends messages, one that did not is in ``exited``.
        """
        peer = assignment.me
        if peer in self._running:
            raise ConfigError(
                f"{peer}, incarnation {peer.incarnation}, is running: start it as the next incarnation"
            )
        process = self._take_warm(peer.role) or self._spawn(peer.role)
        self._running[peer] = process
        process.log = _rename(process.log, f"{peer.role}-{peer.slot}-{peer.incarnation}")
        process.tell(msgspec.json.encode(assignment) + b"\n")

    def exited(self) -> list[Exit]:
        """The processes that have ended since the last call."""
        ended = [(peer, process) for peer, process in self._running.items() if process.ended()]
        for peer, _ in ended:
            del self._running[peer]
        return [Exit(peer, process.returncode or 0) for peer, process in ended]

    def signal(self, peer: Peer, number: int) -> None:
        """Send a signal to a process, unless it has ended."""
        process = self._running.get(peer)
        if process is not None:
            process.signal(number)

    def announce(self, supervisor: str) -> None:
        """Tell all processes that the supervisor has another address now."""
        self.tell(Announcement(supervisor))

    def tell(self, announcement: Announcement) -> None:
        """Tell all processes."""
        line = msgspec.json.encode(announcement) + b"\n"
        for process in self._running.values():
            if process.returncode is None:
                process.tell(line)

    def is_spread(self) -> bool | None:
        """There is one machine."""
        return None

    def misplaced(self) -> Peer | None:
        """There is one machine."""
        return None

    def draining(self) -> Sequence[Draining]:
        """Nobody says so."""
        return ()

    def keep(self, charter: bytes) -> None:
        """Nothing: all processes end with this one."""

    def processes(self) -> frozenset[Peer] | None:
        """The processes that run."""
        return frozenset(self.pids())

    def open_vaults(self, job: str, keys: Sequence[Keys]) -> Board:
        """There are none: the supervisor's state is in a file."""
        return ()

    def pids(self) -> dict[Peer, int]:
        """The pids of processes that have an assignment and were not reported by ``exited``."""
        running = list(self._running.items())  # a copy: another thread may start processes meanwhile
        found = {peer: process.number() for peer, process in running}
        return {peer: pid for peer, pid in found.items() if pid is not None}

    def machine(self, peer: Peer) -> str:
        """The machine of a process: there is only one."""
        return ""

    def read(self, name: str) -> bytes | None:
        """A file in the run's folder; None if it does not exist yet."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def warm_pids(self, role: str) -> list[int]:
        """The pids of spare processes, in the order in which they will be assigned."""
        found = [process.number() for process in self._warm.get(role, [])]
        return [pid for pid in found if pid is not None]

    def template_pid(self, role: str) -> int:
        """The pid of a role's template, which must have been started."""
        return self._templates[role].pid

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End all processes: close their input, then send SIGTERM, then SIGKILL. None is left.

        Spare processes have nothing to finish: they are killed. Closing twice does no harm.
        Processes ended by this call are not reported by ``exited``.
        """
        for template in self._templates.values():
            template.close()
        waiting = [process for warm in self._warm.values() for process in warm]
        for process in waiting:
            process.signal(signals.SIGKILL)
        processes = [*self._running.values(), *waiting]
        for process in processes:
            process.close_stdin()
        left = _wait(processes, timeout_seconds)
        for number, seconds in ((signals.SIGTERM, _TERM_SECONDS), (signals.SIGKILL, float("inf"))):
            for process in left:
                process.signal(number)
            left = _wait(left, seconds)
        for warm in self._warm.values():
            for process in warm:
                _remove_empty(process.log)
        self._running.clear()
        self._warm.clear()
        if self._templates:
            self._templates.clear()
            _adopt(-1)
        self._spawner.shutdown()

    def __enter__(self) -> LocalLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_warm(self, role: str) -> _Node | None:
        waiting = self._warm.get(role, [])
        while waiting:
            process = waiting.pop(0)
            if not process.ended():
                return process
            _remove_empty(process.log)
        return None

    def _spawn(self, role: str) -> _Node:
        self._spawned += 1
        self._logs.mkdir(parents=True, exist_ok=True)
        template = self._template(role)
        read, write = os.pipe()
        try:
            node = _Node(template, write, self._logs / f"{role}-warm-{self._spawned}.log")
            template.ask(node, read)
        finally:
            os.close(read)
        return node

    def _template(self, role: str) -> _Template:
        """The role's template; a new one if it has ended, for whatever reason."""
        template = self._templates.get(role)
        if template is not None and not template.ended():
            return template
        if template is not None:
            template.close()
        elif not self._templates:
            _adopt(1)
        command = [*self._command, role, str(os.getpid())]
        environment = {**os.environ, **self._environment}
        log = self._logs / f"{role}-template.log"
        made = self._spawner.submit(_Template, command, environment, log).result()
        self._templates[role] = made
        return made


_adopting = threading.Lock()
_adopters = 0


def _adopt(change: int) -> None:
    """Count open launchers: while there are any, this process is a subreaper."""
    global _adopters  # noqa: PLW0603 (the kernel has one such flag for the process)
    with _adopting:
        _adopters += change
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(_adopters > 0), 0, 0, 0):
            raise OSError(ctypes.get_errno(), "this process cannot become a subreaper")


def _rename(log: Path, name: str) -> Path:
    """Rename a log while its process writes to it. The log of an earlier run is kept."""
    target, number = log.with_name(f"{name}.log"), 1
    while target.exists():
        number += 1
        target = log.with_name(f"{name}.{number}.log")
    return log.rename(target)


def _remove_empty(log: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size == 0:
            log.unlink()


def _wait(processes: Sequence[_Node], seconds: float) -> list[_Node]:
    """Wait for processes. Returns those that have not ended in time."""
    deadline = time.monotonic() + seconds
    left = [process for process in processes if not process.ended()]
    while left and time.monotonic() < deadline:
        time.sleep(_WAIT_SECONDS)
        left = [process for process in left if not process.ended()]
    return left
