"""An agent: what an engine of many machines runs on each of them. It starts and watches the processes there.

The agent has a launcher of its own, so processes are forked from templates and end with it, as on one
machine. It also collects what they write, because nothing can be fetched from a machine once it is lost.
Whoever owns the agent asks for its news over and over (``look``). The answer repeats what the previous one
said until the caller acknowledges it, so none is lost with an answer.

This module knows nothing of Ray: ``ray.py`` makes an actor of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from holdfast.cluster.protocol.messages import Exit, Peer, VaultAt
from holdfast.cluster.protocol.vault import Vault
from holdfast.cluster.runtime.engines.local import NODE_COMMAND, ONE_THREAD, LocalLauncher
from holdfast.cluster.runtime.files import FileNews, JournalCopy, written
from holdfast.cluster.runtime.keys import Keys
from holdfast.cluster.runtime.loop import send_outbox
from holdfast.cluster.runtime.node import COMPILE, Announcement, Assignment
from holdfast.cluster.runtime.transport.zmq import ZmqTransport
from holdfast.kernels.compiled import is_compiled

OWN_ADDRESS = "tcp"
"""For ``bind`` of an assignment: the address of the machine on which the process runs."""
_WATCH_SECONDS = 0.02
_VAULT_SECONDS = 0.5


class News(Struct, frozen=True, array_like=True):
    """What happened on a machine."""

    time: float
    """Of the machine's clock, Unix seconds."""
    exits: tuple[tuple[int, Exit], ...] = ()
    """Processes that have ended, numbered from 1, and not acknowledged yet."""
    files: tuple[FileNews, ...] = ()
    running: tuple[tuple[Peer, int], ...] = ()
    """The processes that have an assignment, and their pids."""
    state: bytes | None = None
    """The supervisor's state file, if a supervisor runs here and has written it."""
    vault: VaultAt | None = None
    journal: int = 0
    """How much of the run's log there is a copy of."""
    address: str = ""
    """Of this machine."""
    compiling: bool = False
    """Whether the machine compiles what processes need."""


# Made here, by one thread: msgspec crashes if several need a new type at the same time.
NEWS = msgspec.msgpack.Decoder(News)
_ASSIGNMENT = msgspec.json.Decoder(Assignment)
_KEYS = msgspec.json.Decoder(Keys)
_ANNOUNCEMENT = msgspec.json.Decoder(Announcement)


