"""A machine that cannot start another thread: a sentence with the cure, and nothing is lost."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.checkpoint.format.records import Field, make_groups
from holdfast.checkpoint.memory import live
from holdfast.checkpoint.store import open_store
from holdfast.cli.app import main
from holdfast.kernels import openmp
from holdfast.testing.s3 import S3Server
from tests.checkpoint.test_checkpointer import Run

SENTENCE = r"cannot start another thread.*ulimit -u"


@contextmanager
def no_threads(after: int = 0) -> Iterator[None]:
    """Python cannot start any more threads, but so many, as when a limit of the system is reached."""
    start = threading._start_new_thread  # type: ignore[attr-defined]
    left = after

    def refuse(*arguments: Any, **more: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            return start(*arguments, **more)
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "_start_new_thread", refuse)
        yield


@pytest.mark.parametrize("quantize", [None, 4])
def test_saving(tmp_path: Path, quantize: Any) -> None:
    """A Checkpointer has the thread that it needs, or cannot be made."""
    run = Run()
    policy = hf.Policy(strategy="incremental", quantize=quantize)
    with no_threads(), pytest.raises(hf.CheckpointError, match=SENTENCE):
        hf.Checkpointer(tmp_path, run.objects, policy)
    with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
        run.train(2)
        with no_threads():  # the one that writes is there, and does without others
            ckpt.save(1)
            ckpt.wait()
        run.train(2)
        ckpt.save(3)
        ckpt.wait()
        digest = run.digest()
    if not quantize:
        fresh = Run()
        with hf.Checkpointer(tmp_path, fresh.objects) as ckpt:
            assert ckpt.restore() == 4
        assert fresh.digest() == digest


def test_restoring(tmp_path: Path) -> None:
    """Nothing is wrong with the version: no older one is taken."""
    run = Run()
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        for step in range(3):
            run.train(1)
            ckpt.save(step)
    fresh = Run()
    with hf.Checkpointer(tmp_path, fresh.objects) as ckpt:
        for after in (0, 1):
            with no_threads(after), pytest.raises(hf.CheckpointError, match=SENTENCE):
                ckpt.restore()
        assert ckpt.restore() == 3
    assert fresh.digest() == run.digest()


def test_a_lease_that_cannot_be_kept_is_given_back(s3_server: S3Server) -> None:
    url = f"s3://{s3_server.bucket}/no-threads"
    run = Run()
    with no_threads(), pytest.raises(hf.HoldfastError, match=SENTENCE):
        hf.Checkpointer(url, run.objects, options=s3_server.options())
    with open_store(url, create=True, options=s3_server.options()) as store:
        store.lock_writer().release()


COMMANDS: dict[str, Callable[[], list[str]]] = {
    "verify": lambda: ["ckpt", "verify", "store"],
    "ls": lambda: ["ckpt", "ls", "store"],
    "restore": lambda: ["ckpt", "restore", "store", "--out", "x"],
    "job": lambda: ["train", "--servers", "1", "--run", "r", "--set", "data.samples=1000"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    run = Run()
    with hf.Checkpointer(
        tmp_path / "store", run.objects, hf.Policy(strategy=hf.Chunked(round_versions=1, dead_fraction=0.0))
    ) as ckpt:
        for step in range(3):
            run.train(2)
            ckpt.save(step)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["holdfast", *COMMANDS[command]()])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with no_threads(), pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert "cannot start another thread" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_rows_are_copied_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread that needs them, if there is none to help."""
    monkeypatch.setattr(openmp, "threads", lambda: 1)
    monkeypatch.setattr(live, "_CORES", 2)
    live._helper.cache_clear()
    values = np.random.default_rng(0).integers(0, 256, (40_000, 64), dtype=np.uint8)
    tables = live.LiveTables(
        make_groups([("t", 40_000, (Field("weight", "F32", 16),))]), lambda name: (values,)
    )
    ids = np.arange(0, 40_000, 2)
    out = np.zeros((20_000, 64), np.uint8)
    with no_threads():
        tables.start_gather([ids], [[out]]).finish()
    assert np.array_equal(out, values[ids])
