"""Noticing that a loader is read ahead of training, by a queue or a thread of the user's own.

What such a loader says of its position counts batches that were not trained: a restored run would skip them.
A ``Checkpointer`` is told of steps, not of batches. But some loaders can be asked how many batches they
have handed out (Holdfast's readers, ``Prefetch``, torchdata's ``StatefulDataLoader``), and two things give
them away:

- In the first steps of a run, each step reads as many batches as the one before: one, or more where gradients
  are accumulated. If more was read than that many for each step, the rest was read ahead.
- Another thread gets the batches than the one that trains, and it has got more than there were steps.

This must not cry wolf. Steps may be counted from any number, and told from some step on or now and then;
batches may be left out or left over at the end of a pass; loaders may be evaluated with. So the first rule
holds only from the very first step, for steps that are told one by one, and within one pass; what does not
look like that is not looked at any more.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.events import EventLog

log = logging.getLogger("holdfast.checkpoint")

WATCHED_STEPS = 64
"""After so many steps nothing is looked at any more."""
_STEADY_STEPS = 4
"""So many in a row must read alike."""


class ReadAhead:
    """Watches the loaders among a run's objects in its first steps.

    Args:
        objects: of the run, by name.
        events: where it is said that one is read ahead; the log says it, too.
    """

    def __init__(self, objects: Mapping[str, Any], events: EventLog) -> None:
        self._objects = objects
        self._events = events
        self._said: set[str] = set()
        self._watched: dict[str, _Watched] = {}
        self.begin(0)

    def begin(self, start: int) -> None:
        """Training goes on from here, with this step."""
        self._watched = {}
        for name, thing in self._objects.items():
            reads = _reads_of(thing)
            if reads is not None and name not in self._said:
                self._watched[name] = _Watched(thing, reads, start)

    def told(self, step: int) -> None:
        """A step is done."""
        for name, watched in list(self._watched.items()):
            try:
                is_ahead = watched.look(step)
            except (_Unclear, TypeError):  # a step that is no number is not for us to complain about
                is_ahead = False
            if is_ahead is not None:
                del self._watched[name]
            if is_ahead:
                self._say(name, *watched.now)

    def _say(self, name: str, steps: int, batches: int) -> None:
        self._said.add(name)
        self._events.emit("loader_read_ahead", name=name, batches=batches, steps=steps)
        log.warning(
            "%s is read ahead of training: it has handed out %d batches, and step() was told of %d steps, so "
            "a restored run would skip batches that were not trained; iterate over hf.Prefetch(loader), and "
            "give that to the Checkpointer in the loader's place: it counts what was trained",
            name, batches, steps,
        )  # fmt: skip


class _Unclear(Exception):
    """Nothing can be said of this loader."""


class _Reads(NamedTuple):
    """What a loader says of itself."""

    batches: int
    iteration: object
    """Numbers, or objects, one for each time that it is iterated over."""
    thread: int | None = None
    """Which has got the last batch; None: that is not known."""


class _Watched:
    """A loader in the first steps of a run."""

    def __init__(self, loader: Any, before: _Reads, start: int) -> None:
        self._loader = loader
        self._before = before
        self._start = start
        self._iteration: object
        self._seen: list[tuple[int, int]] = []  # steps, and how many batches had been handed out then

    @property
    def now(self) -> tuple[int, int]:
        """How many steps there were since the first that was told, that one included; and batches."""
        step, batches = self._seen[-1]
        return step - self._seen[0][0] + 1, batches

    def look(self, step: int) -> bool | None:
        """Whether it is read ahead; None if that is not known yet. Raises _Unclear if it will not be."""
        reads = _reads_of(self._loader)
        if reads is None or not self._is_the_same_pass(reads):
            raise _Unclear
        if self._seen and step <= self._seen[-1][0]:
            raise _Unclear
        self._seen.append((step, reads.batches - self._before.batches))
        if reads.thread not in (None, threading.get_ident()) and self._has_more_batches_than_steps():
            return True
        if len(self._seen) == WATCHED_STEPS or not (self._is_every_step() or reads.thread):
            raise _Unclear
        return self._has_more_than_steps_read() if self._is_every_step() else None

    def _is_the_same_pass(self, reads: _Reads) -> bool:
        if not self._seen:
            self._iteration = reads.iteration
            before = self._before.iteration
            # Whoever looks at a first batch, and then begins anew, has begun twice.
            return before is None or reads.iteration in (
                before,
                before + 1 if type(before) is int else before,
            )
        return reads.iteration is self._iteration or reads.iteration == self._iteration

    def _is_every_step(self) -> bool:
        """Whether steps are told one by one, from the first one on; counted from 0, or from 1."""
        first, last = self._seen[0][0], self._seen[-1][0]
        return last - first == len(self._seen) - 1 and first - self._start in (0, 1)

    def _has_more_batches_than_steps(self) -> bool:
        steps, batches = self.now
        numbered = self._seen[-1][0] - self._start  # steps, if they were told late, by their numbers
        return batches > steps and batches not in (numbered, numbered + 1)

    def _has_more_than_steps_read(self) -> bool | None:
        """Compare what was read in all with what each step reads, once that is the same for some steps."""
        read = [b - a for (_, a), (_, b) in itertools.pairwise(self._seen)]
        if len(read) < _STEADY_STEPS or len(set(read[-_STEADY_STEPS:])) > 1:
            return None
        per_step = read[-1]
        if per_step == 0:
            raise _Unclear
        more = [batches - per_step for batches in read]
        if min(more) >= 0 and more != sorted(more, reverse=True):
            # No queue that fills at the beginning: batches are left out here and there.
            raise _Unclear
        steps, batches = self.now
        untold = self._seen[0][0] - self._start  # the first step may have been told as the second
        return batches > per_step * steps and batches != per_step * (steps + untold)


def _reads_of(thing: Any) -> _Reads | None:
    """How far a loader has been read; None if it is none, or cannot be asked."""
    count: Any = getattr(thing, "read_count", None)
    if type(getattr(count, "batches", None)) is int:
        return _Reads(count.batches, count.passes, count.thread)
    if not hasattr(thing, "_initial_iter_for_state_dict"):
        return None
    iterator = getattr(thing, "_iterator", None)  # of a StatefulDataLoader
    if iterator is None:
        return _Reads(0, None)
    batches = getattr(iterator, "_num_yielded", None)
    return _Reads(batches, iterator) if type(batches) is int else None
