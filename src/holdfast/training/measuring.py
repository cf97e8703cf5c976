"""Measure the speeds of a store, of memory and of the loopback network."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from holdfast.checkpoint.store import open_store

_STORE_BYTES = 256 << 20
_OBJECT_BYTES = 64 << 20
_COPY_BYTES = 256 << 20
_TALK_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second."""

    write: float
    read: float
    copy: float
    network: float


def measure_rates(path: str) -> Rates:
    """Measure all four, in some seconds.

    What is written under ``path`` is deleted again. Reading back right after writing is as fast as the caches
    of the system allow. The network is this machine's own: what lies between machines it cannot know.
    """
    write, read = _store_rates(path)
    return Rates(write=write, read=read, copy=_copy_rate(), network=_loopback_rate())


def _store_rates(path: str) -> tuple[float, float]:
    size = min(_OBJECT_BYTES, _STORE_BYTES)
    content = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    into = np.empty_like(content)
    prefix = f"measured-{secrets.token_hex(4)}"
    names = [f"{prefix}-{number}" for number in range(_STORE_BYTES // size)]
    with open_store(path, create=True) as store:

        def write() -> None:
            for name in names:
                store.put(name, [content.data])
            store.sync()

        def read() -> None:
            for name in names:
                with store.open(name) as reader:
                    reader.read_into([(0, size)], into.data)

        try:
            written, was_read = _seconds(write), _seconds(read)
        finally:
            store.delete(names)
    return size * len(names) / written, size * len(names) / was_read


def _copy_rate() -> float:
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.zeros_like(source)
    return _COPY_BYTES / min(_seconds(lambda: np.copyto(target, source)) for _ in range(3))


def _loopback_rate() -> float:
    """The bandwidth of one TCP connection."""
    block = bytes(1 << 20)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send() -> None:
            with socket.create_connection(listener.getsockname()) as out:
                for _ in range(_TALK_BYTES // len(block)):
                    out.sendall(block)

        sender = threading.Thread(target=send)
        sender.start()
        connection, _ = listener.accept()
        with connection:
            into = bytearray(1 << 20)

            def receive() -> None:
                while connection.recv_into(into):
                    pass

            seconds = _seconds(receive)
        sender.join()
    return _TALK_BYTES / seconds


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
