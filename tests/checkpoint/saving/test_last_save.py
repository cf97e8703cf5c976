"""The end of a run: a clean exit of the ``with`` block saves the last step that ``step()`` was told."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpoint.layout import rounds
from holdfast.events import EventLog, read_events
from tests.checkpoint.by_hand import SECONDS, Rows, restored


def train(ckpt: hf.Checkpointer, run: Rows, steps: range) -> None:
    for step in steps:
        run.change(ckpt, step % 40, (7 * step) % 40)
        ckpt.step(step, {"loss": step / 10})


def steps_of(ckpt: hf.Checkpointer) -> list[int]:
    return [v.step for v in ckpt.versions()]


def failing(store: Any, times: int, gate: threading.Event | None = None) -> list[str]:
    """Let the next so many manifests fail to be published; the names of those that did."""
    real = store.publish
    failed: list[str] = []

    def publish(name: str, data: bytes) -> None:
        assert gate is None or gate.wait(SECONDS)
        if len(failed) < times:
            failed.append(name)
            raise hf.StoreError("no space left")
        real(name, data)

    store.publish = publish
    return failed


def test_steps_after_the_last_save_are_saved(tmp_path: Path) -> None:
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(every_steps=10)) as ckpt:
        train(ckpt, run, range(59))
    assert steps_of(ckpt) == [9, 19, 29, 39, 49, 58]
    assert ckpt.versions()[-1].metadata == {"loss": 5.8}
    assert restored(tmp_path) == run.value()
    with hf.Checkpointer(tmp_path, Rows().objects) as ckpt:
        assert ckpt.restore() == 59


@pytest.mark.parametrize("policy", [hf.Policy(), hf.Policy(every_seconds=3600)], ids=["none", "seconds"])
def test_where_no_save_was_due(tmp_path: Path, policy: hf.Policy) -> None:
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
        train(ckpt, run, range(3))
    assert steps_of(ckpt) == [2]
    assert restored(tmp_path) == run.value()


def test_a_last_step_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    run = Rows()
    with hf.Checkpointer(tmp_path / "1", run.objects, hf.Policy(every_steps=10)) as ckpt:
        train(ckpt, run, range(20))
    assert steps_of(ckpt) == [9, 19]
    with hf.Checkpointer(tmp_path / "2", run.objects, hf.Policy(every_steps=10)) as ckpt:
        train(ckpt, run, range(15))
        ckpt.save()
    assert steps_of(ckpt) == [9, 14]


def test_without_a_step_nothing_is_saved(tmp_path: Path) -> None:
    """Whoever only restores, or only calls ``save``, gets no version that he did not ask for."""
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        ckpt.save(4)
        run.change(ckpt, 1)
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        assert ckpt.restore() == 5
    assert steps_of(ckpt) == [4]
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        train(ckpt, run, range(5, 8))
        ckpt.restore()  # what was told before is gone
    assert steps_of(ckpt) == [4]


def test_a_step_of_that_number_that_another_run_has_saved(tmp_path: Path) -> None:
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        train(ckpt, run, range(5))
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(every_steps=5)) as ckpt:
        train(ckpt, run, range(5))
        train(ckpt, run, range(4, 5))  # the count began anew
    assert steps_of(ckpt) == [4, 4, 4]
    assert restored(tmp_path) == run.value()


def test_save_last_can_be_turned_off(tmp_path: Path) -> None:
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(every_steps=10, save_last=False)) as ckpt:
        train(ckpt, run, range(15))
    assert steps_of(ckpt) == [9]
    with pytest.raises(hf.ConfigError, match=r"save_last is 'no': expected True or False"):
        hf.Policy(save_last="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_not_on_an_exception(tmp_path: Path, error: type[BaseException]) -> None:
    """The step under way may be half done, and what is wrong may be wrong with the weights."""
    run = Rows()

    def work() -> None:
        with hf.Checkpointer(tmp_path, run.objects, hf.Policy(every_steps=10)) as ckpt:
            train(ckpt, run, range(15))
            raise error

    with pytest.raises(error):
        work()
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:
        assert steps_of(ckpt) == [9]


def test_not_by_close(tmp_path: Path) -> None:
    run = Rows()
    ckpt = hf.Checkpointer(tmp_path, run.objects, hf.Policy(every_steps=10))
    train(ckpt, run, range(15))
    ckpt.close()
    assert steps_of(ckpt) == [9]
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(every_steps=10)) as ckpt:
        train(ckpt, run, range(15, 18))
        ckpt.close()  # before the block ends
    assert steps_of(ckpt) == [9]


def test_after_a_save_that_was_skipped(tmp_path: Path) -> None:
    run = Rows()
    gate, entered = threading.Event(), threading.Event()
    policy = hf.Policy(every_steps=5, when_busy="skip")
    with EventLog(tmp_path) as events, hf.Checkpointer(tmp_path, run.objects, policy, events=events) as ckpt:
        real = ckpt.store.put

        def slow(name: str, parts: Any) -> int:
            entered.set()
            assert gate.wait(SECONDS)
            return real(name, parts)

        ckpt.store.put = slow  # type: ignore[method-assign]
        train(ckpt, run, range(5))
        assert entered.wait(SECONDS)
        train(ckpt, run, range(5, 10))
        threading.Timer(0.1, gate.set).start()  # still under way when the block ends
    assert steps_of(ckpt) == [4, 9]
    assert [e["step"] for e in read_events(tmp_path) if e["event"] == "checkpoint_skipped"] == [9]
    assert restored(tmp_path) == run.value()


def test_after_a_save_of_it_that_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The version is there after all: there is nothing to raise, and the log says what happened."""
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(every_steps=5)) as ckpt:
        train(ckpt, run, range(9))
        ckpt.wait()
        failed = failing(ckpt.store, 1)
        train(ckpt, run, range(9, 10))
    assert len(failed) == 1
    assert "no space left" in caplog.text
    assert steps_of(ckpt) == [4, 9]
    assert restored(tmp_path) == run.value()


