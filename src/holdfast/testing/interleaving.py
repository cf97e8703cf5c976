"""Several writers of one store, interleaved at its operations in an order that a seed decides.

Give each writer a `SteppedStore` of its own over the same place and a script, and let `Turns.run` run the
scripts. Between two operations of a store only one writer runs, so a run with the same seed is the same run.
Writers are held up for one operation or for dozens, as a process is that sleeps in the middle of a save.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.checkpoint.store import ObjectInfo, ObjectReader, Store, WriterLock
from holdfast.errors import StoreUnreachable

if TYPE_CHECKING:
    from typing_extensions import Buffer

_RUNS = (1, 1, 2, 3, 5, 8, 13, 21, 34, 55)
_SECONDS = 120.0  # a script that takes longer for one step hangs


class ThreadTurns:
    """Lets threads take turns.

    Attributes:
        trace: who did what, in order.
    """

    def __init__(self, seed: int) -> None:
        self.trace: list[tuple[str, str]] = []
        self._chance = random.Random(seed)
        self._condition = threading.Condition()
        self._waiting: set[str] = set()
        self._running: str | None = None
        self._left = 0

    def run(self, scripts: Mapping[str, Callable[[], None]]) -> None:
        """Run all scripts to their ends; the first error that one raises is raised when all have ended."""
        errors: list[BaseException] = []

        def follow(who: str, script: Callable[[], None]) -> None:
            try:
                self.arrive(who, "start")
                script()
            except BaseException as error:
                errors.append(error)
            finally:
                with self._condition:
                    self._running = None
                    self._choose()

        threads = [threading.Thread(target=follow, args=item, daemon=True) for item in scripts.items()]
        for thread in threads:
            thread.start()
        with self._condition:
            assert self._condition.wait_for(lambda: len(self._waiting) == len(threads), _SECONDS)
            self._choose()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def arrive(self, who: str, what: str) -> None:
        """Wait for one's turn to do something."""
        with self._condition:
            self._waiting.add(who)
            if self._running == who:
                self._running = None
                self._choose(who)
            else:
                self._condition.notify_all()
            if not self._condition.wait_for(lambda: self._running == who, _SECONDS):
                raise AssertionError(f"{who} waits for its turn to {what}, and nobody gives it")
            self.trace.append((who, what))

    def happens(self, share: float) -> bool:
        """Whether something happens that happens so often. Ask only in one's turn."""
        return self._chance.random() < share

    def _choose(self, last: str | None = None) -> None:
        if not self._waiting:
            return
        self._left -= 1
        if last is None or self._left <= 0:
            self._left = self._chance.choice(_RUNS)
            last = self._chance.choice(sorted(self._waiting))
        self._waiting.discard(last)
        self._running = last
        self._condition.notify_all()


class SteppedStore(Store):
    """A store whose operations wait for their turn; names are deleted one by one.

    Of ``lost_answers`` of its operations, as a share, the answer is lost: they are carried out, and fail.
    """

    def __init__(self, inner: Store, turns: ThreadTurns, who: str, lost_answers: float = 0.0) -> None:
        self.url = inner.url
        self.keeps_open_files = inner.keeps_open_files
        self.publishes_exclusively = inner.publishes_exclusively
        self.may_publish_late = inner.may_publish_late
        self._inner = inner
        self._turns = turns
        self._who = who
        self._lost_answers = lost_answers

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        self._turns.arrive(self._who, what)
        yield
        if self._turns.happens(self._lost_answers):
            raise StoreUnreachable(f"the answer was lost: {what}")

    def put(self, name: str, parts: Sequence[Buffer]) -> int:
        """Write a new object."""
        with self._step(f"put {name}"):
            return self._inner.put(name, parts)

    def publish(self, name: str, data: bytes) -> None:
        """Create an object."""
        with self._step(f"publish {name}"):
            self._inner.publish(name, data)

    def sync(self) -> None:
        """Make names durable: nothing that others see."""
        self._inner.sync()

    def open(self, name: str) -> ObjectReader:
        """Open an object."""
        with self._step(f"open {name}"):
            return self._inner.open(name)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """List objects."""
        with self._step(f"list {prefix}"):
            return self._inner.list(prefix)

    def misplaced(self, prefix: str) -> Sequence[str]:
        """List what is no object."""
        return self._inner.misplaced(prefix)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects."""
        for name in names:
            with self._step(f"delete {name}"):
                self._inner.delete([name])

    def keep_reserve(self, size: int) -> None:
        """Hold back room."""
        self._inner.keep_reserve(size)

    def use_reserve(self) -> bool:
        """Give some of it up."""
        return self._inner.use_reserve()

    def clear_unfinished(self) -> None:
        """Delete unfinished files."""
        with self._step("clear unfinished"):
            self._inner.clear_unfinished()

    def lock_writer(self, wait_seconds: float | None = 0.0) -> WriterLock:
        """Take the real lock: who tests what happens without one does not ask for it."""
        return self._inner.lock_writer(wait_seconds)

    def close(self) -> None:
        """Nothing: the store below is shared."""
