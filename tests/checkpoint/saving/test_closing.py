"""The end of a Checkpointer, by whatever way: no hang, no lost save, no lock left behind."""

from __future__ import annotations

import contextlib
import dis
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.checkpoint import checkpointer as api
from holdfast.checkpoint.background import Background, Latch
from holdfast.checkpoint.saving.writer import Writer
from holdfast.checkpoint.store.local import LocalStore
from tests.checkpoint.by_hand import SECONDS, Rows, in_time, restored


def test_after_close(tmp_path: Path) -> None:
    run = Rows()
    ckpt = hf.Checkpointer(tmp_path, run.objects)
    ckpt.save(0)
    ckpt.close()
    ckpt.close()
    for use in (
        lambda: ckpt.save(1),
        lambda: ckpt.step(1),
        ckpt.restore,
        lambda: ckpt.mark("m.weight"),
    ):
        found = in_time(use)
        assert isinstance(found, hf.CheckpointError), found
        assert "is closed: make a new one" in str(found)
    ckpt.wait()
    assert [v.step for v in ckpt.versions()] == [0]
    run.table(torch.tensor([1]))
    with hf.Checkpointer(tmp_path, run.objects) as second:
        assert second.restore() == 1


def test_a_checkpointer_that_nobody_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Rows()
    before = set(threading.enumerate())
    ckpt = hf.Checkpointer(tmp_path, run.objects)
    ckpt.save(0)
    del ckpt
    gc.collect()
    assert "was not closed" in caplog.text
    assert set(threading.enumerate()) <= before
    assert not run.table._forward_pre_hooks
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        assert ckpt.restore() == 1


def test_one_that_cannot_be_made_leaves_nothing_behind(tmp_path: Path) -> None:
    run = Rows()
    before = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "bind", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            hf.Checkpointer(tmp_path, run.objects)
    for thread in set(threading.enumerate()) - before:
        thread.join(SECONDS)
    assert set(threading.enumerate()) <= before
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        assert ckpt.save(0) == 1


