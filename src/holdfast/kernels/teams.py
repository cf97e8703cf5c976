"""Threads that do the parts of one loop side by side: the compiled loops let others run meanwhile."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_Loop = Callable[[int], object]
_Done = SimpleQueue[BaseException | None]
_Work = SimpleQueue[tuple[_Loop, int, _Done] | None]

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

        Part 0 runs in the calling thread. Returns when all are done; the first error is raised then.
        """
        if parts == 1:
            loop(0)
            return
        done: _Done = SimpleQueue()
        for part, work in enumerate(self._work[: parts - 1], 1):
            work.put((loop, part, done))
        error: BaseException | None = None
        try:
            loop(0)
        except BaseException as caught:
            error = caught
        for _ in range(parts - 1):
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
        loop, part, done = given
        error = None
        try:
            loop(part)
        except BaseException as caught:
            error = caught
        del given, loop  # first: the caller may look whether anybody still refers to its arrays
        done.put(error)
        del done, error


def _dismiss(helpers: list[_Work]) -> None:
    for work in helpers:
        work.put(None)


ALONE = Team()
"""Only the caller."""
