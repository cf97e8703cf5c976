"""A background thread that runs one job at a time and never loses an error.

Ctrl-C may interrupt a trainer anywhere in this module, and the trainer may continue afterwards.
``threading.Condition``, and everything built upon it, takes and releases its lock in Python code. An
interrupt there can leave the lock acquired with nobody to release it, and the other thread would wait for
ever. So this module takes locks with ``with lock``, which cannot be interrupted half-way; a trainer waits for
a ``Latch``, not for an event, a future or the end of a thread; and only the background thread opens latches.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

Value = TypeVar("Value")

_LONGEST_SLEEP_SECONDS = 0.05
"""The longest time until a throttle checks whether it is still needed, and a latch whether it is open."""


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

    def wait(self, most_seconds: float | None = None) -> bool:
        """Return when it has been opened; False on timeout."""
        if most_seconds is None:
            with self._closed:
                return True
        end = time.monotonic() + most_seconds
        while not self.is_open():  # acquire() with a timeout could be interrupted before the release
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _LONGEST_SLEEP_SECONDS))
        return True


class _Task:
    """A place in the queue."""

    def __init__(self, job: Callable[[], None]) -> None:
        self.job: Callable[[], None] | None = job
        """None if it was withdrawn, or has ended: it may hold a snapshot of gigabytes."""
        self.taken = Latch()
        self.ended = Latch()


class Background:
    """Runs jobs in a thread, one after the other; at most one job is queued.

    A job that raises does not stop the thread: ``raise_error`` raises its error later.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()
        # A wake-up comes before what it announces, and the lock is held for both: the thread sees both, or
        # wakes up for nothing if an interrupt came in between.
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiting: _Task | None = None
        self._running: _Task | None = None
        self._closed = False
        self._error: BaseException | None = None
        self._ended = Latch()
        self._process = os.getpid()
        # Not at the first job: threading.Thread.start is one of those that an interrupt can break.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; blocks while another one is queued."""
        while (ahead := self._queue(job)) is not None:
            ahead.taken.wait()

    def _queue(self, job: Callable[[], None]) -> _Task | None:
        """Queue a job, or return the one that is queued already."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed and takes no more jobs")
            ahead = self._waiting
            if ahead is not None and ahead.job is not None:
                return ahead
            self._wakeups.put(None)
            if ahead is not None:
                ahead.job = job
            else:
                self._waiting = _Task(job)
            return None

    def withdraw(self, job: Callable[[], None]) -> bool:
        """Remove a job from the queue; False if it is running."""
        with self._lock:
            if self._waiting is not None and self._waiting.job is job:
                self._waiting.job = None
            return self._running is None or self._running.job is not job

    def wait(self) -> None:
        """Return when no job is running or queued."""
        while True:
            with self._lock:
                task = self._waiting or self._running
            if task is None:
                return
            task.ended.wait()

    def raise_error(self) -> None:
        """Raise the error of the last failed job, once."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, most_seconds: float | None = None) -> bool:
        """Finish all jobs and end the thread; False on timeout. You may call it twice."""
        with self._lock:
            self._wakeups.put(None)
            self._closed = True
        # The garbage collector may close it from the thread itself. A forked child has no thread to wait for.
        if self._thread is threading.current_thread() or self._process != os.getpid():
            return True
        # Thread.join, when it is interrupted, takes a thread that runs for one that has ended.
        if not self._ended.wait(most_seconds):
            return False
        self._thread.join()
        return True

    def _run(self) -> None:
        while True:
            self._wakeups.get()
            with self._lock:
                task, self._waiting = self._waiting, None
                self._running = task
                if task is None and self._closed:
                    self._ended.open()
                    return
            if task is not None:
                self._do(task)

    def _do(self, task: _Task) -> None:
        task.taken.open()
        try:
            if task.job is not None:
                task.job()
        except BaseException as error:
            with self._lock:
                self._error = error
        finally:
            task.job = None
            with self._lock:
                self._running = None
            task.ended.open()


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
