"""Memory that servers on one machine share."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
import zmq

from holdfast.cluster.protocol.envelope import Envelope, Frame, as_array
from holdfast.cluster.protocol.messages import Instant, Peer
from holdfast.cluster.protocol.stripe_messages import Differences, StripePart, Syndromes
from holdfast.cluster.protocol.wire import Header, Message, encode
from holdfast.cluster.runtime.loop import memory_bytes
from holdfast.cluster.runtime.transport.packing import _PREFIX
from holdfast.cluster.runtime.transport.private import private_folder
from holdfast.cluster.runtime.transport.shared import (
    SHARED_FROM_BYTES,
    Arena,
    Offer,
    Returned,
    SharedView,
)
from holdfast.cluster.runtime.transport.zmq import _MOST_LOANS, _OFFER, _RETURNED, ZmqTransport

JOB = "job"
OWNER, PARITY = Peer("server", 0, 1), Peer("server", 1, 1)
LARGE = SHARED_FROM_BYTES
SMALL_ARENA = 1 << 26


@pytest.fixture
def arena() -> Arena:
    return Arena(SMALL_ARENA)


def differences(*frames: Frame) -> Envelope:
    parts = tuple(StripePart(0, 0, 0, 1) for _ in frames[::2])
    return Envelope(OWNER, PARITY, Differences(1, Instant(1), 0, parts), frames)


class TestArena:
    def test_memory_is_used_again_when_nobody_refers_to_it(self, arena: Arena) -> None:
        space = arena.allocate(1000)
        where = arena.find(arena.allocate(LARGE))
        part = space[10:20].view(np.uint16)[1:]
        del space
        other = arena.allocate(1000)
        assert not np.shares_memory(other, part)
        first = part.ctypes.data
        del part
        assert 0 <= first - arena.allocate(1000).ctypes.data < 1000
        assert where > 0

    def test_free_neighbours_become_one(self, arena: Arena) -> None:
        pieces = [arena.allocate(SMALL_ARENA // 4) for _ in range(4)]
        assert arena.find(arena.allocate(LARGE)) == -1, "full: elsewhere"
        for number in (1, 3, 0, 2):
            pieces[number] = np.empty(0, np.uint8)
        whole = arena.allocate(SMALL_ARENA)
        assert arena.find(whole) == 0

    def test_it_gives_memory_back(self) -> None:
        arena = Arena(SMALL_ARENA, kept_bytes=1 << 20)
        arena.allocate(512 << 10)[:] = 1
        arena.allocate(1)
        assert arena.resident_bytes() >= 512 << 10, "some is kept"
        arena.allocate(8 << 20)[:] = 1
        kept = arena.allocate(1)
        kept[:] = 7
        assert arena.resident_bytes() <= 1 << 20
        assert kept[0] == 7

    def test_it_ends_with_the_last_who_refers_to_it(self) -> None:
        files = len(os.listdir("/proc/self/fd"))
        space = Arena(SMALL_ARENA).allocate(100)
        space[:] = 3
        gc.collect()
        assert space.sum() == 300
        del space
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= files

    def test_arrays_elsewhere_are_not_found(self, arena: Arena) -> None:
        assert arena.find(np.zeros(LARGE, np.uint8)) == -1
        assert arena.find(arena.allocate(LARGE)[1:]) == -1, "too small to be shared"
        assert arena.find(arena.allocate(0)) == -1


class TestSharedView:
    def test_others_see_it_and_cannot_write(self, arena: Arena) -> None:
        space = arena.allocate(LARGE)
        view = SharedView(arena.offer(JOB, OWNER))
        frame = view.frame(arena.find(space), LARGE)
        space[:] = 5
        assert not frame.flags.writeable
        assert set(frame) == {5}

    def test_it_outlives_its_owner(self) -> None:
        """An owner may die before it is known whether its last flush counts."""
        heard, said = os.pipe()
        child = os.fork()
        if not child:
            arena = Arena(SMALL_ARENA)
            space = arena.allocate(LARGE)
            space[:] = 9
            os.write(said, msgspec.msgpack.encode(arena.offer(JOB, OWNER)))
            signal.pause()
        try:
            view = SharedView(msgspec.msgpack.decode(os.read(heard, 1000), type=Offer))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(heard)
            os.close(said)
        assert set(view.frame(0, LARGE)) == {9}

    @pytest.mark.parametrize(
        ("at", "size"), [(-4, 8), (2, 4), (SMALL_ARENA, 4), (0, SMALL_ARENA + 1), (0, -1)]
    )
    def test_arrays_beyond_it_are_refused(self, arena: Arena, at: int, size: int) -> None:
        with pytest.raises(ValueError, match="expected one in the arena"):
            SharedView(arena.offer(JOB, OWNER)).frame(at, size)

    def test_files_that_may_become_shorter_are_refused(self, tmp_path: Path) -> None:
        """Who reads behind the end of a file is killed."""
        with (tmp_path / "file").open("w+b") as file:
            file.truncate(4096)
            with pytest.raises((ValueError, OSError)):
                SharedView(Offer(JOB, OWNER, os.getpid(), file.fileno(), 4096))
        unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(unsealed, 4096)
            with pytest.raises(ValueError, match="shorter"):
                SharedView(Offer(JOB, OWNER, os.getpid(), unsealed, 4096))
            fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            with pytest.raises(ValueError, match="shorter"):
                SharedView(Offer(JOB, OWNER, os.getpid(), unsealed, 8192))
            SharedView(Offer(JOB, OWNER, os.getpid(), unsealed, 4096))
        finally:
            os.close(unsealed)

    @pytest.mark.parametrize(
        ("process", "file", "size"), [(0, 1, 1), (1 << 30, 1, 4096), (-1, 0, 1), (1, -1, 1), (1, 0, 0)]
    )
    def test_nonsense_is_refused(self, process: int, file: int, size: int) -> None:
        with pytest.raises((ValueError, OSError)):
            SharedView(Offer(JOB, OWNER, process, file, size))

    def test_a_folder_is_refused(self, tmp_path: Path) -> None:
        handle = os.open(tmp_path, os.O_RDONLY)
        try:
            with pytest.raises((ValueError, OSError)):
                SharedView(Offer(JOB, OWNER, os.getpid(), handle, 4096))
        finally:
            os.close(handle)


def test_memory_of_others_does_not_count(arena: Arena) -> None:
    other = Arena(SMALL_ARENA)
    before = memory_bytes(arena)
    other.allocate(32 << 20)[:] = 1
    assert memory_bytes(arena) < before + (16 << 20)
    mine = arena.allocate(32 << 20)
    mine[:] = 1
    assert memory_bytes(arena) > before + (16 << 20)


class Pair:
    """An owner and a parity server, connected."""

    def __init__(self, folder: Path, arena: Arena | None) -> None:
        self.owner = ZmqTransport(OWNER, JOB, f"ipc://{folder}/owner", arena=arena)
        self.parity = ZmqTransport(PARITY, JOB, f"ipc://{folder}/parity")
        self.owner.connect("server", 1, self.parity.endpoint)
        self.parity.connect("server", 0, self.owner.endpoint)
        for _ in range(3):  # an offer, and its answer
            self.parity.poll(0.1)
            self.owner.poll(0.1)

    def carry(self, envelope: Envelope) -> Envelope | None:
        """Send a message; None if it does not arrive."""
        assert self.owner.send(envelope)
        for _ in range(20):
            for arrived in self.parity.poll(0.05):
                return arrived
            if self.parity.counters.dropped:
                return None
        return None


@pytest.fixture
def pair(arena: Arena) -> Iterator[Pair]:
    with private_folder() as folder:
        made = Pair(folder, arena)
        with made.owner, made.parity:
            yield made


def as_list(frames: Any) -> list[bytes]:
    return [bytes(frame) for frame in frames]


class TestLanes:
    def test_large_arrays_are_read_where_they_are(self, pair: Pair, arena: Arena) -> None:
        large, small = arena.allocate(LARGE), np.arange(3, dtype=np.uint32)
        large[:] = 1
        arrived = pair.carry(differences(small, large))
        assert arrived is not None
        assert as_list(arrived.frames) == [small.tobytes(), large.tobytes()]
        assert pair.owner.counters.sent_bytes < 1000
        large[:] = 2
        assert set(arrived.frames[1]) == {2}

    def test_others_are_lent_until_nobody_reads_them(self, pair: Pair, arena: Arena) -> None:
        rows, large = np.arange(1, dtype=np.uint32), arena.allocate(LARGE)
        large[:] = 1
        lent = weakref.ref(large)
        arrived = pair.carry(Envelope(OWNER, PARITY, Syndromes(1, 0, 1, (), ()), [rows, large, large[4:]]))
        del large
        assert arrived is not None
        assert pair.owner.counters.sent_bytes < 1000 + LARGE, "the part of it is too small to be shared"
        read = as_array(arrived.frames[1], np.uint32, (LARGE // 4,))[7:9]
        del arrived
        self.settle(pair)
        assert lent() is not None
        assert read.tolist() == [0x01010101] * 2
        del read
        self.settle(pair)
        assert lent() is None

    def settle(self, pair: Pair) -> None:
        for _ in range(2):
            pair.parity.poll(0.05)
            pair.owner.poll(0.05)

    def test_what_is_dropped_is_returned(self, pair: Pair, arena: Arena) -> None:
        large = arena.allocate(LARGE)
        lent = weakref.ref(large)
        elsewhere = Envelope(OWNER, Peer("server", 1, 9), Syndromes(1, 0, 1, (), ()), [large])
        pair.parity.me = Peer("server", 3, 1)  # not for this one
        assert pair.owner.send(elsewhere)
        del large, elsewhere
        assert lent() is not None
        while not pair.parity.counters.misdirected:
            assert not pair.parity.poll(1.0)
        self.settle(pair)
        assert lent() is None

    def test_what_was_lent_to_the_dead_is_free(self, pair: Pair, arena: Arena) -> None:
        large = arena.allocate(LARGE)
        lent = weakref.ref(large)
        assert pair.owner.send(Envelope(OWNER, PARITY, Syndromes(1, 0, 1, (), ()), [large]))
        del large
        assert lent() is not None
        with private_folder() as folder:
            pair.owner.connect("server", 1, f"ipc://{folder}/replacement")
            assert lent() is None

    def test_loans_of_a_predecessor_are_not_mine(self, pair: Pair, arena: Arena) -> None:
        large = arena.allocate(LARGE)
        lent = weakref.ref(large)
        assert pair.owner.send(Envelope(OWNER, PARITY, Syndromes(1, 0, 1, (), ()), [large]))
        del large
        router = pair.owner._router
        assert router is not None
        for owner, free in ((Peer("server", 0, 0), False), (OWNER, True)):
            returned = _RETURNED + msgspec.msgpack.encode(Returned(owner, (1, 2)))
            pair.owner._hear_of_memory(router, b"somebody", returned)
            assert (lent() is None) == free

    def test_not_too_much_is_lent(self, pair: Pair, arena: Arena) -> None:
        large = arena.allocate(LARGE)
        for _ in range(_MOST_LOANS + 1):
            assert pair.owner.counters.sent_bytes < LARGE
            assert pair.owner.send(Envelope(OWNER, PARITY, Syndromes(1, 0, 1, (), ()), [large]))
        assert pair.owner.counters.sent_bytes > LARGE

    def test_what_is_elsewhere_is_sent(self, pair: Pair) -> None:
        large = np.ones(LARGE, np.uint8)
        arrived = pair.carry(differences(large, large))
        large[:] = 2
        assert arrived is not None
        assert as_list(arrived.frames) == [bytes([1]) * LARGE] * 2

    def test_without_an_answer_everything_is_sent(
        self, arena: Arena, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As where /proc is closed to other processes."""

        def refuse(offer: Offer) -> None:
            raise PermissionError("not here")

        monkeypatch.setattr("holdfast.cluster.runtime.transport.zmq.SharedView", refuse)
        with private_folder() as folder:
            pair = Pair(folder, arena)
            with pair.owner, pair.parity:
                large = arena.allocate(LARGE)
                large[:] = 1
                pair.parity.counters.malformed = 0
                arrived = pair.carry(differences(large, large))
                large[:] = 2
                assert arrived is not None
                assert set(arrived.frames[0]) == {1}

    def test_a_replacement_gets_an_offer_of_its_own(self, pair: Pair, arena: Arena) -> None:
        with private_folder() as folder:
            again = Peer("server", 1, 2)
            with ZmqTransport(again, JOB, f"ipc://{folder}/again") as replacement:
                pair.owner.connect("server", 1, replacement.endpoint)
                large = arena.allocate(LARGE)
                large[:] = 1
                assert pair.owner.send(differences(large, large)), "sent: no answer yet"
                (arrived,) = replacement.poll(1.0) or replacement.poll(1.0)
                pair.owner.poll(1.0)
                large[:] = 2
                assert set(arrived.frames[0]) == {1}
                assert pair.owner.send(differences(large, large))
                (arrived,) = replacement.poll(1.0)
                large[:] = 3
                assert set(arrived.frames[0]) == {3}


