"""A lease without a store: who holds it, and until when."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from holdfast.checkpoint.store import holder
from holdfast.checkpoint.store.lease import Lease, LeaseChanged
from holdfast.errors import StoreError, StoreLocked

LONG = 1000.0  # longer than any test, so that the renewing thread does not stir


class MemoryObject:
    """A lease in memory, with faults."""

    def __init__(self) -> None:
        self.content: bytes | None = None
        self.version = 0
        self.answers_to_lose = 0
        self.is_out_of_reach = False
        self.written = threading.Condition()

    def read(self) -> tuple[bytes, str] | None:
        return None if self.content is None else (self.content, str(self.version))

    def create(self, content: bytes) -> str:
        return self._write(content, self.content is None)

    def replace(self, content: bytes, tag: str) -> str:
        return self._write(content, tag == str(self.version))

    def _write(self, content: bytes, allowed: bool) -> str:
        with self.written:
            if self.is_out_of_reach:
                self.written.notify_all()
                raise StoreError("out of reach")
            if not allowed:
                raise LeaseChanged
            self.content = content
            self.version += 1
            self.written.notify_all()
            if self.answers_to_lose:
                self.answers_to_lose -= 1
                raise LeaseChanged  # what a repeated request is told
            return str(self.version)


@pytest.fixture
def shared() -> MemoryObject:
    return MemoryObject()


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    return pass_time


def test_a_lease_can_be_taken_over_only_after_its_end(
    shared: MemoryObject, pass_time: Callable[[float], None]
) -> None:
    first = Lease(shared, "s3://b", LONG)
    pass_time(LONG - 1)
    with pytest.raises(StoreLocked, match="s3://b is being written by process"):
        Lease(shared, "s3://b", LONG)
    first._prolong()
    pass_time(LONG - 1)
    with pytest.raises(StoreLocked):
        Lease(shared, "s3://b", LONG)
    pass_time(2)
    second = Lease(shared, "s3://b", LONG)
    for _ in range(2):
        with pytest.raises(StoreLocked):
            first._prolong()
        with pytest.raises(StoreLocked):
            first.renew()
    first.release()  # must not end the second's
    with pytest.raises(StoreLocked):
        Lease(shared, "s3://b", LONG)
    second.release()
    Lease(shared, "s3://b", LONG).release()


def test_a_lease_by_a_clock_that_was_ahead_names_the_cure(
    shared: MemoryObject, pass_time: Callable[[float], None]
) -> None:
    pass_time(30 * 86400)
    lease = Lease(shared, "s3://b", LONG)
    pass_time(-30 * 86400)
    with pytest.raises(StoreLocked, match=r"a clock was ahead.* delete writer\.lease there"):
        Lease(shared, "s3://b", LONG)
    lease.release()


def test_a_lease_that_ended_unnoticed_is_renewed(
    shared: MemoryObject, pass_time: Callable[[float], None]
) -> None:
    lease = Lease(shared, "s3://b", LONG)
    pass_time(2 * LONG)
    lease._prolong()
    with pytest.raises(StoreLocked):
        Lease(shared, "s3://b", LONG)
    lease.release()


def test_a_released_lease_cannot_be_renewed(shared: MemoryObject) -> None:
    lease = Lease(shared, "s3://b", LONG)
    lease.release()
    lease.release()
    with pytest.raises(StoreError, match="was released"):
        lease.renew()


def test_lost_answers_do_not_lock_a_writer_out(shared: MemoryObject) -> None:
    shared.answers_to_lose = 1
    lease = Lease(shared, "s3://b", LONG)
    shared.answers_to_lose = 1
    lease._prolong()
    lease._prolong()
    lease.renew()
    assert shared.answers_to_lose == 0
    lease.release()


def test_it_is_renewed_in_the_background_also_after_a_failure(shared: MemoryObject) -> None:
    lease = Lease(shared, "s3://b", 0.1)
    with shared.written:
        shared.is_out_of_reach = True
        assert shared.written.wait(60)
        shared.is_out_of_reach = False
        reached = shared.version
        assert shared.written.wait_for(lambda: shared.version > reached + 1, 60)
    lease.release()
    assert not lease._renewer.is_alive()
    assert shared.content is not None
    assert json.loads(shared.content)["expires"] == 0


def held_elsewhere(shared: MemoryObject, seconds: float, **others: object) -> None:
    """A lease of a process of which nobody here can tell whether it lives."""
    note = {"owner": "another", "host": "far", "pid": 7, "expires": time.time() + seconds, "seconds": seconds}
    shared.content = json.dumps(note | others).encode()
    shared.version += 1


class TestWaiting:
    def test_for_the_end_of_a_lease(self, shared: MemoryObject, caplog: pytest.LogCaptureFixture) -> None:
        held_elsewhere(shared, 0.3)
        with pytest.raises(StoreLocked):
            Lease(shared, "s3://b", LONG)
        assert not caplog.text
        Lease(shared, "s3://b", LONG, wait_seconds=None).release()
        assert "s3://b is locked by process 7 on host far" in caplog.text
        assert len(caplog.records) == 1

    def test_no_longer_than_is_asked_for(self, shared: MemoryObject) -> None:
        held_elsewhere(shared, LONG)
        with pytest.raises(StoreLocked, match="process 7 on host far"):
            Lease(shared, "s3://b", LONG, wait_seconds=0.2)

    def test_a_holder_that_renews_is_alive(self, shared: MemoryObject) -> None:
        held_elsewhere(shared, LONG)

        def renew() -> None:
            while not asked.wait(0.05):
                held_elsewhere(shared, LONG)

        asked = threading.Event()
        holder = threading.Thread(target=renew)
        holder.start()
        try:
            with pytest.raises(StoreLocked, match="process 7 on host far"):
                Lease(shared, "s3://b", LONG, wait_seconds=None)
        finally:
            asked.set()
            holder.join()

    def test_a_holder_that_lets_go(self, shared: MemoryObject) -> None:
        held_elsewhere(shared, LONG)
        timer = threading.Timer(0.1, lambda: held_elsewhere(shared, 0.0, expires=0.0))
        timer.start()
        Lease(shared, "s3://b", LONG, wait_seconds=None).release()
        timer.join()

    def test_a_clock_that_is_ahead_is_not_waited_for(self, shared: MemoryObject) -> None:
        """A lease that nobody has renewed for as long as it lasts has ended, whatever it says."""
        held_elsewhere(shared, 0.3, expires=time.time() + 86400)
        Lease(shared, "s3://b", LONG, wait_seconds=None).release()

    def test_a_note_that_says_for_ever_is_not_believed(self, shared: MemoryObject) -> None:
        held_elsewhere(shared, 1e9)
        Lease(shared, "s3://b", 0.3, wait_seconds=None).release()


class TestHolder:
    def test_a_dead_process_of_this_machine_holds_nothing(self, shared: MemoryObject) -> None:
        code = "from holdfast.checkpoint.store.holder import note; import json; print(json.dumps(note()))"
        said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        held_elsewhere(shared, LONG, **json.loads(said))
        Lease(shared, "s3://b", LONG).release()

    def test_a_process_that_got_the_number_of_a_dead_one_is_not_taken_for_it(
        self, shared: MemoryObject
    ) -> None:
        mine = holder.note()
        held_elsewhere(shared, LONG, **mine | {"started": mine["started"] - 1})
        Lease(shared, "s3://b", LONG).release()

    def test_a_living_process_of_this_machine_is_not_waited_for(
        self, shared: MemoryObject, caplog: pytest.LogCaptureFixture
    ) -> None:
        held_elsewhere(shared, LONG, **holder.note())
        with pytest.raises(StoreLocked, match=f"process {os.getpid()} "):
            Lease(shared, "s3://b", LONG, wait_seconds=None)
        assert not caplog.text

    @pytest.mark.parametrize(
        "other", [{"machine": "another"}, {"machine": ""}, {"machine": None}, {"started": None}, {"pid": -1}]
    )
    def test_what_is_not_known_for_sure_is_waited_for(
        self, shared: MemoryObject, other: dict[str, object]
    ) -> None:
        """Containers share process numbers, and sometimes a name."""
        held_elsewhere(shared, LONG, **holder.note() | {"pid": 4_000_000} | other)
        with pytest.raises(StoreLocked):
            Lease(shared, "s3://b", LONG)

    def test_a_zombie_is_dead(self, shared: MemoryObject) -> None:
        code = "from holdfast.checkpoint.store.holder import note; import json; print(json.dumps(note()))"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            held_elsewhere(shared, LONG, **json.loads(process.stdout.read()))
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            Lease(shared, "s3://b", LONG).release()


def keep_on(lease: Lease) -> None:
    with suppress(StoreError):
        lease._prolong()


def test_nobody_waits_for_a_store_that_does_not_answer(shared: MemoryObject) -> None:
    """A trainer asks before every save: a request with all its retries may take a minute."""
    asked, answer = threading.Event(), threading.Event()
    lease = Lease(shared, "s3://b", LONG)

    def hang(content: bytes, tag: str) -> str:
        asked.set()
        assert answer.wait(60)
        raise StoreError("out of reach")

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(shared, "replace", hang)
        renewer = threading.Thread(target=keep_on, args=(lease,))
        renewer.start()
        assert asked.wait(60)
        trainer = threading.Thread(target=lease.renew, daemon=True)
        trainer.start()
        trainer.join(10)
        waits = trainer.is_alive()
        answer.set()
        renewer.join()
    assert not waits
    lease.release()


NONSENSE = (
    b"",
    b"\xff",
    b"[]",
    b"{}",
    b'{"expires": "soon"}',
    b'{"expires": null}',
    b'{"expires": Infinity, "host": "h", "pid": Infinity}',
    b'{"expires": NaN}',
    b'{"expires": 1e300}',
    b'{"expires": ' + b"[" * 100_000,
)


@pytest.mark.parametrize("content", NONSENSE, ids=lambda content: repr(content)[:30])
def test_a_lease_that_makes_no_sense_locks_nobody_out(shared: MemoryObject, content: bytes) -> None:
    shared.content = content
    Lease(shared, "s3://b", LONG).release()


@pytest.mark.parametrize("content", NONSENSE, ids=lambda content: repr(content)[:30])
def test_a_lease_that_turns_into_nonsense_is_lost(shared: MemoryObject, content: bytes) -> None:
    lease = Lease(shared, "s3://b", LONG)
    shared.content = content
    shared.version += 1
    with pytest.raises(StoreLocked, match="process unknown on host unknown"):
        lease._prolong()
    lease.release()