class Agent:
    """Starts, watches and ends the processes of one job on one machine. Any thread may call it.

    Args:
        address: of this machine, for processes on other machines.
        state_file: the name of the file in which a supervisor tells where it listens.
        environment: variables for the processes.
        command: that of ``LocalLauncher``.
    """

    def __init__(
        self,
        address: str,
        state_file: str,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = NODE_COMMAND,
    ) -> None:
        self._machine = address
        self._address = f"[{address}]" if ":" in address else address
        self._folder = Path(tempfile.mkdtemp(prefix="holdfast-"))
        self._state = self._folder / state_file
        self._announced = b""
        self._vault: threading.Thread | None = None
        self._vault_at: VaultAt | None = None
        self._journal = JournalCopy(self._folder / "journal")
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        variables = {**ONE_THREAD, "PYTHONPATH": paths, **(environment or {})}
        self._launcher = LocalLauncher(self._folder, command, variables)
        self._compile_command = [*command, COMPILE, str(os.getpid())]
        self._compile_environment = {**os.environ, **variables}
        self._compiler: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._exits: list[tuple[int, Exit]] = []
        self._count = 0
        self._ending = False
        self._watcher = threading.Thread(target=self._watch, name="agent", daemon=True)
        self._watcher.start()

    def warm(self, role: str) -> None:
        """Start a spare process of a role."""
        with self._lock:
            self._launcher.warm(role)

    def compile(self) -> bool:
        """Compile what processes need, unless that was done on this machine before; whether that is so.

        A process of its own does it, and news say when it is over. Whatever becomes of it, processes compile
        what they lack.
        """
        if is_compiled():
            return False
        log = self._folder / "logs" / "compile.log"
        log.parent.mkdir(exist_ok=True)
        with self._lock, log.open("wb") as output:
            if not self._ending:
                self._compiler = subprocess.Popen(
                    self._compile_command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    env=self._compile_environment,
                )  # fmt: skip
        return True

    def start(self, assignment: bytes) -> None:
        """Start a process. One that cannot be started counts as ended, and the news say why."""
        decoded = _ASSIGNMENT.decode(assignment)
        here = msgspec.structs.replace(decoded, folder=str(self._folder))
        if here.bind == OWN_ADDRESS:
            here = msgspec.structs.replace(here, bind=f"tcp://{self._address}")
        with self._lock:
            if here.me.role == "supervisor":
                self._state.unlink(missing_ok=True)  # an earlier one's
            try:
                self._launcher.start(here)
                self._tell()
            except Exception as error:
                self._note(Exit(here.me, 1, f"could not be started: {error}"))

    def signal(self, peer: Peer, number: int) -> None:
        """Send a signal to a process, unless it has ended."""
        with self._lock:
            self._launcher.signal(peer, number)

    def open_vault(self, job: str, slot: int, keys: bytes) -> str:
        """Open a vault; its address."""
        me = Peer("vault", slot)
        decoded = _KEYS.decode(keys)
        transport = ZmqTransport(me, job, f"tcp://{self._address}", decoded)
        self._vault = threading.Thread(
            target=self._keep, args=(Vault(me), transport), name="vault", daemon=True
        )
        self._vault.start()
        self._vault_at = VaultAt(slot, transport.endpoint)
        return transport.endpoint

    def _keep(self, vault: Vault, transport: ZmqTransport) -> None:
        with transport:
            while not self._ending:
                for envelope in transport.poll(_VAULT_SECONDS):
                    vault.receive(envelope, time.monotonic())
                    send_outbox(vault, transport)

    def read_journal(self, offset: int) -> bytes:
        """A part of the copy of the run's log; b"" at its end."""
        with self._lock:
            return self._journal.read(offset)

    def look(
        self,
        acknowledged: int,
        offsets: Mapping[str, int],
        seconds: float,
        announcement: bytes = b"",
        journal: tuple[int, bytes] = (0, b""),
    ) -> bytes:
        """The news (``News``, as MessagePack); waits so long for a process to end.

        Args:
            acknowledged: the number of the last exit that the caller knows.
            offsets: how much of each file the caller has.
            seconds: how long to wait.
            announcement: what all processes here are to be told (``Announcement``, as JSON).
            journal: a further part of the run's log, and its offset.
        """
        with self._lock:
            self._journal.take(*journal)
            if announcement and announcement != self._announced:
                self._announced = announcement
                self._tell()
            self._exits = [one for one in self._exits if one[0] > acknowledged]
            self._news.wait_for(lambda: bool(self._exits) or self._ending, seconds)
            exits, running = tuple(self._exits), tuple(self._launcher.pids().items())
            vault, length = self._vault_at, self._journal.length
        state = None
        if any(peer.role == "supervisor" for peer, _ in running):
            with contextlib.suppress(FileNotFoundError):
                state = self._state.read_bytes()
        files = tuple(written(self._folder, offsets))
        compiling = self._compiler is not None and self._compiler.poll() is None
        news = News(time.time(), exits, files, running, state, vault, length, self._machine, compiling)
        return msgspec.msgpack.encode(news)

    def close(self, seconds: float) -> None:
        """End all processes; ``look`` has their last words. Call ``remove`` afterwards."""
        with self._lock:
            self._ending = True
            self._news.notify_all()
        self._watcher.join()
        if self._compiler is not None:
            self._compiler.kill()
            self._compiler.wait()
        if self._vault is not None:
            self._vault.join()
        self._launcher.close(seconds)

    def remove(self) -> None:
        """Remove the agent's files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        while True:
            with self._lock:
                if self._ending:
                    return
                for exited in self._launcher.exited():
                    self._note(exited)
            time.sleep(_WATCH_SECONDS)

    def _tell(self) -> None:
        """Tell all processes what was announced last; those that have just started do not know it yet."""
        if self._announced:
            self._launcher.tell(_ANNOUNCEMENT.decode(self._announced))

    def _note(self, exited: Exit) -> None:
        self._count += 1
        self._exits.append((self._count, exited))
        self._news.notify_all()
