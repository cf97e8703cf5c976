"""Threads that do the parts of one loop side by side: the compiled loops let others run meanwhile."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue

_Loop = Callable[[int], object]
_Parts = SimpleQueue[tuple[_Loop, int]]
_Done = SimpleQueue[BaseException | None]
_Work = SimpleQueue[tuple[_Parts, _Done] | None]

LEAST_BYTES = 1 << 20
"""Of memory that a part goes through, reading and writing. To wake a thread and to wait for it takes about
100 µs in a virtual machine, in which one thread goes through half of that."""


class Team:
    """A calling thread and its helpers. One thread at a time may call.

    Args:
        threads: how many work, the caller included. With one, no thread is started.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._work: list[_Work] = [SimpleQueue() for _ in range(threads - 1)]
        for number, work in enumerate(self._work, 1):
            threading.Thread(target=_help, args=(work,), name=f"team-{number}", daemon=True).start()
        weakref.finalize(self, _dismiss, self._work).atexit = False

    def parts(self, nbytes: int) -> int:
        """In how many parts to do what goes through so many bytes: 1 if it is too little to share."""
        if self.threads == 1:
            return 1
        return max(1, min(self.threads, nbytes // LEAST_BYTES))

    def run(self, loop: _Loop, parts: int) -> None:
        """Call ``loop(part)`` for each part, from 0 on, at most as many as there are threads.

        Part 0 runs in the calling thread, and so do parts that no helper has begun by then: if processors are
        busy, nobody waits for a helper to get one. Returns when all are done; the first error is raised then.
        """
        if parts == 1:
            loop(0)
            return
        left: _Parts = SimpleQueue()
        done: _Done = SimpleQueue()
        for part in range(1, parts):
            left.put((loop, part))
        for work in self._work[: parts - 1]:
            work.put((left, done))
        error = _try(loop, 0)
        waiting = parts - 1
        while (mine := _next(left)) is not None:
            other = _try(*mine)
            error = other if error is None else error
            waiting -= 1
        for _ in range(waiting):
            other = done.get()  # of whichever thread is done next
            error = other if error is None else error
        if error is not None:
            raise error

    def run_slices(self, loop: Callable[[slice], object], count: int, nbytes: int) -> None:
        """Call ``loop`` for slices that together are ``range(count)`` and go through so many bytes."""
        parts = self.parts(nbytes)
        if parts == 1:
            loop(slice(count))
        else:
            self.run(lambda part: loop(slice(count * part // parts, count * (part + 1) // parts)), parts)


def _help(work: _Work) -> None:
    while (given := work.get()) is not None:
        left, done = given
        mine = _next(left)
        if mine is not None:
            error = _try(*mine)
            del mine  # first: the caller may look whether anybody still refers to its arrays
            done.put(error)
            del error


def _next(left: _Parts) -> tuple[_Loop, int] | None:
    try:
        return left.get_nowait()
    except Empty:
        return None


def _try(loop: _Loop, part: int) -> BaseException | None:
    try:
        loop(part)
    except BaseException as error:
        return error
    return None


def _dismiss(helpers: list[_Work]) -> None:
    for work in helpers:
        work.put(None)


ALONE = Team()
"""Only the caller."""
