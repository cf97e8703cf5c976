"""Read ahead of training without losing track of the trained batches.

A loader's state counts the batches that it has handed out. If a thread reads ahead of training, some of
those are still waiting in a queue when the state is saved, and a restored run would skip them. So
``Prefetch`` takes the loader's state after each batch and keeps it with the batch. Its own state is the one
of the last batch that the training loop got. (Check-N-Run, section 3.1, instead stops readers at every
checkpoint.)

Everything that the thread has read is an ``_Item`` under the next number. ``_ReadAhead.taken`` is the number
of the last one that was handed out. It is set by a single assignment: an interrupt (Ctrl-C) comes before it,
and the batch is handed out next, or after it. Both sides wait on a ``SimpleQueue``, which an interrupt cannot
leave locked, and look again now and then, as an interrupt can lose a token.
"""

from __future__ import annotations

import copy
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

from holdfast.data.reader import ReadCount
from holdfast.errors import ConfigError, WrongReaderState

log = logging.getLogger("holdfast.data")

Count = Literal["yielded", "trained"]

_LOOK_AGAIN_SECONDS = 0.1
_PATIENCE_SECONDS = 5.0
"""For the batch that is being read when nobody wants more; a loader may wait for data that never come."""


class Prefetch:
    """Read up to ``depth`` batches ahead of training in a thread, with a state that can be checkpointed.

        loader = hf.Prefetch(hf.Synthetic(...), depth=4)
        with hf.Checkpointer("run1", {"model": model, "optim": optimizer, "loader": loader}, ...) as ckpt:
            start = ckpt.restore()
            for step, batch in enumerate(loader, start):
                ...
                ckpt.step(step)

    Pass the ``Prefetch`` to the ``Checkpointer``, not the wrapped loader. Its ``state_dict`` is the
    loader's own, at the position after the last batch that counts, so you can add or remove the wrapper
    between two runs.

    Iterating again after the end starts over. After a ``break`` it continues with the next batch, even if
    the loader alone would start over. Leaving the loop ends the thread after the batch that it is reading.

    The loader's ``iter()`` is called in your thread, its ``next()`` and ``state_dict()`` in the reading
    thread. If those draw random numbers from the global generators of torch, NumPy or Python, their order
    relative to the draws of training is not deterministic: give the loader its own generator.

    Args:
        loader: has ``__iter__``, ``state_dict`` and ``load_state_dict``: a reader of Holdfast, torchdata's
            ``StatefulDataLoader``, or your own. Nothing else may read it.
        depth: maximum number of batches that are read but not yet handed out.
        count: which batches the state counts. "yielded": those that the loop got, which is right if it
            trains on each before it asks for the next. "trained": those that ``trained()`` was called for;
            use this if your loop itself takes batches ahead, for example to copy them to a device.
    """

    def __init__(self, loader: Any, depth: int = 2, *, count: Count = "yielded") -> None:
        missing = [n for n in ("__iter__", "state_dict", "load_state_dict") if not hasattr(loader, n)]
        if missing:
            raise ConfigError(
                f"a {type(loader).__name__} has no {', '.join(missing)}: expected a loader whose position "
                "can be saved, such as torchdata's StatefulDataLoader"
            )
        if type(depth) is not int or depth < 1:
            raise ConfigError(f"depth is {depth!r}: expected a whole number of batches, at least 1")
        if count not in get_args(Count):
            raise ConfigError(f"count is {count!r}: expected 'yielded' or 'trained'")
        self._loader = loader
        self._by_training = count == "trained"
        self._ahead = _ReadAhead(loader, depth)
        self._iteration: object | None = None
        self._trained = 0
        self._counted_any = False
        self._handed_out_before = 0
        self._closed = False
        self._reads = ReadCount()
        weakref.finalize(self, self._ahead.pause)  # also when the program ends

    def __iter__(self) -> Iterator[Any]:
        """The batches from the current position to the end of the loader."""
        ahead = self._ahead
        iteration = self._iteration = object()
        try:
            ahead.start(closed=self._closed)
            self._reads.begin()
            while True:
                item = ahead.get(ahead.taken + 1)
                if self._iteration is not iteration:
                    raise _over()
                batch, error = item.batch, item.error
                ahead.take(item)
                item.batch = item.error = None  # only now: an interrupt before it must leave them there
                if not self._by_training:
                    ahead.forget_before(item.number)
                if error is not None:
                    raise error
                if item.is_end:
                    return
                self._reads.count()
                yield batch
        finally:
            if self._iteration is iteration:
                self._iteration = None
                ahead.pause()

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def is_iterating(self) -> bool:
        """Whether a loop is running or a batch is being read, so that no state can be loaded."""
        return self._iteration is not None or self._ahead.is_reading

    @property
    def read_count(self) -> ReadCount | None:
        """The number of batches handed out; None with ``count="trained"``."""
        return None if self._by_training else self._reads

    def trained(self, batches: int = 1) -> None:
        """Count the next ``batches`` of the batches that were handed out as trained.

        Only with ``count="trained"``. Call it after training on a batch and before ``Checkpointer.step``.
        """
        if not self._by_training:
            raise ConfigError(
                "this Prefetch counts batches as they are yielded: make it with count='trained'"
            )
        if batches < 1:
            raise ConfigError(f"{batches} batches are said to be trained: expected at least 1")
        self._counted_any = True
        self._trained = self._ahead.after(self._trained, batches)
        self._ahead.forget_before(self._trained)

    def state_dict(self) -> Any:
        """The loader's state after the last batch that counts; see ``count``."""
        ahead = self._ahead
        if self._by_training:
            self._check_counted()
            return ahead.state(lambda: ahead.after(self._trained, 0))
        return ahead.state(lambda: ahead.taken)

    def load_state_dict(self, state: Any) -> None:
        """Continue at a position from ``state_dict``; batches that were read ahead are dropped.

        Raises WrongReaderState while a loop is running, because it would have no effect.
        """
        if self.is_iterating:
            raise WrongReaderState(
                "load_state_dict was called after iter(): load the state before you iterate"
            )
        here = self.state_dict() if self._ahead.taken else None
        try:
            self._ahead.load(state)
        except BaseException:
            if here is not None:
                self._ahead.load(here)  # the loader may be ahead of what was handed out
            raise
        finally:
            self._trained, self._counted_any, self._handed_out_before = self._ahead.taken, False, 0

    def close(self) -> None:
        """End the thread and drop batches that were read ahead. The state stays available."""
        self._closed = True
        self._iteration = None
        self._ahead.pause()
        self._ahead.forget_after(self._ahead.taken)

    def _check_counted(self) -> None:
        """Whoever forgets to call ``trained`` would train on everything once more after a restore."""
        before, self._handed_out_before = self._handed_out_before, self._reads.batches
        if not self._counted_any and 0 < before < self._reads.batches:
            self._counted_any = True  # it is said once
            log.warning(
                "a Prefetch with count='trained' has handed out %d batches, and none was counted: call "
                "trained() after each batch, or make it with count='yielded'",
                self._reads.batches,
            )


