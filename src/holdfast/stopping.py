"""Ctrl-C and SIGTERM: the first stops a run in an orderly way, the second at once.

Python calls signal handlers between two instructions of the main thread, so not while that runs compiled code
for a minute. So another thread (``Notice``), which the interpreter notifies at once, prints the message.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from types import FrameType, TracebackType
from typing import Any, Self

from holdfast.screen import drop_output

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AT_ONCE_SECONDS = 5.0
"""That the main thread has to clear up after the second signal."""
_SAY_SECONDS = 1.0
_SHOW_CURSOR = b"\x1b[?25h"


@contextlib.contextmanager
def stop_on_signals(in_order: Callable[[], bool] = lambda: True) -> Iterator[list[int]]:
    """Yield the list of signals received so far. Each signal is caught once, then its old handler is
    restored.

    While ``in_order`` returns False, the first signal goes to the old handler, too.
    """
    received: list[int] = []
    before: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before[number])
        if in_order():
            received.append(number)
        elif callable(before[number]):
            before[number](number, frame)
        elif before[number] == signal.SIG_DFL:
            signal.raise_signal(number)

    if threading.current_thread() is threading.main_thread():  # others are not told of signals
        for number in SIGNALS:
            # None: a handler that Python did not set, and cannot set again.
            before[number] = signal.signal(number, handle) or signal.SIG_DFL
    try:
        yield received
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


class Notice:
    """Prints "stopping…" as soon as a signal arrives. A context manager for the main thread.

    Some seconds after the second signal it ends this process, and with it the processes of a job.

    Attributes:
        then: what is still done after the first signal, for the message; may be empty.
    """

    def __init__(self) -> None:
        self.then = ""
        self._said = threading.Event()

    def __enter__(self) -> Self:
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            signal.set_wakeup_fd(self._before)
        except (OSError, ValueError):  # whoever set it has closed it since
            signal.set_wakeup_fd(-1)
        self._theirs.close()
        self._thread.join()
        self._ours.close()

    def wait(self) -> None:
        """After a signal, wait until the message is printed, so that later output follows it."""
        self._said.wait(_SAY_SECONDS)

    def _listen(self) -> None:
        heard: set[int] = set()
        while number := int.from_bytes(self._ours.recv(1)):  # 0: the end
            if number in heard:
                self._end_soon(number)
                return
            if number in SIGNALS:
                if not heard:
                    self._say()
                heard.add(number)

    def _say(self) -> None:
        line = f"stopping… {self.then}".rstrip() + "\n"
        try:
            # Not by a console of rich's: it writes past the live view that has taken stdout's place.
            sys.stdout.write(line)
            sys.stdout.flush()
        except OSError:  # nobody reads it
            drop_output()
        if sys.stderr.isatty() and not sys.stdout.isatty():  # whoever pressed Ctrl-C is there
            with contextlib.suppress(OSError):
                sys.stderr.write(line)
        self._said.set()

    def _end_soon(self, number: int) -> None:
        """End the process, unless the main thread does so itself; at once with the next signal."""
        if select.select([self._ours], [], [], _AT_ONCE_SECONDS)[0] and not self._ours.recv(1):
            return
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), _SHOW_CURSOR)  # a live view hides it
        os._exit(128 + number)


class Stopped(KeyboardInterrupt):
    """A run was stopped at once.

    Attributes:
        lines: the lines to print.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)
        self.lines = lines


class WorkerPool(ProcessPoolExecutor):
    """Processes that ignore Ctrl-C and do not outlive the block: if it raises, they are killed. If this
    process is killed, they end by themselves.

    They are spawned, not forked, because torch's threads do not survive a fork.
    """

    def __init__(
        self, processes: int, initializer: Callable[..., object] | None = None, *arguments: Any
    ) -> None:
        start = (initializer, *arguments)
        super().__init__(processes, multiprocessing.get_context("spawn"), _begin, start)
        self._others = set(multiprocessing.active_children())

    def submit(self, *call: Any, **more: Any) -> Any:
        """As any executor does; it may start a process."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            return super().submit(*call, **more)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for process in set(multiprocessing.active_children()) - self._others:
                process.kill()
        self.shutdown(cancel_futures=True)


def _begin(initializer: Callable[..., object] | None, *arguments: Any) -> None:
    """In a process of the pool: those that wait for work hold each other's pipes open, and would wait for
    ever for a parent that is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, name="parent", daemon=True).start()
    if initializer is not None:
        initializer(*arguments)
