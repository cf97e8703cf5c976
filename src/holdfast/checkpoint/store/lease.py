"""A lease that expires: one writer at a time on stores without kernel locks.

The lease is an object that names its holder and the moment when it ends. Its holder renews it; another
writer may take it over once it has ended, or once its holder is known to be dead. A writer can wait for that:
a lease that nobody renews for as long as it lasts has ended, by the clock of whoever waits.

Clocks of different machines differ, and a holder may sleep. So a lease is only an early warning that two jobs
write to one store; what keeps versions whole is said in `holdfast.checkpoint.saving.catalog`.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Protocol

from holdfast.checkpoint.store.base import LEASE_OBJECT, WriterLock
from holdfast.checkpoint.store.holder import NONSENSE, is_alive, note, read_holder
from holdfast.errors import StoreError, StoreLocked

log = logging.getLogger("holdfast.checkpoint")

_MARGIN_SECONDS = 1.0  # a request of the holder's may be on its way
_LOOK_SECONDS = 1.0
_LONGEST_LEASE_SECONDS = 3600.0  # a note that says more is damaged, or meant to lock others out
_END_OF_CALENDAR = datetime(9999, 1, 1, tzinfo=UTC).timestamp()


class LeaseChanged(Exception):
    """The lease has changed since it was read: another writer was faster."""


class LeaseObject(Protocol):
    """The operations that a lease needs from a store; a tag identifies one state of the object."""

    def read(self) -> tuple[bytes, str] | None:
        """Return content and tag, or None if there is no lease."""

    def create(self, content: bytes) -> str:
        """Write the lease and return its tag, or raise `LeaseChanged` if there is one."""

    def replace(self, content: bytes, tag: str) -> str:
        """Write the lease and return its new tag, or raise `LeaseChanged` if its tag is not ``tag``."""


class Lease(WriterLock):
    """A held lease, renewed by its own thread after a third of its duration."""

    def __init__(
        self, lease: LeaseObject, url: str, seconds: float, wait_seconds: float | None = 0.0
    ) -> None:
        """Take the lease, or raise `StoreLocked`; for the wait see `Store.lock_writer`."""
        self._object = lease
        self._url = url
        self._seconds = seconds
        self._owner = secrets.token_hex(8)
        self._guard = threading.Lock()
        self._released = threading.Event()
        self._taken_by: StoreLocked | None = None
        self._tag = self._take(wait_seconds)
        self._renewer = threading.Thread(target=self._keep, name="holdfast-lease", daemon=True)
        try:
            self._renewer.start()
        except BaseException:  # the system has no thread left: nobody would renew it
            with suppress(StoreError, LeaseChanged):
                self._object.replace(self._note(0.0), self._tag)
            raise

    def renew(self) -> None:
        """Raise `StoreLocked` if another writer is known to have taken over the expired lease.

        Its own thread prolongs it: a trainer that calls this must not wait for a store that does not answer.
        So nothing is asked here, and no lock is taken that is held while something is being asked.
        """
        if self._taken_by is not None:
            raise self._taken_by
        if self._released.is_set():
            raise StoreError(f"the lease on {self._url} was released: lock the store again")

    def _prolong(self) -> None:
        with self._guard:
            self.renew()
            try:
                self._tag = self._object.replace(self._note(self._seconds), self._tag)
            except LeaseChanged:
                self._adopt_or_give_up()

    def release(self) -> None:
        """End the lease, unless another writer has taken it over."""
        if self._released.is_set():
            return
        self._released.set()
        with self._guard, suppress(StoreError, LeaseChanged):
            # Replaced by one that has ended, not deleted: a delete could hit a successor's lease.
            self._object.replace(self._note(0.0), self._tag)
        self._renewer.join()

    def _take(self, wait_seconds: float | None) -> str:
        found = self._object.read()
        if found is not None and _ends(found[0]) > time.time() and is_alive(found[0]) is not False:
            found = self._wait(*found, wait_seconds)
        try:
            if found is None:
                return self._object.create(self._note(self._seconds))
            return self._object.replace(self._note(self._seconds), found[1])
        except LeaseChanged:
            found = self._object.read()
            if found is not None and self._is_ours(found[0]):
                return found[1]  # our request was carried out, and repeated because its answer was lost
            raise self._held_by(found[0] if found else b"") from None

    def _wait(self, content: bytes, tag: str, most_seconds: float | None) -> tuple[bytes, str] | None:
        """Wait for the lease to end and return it; raise `StoreLocked` if its holder is, or may be, alive."""
        left = min(_ends(content) - time.time(), _length(content, self._seconds)) + _MARGIN_SECONDS
        seconds = left if most_seconds is None else min(most_seconds, left)
        if seconds <= 0 or is_alive(content):
            raise self._held_by(content)
        host, pid = read_holder(content)
        log.warning(
            "%s is locked by process %d on host %s, which may be gone: waiting up to %.0f s, until %s, for "
            "its lease to run out",
            self._url, pid, host, seconds, _clock(time.time() + seconds),
        )  # fmt: skip
        found: tuple[bytes, str] | None = (content, tag)
        end = time.monotonic() + seconds
        while (rest := end - time.monotonic()) > 0:
            time.sleep(min(rest, _LOOK_SECONDS))
            found = self._object.read()
            if found is None or _ends(found[0]) == 0:
                return found  # given back
            if found[1] != tag:
                raise self._held_by(found[0])  # it was renewed, or another one was faster
        if seconds < left:
            raise self._held_by(content)
        return found

    def _adopt_or_give_up(self) -> None:
        found = self._object.read()
        if found is not None and self._is_ours(found[0]):
            self._tag = found[1]
            return
        self._taken_by = self._held_by(found[0] if found else b"")
        raise self._taken_by

    def _keep(self) -> None:
        while not self._released.wait(self._seconds / 3):
            try:
                self._prolong()
            except StoreLocked:
                return  # the writer is told by its own next renew()
            except StoreError:
                continue  # out of reach for now; there are two more tries before the lease ends

    def _note(self, seconds: float) -> bytes:
        expires = time.time() + seconds if seconds else 0.0
        return json.dumps(
            {"owner": self._owner, **note(), "expires": expires, "seconds": self._seconds}
        ).encode()

    def _is_ours(self, content: bytes) -> bool:
        with suppress(*NONSENSE):
            return bool(json.loads(content)["owner"] == self._owner)
        return False

    def _held_by(self, content: bytes) -> StoreLocked:
        host, pid = read_holder(content)
        ends = _ends(content)
        when = _clock(ends) if ends > 0 else "an unknown time"
        cure = (
            f"; a clock was ahead, no lease is that long: if the process is gone, delete {LEASE_OBJECT} there"
            if ends > time.time() + 2 * self._seconds
            else ""
        )
        return StoreLocked(
            f"{self._url} is being written by process {pid or 'unknown'} on host {host}: "
            f"stop it, or wait until its lease runs out at {when}{cure}",
            host,
            pid,
        )


def _clock(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


def _length(content: bytes, default: float) -> float:
    """Return the duration of a lease, if it states one."""
    with suppress(*NONSENSE):
        seconds = float(json.loads(content)["seconds"])
        return seconds if 0 < seconds <= _LONGEST_LEASE_SECONDS else default
    return default


def _ends(content: bytes) -> float:
    """Return when a lease ends; an unreadable one has ended, else it would lock the store forever."""
    try:
        ends = float(json.loads(content)["expires"])
    except NONSENSE:
        return 0.0
    return ends if 0.0 <= ends < _END_OF_CALENDAR else 0.0
