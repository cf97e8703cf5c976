"""How the ranks of a job agree on what to do, and when.

Ranks *meet* in a step in which something may have to be saved, and whenever they are told to save or restore.
Rank 0 decides and leaves its *order*; the others read it, and wait for it if they are ahead. Rank 0 waits for
nobody. With ``every_steps`` they meet in the steps in which a save is due; with ``every_seconds`` each order
says in which step the next one will be, by how long steps have taken. All other steps cost nothing.

Each meeting has a number, which all ranks count by themselves: so a rank that calls ``save`` while another
calls ``step`` finds out.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec import Struct

from holdfast.checkpoint.format.manifest import Manifest, Version, read
from holdfast.checkpoint.ranks.link import Link
from holdfast.checkpoint.ranks.publisher import Follower, Leader, Order, error_of, kind_of
from holdfast.checkpoint.reading.version import find_version
from holdfast.checkpoint.saving.schedule import SaveSchedule
from holdfast.checkpoint.store import Store
from holdfast.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    HoldfastError,
    ModelMismatch,
    NoSuchVersion,
    StoreError,
    message_of,
)
from holdfast.options import Policy

_encode = msgspec.msgpack.encode
_FIRST = -(1 << 62)
Attempt = Callable[[Version, Manifest], bool]
"""Restores a version; whether the next one may go on with its era."""


class Hello(Struct):
    """What a rank says in the beginning."""

    store: str = ""
    policy: str = ""
    objects: list[str] = []
    error: str = ""


class Offer(Struct):
    """What rank 0 says while a version is restored."""

    version: int = 0
    """To try now; 0: none is left, or needed."""
    manifest: int = 0
    restored: int = 0
    """The version that all ranks have restored; 0: the store has none."""
    continues: bool = False
    error: str = ""
    kind: str = ""


class Tried(Struct):
    """What became of an offer at another rank."""

    continues: bool = False
    error: str = ""
    kind: str = ""


class Agreement:
    """The trainer's side of one rank.

    Args:
        link: to the others.
        publisher: of this rank.
        policy: the same on all ranks.
        schedule: rank 0's counts.
    """

    def __init__(
        self, link: Link, publisher: Leader | Follower, policy: Policy, schedule: SaveSchedule
    ) -> None:
        self.link = link
        self._publisher = publisher
        self._policy, self._schedule = policy, schedule
        self._meetings = 0
        self._next_step: int | None = _FIRST
        self._last_step = _FIRST
        self._pace: tuple[int, float] | None = None
        self._call = ("", 0)
        self._announced = False
        self._offers = 0
        if isinstance(publisher, Leader):
            publisher.announce = self._announce

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.link.rank == 0

    def meets(self, step: int) -> bool:
        """Whether all ranks meet in this step."""
        again, self._last_step = step < self._last_step, step  # the caller counts anew
        return again or (self._next_step is not None and step >= self._next_step)

    def begin_at_once(self) -> None:
        """Meet in the next step."""
        self._next_step = self._last_step = _FIRST
        self._pace = None

    @contextlib.contextmanager
    def meeting(self, call: str, step: int) -> Iterator[Order | None]:
        """Meet for a call. Gives rank 0's order to the others, and None to rank 0.

        Rank 0's order is that nothing is saved, unless its publisher begins a version in here. A rank that
        fails in here tells the others.
        """
        self._meetings += 1
        self._offers = 0
        if isinstance(self._publisher, Leader):
            self._call, self._announced = (call, step), False
            if call == "restore":
                self._post(Order(call, step))
            try:
                yield None
            finally:
                if not self._announced:
                    self._post(Order(call, step, next_step=self._next_meeting(step)))
            return
        order = msgspec.msgpack.decode(self.link.hear(self._key(), 0, is_urgent=True), type=Order)
        self._next_step = order.next_step
        try:
            if (order.call, order.step) != (call, step):
                raise CheckpointError(
                    f"rank {self.link.rank} called {call}() for step {step}, rank 0 {order.call}() "
                    f"for step {order.step}: make the same calls on every rank"
                )
            self._publisher.order = order
            yield order
        except BaseException as error:
            if order.version:
                self._publisher.failed(order.version, error)
            raise

    def _key(self) -> str:
        return f"order/{self._meetings}"

    def _announce(self, version: int, baseline: bool, tables: str) -> None:
        call, step = self._call
        next_step = self._next_meeting(step, saved=True)
        self._post(Order(call, step, version, baseline, tables, next_step))

    def _post(self, order: Order) -> None:
        assert isinstance(self._publisher, Leader)
        self._announced = True
        self._next_step = order.next_step
        self.link.post(self._key(), _encode(order))
        self._publisher.note_spent([self._key()])

    def _next_meeting(self, step: int, *, saved: bool = False) -> int | None:
        """The step of the next meeting: the first one in which a save may be due."""
        steps = self._schedule.steps_left(step, saved=saved)
        seconds = self._schedule.seconds_left(time.monotonic(), saved=saved)
        if seconds is not None:
            now = time.monotonic()
            begun, since = self._pace or (step, now)
            per_step = (now - since) / (step - begun) if step > begun else math.inf
            self._pace = step, now
            # Half way: should steps become longer, no save comes late.
            by_time = max(1, int(seconds / max(per_step, 1e-6) / 2))
            steps = by_time if steps is None else min(steps, by_time)
        return None if steps is None else step + steps

    # In the beginning

    @staticmethod
    def greet(link: Link, hello: Hello) -> None:
        """Tell the others that this rank is ready, or why it is not; raises if another one is not."""
        if link.rank == 0:
            answer = hello.error and f"rank 0: {hello.error}"
            for rank in link.others:
                theirs = msgspec.msgpack.decode(link.hear(f"hello/{rank}", rank), type=Hello)
                answer = answer or _difference(rank, hello, theirs)
            link.post("welcome", answer.encode())
        else:
            link.post(f"hello/{link.rank}", _encode(hello))
            answer = link.hear("welcome", 0).decode()
        if answer and not hello.error:
            raise ConfigError(f"the ranks of this job cannot save together: {answer}")

    # Restoring

    def lead_restore(
        self,
        candidates: Sequence[Version],
        manifest: Manifest,
        attempt: Attempt,
        on_problem: Callable[[Version, HoldfastError], None],
    ) -> tuple[Version | None, bool]:
        """Try versions until all ranks have restored one; which, and whether all may go on with its era."""
        for candidate in candidates:
            number = self._offer(Offer(candidate.version, manifest.number))
            continues, error = self._try(candidate, manifest, attempt)
            for rank in self.link.others:
                data = self.link.hear(f"tried/{self._meetings}/{number}/{rank}", rank)
                tried = msgspec.msgpack.decode(data, type=Tried)
                continues = continues and tried.continues
                if tried.error and (error is None or tried.kind != "damaged"):
                    error = _restore_error(f"rank {rank}: {tried.error}", tried.kind)
            if error is None:
                self._offer(Offer(restored=candidate.version, continues=continues))
                return candidate, continues
            if not isinstance(error, _DAMAGE):
                raise error
            on_problem(candidate, error)
        if not candidates:
            self._offer(Offer())
        return None, False

    @contextlib.contextmanager
    def leading_restore(self) -> Iterator[None]:
        """Tell the others of an error in here."""
        try:
            yield
        except BaseException as error:
            self._offer(Offer(error=message_of(error) or "it was interrupted", kind=_restore_kind(error)))
            raise

    def follow_restore(
        self, store: Store, prepare: Callable[[], None], attempt: Attempt
    ) -> tuple[Version | None, bool]:
        """Try what rank 0 offers, once this rank is prepared; the version that all ranks have restored."""
        last: Version | None = None
        number = 0
        while True:
            number += 1
            data = self.link.hear(f"offer/{self._meetings}/{number}", 0)
            offer = msgspec.msgpack.decode(data, type=Offer)
            if offer.error:
                raise _restore_error(f"rank 0: {offer.error}", offer.kind)
            if not offer.version:
                return (last if offer.restored else None), offer.continues
            try:
                prepare()
                manifest = read(store, offer.manifest)
                last = find_version(manifest, offer.version, store.url)
                continues, error = self._try(last, manifest, attempt)
            except HoldfastError as problem:
                continues, error = False, problem
            kind = "" if error is None else _restore_kind(error)
            tried = Tried(continues, "" if error is None else message_of(error), kind)
            self.link.post(f"tried/{self._meetings}/{number}/{self.link.rank}", _encode(tried))

    def _try(
        self, version: Version, manifest: Manifest, attempt: Attempt
    ) -> tuple[bool, HoldfastError | None]:
        try:
            return attempt(version, manifest), None
        except HoldfastError as error:
            return False, error

    def _offer(self, offer: Offer) -> int:
        self._offers += 1
        self.link.post(f"offer/{self._meetings}/{self._offers}", _encode(offer))
        return self._offers


_DAMAGE = (CorruptCheckpoint, NoSuchVersion, StoreError)


def _restore_kind(error: BaseException) -> str:
    if isinstance(error, _DAMAGE):
        return "damaged"
    return "other model" if isinstance(error, ModelMismatch) else kind_of(error)


def _restore_error(text: str, kind: str) -> HoldfastError:
    if kind == "damaged":
        return CorruptCheckpoint(text)
    if kind == "other model":
        return ModelMismatch(text)
    found = error_of(text, kind)
    return found if isinstance(found, HoldfastError) else CheckpointError(text)


def _difference(rank: int, mine: Hello, theirs: Hello) -> str:
    """Why two ranks cannot save together; "" if they can."""
    if theirs.error:
        return f"rank {rank}: {theirs.error}"
    for what, here, there in (
        ("stores", mine.store, theirs.store),
        ("policies", mine.policy, theirs.policy),
        ("objects", mine.objects, theirs.objects),
    ):
        if here != there:
            return (
                f"ranks 0 and {rank} have different {what}, {here} and {there}: give the same on every rank"
            )
    return ""
