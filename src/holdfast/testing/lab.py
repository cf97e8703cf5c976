"""Several hosts on one machine, to test what becomes of a job when a machine is lost.

A host is a set of Linux namespaces: it has a network interface, processes and shared memory of its own; the
kernel, the clock and the disk are this machine's. The lab is in namespaces, too, so nothing of the machine
itself changes, and everything ends with the lab's first process. An ordinary user can make one where the
kernel allows user namespaces.

    python -m holdfast.testing.lab COMMAND …     # runs the command in a new lab; it makes hosts with ``Lab``
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.errors import ConfigError, HoldfastError

_INSIDE = "HOLDFAST_LAB"
_ENCLOSED = "--enclosed"
_NETWORK = "10.77.0"
_START_SECONDS = 10.0
# Process 1 of a host. It must reap: otherwise nobody there would notice that a process has died.
_FIRST = """
set -e
mount -t tmpfs tmpfs "$1"
mount -t tmpfs tmpfs /dev/shm
hostname "$0"
echo ready
while true; do sleep 1000 & wait $!; done
"""


def unavailable() -> str:
    """Why there can be no lab on this machine; "" if there can."""
    for command, package in (("unshare", "util-linux"), ("nsenter", "util-linux"), ("ip", "iproute2")):
        if shutil.which(command) is None:
            return f"the command {command} is missing: install Debian's package {package}"
    tried = subprocess.run([*_enclosure(), "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"this system allows no namespaces: {tried.stderr.strip()}"


def check_available() -> None:
    """Raise ConfigError if there can be no lab on this machine."""
    why_not = unavailable()
    if why_not:
        raise ConfigError(f"there can be no lab on this machine: {why_not}")


def enclosed(command: Sequence[str]) -> list[str]:
    """The command line that runs a command in a new lab."""
    return [*_enclosure(), sys.executable, "-m", "holdfast.testing.lab", _ENCLOSED, *command]


def _enclosure() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


class Host:
    """One host of a lab."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.address = f"{_NETWORK}.{number}"
        self.private = folder / "private"
        """A folder in memory: under this name, each host has another one."""
        self._folder = folder / f"host{number}"
        self._folder.mkdir()
        self._first: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[Any]] = []
        self._pid = 0

    def start(self) -> None:
        """Switch it on."""
        _ip("link", "set", f"v{self.number}", "up")
        self._first = subprocess.Popen(
            ["ip", "netns", "exec", f"h{self.number}", "unshare", "--mount", "--uts", "--pid", "--fork",
             "--kill-child", "--mount-proc", "bash", "-c", _FIRST, f"host{self.number}", str(self.private)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._first.stdout is not None
        if self._first.stdout.readline() != "ready\n":
            raise HoldfastError(f"host {self.number} of the lab did not start")
        (self._pid,) = _children(self._first.pid)

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on this host."""
        return ["nsenter", "-t", str(self._pid), "-n", "-m", "-p", "-u", "--", *command]

    def popen(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, **more: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on this host."""
        started = subprocess.Popen(self.command(command), env=self._environment(env), **more)
        self._started.append(started)
        return started

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, **more: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command on this host."""
        return subprocess.run(self.command(command), env=self._environment(env), check=True, **more)

    def _environment(self, more: Mapping[str, str] | None) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self._folder), **(more or {})}

    def cut(self) -> None:
        """Cut its cable: nothing arrives, and nobody is told."""
        _ip("link", "set", f"v{self.number}", "down")

    def heal(self) -> None:
        """Mend its cable."""
        _ip("link", "set", f"v{self.number}", "up")

    def pids(self) -> list[int]:
        """Its processes but the first, as this process numbers them."""
        if not self.is_on():
            return []
        mine = os.readlink(f"/proc/{self._pid}/ns/pid")
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(path / "ns/pid") == mine and int(path.name) != self._pid:
                    found.append(int(path.name))
        return found

    def find(self, text: str) -> list[int]:
        """Those of its processes whose command line contains a text."""
        return [pid for pid in self.pids() if text in command_line(pid)]

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes but the first: SIGSTOP makes it stand still."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGCONT:
            self._wake_commands()

    def kill(self, started: subprocess.Popen[Any]) -> None:
        """Kill -9 what ``popen`` has started."""
        for pid in _children(started.pid):  # nsenter waits for it, and would leave it behind
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        started.wait()

    def crash(self) -> None:
        """End all of its processes at once. The kernel closes their connections, so that others notice."""
        assert self._first is not None
        os.kill(self._pid, signal.SIGKILL)
        self._wake_commands()
        self._first.wait()

    def _wake_commands(self) -> None:
        """nsenter stops itself when its command is stopped. It would reap nothing, and the host never end."""
        self._started = [started for started in self._started if started.poll() is None]
        for started in self._started:
            started.send_signal(signal.SIGCONT)

    def power_off(self) -> None:
        """End all of its processes, and nobody is told."""
        self.cut()
        self.crash()

    def is_on(self) -> bool:
        """Whether it is running."""
        return self._first is not None and self._first.poll() is None


class Lab:
    """Hosts that reach each other by their addresses; use as a context manager, in a process of ``enclosed``.

    Args:
        hosts: how many; they are numbered from 1.
    """

    def __init__(self, hosts: int) -> None:
        if os.environ.get(_INSIDE) != "1":
            raise HoldfastError(
                "this process is not in a lab: start it with `python -m holdfast.testing.lab`"
            )
        # A short path: that of a socket in it may have 107 bytes, and Ray's take 60.
        self._temporary = tempfile.TemporaryDirectory(
            prefix="hf-lab-", dir="/tmp", ignore_cleanup_errors=True
        )
        self.folder = Path(self._temporary.name)
        (self.folder / "private").mkdir()
        self.hosts = {number: Host(number, self.folder) for number in range(1, hosts + 1)}

    def __enter__(self) -> Self:
        _run("mount", "-t", "tmpfs", "tmpfs", "/run")
        Path("/run/netns").mkdir()
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "br0", "type", "bridge")
        _ip("link", "set", "br0", "up")
        for number, host in self.hosts.items():
            name, cable = f"h{number}", f"v{number}"
            _ip("netns", "add", name)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", cable, "master", "br0")
            _ip("-n", name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", name, "link", "set", interface, "up")
            host.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self.hosts.values():
            if host.is_on():
                host.crash()
        self._temporary.cleanup()

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]


def command_line(pid: int) -> str:
    """The command line of a process, or the title that it has given itself; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        raise HoldfastError(f"{' '.join(command)}: {tried.stderr.strip()}")


def main() -> None:
    """Run the command of the arguments as the first program of a new lab."""
    if sys.argv[1:2] != [_ENCLOSED]:  # a lab in the machine's own namespaces would change the machine
        check_available()
        command = enclosed(sys.argv[1:])
        os.execvp(command[0], command)
    os.environ[_INSIDE] = "1"
    program = subprocess.Popen(sys.argv[2:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program decides what becomes of the lab
    # As process 1 of the lab, reap everything.
    while program.returncode is None:
        pid, status = os.wait()
        if pid == program.pid:
            program.returncode = os.waitstatus_to_exitcode(status)
        time.sleep(0)
    sys.exit(program.returncode)


if __name__ == "__main__":
    main()
