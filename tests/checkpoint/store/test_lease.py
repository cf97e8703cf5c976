"""A lease without a store: who holds it, and until when."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

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


def held_elsewhere(shared: MemoryObject, seconds: float, /, **others: object) -> None:
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


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, start: float = 1_000_000.0) -> None:
        self.start = self.now = start
        self.sleeps: list[float] = []
        self.wakes: Callable[[], None] = lambda: None
        for name in ("time", "monotonic"):
            monkeypatch.setattr(time, name, lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds
        self.wakes()

    @property
    def slept(self) -> float:
        return self.now - self.start


class TestHowLong:
    """Waiting, on a clock of our own."""

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        return Clock(monkeypatch)

    def wait(self, shared: MemoryObject, wait_seconds: float | None, seconds: float = 10.0) -> Lease:
        """With threads that live by the real clock."""
        return Lease(shared, "s3://b", seconds, wait_seconds)

    def test_until_the_end_and_a_second_more(self, shared: MemoryObject, clock: Clock) -> None:
        """A request of the holder's may be on its way."""
        held_elsewhere(shared, 4.5)
        self.wait(shared, None).release()
        assert clock.slept == 5.5
        assert set(clock.sleeps) == {1.0, 0.5}  # it looks every second whether it was given back

    def test_no_longer_than_that_if_more_is_allowed(self, shared: MemoryObject, clock: Clock) -> None:
        held_elsewhere(shared, 4.5)
        self.wait(shared, 100.0).release()
        assert clock.slept == 5.5

    def test_as_long_as_is_allowed(self, shared: MemoryObject, clock: Clock) -> None:
        held_elsewhere(shared, 4.5)
        with pytest.raises(StoreLocked, match=r"process 7 on host far.*runs out at 1970-01-12T13:46:44"):
            self.wait(shared, 5.0)
        assert clock.slept == 5.0

    def test_not_at_all(self, shared: MemoryObject, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
        held_elsewhere(shared, 4.5)
        with pytest.raises(StoreLocked):
            self.wait(shared, 0.0)
        assert clock.slept == 0
        assert not caplog.text

    def test_until_it_is_given_back(self, shared: MemoryObject, clock: Clock) -> None:
        held_elsewhere(shared, 100.0)
        clock.wakes = lambda: held_elsewhere(shared, 0.0, expires=0.0)
        self.wait(shared, None).release()
        assert clock.slept == 1.0

    def test_until_it_is_deleted(self, shared: MemoryObject, clock: Clock) -> None:
        held_elsewhere(shared, 100.0)

        def delete() -> None:
            shared.content = None

        clock.wakes = delete
        self.wait(shared, None).release()
        assert clock.slept == 1.0

    def test_until_it_is_renewed(self, shared: MemoryObject, clock: Clock) -> None:
        held_elsewhere(shared, 100.0)
        clock.wakes = lambda: held_elsewhere(shared, 100.0, pid=8)
        with pytest.raises(StoreLocked, match="process 8 on host far"):
            self.wait(shared, None)
        assert clock.slept == 1.0

    @pytest.mark.parametrize(
        ("said", "length"),
        [(5.0, 5.0), (3600.0, 3600.0), (3601.0, 10.0), (0.0, 10.0), (-1.0, 10.0), ("x", 10.0)],
    )
    def test_as_long_as_a_lease_lasts_if_a_clock_was_ahead(
        self, shared: MemoryObject, clock: Clock, said: object, length: float
    ) -> None:
        held_elsewhere(shared, 1e6, seconds=said)
        self.wait(shared, None).release()
        assert clock.slept == length + 1

    def test_a_lease_ends_at_its_end(self, shared: MemoryObject, clock: Clock) -> None:
        held_elsewhere(shared, 5.0)
        clock.now += 5.0
        self.wait(shared, 0.0).release()
        assert not clock.sleeps

    def test_a_lease_that_ends_when_the_calendar_does_has_ended(
        self, shared: MemoryObject, clock: Clock
    ) -> None:
        held_elsewhere(shared, 5.0, expires=datetime(9999, 1, 1, tzinfo=UTC).timestamp())
        self.wait(shared, 0.0).release()
        held_elsewhere(shared, 5.0, expires=datetime(9998, 12, 31, tzinfo=UTC).timestamp())
        with pytest.raises(StoreLocked, match="9998-12-31"):
            self.wait(shared, 0.0)

    def test_only_a_lease_that_is_longer_than_any_names_the_cure(
        self, shared: MemoryObject, clock: Clock
    ) -> None:
        held_elsewhere(shared, 20.0)
        with pytest.raises(StoreLocked) as refused:
            self.wait(shared, 0.0)
        assert "a clock was ahead" not in str(refused.value)
        held_elsewhere(shared, 20.5)
        with pytest.raises(StoreLocked, match="a clock was ahead"):
            self.wait(shared, 0.0)

    def test_the_note_says_until_when_and_for_how_long(self, shared: MemoryObject, clock: Clock) -> None:
        lease = self.wait(shared, 0.0)
        said = json.loads(shared.content or b"")
        assert (said["expires"], said["seconds"]) == (clock.now + 10.0, 10.0)
        assert said["pid"] == os.getpid()
        lease.release()
        assert json.loads(shared.content or b"")["expires"] == 0


class TestRaces:
    def test_another_writer_was_faster(self, shared: MemoryObject, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between looking and taking."""
        looks = iter([None])
        look = shared.read
        monkeypatch.setattr(shared, "read", lambda: next(looks, look()))
        held_elsewhere(shared, LONG)
        with pytest.raises(StoreLocked, match="process 7 on host far"):
            Lease(shared, "s3://b", LONG)

    def test_another_writer_was_faster_and_is_gone(
        self, shared: MemoryObject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def taken(content: bytes) -> str:
            raise LeaseChanged

        monkeypatch.setattr(shared, "create", taken)
        with pytest.raises(StoreLocked, match=r"process unknown on host unknown.*an unknown time"):
            Lease(shared, "s3://b", LONG)

    def test_a_lease_whose_answer_was_lost_can_be_prolonged(self, shared: MemoryObject) -> None:
        shared.answers_to_lose = 1
        lease = Lease(shared, "s3://b", LONG)
        before = shared.version
        lease._prolong()
        assert shared.version == before + 1
        lease.release()
        assert shared.version == before + 2


class TestRenewing:
    def test_a_lost_answer_delays_it_once(self, shared: MemoryObject) -> None:
        """The lease is ours, under another tag: the next renewal must count, or it ends unnoticed."""
        lease = Lease(shared, "s3://b", LONG)
        shared.answers_to_lose = 1
        lease._prolong()
        written = shared.version
        lease._prolong()
        assert shared.version == written + 1
        lease.release()

    def test_at_a_third_of_its_length(self, shared: MemoryObject, monkeypatch: pytest.MonkeyPatch) -> None:
        waits = queue.SimpleQueue[float | None]()

        class Event(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                waits.put(timeout)
                return super().wait(timeout)

        monkeypatch.setattr(threading, "Event", Event)
        lease = Lease(shared, "s3://b", LONG)
        try:
            while waits.get(timeout=60) != pytest.approx(LONG / 3):
                pass
        finally:
            lease.release()

    def test_it_ends_when_the_lease_was_deleted(self, shared: MemoryObject) -> None:
        """Whoever deleted it took this writer for dead: another one may be writing."""
        lease = Lease(shared, "s3://b", 0.1)
        with shared.written:
            shared.content, shared.version = None, shared.version + 1
        lease._renewer.join(60)
        assert not lease._renewer.is_alive()
        with pytest.raises(StoreLocked, match="process unknown on host unknown"):
            lease.renew()
        assert shared.content is None

    def test_it_ends_when_another_has_taken_over(self, shared: MemoryObject) -> None:
        lease = Lease(shared, "s3://b", 0.1)
        with shared.written:
            held_elsewhere(shared, LONG)
        lease._renewer.join(60)
        assert not lease._renewer.is_alive()
        with pytest.raises(StoreLocked, match="process 7 on host far"):
            lease.renew()

    def test_without_a_thread_to_renew_it_a_lease_is_given_back(
        self, shared: MemoryObject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            Lease(shared, "s3://b", LONG)
        assert json.loads(shared.content or b"")["expires"] == 0


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