def test_after_an_earlier_save_that_failed(tmp_path: Path) -> None:
    """A version that was due is missing, which is told, once everything is saved."""
    run = Rows()
    held: list[hf.Checkpointer] = []

    def work() -> None:
        gate = threading.Event()
        with hf.Checkpointer(tmp_path, run.objects, hf.Policy(every_steps=6)) as ckpt:
            held.append(ckpt)
            failing(ckpt.store, 1, gate)
            train(ckpt, run, range(7))  # of step 5, nothing is known yet
            gate.set()

    with pytest.raises(hf.SaveFailed, match="no space left"):
        work()
    assert steps_of(held[0]) == [6]
    assert restored(tmp_path) == run.value()


def test_after_a_round_and_a_save_of_it_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 8)
    run = Rows()
    held: list[hf.Checkpointer] = []
    policy = hf.Policy(every_steps=1, strategy=hf.Chunked(round_versions=1, dead_fraction=0.0, reset="never"))

    def work() -> None:
        entered, gate = threading.Event(), threading.Event()
        with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
            held.append(ckpt)
            for step in range(4):
                run.change(ckpt, step, step + 1)
                if step == 2:
                    ckpt.wait()

                    def put(name: str, parts: Any, real: Any = ckpt.store.put) -> int:
                        if "-live-" not in name:
                            return int(real(name, parts))
                        failing(ckpt.store, 1)
                        entered.set()
                        assert gate.wait(SECONDS)
                        raise hf.StoreError("no permission")

                    ckpt.store.put = put  # type: ignore[method-assign]
                ckpt.step(step)
                assert step < 2 or entered.wait(SECONDS)
            gate.set()

    with pytest.raises(
        hf.SaveFailed, match=r"are intact, but their files could not be rearranged: no permission"
    ):
        work()
    assert steps_of(held[0]) == [0, 1, 2, 3]
    assert [v.version for v in held[0].versions()] == [1, 2, 3, 5]
    assert restored(tmp_path) == run.value()


def test_a_step_that_is_told_of_an_earlier_failure_counts(tmp_path: Path) -> None:
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(every_steps=5)) as ckpt:
        failing(ckpt.store, 1)
        train(ckpt, run, range(5))
        ckpt._writer._thread.wait()
        run.change(ckpt, 5)
        with pytest.raises(hf.SaveFailed):
            ckpt.step(5)
        ckpt.save()
    assert steps_of(ckpt) == [5]
    assert restored(tmp_path) == run.value()


