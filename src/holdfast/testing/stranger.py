"""A stranger: a process of this machine that is no member of a job and does its worst to the job's sockets.

It knows what any local user can find out and more: where the processes listen, the job's name, and how
messages look. It holds no key. ``Stranger`` runs it beside a job; ``endpoints_of`` finds the sockets of a
process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import zmq
from msgspec import Struct

from holdfast.cluster.protocol.envelope import Envelope, Frame
from holdfast.cluster.protocol.messages import Hello, LauncherBeat, Part, Peer, Pull, View, ViewNumber
from holdfast.cluster.protocol.stripe_messages import ReadStripes
from holdfast.cluster.protocol.wire import Message
from holdfast.cluster.runtime.transport.packing import Piece, pack

_TARGETS: Final = (Peer("supervisor"), *(Peer("server", slot, 1) for slot in range(8)))
_WAIT_SECONDS: Final = 2.0
_ANSWER_MILLISECONDS: Final = 200
_READY: Final = b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"


class Findings(Struct):
    """What a stranger has come to."""

    rounds: int = 0
    """How often it has tried everything."""
    connected: int = 0
    """Connections that a process of the job has taken, …"""
    unreachable: int = 0
    """… and those that the system has refused."""
    sent_bytes: int = 0
    answers: int = 0
    """Messages that it got from the job: each tells it something."""


class Stranger:
    """The stranger's process, as long as the context lasts.

    Args:
        endpoints: where the job's processes listen ("ipc:///a/path", "tcp://127.0.0.1:4000").
        job: the job's name, which stands in every manifest.
        uid: the user that it is; None: the caller's own.
        megabytes: how much it sends to one process in each kind of attack.
    """

    def __init__(
        self, endpoints: Sequence[str], job: str, uid: int | None = None, megabytes: int = 256
    ) -> None:
        options = msgspec.json.encode([list(endpoints), job, uid, megabytes]).decode()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.testing.stranger", options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._lines: list[Findings] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(msgspec.json.decode(line, type=Findings))

    @property
    def findings(self) -> Findings:
        """As of the last round that it has finished."""
        return self._lines[-1] if self._lines else Findings()

    @property
    def ended(self) -> bool:
        """Whether the process is gone; before ``close`` that means that it has failed."""
        return self._process.poll() is not None

    def close(self) -> Findings:
        """End it, with all its connections."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self.findings

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def endpoints_of(pid: int) -> list[str]:
    """Where a process of this user listens, by what the kernel says."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            host, port = fields[1].split(":")
            found.append(f"tcp://{socket.inet_ntoa(bytes.fromhex(host)[::-1])}:{int(port, 16)}")
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if int(fields[3], 16) & 0x10000 and fields[6] in inodes and len(fields) == 8:
            found.append(f"ipc://{fields[7]}")
    return found


def most_memory_of(pid: int) -> int:
    """The most bytes that a process has ever had in memory; 0 if it has ended."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return 1024 * int(found[1]) if found else 0
    return 0


