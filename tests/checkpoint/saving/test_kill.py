"""Writers that are killed, or stopped for a while, at random and at named moments."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.store.base import PARTIAL_PREFIX
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import StoreLocked
from holdfast.events import read_events
from holdfast.options import Policy
from holdfast.testing.faults import WRITING_OPERATIONS
from holdfast.testing.s3 import S3Server
from tests.checkpoint.by_hand import Rows
from tests.checkpoint.lineage import STRATEGIES, Lineage, QuickFiles, check_no_leftovers, check_store
from tests.checkpoint.workers import Workers, running_workers, versions, wait_until_stopped

CHUNKED = 4  # in STRATEGIES
POLICY = {"keep": 6}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with running_workers() as found:
        yield found


def check_after(store: Store, promised: dict[int, int], strategy: int) -> None:
    """What is listed is right, what was promised is there, and a new writer finds a clean house."""
    listed = {v.version: v.step for v in check_store(store).versions}
    newest = max(listed, default=0)
    kept = {v: s for v, s in promised.items() if v > newest - POLICY["keep"]}
    assert kept.items() <= listed.items()
    assert newest >= max(promised, default=0)
    with store.lock_writer():
        line = Lineage(store, Policy(strategy=STRATEGIES[strategy], keep=POLICY["keep"]))
        assert line.step == listed.get(newest, 0)
        line.writer.catalog.take_over()
        check_no_leftovers(line)
        line.train()
        line.save()
        line.writer.close()
        check_store(store)


def kill_at_random(workers: Workers, root: Path, strategy: int, chance: random.Random) -> int:
    pid = workers.start("write", url=str(root), strategy=strategy, policy=POLICY)
    workers.hear("open", pid)
    heard = [workers.hear("saved", pid) for _ in range(chance.randrange(4))]
    time.sleep(chance.random() * 0.02)
    os.kill(pid, signal.SIGKILL)
    code, said = workers.end(pid)
    assert code == -signal.SIGKILL, said
    said = heard + said
    with LocalStore(root, create=False, files=QuickFiles()) as store:
        check_after(store, versions(said), strategy)
    return len(versions(said))


def kill_at(workers: Workers, root: Path, operation: str, at: int, after: bool) -> bool:
    pid = workers.start(
        "write", url=str(root), strategy=CHUNKED, policy=POLICY, kill=[operation, at, after], saves=8
    )
    code, said = workers.end(pid)
    assert code in (0, -signal.SIGKILL), said
    with LocalStore(root, create=True, files=QuickFiles()) as store:
        check_after(store, versions(said), CHUNKED)
    assert not list(root.rglob(f"{PARTIAL_PREFIX}*"))
    return code != 0


def test_killed_at_random(tmp_path: Path, workers: Workers) -> None:
    """The same store over and over: each writer goes on from what the one before it left."""
    chance = random.Random(0)
    saved = sum(kill_at_random(workers, tmp_path, CHUNKED, chance) for _ in range(15))
    saved += sum(kill_at_random(workers, tmp_path / str(s), s, chance) for s in (0, 1, 2, 3, 5))
    assert saved > 20, "there was something to lose"


def test_killed_at_named_moments(tmp_path: Path, workers: Workers) -> None:
    killed = 0
    for number, operation in enumerate(WRITING_OPERATIONS):
        for at, after in ((2, False), (11, True), (17, False)):
            killed += kill_at(workers, tmp_path / f"{number}-{at}", operation, at, after)
    assert killed >= 20


@pytest.mark.soak
@pytest.mark.parametrize("strategy", range(len(STRATEGIES)))
def test_killed_hundreds_of_times(tmp_path: Path, workers: Workers, strategy: int) -> None:
    chance = random.Random(strategy)
    saved = sum(kill_at_random(workers, tmp_path, strategy, chance) for _ in range(100))
    assert saved > 100


@pytest.mark.soak
@pytest.mark.parametrize("operation", WRITING_OPERATIONS)
def test_killed_at_every_moment(tmp_path: Path, workers: Workers, operation: str) -> None:
    for at in range(1, 400):
        if not all(kill_at(workers, tmp_path / f"{at}-{a}", operation, at, a) for a in (False, True)):
            break
    assert 3 < at < 399


def test_a_stopped_writer_keeps_its_folder(tmp_path: Path, workers: Workers) -> None:
    """On a local disk the lock is the kernel's: it lasts as long as its holder, however slow."""
    pid = workers.start(
        "write", url=str(tmp_path), strategy=CHUNKED, policy=POLICY, stop_at=("publish", 4), saves=10
    )
    workers.hear("open", pid)
    wait_until_stopped(pid)
    with open_store(tmp_path, create=False) as store:
        with pytest.raises(StoreLocked, match=f"process {pid} ") as caught:
            store.lock_writer()
        assert caught.value.pid == pid
        check_store(store)
        os.kill(pid, signal.SIGCONT)
        code, said = workers.end(pid)
        assert (code, said[-1]["event"]) == (0, "done")
        assert len(versions(said)) == 10
        check_after(store, versions(said), CHUNKED)


