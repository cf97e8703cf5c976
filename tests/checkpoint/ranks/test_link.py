"""Messages between ranks, over a real store of ``torch.distributed``, each rank in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore

from holdfast.checkpoint.ranks.link import Link
from holdfast.errors import RankLost


@pytest.fixture
def links(tmp_path: Path) -> Iterator[list[Link]]:
    made = linked(FileStore(str(tmp_path / "store"), 2), 1.5)
    yield made
    for link in made:
        link.close()


def linked(store: FileStore, silent_seconds: float) -> list[Link]:
    return linked_late(store, silent_seconds, 2, 0.0)


def linked_late(store: FileStore, silent_seconds: float, world_size: int, seconds: float) -> list[Link]:
    """Each rank comes so much later than the one before."""

    def link(rank: int) -> Link:
        time.sleep(rank * seconds)
        return Link(store, rank, world_size, silent_seconds)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(link, range(world_size)))


def silence(link: Link) -> None:
    """As if its process had been killed: nothing more is said."""
    link._ended.set()
    link._thread.join()


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (5 << 20) + 3])
def test_messages_of_any_size(links: list[Link], size: int) -> None:
    message = bytes(range(256)) * (size // 256 + 1)
    links[1].post("key", message[:size])
    assert links[0].hear("key", 1) == message[:size]
    links[0].forget(["key"])
    assert not links[1].has("key")


def test_who_hears_waits_for_who_posts(links: list[Link]) -> None:
    threading.Timer(0.6, links[1].post, ("late", b"here")).start()
    assert links[0].hear("late", 1) == b"here"


def test_a_silent_rank_is_lost_and_a_slow_one_is_not(links: list[Link]) -> None:
    threading.Timer(3.0, links[1].post, ("slow", b"")).start()  # twice as long as it may be silent
    assert links[0].hear("slow", 1) == b""
    silence(links[1])
    began = time.monotonic()
    with pytest.raises(RankLost, match="rank 1 has not been heard of"):
        links[0].hear("never", 1)
    assert time.monotonic() - began < 10


def test_a_rank_that_closes_is_not_waited_for(links: list[Link]) -> None:
    links[1].post("before", b"it came in time")
    links[1].close(b"last words")
    assert links[0].hear("before", 1) == b"it came in time"
    assert links[0].last_words(1) == b"last words"
    with pytest.raises(RankLost, match="rank 1 has closed its Checkpointer"):
        links[0].hear("after", 1)


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(RankLost, match="rank 1 has made no Checkpointer"):
        Link(store, 0, 2, silent_seconds=0.1)
    with pytest.raises(RankLost, match="rank 0 has made no Checkpointer"):
        Link(store, 1, 2, silent_seconds=0.1)


def test_links_that_follow_each_other_do_not_mix(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    for _ in range(3):
        links = linked(store, 1.0)
        assert not links[0].has("key")
        links[0].post("key", b"old")
        assert links[1].hear("key", 0) == b"old"
        silence(links[0])  # one is killed, and the other has no time to say goodbye
        silence(links[1])


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_ranks_that_come_in_while_others_are_still_those_of_before(tmp_path: Path, seconds: float) -> None:
    store = FileStore(str(tmp_path / "store"), 4)
    for attempt in range(3):
        links = linked_late(store, 5.0, 4, seconds)
        for link in links:
            link.post(f"from/{link.rank}", str(attempt).encode())
        for link in links:
            assert [link.hear(f"from/{rank}", rank) for rank in range(4)] == [str(attempt).encode()] * 4
        for link in links:
            silence(link)


def test_a_rank_that_was_killed_before_it_was_let_in(tmp_path: Path) -> None:
    """What it has said is still in the store when all are started again."""
    store = FileStore(str(tmp_path / "store"), 2)
    for rank in (0, 1):
        with pytest.raises(RankLost):
            Link(store, rank, 2, silent_seconds=0.05)
        again = linked(store, 1.0)
        again[1].post("key", b"new")
        assert again[0].hear("key", 1) == b"new"
        for link in again:
            link.close()
