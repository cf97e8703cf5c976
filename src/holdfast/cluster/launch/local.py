"""The processes of a job on this machine.

None outlives whoever started it: each gets a pipe as standard input and ends when that ends, and the kernel
kills it when its parent dies, even while it is stopped. Each is a session of its own, so that Ctrl-C at the
terminal reaches only the parent, which then ends the others in order.
"""

from __future__ import annotations

import contextlib
import os
import signal as signals
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from holdfast.cluster.messages import Peer
from holdfast.cluster.node import Assignment
from holdfast.errors import ConfigError

NODE_COMMAND: Final = (sys.executable, "-m", "holdfast.cluster.node")
ONE_THREAD: Final[Mapping[str, str]] = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)
"""Many processes share the processors: none is to start a thread for each of them."""
_PIPE_BYTES: Final = 64 << 10  # what a pipe takes without a reader
_TERM_SECONDS: Final = 1.0
_WAIT_SECONDS: Final = 0.01


@dataclass(slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    log: Path
    writer: threading.Thread | None = None

    def ended(self) -> bool:
        """Whether it has ended; if so, what it started and left behind has, too."""
        if self.popen.returncode is not None:
            return True
        pid = self.popen.pid
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        # Before it is reaped: until then no other process can have its number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signals.SIGKILL)
        self.popen.wait()
        self.close_stdin()
        return True

    def tell(self, line: bytes) -> None:
        """Hand over its assignment without waiting for it; if it has died, that shows when it is reaped."""
        if len(line) <= _PIPE_BYTES:
            self._write(line)
        else:
            self.writer = threading.Thread(target=self._write, args=(line,), daemon=True)
            self.writer.start()

    def _write(self, line: bytes) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.write(line)

    def close_stdin(self) -> None:
        if self.writer is not None and self.popen.returncode is None and self.writer.is_alive():
            return  # it does not read: it takes a signal to end it
        if self.writer is not None:
            self.writer.join()
        assert self.popen.stdin is not None
        self.popen.stdin.close()


class LocalLauncher:
    """Starts, watches and ends processes. Calls must not overlap; they may come from any thread.

    What a process prints goes to ``folder/logs/ROLE-SLOT-INCARNATION.log``, from its first import on (until
    it has an assignment, to ``ROLE-warm-N.log``).

    Args:
        folder: the run's.
        command: what runs a node; role and parent are appended.
        environment: set for the processes, on top of this one's.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str] = NODE_COMMAND,
        environment: Mapping[str, str] = ONE_THREAD,
    ) -> None:
        self._logs = Path(folder) / "logs"
        self._command = list(command)
        self._environment = dict(environment)
        self._warm: dict[str, list[_Process]] = {}
        self._running: dict[Peer, _Process] = {}
        self._spawned = 0
        # The kernel takes the end of the thread that started a process for the end of its parent: this
        # one lives until ``close``.
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="launcher")

    def warm(self, role: str) -> None:
        """Start a process that loads what this role needs and waits for the next ``start``."""
        self._warm.setdefault(role, []).append(self._spawn(role))

    def start(self, assignment: Assignment) -> None:
        """Give a warm process its assignment, the one that has waited for longest; without one, start one.

        Returns at once: that it came up shows when it speaks, that it did not, in ``exited``.
        """
        peer = assignment.me
        if peer in self._running:
            raise ConfigError(
                f"{peer}, incarnation {peer.incarnation}, runs: start it as the next incarnation"
            )
        process = self._take_warm(peer.role) or self._spawn(peer.role)
        self._running[peer] = process
        process.log = _rename(process.log, f"{peer.role}-{peer.slot}-{peer.incarnation}")
        process.tell(msgspec.json.encode(assignment) + b"\n")

    def exited(self) -> list[tuple[Peer, int]]:
        """Who has ended since this was last asked, with the exit code, or minus the signal."""
        ended = [(peer, process) for peer, process in self._running.items() if process.ended()]
        for peer, _ in ended:
            del self._running[peer]
        return [(peer, process.popen.returncode) for peer, process in ended]

    def signal(self, peer: Peer, number: int) -> None:
        """Send a signal; one that has ended is left alone."""
        process = self._running.get(peer)
        if process is not None:
            process.popen.send_signal(number)

    def pids(self) -> dict[Peer, int]:
        """Of those that have an assignment and were not reported by ``exited``."""
        return {peer: process.popen.pid for peer, process in self._running.items()}

    def warm_pids(self, role: str) -> list[int]:
        """Of those that wait for an assignment, in the order in which they get one."""
        return [process.popen.pid for process in self._warm.get(role, [])]

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End all processes: by the end of their input, then by SIGTERM, then by force. None is left.

        Those that wait for an assignment have nothing to finish, and would not look at their input before all
        is loaded: they are killed. Closing twice does no harm. Processes that ended by this are not reported.
        """
        waiting = [process for warm in self._warm.values() for process in warm]
        for process in waiting:
            process.popen.send_signal(signals.SIGKILL)
        processes = [*self._running.values(), *waiting]
        for process in processes:
            process.close_stdin()
        left = _wait(processes, timeout_seconds)
        for number, seconds in ((signals.SIGTERM, _TERM_SECONDS), (signals.SIGKILL, float("inf"))):
            for process in left:
                process.popen.send_signal(number)
            left = _wait(left, seconds)
        for warm in self._warm.values():
            for process in warm:
                _remove_empty(process.log)
        self._running.clear()
        self._warm.clear()
        self._spawner.shutdown()

    def __enter__(self) -> LocalLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_warm(self, role: str) -> _Process | None:
        waiting = self._warm.get(role, [])
        while waiting:
            process = waiting.pop(0)
            if not process.ended():
                return process
            _remove_empty(process.log)
        return None

    def _spawn(self, role: str) -> _Process:
        return self._spawner.submit(self._spawn_here, role).result()

    def _spawn_here(self, role: str) -> _Process:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._spawned += 1
        log = self._logs / f"{role}-warm-{self._spawned}.log"
        with log.open("wb", buffering=0) as output:
            popen = subprocess.Popen(
                [*self._command, role, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                bufsize=0,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        return _Process(popen, log)


def _rename(log: Path, name: str) -> Path:
    """Give a log its name; the process goes on writing to it. An earlier run's is kept."""
    target, number = log.with_name(f"{name}.log"), 1
    while target.exists():
        number += 1
        target = log.with_name(f"{name}.{number}.log")
    return log.rename(target)


def _remove_empty(log: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size == 0:
            log.unlink()


def _wait(processes: Sequence[_Process], seconds: float) -> list[_Process]:
    """Those that have not ended after so long."""
    deadline = time.monotonic() + seconds
    left = [process for process in processes if not process.ended()]
    while left and time.monotonic() < deadline:
        time.sleep(_WAIT_SECONDS)
        left = [process for process in left if not process.ended()]
    return left
