"""Files are replaced and deleted while others restore: every restore is right, or its version is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.store import open_store
from holdfast.testing.s3 import S3Server
from tests.checkpoint.lineage import STRATEGIES, check_store
from tests.checkpoint.workers import Workers, running_workers, versions

CHUNKED = 4  # in STRATEGIES
FULL = 0


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with running_workers(seconds=120.0) as found:
        yield found


def race(workers: Workers, url: str, strategy: int, seconds: float, **more: Any) -> tuple[int, int, int]:
    """One writes, saving, tidying and deleting as quickly as it can, two restore."""
    order = {"url": url, "seconds": seconds, "strategy": strategy, **more}
    writer = workers.start("write", **order)
    workers.hear("saved", writer)
    readers = [workers.start("read", seed=seed, **order) for seed in range(2)]
    right = gone = 0
    for reader in readers:
        code, said = workers.end(reader)
        assert (code, said[-1]["event"]) == (0, "done"), said
        right += said[0]["right"]
        gone += said[0]["gone"]
    code, said = workers.end(writer)
    assert (code, said[-1]["event"]) == (0, "done"), said
    with open_store(url, create=False, options=more.get("options")) as store:
        check_store(store)
    return len(versions(said)), right, gone


@pytest.mark.parametrize("strategy", [CHUNKED, FULL], ids=lambda s: str(STRATEGIES[s]))
def test_on_a_local_disk(tmp_path: Path, workers: Workers, strategy: int) -> None:
    saves, right, _ = race(workers, str(tmp_path), strategy, 1.5, policy={"keep": 3})
    assert saves > 10
    assert right > 10


def test_on_an_object_store(s3_server: S3Server, workers: Workers) -> None:
    url = f"s3://{s3_server.bucket}/race"
    policy = {"keep": 3, "deletion_delay_seconds": 1.0}
    saves, right, _ = race(workers, url, CHUNKED, 3.5, policy=policy, options=s3_server.options())
    assert saves > 5
    assert right > 5


@pytest.mark.soak
@pytest.mark.parametrize("strategy", range(len(STRATEGIES)), ids=lambda s: str(STRATEGIES[s]))
def test_for_a_minute(tmp_path: Path, workers: Workers, strategy: int) -> None:
    saves, right, gone = race(workers, str(tmp_path), strategy, 60.0, policy={"keep": 2})
    assert saves > 500
    assert right > 500
    assert gone > 0