@pytest.mark.parametrize("publish", [3, 4, 6])
def test_a_writer_that_sleeps_through_its_lease(s3_server: S3Server, workers: Workers, publish: int) -> None:
    """On an object store a lease runs out. Whoever wakes up after that must not undo its successor's work.

    It stops with all files of a version written and the manifest not yet: the successor takes the files for
    leftovers, so the manifest must never come to be. Nor may the one that failed clear away its successor's.
    """
    url = f"s3://{s3_server.bucket}/sleeper{publish}"
    options: dict[str, Any] = s3_server.options(lease_seconds=1.0)
    order = {"url": url, "options": options, "strategy": CHUNKED, "policy": POLICY}
    first = workers.start("write", **order, stop_at=("publish", publish), saves=10)
    workers.hear("open", first)
    wait_until_stopped(first)
    with open_store(url, create=False, options=options) as store:
        before = check_store(store)
        time.sleep(1.2)
        # With the first manifest it takes over.
        second = workers.start("write", **order, stop_at=("publish", 2), saves=1)
        workers.hear("open", second)
        wait_until_stopped(second)
        os.kill(first, signal.SIGCONT)
        code, said = workers.end(first)
        assert code == 0
        assert said[-1]["event"] == "error", said
        assert said[-1]["kind"] in ("SaveFailed", "StoreLocked"), said
        os.kill(second, signal.SIGCONT)
        code, said = workers.end(second)
        assert (code, said[-1]["event"]) == (0, "done"), said
        (saved,) = versions(said)
        found = check_store(store)
        assert [v.version for v in found.versions] == [*(v.version for v in before.versions), saved]


@pytest.mark.parametrize(("operation", "at"), [("put", 6), ("publish", 4), ("list", 24), ("delete", 4)])
def test_a_writer_that_wakes_up_long_after_its_lease(
    s3_server: S3Server, workers: Workers, tmp_path: Path, operation: str, at: int
) -> None:
    """Meanwhile its successor has saved so often that the number of its next manifest is free again."""
    url = f"s3://{s3_server.bucket}/woken/{operation}{at}"
    options: dict[str, Any] = s3_server.options(lease_seconds=0.5)
    policy = {"keep": 20, "deletion_delay_seconds": 0.0}
    order = {"url": url, "options": options, "strategy": CHUNKED, "policy": policy}
    first = workers.start("write", **order, stop_at=(operation, at), saves=10, events=str(tmp_path))
    workers.hear("open", first)
    wait_until_stopped(first)
    with open_store(url, create=False, options=options) as store:
        time.sleep(0.6)
        second = workers.start("write", **order, saves=4, steps=3)
        code, said = workers.end(second)
        assert (code, said[-1]["event"]) == (0, "done"), said
        listed = {v.version: v.step for v in check_store(store).versions}
        assert versions(said).items() <= listed.items()
        os.kill(first, signal.SIGCONT)
        code, said = workers.end(first)
        assert code == 0
        assert said[-1]["event"] == "error", said
        assert said[-1]["kind"] in ("SaveFailed", "StoreLocked"), said
        assert {v.version: v.step for v in check_store(store).versions} == listed
    assert versions(said).items() <= listed.items()
    saved = {e["version"]: e["step"] for e in read_events(tmp_path) if e["event"] == "checkpoint_saved"}
    assert len(saved) >= 2
    assert saved.items() <= listed.items()


class TestRestart:
    """A restart script starts a killed run again at once, long before the lease of a minute has run out."""

    def test_on_the_same_host(self, s3_server: S3Server, workers: Workers) -> None:
        url, options = f"s3://{s3_server.bucket}/killed", s3_server.options()
        pid = workers.start("write", url=url, options=options, strategy=CHUNKED, policy=POLICY)
        workers.hear("saved", pid)
        os.kill(pid, signal.SIGKILL)
        _, said = workers.end(pid)
        run = Rows()
        with hf.Checkpointer(url, run.objects, hf.Policy(lock_wait_seconds=0), options=options) as ckpt:
            assert len(ckpt.versions()) >= len(versions(said))

    def test_on_another_host(self, s3_server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
        import obstore

        url, options = f"s3://{s3_server.bucket}/moved", s3_server.options()
        run = Rows()
        with hf.Checkpointer(url, run.objects, options=options) as ckpt:
            ckpt.save(0)
        note = {"owner": "dead", "host": "gone", "pid": 1, "expires": time.time() + 1, "seconds": 1.0}
        with open_store(url, create=False, options=options) as store:
            obstore.put(store._bucket, "writer.lease", json.dumps(note).encode())  # type: ignore[attr-defined]
        with pytest.raises(StoreLocked, match="process 1 on host gone"):
            hf.Checkpointer(url, run.objects, hf.Policy(lock_wait_seconds=0), options=options)
        with hf.Checkpointer(url, run.objects, options=options) as ckpt:
            assert ckpt.restore() == 1
        assert "is locked by process 1 on host gone" in caplog.text
