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
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from holdfast.screen import drop_output

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AT_ONCE_SECONDS = 5.0
"""That the main thread has to clear up after the second signal."""
_SAY_SECONDS = 1.0
_SHOW_CURSOR = b"\x1b[?25h"


@contextlib.contextmanager
def stop_on_signals(in_order: Callable[[], bool] = lambda: True) -> Iterator[list[int]]:
    """Yield the list of signals received so far. Each signal is caught once, then its old handler is
    restored; if it was ignored, the default.

    While ``in_order`` returns False, the first signal goes to the old handler, too.
    """
    received: list[int] = []
    before: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        old = before[number]
        if old == signal.SIG_IGN:  # as a script's background commands have it; the second must end this one
            old = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, old)
        if in_order():
            received.append(number)
        elif callable(old):
            old(number, frame)
        else:
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

    After the second signal, the end of the block ends the process, which otherwise would wait for all
    threads. If the block does not end within some seconds, the process ends nevertheless, and with it the
    processes of a job.

    Attributes:
        then: what is still done after the first signal, for the message; may be empty.
    """

    def __init__(self) -> None:
        self.then = ""
        self._said = threading.Event()

    def __enter__(self) -> Self:
        self._heard: set[int] = set()
        self._second: int | None = None
        self._all_heard = threading.Event()
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
            self._stop_listening()
            second = self._second
        except KeyboardInterrupt:  # it came just now
            second = signal.SIGINT
        if second is None:
            return
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            _end(error.code)
        if error is None or isinstance(error, KeyboardInterrupt):
            _end(128 + second)
        # Any other error is still to be printed. The thread ends the process in some seconds.

    def _stop_listening(self) -> None:
        """Return when the thread has heard of all signals before this call."""
        try:
            signal.set_wakeup_fd(self._before)
        except (OSError, ValueError):  # whoever set it has closed it since
            signal.set_wakeup_fd(-1)
        self._theirs.close()
        self._all_heard.wait()
        if self._second is None:
            self._thread.join()
            self._ours.close()
        if self._heard:
            self.wait()
            # The interpreter may wait for threads for ever. From now on another signal ends it at once.
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)

    def wait(self) -> None:
        """After a signal, wait until the message is printed, so that later output follows it."""
        self._said.wait(_SAY_SECONDS)

    def _listen(self) -> None:
        while number := int.from_bytes(self._ours.recv(1)):  # 0: the end
            if number in self._heard:
                self._second = number
                self._end_soon(number)
            if number in SIGNALS:
                if not self._heard:
                    self._say_aside()
                self._heard.add(number)
        self._all_heard.set()

    def _say_aside(self) -> None:
        """In another thread: it waits as long as nobody reads the output, and the second signal must be
        heard."""
        try:
            threading.Thread(target=self._say, name="stopping", daemon=True).start()
        except RuntimeError:  # the system has no more threads
            self._say()

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

    def _end_soon(self, number: int) -> NoReturn:
        """End the process, unless the main thread does so itself; at once with the next signal."""
        if select.select([self._ours], [], [], _AT_ONCE_SECONDS)[0] and not self._ours.recv(1):
            self._all_heard.set()
            time.sleep(_AT_ONCE_SECONDS)  # for the last output
        out = sys.stdout
        if out.isatty() and select.select([], [out.fileno()], [], 0)[1]:
            os.write(out.fileno(), _SHOW_CURSOR)  # a live view hides it
        os._exit(128 + number)


def _end(code: int) -> NoReturn:
    """End the process, whatever its threads do."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it; it is closed
            stream.flush()
    os._exit(code)


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
