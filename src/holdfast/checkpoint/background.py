"""A background thread that runs one job at a time and never loses an error.

Ctrl-C may interrupt a trainer anywhere in this module, and the trainer may continue afterwards.
``threading.Condition``, and everything built upon it, acquires its lock in Python code. An interrupt there
can leave the lock acquired with nobody to release it, and the other thread would wait forever. So this
module takes locks with ``with lock``, which cannot be interrupted half-way, and a trainer waits for a
``Latch``, not for an event or a future.
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
"""The longest time until a throttle checks whether it is still needed."""


class Latch:
    """Opened once, by one thread; other threads wait for it."""

    def __init__(self) -> None:
        self._closed = threading.Lock()
        self._closed.acquire()

    def open(self) -> None:
        """Release the threads that wait."""
        self._closed.release()

    def is_open(self) -> bool:
        """Whether it has been opened."""
        return not self._closed.locked()

    def wait(self) -> None:
        """Return when it has been opened."""
        with self._closed:
            pass


class Background:
    """Runs jobs in a thread, one after the other; at most one job is queued.

    A job that raises does not stop the thread: ``raise_error`` raises its error later.
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
        """Queue a job; blocks while another one is queued."""
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
        """Remove a job from the queue; False if it is running."""
        with self._lock:
            if self._waiting is job:
                self._waiting = None
                self._condition.notify_all()
            return self._running is not job

    def wait(self) -> None:
        """Return when no job is running or queued."""
        with self._lock:
            self._condition.wait_for(lambda: self._waiting is None and self._running is None)

    def raise_error(self) -> None:
        """Raise the error of the last failed job, once."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, most_seconds: float | None = None) -> bool:
        """Finish all jobs and end the thread; False on timeout. You may call it twice."""
        with self._lock:
            self._closed = True
            self._condition.notify_all()
            thread = self._thread
        # The garbage collector may close it from the thread itself.
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
    """Limits several threads together to a share of one processor's time.

    Each thread calls ``pause`` now and then. It sleeps until the pauses that all of the work so far requires
    are over, measured by processor time. Time that a thread spends waiting, for a disk for example, counts as
    a pause, but does not accumulate. A pause ends early when ``stopped`` returns True.

    Args:
        share: of one processor's time.
        stopped: whether to pause no longer.
        length: how long a pause is, relative to the one that the share requires.
    """

    def __init__(
        self,
        share: float,
        stopped: Callable[[], bool] = lambda: False,
        length: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._rest_per_second = 1 / share - 1
        self._stopped, self._length = stopped, length
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._own = threading.local()

    def begin(self) -> None:
        """Ignore the processor time that this thread has used so far."""
        self._own.since = time.thread_time()

    def pause(self) -> None:
        """Sleep for the processor time that this thread has used since ``begin``."""
        worked = time.thread_time() - self._own.since
        rest = worked * self._rest_per_second * self._length()
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + rest
            rest = self._free_at - time.monotonic()
        while rest > 0 and not self._stopped():
            time.sleep(min(rest, _LONGEST_SLEEP_SECONDS))
            rest -= _LONGEST_SLEEP_SECONDS
        self.begin()

    def after_each(self, values: Iterable[Value]) -> Generator[Value, None, None]:
        """The same values, with a pause before each one, for computing it and for using the one before."""
        self.begin()
        for value in values:
            self.pause()
            yield value


def computed_ahead(values: Iterator[Value], most: int) -> Generator[Value, None, None]:
    """The same values; a thread computes up to ``most`` of them ahead of time."""
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
        except BaseException as error:  # of any kind: raised where the values are consumed
            put((False, error))

    thread = threading.Thread(target=compute, name="holdfast-encode", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the system has no threads left
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