class TestStrangers:
    """Whoever can connect is a process of this user; still, no message may end a node."""

    @pytest.mark.parametrize(
        ("place", "size"), [(SMALL_ARENA, 4), (SMALL_ARENA - 4, 8), (2, 4), (1 << 62, 4)]
    )
    def test_arrays_beyond_the_arena_are_dropped(self, pair: Pair, place: int, size: int) -> None:
        self.check_dropped(pair, OWNER, (size,), (place,))

    def test_arrays_of_somebody_without_an_arena_are_dropped(self, pair: Pair) -> None:
        self.check_dropped(pair, Peer("server", 2, 1), (4,), (0,))
        self.check_dropped(pair, Peer("server", 0, 2), (4,), (0,))

    def test_as_many_places_as_arrays(self, pair: Pair) -> None:
        self.check_dropped(pair, OWNER, (4, 4), (0,))

    def check_dropped(
        self, pair: Pair, source: Peer, sizes: tuple[int, ...], places: tuple[int, ...]
    ) -> None:
        message: Message = Differences(1, Instant(1), 0, ())
        header = encode(Header(JOB, source, PARITY, message, sizes, places))
        checksum = xxhash.xxh3_64(header).intdigest()
        before = pair.parity.counters.malformed
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(pair.parity.endpoint)
            stranger.send(_PREFIX.pack(checksum, len(header)) + header)
            while pair.parity.counters.malformed == before:
                assert not pair.parity.poll(1.0)
            stranger.linger = 0

    def test_an_arena_of_a_predecessor_comes_too_late(self, pair: Pair, arena: Arena) -> None:
        """It would hide that of its successor, whose messages would be dropped."""
        before = pair.parity.counters.malformed
        late = _OFFER + msgspec.msgpack.encode(arena.offer(JOB, Peer("server", 0, 0)))
        router = pair.parity._router
        assert router is not None
        pair.parity._hear_of_memory(router, b"somebody", late)
        assert pair.parity.counters.malformed == before + 1
        assert pair.parity._views["server", 0][0] == OWNER

    @pytest.mark.parametrize(
        "offer",
        [
            b"",
            b"\xc1",
            msgspec.msgpack.encode(Offer("another", OWNER, 1, 0, 4096)),
            msgspec.msgpack.encode(Offer(JOB, Peer("worker", 0, 1), 1, 0, 4096)),
            msgspec.msgpack.encode(Offer(JOB, OWNER, 1 << 40, 0, 4096)),
            msgspec.msgpack.encode(Offer(JOB, OWNER, -5, 0, 4096)),
        ],
    )
    def test_offers_of_nothing_are_dropped(self, pair: Pair, offer: bytes) -> None:
        before = pair.parity.counters.malformed
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(pair.parity.endpoint)
            stranger.send(_OFFER + offer)
            while pair.parity.counters.malformed == before:
                assert not pair.parity.poll(1.0)
            stranger.linger = 0
        assert pair.parity._views.keys() == {("server", 0)}
