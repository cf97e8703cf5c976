"""A job's store is opened for writing behind the supervisor's back, again and again until it can be.

A store elsewhere stays locked for a while after a supervisor that died; one on a full disk can be opened once
there is space.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.store import Store, WriterLock
from holdfast.cluster.saving.failures import cause_of
from holdfast.cluster.saving.shard_saver import Runs
from holdfast.errors import StoreLocked, StoreUnreachable, message_of
from holdfast.options import Policy

log = logging.getLogger("holdfast.checkpoint")

GIVE_UP_SECONDS = 120.0
"""That a job waits at its end for a store that is locked or cannot be reached."""
_AGAIN_SECONDS = 2.0
_LEASE_SECONDS = 90.0
"""In which the lease of a supervisor that died runs out, after a minute."""


class Outcome:
    """What became of a job in the background."""

    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None


def start(runs: Runs, job: Callable[[], None]) -> Outcome:
    """Do something behind the supervisor's back."""
    outcome = Outcome()

    def run() -> None:
        try:
            job()
        except Exception as error:
            log.warning("%r", error)
            outcome.error = error
        finally:
            outcome.done = True  # last: whoever sees it reads the rest

    runs.submit(run)
    return outcome


class Opening:
    """Opens it.

    Args:
        open_store: opens the store for writing.
        policy: of the catalog.
        runs: what waits for it.
        now: the time.

    Attributes:
        catalog: the store's, once it is open.
        lock: the right to write to it.
        error: why it could not be opened the last time.
    """

    def __init__(self, open_store: Callable[[], Store], policy: Policy, runs: Runs, now: float) -> None:
        self.catalog: Catalog | None = None
        self.lock: WriterLock | None = None
        self.error: Exception | None = None
        self._open_store = open_store
        self._policy = policy
        self._runs = runs
        self._store: Store | None = None
        self._opened: Catalog | None = None
        self._outcome: Outcome | None = None
        self._first = self._began = self._next = now

    def advance(self, now: float) -> None:
        """Try, or see what became of that."""
        if self._outcome is None:
            if now >= self._next:
                self._began = now
                self._outcome = start(self._runs, self._open)
        elif self._outcome.done:
            self.error, self._outcome = self._outcome.error, None
            self._next = now + _AGAIN_SECONDS
            self.catalog = self._opened

    def why(self) -> str:
        """Why it is not open, in a sentence."""
        error = self.error or TimeoutError("it did not answer in time")
        return f"the store could not be opened: {cause_of(message_of(error))}"

    def has_failed(self, now: float) -> bool:
        """Whether it is not open for a reason that somebody should hear of."""
        # The one that had it before may be the supervisor that died.
        locked = isinstance(self.error, StoreLocked) and now - self._first < _LEASE_SECONDS
        return self.error is not None and not locked

    @property
    def is_waited_for(self) -> bool:
        """Whether it may be free, or answer, if one waits; a disk that is full stays so."""
        return isinstance(self.error, StoreLocked | StoreUnreachable)

    def is_hopeless(self, since: float, now: float) -> bool:
        """Whether a job that has waited for it from then on should not any longer."""
        if self.error is None or self.is_waited_for:
            return now - since >= GIVE_UP_SECONDS
        return self._outcome is None and self._began >= since  # it was tried once more

    def close(self) -> None:
        """Let go of the store."""
        if self.lock is not None:
            self.lock.release()
        if self._store is not None:
            self._store.close()

    def _open(self) -> None:
        store = self._store or self._open_store()
        self._store = store
        self.lock = self.lock or store.lock_writer()
        catalog = Catalog(store, self._policy)
        catalog.take_over()  # before any server puts a file
        self._opened = catalog