def test_a_last_save_that_fails_is_told(tmp_path: Path) -> None:
    run = Rows()

    def work(fail: Callable[[hf.Checkpointer], Any]) -> None:
        with hf.Checkpointer(tmp_path, run.objects, hf.Policy(every_steps=10)) as ckpt:
            train(ckpt, run, range(15))
            ckpt.wait()
            fail(ckpt)

    with pytest.raises(hf.SaveFailed, match="no space left"):
        work(lambda ckpt: failing(ckpt.store, 1))

    def locked(ckpt: hf.Checkpointer) -> None:
        def renew() -> None:
            raise hf.StoreLocked("another writer has it", "elsewhere", 1)

        ckpt._lock.renew = renew  # type: ignore[method-assign]

    with pytest.raises(hf.StoreLocked, match="another writer"):
        work(locked)
    with hf.Checkpointer(tmp_path, run.objects) as ckpt:  # the store was let go of
        assert steps_of(ckpt) == [9, 9]


@pytest.mark.parametrize("last", [8, 9], ids=["not due", "due"])
def test_of_prioritized_rows_the_last_version_has_all(tmp_path: Path, last: int) -> None:
    run = Rows(4000)
    policy = hf.Policy(every_steps=8, prioritize="mfu", fraction=0.25, strategy="incremental")
    with hf.Checkpointer(tmp_path, run.objects, policy) as ckpt:
        ckpt.step(0)
        for step in range(1, last + 1):
            run.change(ckpt, *range(step, 4000, 3))
            ckpt.step(step)
    fresh = Rows(4000)
    with hf.Checkpointer(tmp_path, fresh.objects) as ckpt:
        assert ckpt.restore() == last + 1
    assert fresh.value() == run.value()


def test_a_forked_process_that_leaves_the_block(tmp_path: Path) -> None:
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects, hf.Policy(every_steps=10)) as ckpt:
        train(ckpt, run, range(15))
        ckpt.wait()
        child = os.fork()
        if not child:
            try:
                ckpt.__exit__(None, None, None)
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        train(ckpt, run, range(15, 17))
    assert steps_of(ckpt) == [9, 16]


class AnyRun:
    """What a seed makes of a run: steps, saves, a disk that fails, restores, counts that begin anew."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rows = Rows()
        self.step = 0
        self.told = False
        self.errors: list[str] = []

    def policy(self) -> hf.Policy:
        rng = self.rng
        return hf.Policy(
            every_steps=rng.choice([None, 1, 2, 5]),
            when_busy=rng.choice(["wait", "skip", "cancel"]),
            strategy=rng.choice(["full", "incremental", "differential", "chunked"]),
            keep=rng.choice([None, 1]),
        )

    def act(self, ckpt: hf.Checkpointer) -> None:
        action = self.rng.choice(["step"] * 6 + ["save", "fail", "wait", "restore", "begin anew"])
        if action == "step":
            self.step, self.told = self.step + 1, True
            self.rows.change(ckpt, self.rng.randrange(40))
            ckpt.step(self.step)
        elif action == "save":
            ckpt.save(self.rng.choice([None, self.step]))
        elif action == "fail":
            failing(ckpt.store, 1)
        elif action == "wait":
            ckpt.wait()
        elif action == "restore":
            ckpt.restore()
            self.told = self.told and not ckpt.versions()
        else:
            self.step, self.told = 0, False

    def run(self, path: Path) -> None:
        with hf.Checkpointer(path, self.rows.objects, self.policy()) as ckpt:
            for _ in range(self.rng.randint(1, 25)):
                try:
                    self.act(ckpt)
                except hf.SaveFailed as error:
                    self.errors.append(str(error))
            ckpt.store.__dict__.pop("publish", None)  # the disk is well again


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 1000), marks=pytest.mark.soak)], ids=len)
def test_whatever_came_before_the_last_step_is_saved(tmp_path: Path, seeds: range) -> None:
    checked = failed = 0
    for seed in seeds:
        run = AnyRun(seed)
        try:
            run.run(tmp_path / str(seed))
        except hf.SaveFailed as error:
            run.errors.append(str(error))
        assert all("no space left" in error for error in run.errors)
        failed += len(run.errors)
        if run.told:
            checked += 1
            assert restored(tmp_path / str(seed)) == run.rows.value(), seed
            with hf.Checkpointer(tmp_path / str(seed), Rows().objects) as ckpt:
                assert ckpt.restore() == run.step + 1, seed
    assert checked > len(seeds) // 2
    assert failed
