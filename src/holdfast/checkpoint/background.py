"""One thread that does one thing at a time, and never loses an error.

A trainer may be interrupted (Ctrl-C) wherever it is in here, and may go on. ``threading.Condition`` and all
that is built upon it are entered by code of Python's, in which the interrupt can come when the lock is taken
already and nobody is there yet to give it back: the other thread would wait for good. So locks are taken by
``with lock``, which cannot be interrupted half-way, and what a trainer waits for is a ``Latch``, not an event
or a future.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

Value = TypeVar("Value")

_LONGEST_SLEEP_SECONDS = 0.05
"""Of a throttle, between two looks at whether it is still needed."""


class Latch:
    """Is opened once, by one thread; another waits for that."""

    def __init__(self) -> None:
        self._closed = threading.Lock()
        self._closed.acquire()

    def open(self) -> None:
        """Let whoever waits go on."""
        self._closed.release()

    def is_open(self) -> bool:
        """Whether that has happened."""
        return not self._closed.locked()

    def wait(self) -> None:
        """Return when that has happened."""
        with self._closed:
            pass


class Background:
    """Runs jobs in a thread, one after the other; at most one is waiting.

    A job that raises stops nothing: its error is kept for ``raise_error``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._waiting: Callable[[], None] | None = None
        self._running: Callable[[], None] | None = None
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Hand over a job; waits while another one is waiting already."""
        with self._lock:
            self._condition.wait_for(lambda: self._waiting is None or self._closed)
            if self._closed:
                raise RuntimeError(f"{self._name} is closed and takes no more jobs")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()  # before the job is noted: without a thread nobody would ever do it
                self._thread = thread
            self._waiting = job
            self._condition.notify_all()

    def withdraw(self, job: Callable[[], None]) -> bool:
        """Take a job back; False if it is being done."""
        with self._lock:
            if self._waiting is job:
                self._waiting = None
                self._condition.notify_all()
            return self._running is not job

    def wait(self) -> None:
        """Return when nothing is running or waiting."""
        with self._lock:
            self._condition.wait_for(lambda: self._waiting is None and self._running is None)

    def raise_error(self) -> None:
        """Raise what the last failed job raised, once."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, most_seconds: float | None = None) -> bool:
        """Finish what was submitted and end the thread; closing twice is fine. False if it takes longer."""
        with self._lock:
            self._closed = True
            self._condition.notify_all()
            thread = self._thread
        # The collector of garbage may close it from the thread itself.
        if thread is not None and thread is not threading.current_thread():
            thread.join(most_seconds)
            return not thread.is_alive()
        return True

    def _run(self) -> None:
        while True:
            with self._lock:
                self._condition.wait_for(lambda: self._waiting is not None or self._closed)
                job, self._waiting = self._waiting, None
                if job is None:
                    return
                self._running = job
                self._condition.notify_all()
            try:
                job()
            except BaseException as error:
                with self._lock:
                    self._error = error
            finally:
                del job  # it may hold a snapshot of gigabytes
                with self._lock:
                    self._running = None
                    self._condition.notify_all()


class Throttle:
    """Lets threads work together for no more than a share of one processor's time.

    Each says now and then what it has done since it said so last, by its own clock of processor time, and is
    held up until the rests that all of the work so far asks for are over. Rests that come by themselves,
    while a disk writes, count as well; they are not saved up. A rest ends early when ``stopped`` says that
    nobody needs the work any more.
    """

    def __init__(self, share: float, stopped: Callable[[], bool] = lambda: False) -> None:
        self._rest_per_second = 1 / share - 1
        self._stopped = stopped
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._own = threading.local()

    def begin(self) -> None:
        """What this thread did until now does not count."""
        self._own.since = time.thread_time()

    def pause(self) -> None:
        """This thread has done something: rest for it."""
        worked = time.thread_time() - self._own.since
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + worked * self._rest_per_second
            rest = self._free_at - time.monotonic()
        while rest > 0 and not self._stopped():
            time.sleep(min(rest, _LONGEST_SLEEP_SECONDS))
            rest -= _LONGEST_SLEEP_SECONDS
        self.begin()

    def after_each(self, values: Iterable[Value]) -> Generator[Value, None, None]:
        """The same values, with a rest after what it took to make each, and to deal with the one before."""
        self.begin()
        for value in values:
            self.pause()
            yield value


def computed_ahead(values: Iterator[Value], most: int) -> Generator[Value, None, None]:
    """The same values, of which another thread computes up to ``most`` before they are asked for."""
    done: queue.Queue[tuple[bool, Any]] = queue.Queue(most)
    stopped = threading.Event()

    def put(item: tuple[bool, Any]) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                done.put(item, timeout=0.1)
                return

    def compute() -> None:
        try:
            for value in values:
                put((True, value))
                if stopped.is_set():
                    return
            put((False, None))
        except BaseException as error:  # of whatever kind: it belongs to whoever asks for values
            put((False, error))

    thread = threading.Thread(target=compute, name="holdfast-encode", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system has none left
        yield from values
        return
    try:
        while True:
            more, value = done.get()
            if not more:
                if value is not None:
                    raise value
                return
            yield value
    finally:
        stopped.set()
        thread.join()