@dataclass(slots=True)
class _Item:
    """What was read: a batch, the end, an error; or only the position at which a pass begins."""

    number: int
    state: Any
    """The loader's, after it."""
    is_batch: bool = False
    is_end: bool = False
    batch: Any = None
    error: BaseException | None = None


class _ReadAhead:
    """What the loop and the reading thread share.

    It knows nothing of the ``Prefetch`` that has it: the thread would keep that alive.

    Attributes:
        taken: the number of the last item that was handed out.
    """

    def __init__(self, loader: Any, depth: int) -> None:
        self.taken = 0
        self._loader = loader
        self._depth = depth
        self._items: dict[int, _Item] = {}
        self._oldest = 1
        self._read = 0
        self._last_state: Any = None
        self._source: Iterator[Any] | None = None
        self._reading = threading.Lock()  # held by the thread as long as it lives, so that there is only one
        self._asking = threading.Lock()
        self._wanted: object | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()

    @property
    def is_reading(self) -> bool:
        """Whether the thread lives."""
        return self._reading.locked()

    # In the loop's thread

    def start(self, *, closed: bool) -> None:
        """Begin to read, or go on where a loop was left."""
        if closed:
            raise WrongReaderState("this Prefetch is closed: make a new one")
        self.pause()
        if self._pid != os.getpid():
            if self.is_reading:
                raise _forked()
            self._pid = os.getpid()
        if self._source is None and self.taken >= self._read:
            with self._asking:
                source = iter(self._loader)
                self._begin_at(self._state_now())
                self._source = source  # last: whoever is interrupted before it does this again
        self._wanted = wanted = object()
        self._thread = threading.Thread(
            target=self._run, args=(wanted,), name="holdfast-prefetch", daemon=True
        )
        self._thread.start()

    def get(self, number: int) -> _Item:
        """The item of that number, when it has been read."""
        while (item := self._items.get(number)) is None:
            if self._pid != os.getpid():
                raise _forked()
            thread = self._thread
            if (thread is None or not thread.is_alive()) and number not in self._items:
                raise _over()
            with suppress(queue.Empty):
                self._arrived.get(timeout=_LOOK_AGAIN_SECONDS)
        return item

    def take(self, item: _Item) -> None:
        """Hand an item out."""
        self.taken = item.number
        if self._room.empty():
            self._room.put(None)

    def pause(self) -> None:
        """Let the thread end, with the batch that it is reading. What it has read stays for the next loop."""
        self._wanted = None
        self._room.put(None)
        thread, self._thread = self._thread, None
        # The garbage collector may call this in any thread; a forked process has no such thread.
        if thread is None or thread is threading.current_thread() or self._pid != os.getpid():
            return
        if thread.ident is not None:  # an interrupt may have kept it from being started
            thread.join(_PATIENCE_SECONDS)

    def after(self, number: int, batches: int) -> int:
        """The last item up to which so many batches more were handed out than up to item ``number``."""
        while batches or (number < self.taken and not self._items[number + 1].is_batch):
            if number >= self.taken:
                raise WrongReaderState(
                    f"{batches} more batches are said to be trained than were handed out: call trained() "
                    "once for each batch"
                )
            number += 1
            batches -= self._items[number].is_batch
        return number

    def state(self, number: Callable[[], int]) -> Any:
        """The loader's state after the item of that number; of none, as it is now.

        The number is asked for again, as another thread may iterate.
        """
        while (item := self._items.get(number())) is None:
            with self._asking:  # nobody begins to read meanwhile
                if number() == 0:
                    return self._state_now()
        return copy.deepcopy(item.state)

    def load(self, state: Any) -> None:
        """Put the loader to another position, while no thread reads it; what was read ahead is dropped."""
        self.close_source()
        self._loader.load_state_dict(state)
        self._items.clear()
        # A StatefulDataLoader draws random numbers when it goes to its position: it does so now, before
        # whoever restores a run restores the random states.
        self._begin_at(self._state_now())

    def forget_before(self, number: int) -> None:
        """Nobody asks for items before this one any more."""
        while self._oldest < number:
            self._items.pop(self._oldest, None)
            self._oldest += 1

    def forget_after(self, number: int) -> None:
        """Drop what was read ahead, and the loader's iterator."""
        for later in [n for n in self._items if n > number]:
            self._items.pop(later, None)
        if not self.is_reading:
            self.close_source()

    def close_source(self) -> None:
        """Let go of the loader's iterator: of a generator, whose loader takes no state before."""
        source, self._source = self._source, None
        close = getattr(source, "close", None)
        if close is not None:
            close()

    def _begin_at(self, state: Any) -> None:
        number = max(self.taken, self._read) + 1
        self._last_state = state
        self._items[number] = _Item(number, state)
        self.taken = number
        self._read = number

    def _state_now(self) -> Any:
        """A copy: the loader may change what it gives as it goes on."""
        return copy.deepcopy(self._loader.state_dict())

    # In the thread

    def _run(self, wanted: object) -> None:
        with self._reading:
            while self._wanted is wanted and self._source is not None:
                if self._read - self.taken < self._depth:
                    self._read_one(self._source)
                else:
                    with suppress(queue.Empty):
                        self._room.get(timeout=_LOOK_AGAIN_SECONDS)

    def _read_one(self, source: Iterator[Any]) -> None:
        item = _Item(self._read + 1, self._last_state)
        try:
            try:
                item.batch = next(source)
                item.is_batch = True
            except StopIteration:
                item.is_end = True
                self._source = None
            item.state = self._last_state = self._state_now()
        except BaseException as error:  # of whatever kind: it belongs to whoever asks for the batch
            item.is_batch, item.batch, item.error = False, None, error
            self._source = None
        self._items[item.number] = item
        self._read = item.number
        if self._arrived.empty():
            self._arrived.put(None)


def _over() -> WrongReaderState:
    return WrongReaderState("this iteration is over: another was begun, or the Prefetch was closed")


def _forked() -> WrongReaderState:
    return WrongReaderState(
        "a thread of the process that this one was forked from is reading ahead: make a Prefetch of this "
        "process's own"
    )