def test_a_program_that_ends_without_closing(tmp_path: Path) -> None:
    code = (
        "import sys, torch, holdfast as hf\n"
        "from holdfast.checkpoint.store.local import LocalStore\n"
        "import time\n"
        "real = LocalStore.publish\n"
        "def slow(*a): time.sleep(0.5); return real(*a)\n"
        "LocalStore.publish = slow\n"
        "ckpt = hf.Checkpointer(sys.argv[1], {'m': torch.nn.Embedding(40, 3).requires_grad_(False)})\n"
        "ckpt.save(0)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    names = sorted(p.name for p in (tmp_path / "manifests").iterdir())
    assert names == ["0000000001.json", "0000000002.json"]


def test_a_process_that_was_forked_off(tmp_path: Path) -> None:
    """It has no part in saving: it cannot save, and its end takes nothing from its parent."""
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        ckpt.save(0)
        ckpt.wait()
        child = os.fork()
        if not child:
            code = 1
            try:
                ckpt.save(1)
            except hf.StoreLocked:
                api._close_forgotten(ckpt._writer, ckpt._cleanup, ckpt._closing.peek()[2][2])  # type: ignore[index]
                code = 7
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        run.change(ckpt, 1)
        assert ckpt.save(1) == 2
    assert restored(tmp_path) == run.value()


class TestBackground:
    def test_jobs_run_in_turn_and_errors_are_kept(self) -> None:
        background, done = Background("test"), []
        for i in range(5):
            background.submit(lambda i=i: done.append(i))  # type: ignore[misc]
        background.submit(lambda: 1 // 0)  # type: ignore[arg-type]
        assert in_time(background.wait) is None
        assert done == list(range(5))
        with pytest.raises(ZeroDivisionError):
            background.raise_error()
        background.raise_error()
        assert in_time(background.close) is None
        assert in_time(background.close) is None
        with pytest.raises(RuntimeError, match="test is closed"):
            background.submit(lambda: None)

    def test_closing_finishes_what_waits(self) -> None:
        background, done = Background("test"), []
        background.submit(lambda: time.sleep(0.1))
        background.submit(lambda: done.append(1))
        background.close()
        assert done == [1]

    def test_closing_from_its_own_thread(self) -> None:
        background = Background("test")

        def close() -> None:
            background.close()

        background.submit(close)
        assert in_time(background.wait) is None
        assert in_time(background.close) is None

    def test_taking_a_job_back(self) -> None:
        background, gate, done = Background("test"), threading.Event(), []

        def first() -> None:
            gate.wait(SECONDS)

        def second() -> None:
            done.append(2)

        background.submit(first)
        while background._running is None:
            time.sleep(0.001)
        background.submit(second)
        assert background.withdraw(second)
        assert not background.withdraw(first)
        gate.set()
        background.close()
        assert not done

    def test_interrupts_leave_nothing_locked(self) -> None:
        """Wherever they come, also right behind the taking of a lock."""
        background, done = Background("test"), 0
        main = threading.get_ident()

        def strike(seconds: float) -> None:
            time.sleep(seconds)
            signal.pthread_kill(main, signal.SIGUSR1)

        before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
        try:
            for i in range(400):
                thread = threading.Thread(target=strike, args=(1e-6 * i,))
                with contextlib.suppress(KeyboardInterrupt):
                    thread.start()
                    try:
                        while thread.is_alive():
                            latch = Latch()
                            background.submit(latch.open)
                            latch.wait()
                            done += 1
                    except KeyboardInterrupt:
                        pass
                    thread.join()
                thread.join()
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert done > 400
        latch = Latch()
        assert in_time(lambda: background.submit(latch.open)) is None
        assert in_time(latch.wait) is None
        assert in_time(background.close) is None

    @pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning"
    )  # in a weak reference's callback
    def test_interrupts_at_every_instruction_leave_nothing_locked(self) -> None:
        """Wherever the interpreter takes one: after a call, at a jump back, where a function begins."""
        for place in itertools.count(0):
            background = Background("test")

            def work(background: Background = background) -> None:
                for latch in [Latch() for _ in range(3)]:
                    job = latch.open
                    background.submit(job)
                    background.withdraw(job)
                background.submit(Latch().open)
                background.wait()

            took = _interrupt(work, place)
            latch = Latch()
            assert in_time(lambda b=background, latch=latch: b.submit(latch.open)) is None, place  # type: ignore[misc]
            assert in_time(latch.wait) is None, place
            assert in_time(background.wait) is None, place
            assert in_time(background.close) is None, place
            if not took:
                break
        assert place > 20

    @pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning"
    )  # in a weak reference's callback
    def test_interrupts_while_it_closes(self) -> None:
        """It can be closed again, and every job is done by then."""
        for place in itertools.count(0):
            background, done = Background("test"), Latch()

            def job(done: Latch = done) -> None:
                time.sleep(0.002)
                done.open()

            background.submit(job)
            took = _interrupt(background.close, place)
            assert in_time(background.close) is None, place
            assert done.is_open(), place
            if not took:
                break
        assert place > 5


_INTERRUPTIBLE = {dis.opmap[name] for name in ("RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD")}
"""The instructions after which the interpreter looks for signals."""


def _interrupt(work: Callable[[], object], place: int) -> bool:
    """Do the work with an interrupt at one place where the interpreter may take it; False if it has fewer."""
    seen = 0
    before: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        frame.f_trace_opcodes = True
        if event == "opcode":
            last = before.get(frame)
            before[frame] = frame.f_code.co_code[frame.f_lasti]
            if last in _INTERRUPTIBLE:
                seen += 1
                if seen == place + 1:
                    raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            work()
    finally:
        sys.settrace(None)
    return seen > place


def test_a_forgotten_one_that_cannot_end_now_ends_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector of garbage may come while a lock is held that the save needs."""
    monkeypatch.setattr(api, "_PATIENCE_SECONDS", 0.05)
    held, real = threading.Lock(), LocalStore.publish

    def publish(*arguments: Any) -> Any:
        with held:
            return real(*arguments)

    monkeypatch.setattr(LocalStore, "publish", publish)
    run = Rows()
    before = set(threading.enumerate())
    ckpt = hf.Checkpointer(tmp_path, run.objects)
    with held:
        ckpt.save(0)
        del ckpt
        gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(SECONDS)
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        assert ckpt.restore() == 1
