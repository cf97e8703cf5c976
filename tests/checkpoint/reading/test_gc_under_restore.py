"""Files are replaced and deleted while others restore: every restore is right, or its version is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.store import open_store
from holdfast.testing.s3 import S3Server
from tests.checkpoint.lineage import STRATEGIES, check_store
from tests.checkpoint.workers import Workers, running_workers

CHUNKED = 4  # in STRATEGIES
FULL = 0


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with running_workers(seconds=600.0) as found:
        yield found


def race(workers: Workers, url: str, strategy: int, **more: Any) -> int:
    """One writes, saving, tidying and deleting as quickly as it can, until two have restored enough.

    How many versions were gone when they were to be restored.
    """
    writer = workers.start("write", url=url, strategy=strategy, **more)
    workers.hear("saved", writer)
    gone = 0
    for reader in [workers.start("read", url=url, seed=seed, **more) for seed in range(2)]:
        code, said = workers.end(reader)
        assert (code, said[-1]["event"]) == (0, "done"), said
        gone += said[0]["gone"]
    os.kill(writer, signal.SIGTERM)
    code, said = workers.end(writer)
    assert (code, said[-1]["event"]) == (0, "done"), said
    with open_store(url, create=False, options=more.get("options")) as store:
        check_store(store)
    return gone


@pytest.mark.parametrize("strategy", [CHUNKED, FULL], ids=lambda s: str(STRATEGIES[s]))
def test_on_a_local_disk(tmp_path: Path, workers: Workers, strategy: int) -> None:
    race(workers, str(tmp_path), strategy, right=40, version=40, policy={"keep": 3})


def test_on_an_object_store(s3_server: S3Server, workers: Workers) -> None:
    url = f"s3://{s3_server.bucket}/race"
    policy = {"keep": 3, "deletion_delay_seconds": 1.0}
    options = s3_server.options()
    race(workers, url, CHUNKED, right=6, version=10, seconds=2.5, policy=policy, options=options)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", range(len(STRATEGIES)), ids=lambda s: str(STRATEGIES[s]))
def test_for_a_long_time(tmp_path: Path, workers: Workers, strategy: int) -> None:
    assert race(workers, str(tmp_path), strategy, right=500, version=500, policy={"keep": 2}) > 0
