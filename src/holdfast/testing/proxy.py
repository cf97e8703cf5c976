"""A network that breaks on command: a TCP proxy that a test puts before a server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_BLOCK = 64 * 1024


class BreakingProxy:
    """Passes bytes to and from a server until it is told to break.

    Attributes:
        port: where it listens on the loopback device.
        sent_bytes: how much clients have sent through it.
        breaks: how often it broke something; a test asserts that it is not 0.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.sent_bytes = 0
        self.breaks = 0
        self._cut_at: int | None = None
        self._answers_to_drop = 0
        self._method_to_drop = b""
        self._guard = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def cut_after(self, more_bytes: int) -> None:
        """Cut every connection once clients have sent that much more, and refuse new ones."""
        with self._guard:
            self._cut_at = self.sent_bytes + more_bytes

    def mend(self) -> None:
        """Let connections through again."""
        with self._guard:
            self._cut_at = None

    def drop_answers(self, method: str, count: int = 1) -> None:
        """Carry out the next ``count`` requests of an HTTP method, but cut the line instead of answering."""
        with self._guard:
            self._method_to_drop = method.encode() + b" "
            self._answers_to_drop = count

    def close(self) -> None:
        """End all connections and threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._close_all()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut():
                self.breaks += 1
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._server_port))
            with self._guard:
                self._open |= {client, server}
            drop = threading.Event()
            self._start(self._send, client, server, drop)
            self._start(self._answer, client, server, drop)

    def _send(self, client: socket.socket, server: socket.socket, drop: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while block := client.recv(_BLOCK):
                with self._guard:
                    self.sent_bytes += len(block)
                    if self._answers_to_drop and block.startswith(self._method_to_drop):
                        self._answers_to_drop -= 1
                        drop.set()
                if self._is_cut():
                    self.breaks += 1
                    self._close_all()
                    return
                server.sendall(block)
        self._close(client, server)

    def _answer(self, client: socket.socket, server: socket.socket, drop: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while block := server.recv(_BLOCK):
                # The go-ahead for a body is not yet the answer.
                if drop.is_set() and not block.startswith(b"HTTP/1.1 100"):
                    self.breaks += 1
                    break
                client.sendall(block)
        self._close(client, server)

    def _is_cut(self) -> bool:
        with self._guard:
            return self._cut_at is not None and self.sent_bytes >= self._cut_at

    def _close_all(self) -> None:
        with self._guard:
            doomed = list(self._open)
        self._close(*doomed)

    def _close(self, *ends: socket.socket) -> None:
        with self._guard:
            self._open -= set(ends)
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in recv
            end.close()

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()


@contextmanager
def breaking_proxy(server_port: int) -> Iterator[BreakingProxy]:
    """Run a proxy for the length of the block."""
    proxy = BreakingProxy(server_port)
    try:
        yield proxy
    finally:
        proxy.close()