class _Attack:
    """One process's attacks on one endpoint."""

    def __init__(self, endpoint: str, job: str, megabytes: int) -> None:
        self.findings = Findings()
        self._endpoint, self._job = endpoint, job
        self._budget = megabytes << 20
        self._held: list[socket.socket] = []

    def run(self) -> None:
        """Everything, once; what is half done stays so until the next round."""
        self.release()
        self.unfinished_message()
        self.empty_frames()
        self.half_handshakes()
        self.claimed_lengths()
        self.stolen_name()
        self.findings.rounds += 1

    def release(self) -> None:
        """Close all connections."""
        for connection in self._held:
            connection.close()
        self._held.clear()

    def unfinished_message(self) -> None:
        """Frames of one message, of which the last never comes."""
        frame = b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20)
        self._stream(_greeting(b"NULL") + _READY, itertools.repeat(frame, self._budget >> 20))

    def empty_frames(self) -> None:
        """Likewise, but all of them are empty: each takes memory of the receiver, and time at the end."""
        frames = b"\x01\x00" * (1 << 19)
        self._stream(_greeting(b"NULL") + _READY, itertools.repeat(frames, self._budget >> 25))

    def half_handshakes(self) -> None:
        """Many connections that say hardly anything."""
        for number in range(300):
            self._stream(_greeting(b"CURVE")[: number % 65], ())

    def claimed_lengths(self) -> None:
        """The first frame of a handshake, of any length that is let through, but for its last byte."""
        for length, count in ((255 << 20, 4), (8 << 20, 16), (1 << 20, 64), (65_000, 900)):
            body = [bytes(1 << 20)] * (length >> 20) + [bytes(length % (1 << 20))]
            body[-1] = body[-1][:-1] if body[-1] else b""
            for _ in range(count):
                start = _greeting(b"CURVE") + b"\x06" + struct.pack(">Q", length + 1)
                self._stream(start, body)

    def stolen_name(self) -> None:
        """Messages of the job as a member would send them: to read rows, to stop it, to break it."""
        stop = View(ViewNumber(1 << 40), "stopping")
        places = np.arange(4, dtype=np.uint32)
        lies: list[tuple[Peer, Message, list[Frame]]] = [
            (Peer("worker", 0, 1), Pull(1, (Part(0, 4),)), [places]),
            (Peer("launcher"), Pull(2, (Part(0, 4),)), [places]),
            (Peer("worker", 0, 1), stop, []),
            (Peer("supervisor"), stop, []),
            (Peer("launcher"), LauncherBeat("done", ViewNumber(1 << 40)), []),
            (Peer("worker", 0, 1), Hello(), []),
            (Peer("server", 1, 1), ReadStripes(1, 0, 0, 1), []),
            (Peer("server", 0, 1), ReadStripes(1, 0, 0, 1), []),
        ]
        messages = [
            pack(self._job, Envelope(source, target, message, frames))
            for target, (source, message, frames) in itertools.product(_TARGETS, lies)
        ]
        self._speak(messages, encrypted=False)
        self._speak(messages, encrypted=True)

    def _speak(self, messages: Iterable[Sequence[Piece]], *, encrypted: bool) -> None:
        """Send messages with a client of ZeroMQ's own, and see whether answers come."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            if encrypted:
                dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
                dealer.curve_serverkey = zmq.curve_keypair()[0]
            dealer.connect(self._endpoint)
            for parts in messages:
                dealer.send_multipart(parts)
            while dealer.poll(_ANSWER_MILLISECONDS):
                dealer.recv_multipart()
                self.findings.answers += 1

    def _connect(self) -> socket.socket | None:
        scheme, _, address = self._endpoint.partition("://")
        connection = socket.socket(socket.AF_UNIX if scheme == "ipc" else socket.AF_INET)
        connection.settimeout(_WAIT_SECONDS)
        host, _, port = address.rpartition(":")
        try:
            connection.connect(address if scheme == "ipc" else (host, int(port)))
        except OSError:
            connection.close()
            self.findings.unreachable += 1
            return None
        self.findings.connected += 1
        return connection

    def _stream(self, start: bytes, blocks: Iterable[bytes]) -> None:
        """Send until all is sent, the other side closes, or takes nothing more."""
        connection = self._connect()
        if connection is None:
            return
        self._held.append(connection)
        with contextlib.suppress(OSError):
            for block in itertools.chain([start], blocks):
                connection.sendall(block)
                self.findings.sent_bytes += len(block)


def _greeting(mechanism: bytes) -> bytes:
    """What a client of ZMTP 3.0 says first."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def main() -> None:
    """Attack until standard input ends; a line of findings after each round."""
    endpoints, job, uid, megabytes = msgspec.json.decode(sys.argv[1])
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    attacks = [_Attack(endpoint, job, megabytes) for endpoint in endpoints]
    with ThreadPoolExecutor(len(attacks) + 1) as threads:
        threads.submit(_end_with_input)
        while True:
            list(threads.map(_Attack.run, attacks))
            found = [attack.findings for attack in attacks]
            sums = {name: sum(getattr(one, name) for one in found) for name in Findings.__struct_fields__}
            print(msgspec.json.encode({**sums, "rounds": found[0].rounds}).decode(), flush=True)


def _end_with_input() -> None:
    while os.read(0, 1 << 16):
        pass
    os._exit(0)  # in the midst of an attack


if __name__ == "__main__":
    main()
