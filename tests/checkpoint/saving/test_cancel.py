"""``when_busy="cancel"``: a save that comes while one is being written takes its place."""

from __future__ import annotations

import contextlib
import errno
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpoint.format import encoding
from holdfast.checkpoint.layout import bundles, rounds
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import SaveFailed
from holdfast.events import EventLog, read_events
from holdfast.options import Chunked, Policy
from holdfast.testing.faults import WRITING_OPERATIONS, FaultyFiles
from holdfast.testing.s3 import S3Server
from tests.checkpoint.by_hand import SECONDS, Rows, in_time, restored
from tests.checkpoint.lineage import (
    QUANTIZED,
    STRATEGIES,
    Lineage,
    QuickFiles,
    check_no_leftovers,
    check_store,
)


class Gate:
    """Holds up the calls of a store's method, each until it is let through."""

    def __init__(self, store: Any, method: str, part: str = "") -> None:
        self.names: list[str] = []
        self.arrived = threading.Semaphore(0)
        self._through = threading.Semaphore(0)
        self._open = False
        real = getattr(store, method)

        def held(name: str, *arguments: Any) -> Any:
            if part in name and not self._open:
                self.names.append(name)
                self.arrived.release()
                assert self._through.acquire(timeout=SECONDS)
            return real(name, *arguments)

        setattr(store, method, held)

    def wait(self) -> None:
        assert self.arrived.acquire(timeout=SECONDS)

    def let(self, calls: int = 1) -> None:
        for _ in range(calls):
            self._through.release()

    def open(self) -> None:
        self._open = True
        self.let(1000)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a save of a few rows is made of many files."""
    monkeypatch.setattr(bundles, "FILE_BYTES", 100)
    monkeypatch.setattr(bundles, "STRETCH_BYTES", 100)


def cancelling(path: Path, run: Rows, **options: Any) -> hf.Checkpointer:
    return hf.Checkpointer(path, run.objects, hf.Policy(when_busy="cancel", **options))


def started(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def cancelled(ckpt: hf.Checkpointer) -> None:
    """Wait until the save that is under way has been told to stop."""
    deadline = time.monotonic() + SECONDS
    while True:
        outcome = ckpt._writer._under_way
        if outcome is None or outcome.wanted.cancelled:
            return
        assert time.monotonic() < deadline, "it was never cancelled"
        time.sleep(0.001)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("puts", [1, 3], ids=["first file", "later file"])
def test_the_running_save_ends_with_the_file_that_it_writes(tmp_path: Path, puts: int) -> None:
    run = Rows()
    with EventLog(tmp_path) as events:
        policy = hf.Policy(when_busy="cancel")
        with hf.Checkpointer(tmp_path / "store", run.objects, policy, events=events) as ckpt:
            gate = Gate(ckpt.store, "put")
            assert ckpt.save(0) == 1
            for _ in range(puts):
                gate.wait()
                if len(gate.names) < puts:
                    gate.let()
            run.change(ckpt, 1, 2)
            found: list[int | None] = []
            saving = started(lambda: found.append(ckpt.save(1)))
            cancelled(ckpt)
            assert len(gate.names) == puts
            gate.let()  # that put ends, and with it the save
            saving.join(SECONDS)
            assert found == [2]
            assert all("/00000002-" in name for name in gate.names[puts:])
            gate.open()
            ckpt.wait()
            assert [(v.version, v.step) for v in ckpt.versions()] == [(2, 1)]
            (report,) = ckpt.reports
            assert report.stall_seconds >= report.snapshot_seconds
    names = [p.name for folder in ("chunks", "dense") for p in (tmp_path / "store" / folder).iterdir()]
    assert names
    assert all(name.startswith("00000002-") for name in names)
    (event,) = (e for e in read_events(tmp_path) if e["event"] == "checkpoint_cancelled")
    assert (event["version"], event["step"]) == (1, 0)
    assert not [e for e in read_events(tmp_path) if e["event"] == "checkpoint_failed"]
    assert restored(tmp_path / "store") == run.value()


@pytest.mark.usefixtures("small_files")
def test_rows_of_a_cancelled_save_are_in_the_next(tmp_path: Path) -> None:
    run = Rows()
    with cancelling(tmp_path, run, strategy="incremental") as ckpt:
        ckpt.save(0)
        ckpt.wait()
        gate = Gate(ckpt.store, "put")
        run.change(ckpt, 1, 2, 3)
        ckpt.save(1)
        gate.wait()
        run.change(ckpt, 3, 4)
        saving = started(lambda: ckpt.save(2))
        cancelled(ckpt)
        gate.open()
        saving.join(SECONDS)
        ckpt.wait()
        assert [(v.version, v.step, v.rows) for v in ckpt.versions()] == [(1, 0, 40), (3, 2, 4)]
    assert restored(tmp_path) == run.value()


def test_a_save_past_its_commit_point_counts_as_done(tmp_path: Path) -> None:
    run = Rows()
    with cancelling(tmp_path, run) as ckpt:
        ckpt.save(0)  # it takes the store over, which publishes as well
        ckpt.wait()
        gate = Gate(ckpt.store, "publish")
        run.change(ckpt, 1)
        ckpt.save(1)
        gate.wait()
        truth = run.value()
        run.change(ckpt, 2)
        saving = started(lambda: ckpt.save(2))
        cancelled(ckpt)
        gate.open()
        saving.join(SECONDS)
    assert [(v.version, v.step) for v in ckpt.versions()] == [(1, 0), (2, 1), (3, 2)]
    assert restored(tmp_path, 2) == truth
    assert restored(tmp_path) == run.value()


@pytest.mark.usefixtures("small_files")
def test_no_two_saves_in_a_row_are_cancelled(tmp_path: Path) -> None:
    """However quickly they come, at least every second one is written to its end."""
    run = Rows()
    truth = {}
    with cancelling(tmp_path, run, strategy="incremental") as ckpt:
        gate = Gate(ckpt.store, "put")
        for step in range(9):
            run.change(ckpt, step, 9 + step)
            if step:
                gate.wait()  # the one before is being written
            saving = started(lambda step=step: truth.update({ckpt.save(step): run.value()}))
            while saving.is_alive():  # it may be waiting for all puts of the one before
                gate.let()
                saving.join(0.01)
            while gate._through.acquire(blocking=False):
                pass
        gate.open()
        ckpt.wait()
        assert [v.step for v in ckpt.versions()] == [1, 3, 5, 7, 8]
    for version in ckpt.versions():
        assert restored(tmp_path, version.version) == truth[version.version]


def test_a_save_that_waits_behind_a_round_is_taken_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a version that stands are being rearranged: a save need not wait for that to be cancelled."""
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 8)
    run = Rows()
    strategy = Chunked(round_versions=1, dead_fraction=0.0, reset="never")
    with EventLog(tmp_path) as events:
        policy = hf.Policy(when_busy="cancel", strategy=strategy)
        with hf.Checkpointer(tmp_path / "store", run.objects, policy, events=events) as ckpt:
            for step in range(2):
                run.change(ckpt, step, step + 1)
                ckpt.save(step)
                ckpt.wait()
            gate = Gate(ckpt.store, "put", "-live-")
            run.change(ckpt, 2, 3)
            ckpt.save(2)
            gate.wait()  # step 2 is saved, and behind it a round has begun
            for step in (3, 4):
                run.change(ckpt, step, step + 1)
                assert in_time(partial(ckpt.save, step)) is None
            assert len(gate.names) == 1
            gate.open()
            ckpt.wait()
            assert [v.step for v in ckpt.versions()] == [0, 1, 2, 4]
    assert [e["step"] for e in read_events(tmp_path) if e["event"] == "checkpoint_cancelled"] == [3]
    assert restored(tmp_path / "store") == run.value()


@pytest.mark.parametrize("share", [1.0, 1e-6], ids=["at full speed", "throttled"])
def test_quantized_rows_stop_being_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Between two blocks, and without the rest of hours that a throttle would take after one."""
    monkeypatch.setattr(encoding, "BLOCK_BYTES", 400)
    monkeypatch.setattr(bundles, "FILE_BYTES", 200)
    encoding_now, going_on = threading.Event(), threading.Event()
    real = encoding._encode

    def encode(*arguments: Any) -> Any:
        encoding_now.set()
        assert going_on.wait(SECONDS)
        return real(*arguments)

    run = Rows(2000)
    with cancelling(tmp_path, run, quantize=8, background_share=share) as ckpt:
        monkeypatch.setattr(encoding, "_encode", encode)
        ckpt.save(0)
        assert encoding_now.wait(SECONDS)
        saving = started(lambda: ckpt.save(1))
        cancelled(ckpt)
        going_on.set()
        saving.join(SECONDS)
        assert not saving.is_alive(), "the rest that the throttle takes is not cut short"
        if share != 1:  # it would take hours
            ckpt._writer._under_way.wanted.cancelled = True  # type: ignore[union-attr]
        ckpt._writer._thread.wait()
        assert [v.step for v in ckpt.versions()] == ([1] if share == 1 else [])
        assert not [t for t in threading.enumerate() if t.name == "holdfast-encode"]


def test_a_failure_is_told_although_a_cancel_was_asked_for(tmp_path: Path) -> None:
    run = Rows()
    with cancelling(tmp_path, run, strategy="incremental") as ckpt:
        gate = Gate(ckpt.store, "publish")
        real = ckpt.store.publish

        def full(name: str, data: bytes) -> None:
            real(f"{name}-not", data)
            raise hf.StoreError("no space left")

        ckpt.store.publish = full  # type: ignore[method-assign]
        ckpt.save(0)
        gate.wait()
        errors: list[BaseException | None] = []
        saving = started(lambda: errors.append(in_time(lambda: ckpt.save(1))))
        cancelled(ckpt)
        gate.open()
        saving.join(SECONDS)
        assert isinstance(errors[0], hf.SaveFailed)
        del ckpt.store.publish
        ckpt.save(2)
    assert [v.step for v in ckpt.versions()] == [2]
    assert restored(tmp_path) == run.value()


@pytest.mark.usefixtures("small_files")
def test_closing_and_waiting_after_a_cancel(tmp_path: Path) -> None:
    run = Rows()
    ckpt = cancelling(tmp_path, run)
    for step in range(20):
        run.change(ckpt, step)
        ckpt.save(step)
    assert in_time(ckpt.wait) is None
    assert ckpt.versions()[-1].step == 19
    for step in range(20, 30):
        run.change(ckpt, step)
        ckpt.save(step)
    assert in_time(ckpt.close) is None
    assert ckpt.versions()[-1].step == 29
    assert restored(tmp_path) == run.value()


@pytest.mark.usefixtures("small_files")
def test_an_interrupt_of_a_cancel_loses_nothing_and_blocks_nothing(tmp_path: Path) -> None:
    """As Ctrl-C, at many moments of a save that cancels another."""
    run = Rows()
    main = threading.get_ident()

    def strike(seconds: float) -> None:
        time.sleep(seconds)
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    interrupted = 0
    try:
        with EventLog(tmp_path) as events:
            policy = hf.Policy(when_busy="cancel", strategy="incremental", keep=3)
            with hf.Checkpointer(tmp_path / "store", run.objects, policy, events=events) as ckpt:
                for i in range(3):  # not while kernels are being loaded: LLVM does not survive that
                    run.change(ckpt, i)
                    ckpt.save(i)
                ckpt.wait()
                for i in range(3, 160):
                    run.change(ckpt, i % 40)
                    ckpt.save(i)
                    run.change(ckpt, (i + 7) % 40)
                    thread = threading.Thread(target=strike, args=(5e-6 * i,))
                    with contextlib.suppress(KeyboardInterrupt):
                        thread.start()
                        try:
                            ckpt.save(i)
                        except KeyboardInterrupt:
                            interrupted += 1
                        thread.join()
                    thread.join()
                    if i % 10 == 0:
                        ckpt.wait()
                ckpt.save(1000)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert interrupted
    assert any(e["event"] == "checkpoint_cancelled" for e in read_events(tmp_path))
    assert ckpt.versions()[-1].step == 1000
    assert restored(tmp_path / "store") == run.value()


class SlowFiles(QuickFiles):
    """A disk that takes its time, now and then."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def fsync(self, handle: int) -> None:
        """Take some time."""
        time.sleep(self._random.choice([0, 0, 0.0005, 0.002]))


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("quantized", [{}, QUANTIZED], ids=["raw", "quantized"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_version_is_right_whatever_is_cancelled(
    tmp_path: Path, strategy: Any, quantized: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    policy = Policy(strategy=strategy, when_busy="cancel", keep=6, **quantized)
    chance = random.Random(repr((strategy, quantized)))
    with EventLog(tmp_path) as events:
        for part in range(2):
            files = SlowFiles(part)
            with LocalStore(tmp_path / "store", create=True, files=files) as store, store.lock_writer():
                line = Lineage(store, policy, events)
                for _ in range(12):
                    for _ in range(chance.randint(1, 3)):
                        line.train()
                    number = line.save()
                    if chance.random() < 0.2:
                        line.writer.wait()
                        check_store(store, on_grids=line.on_grids)
                        check_no_leftovers(line)
                line.writer.close()
                manifest = check_store(store, on_grids=line.on_grids)
                check_no_leftovers(line)
                assert (manifest.versions[-1].version, manifest.versions[-1].step) == (number, line.step)
    found = [e["event"] for e in read_events(tmp_path)]
    assert "checkpoint_cancelled" in found
    assert "checkpoint_failed" not in found
    assert found.count("checkpoint_saved") >= found.count("checkpoint_cancelled")


class SlowAndFaulty(FaultyFiles):
    """One that fails as well."""

    def fsync(self, handle: int) -> None:
        """Fail, or take some time."""
        self._arrive("fsync")
        time.sleep(0.0005)

    def fsync_dir(self, path: str) -> None:
        """Fail or do nothing."""
        self._arrive("fsync_dir")


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 600), marks=pytest.mark.soak)], ids=len)
def test_cancels_on_a_disk_that_fails(tmp_path: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    failed = 0
    with EventLog(tmp_path) as events:
        for seed in seeds:
            chance = random.Random(seed)
            policy = Policy(strategy=chance.choice(STRATEGIES), when_busy="cancel", keep=4)
            files = SlowAndFaulty(
                chance.choice(WRITING_OPERATIONS[1:]), chance.randint(3, 120), errno.EIO, chance.randint(1, 3)
            )
            root = tmp_path / str(seed)
            with LocalStore(root, create=True, files=files) as store, store.lock_writer():
                line = Lineage(store, policy, events)
                for _ in range(12):
                    line.train()
                    try:
                        line.save()
                    except SaveFailed:
                        failed += 1
                for _ in range(2):  # of a save, and of a round before it
                    with contextlib.suppress(SaveFailed):
                        line.writer.wait()
                files._first = files._last = 10**9  # the disk is well again
                number = line.save()
                with contextlib.suppress(SaveFailed):  # that files could not be deleted before
                    line.writer.close()
                assert check_store(store).versions[-1].version == number, seed
            with LocalStore(root, create=False, files=QuickFiles()) as store, store.lock_writer():
                check_no_leftovers(Lineage(store, policy))
    assert failed
    assert any(e["event"] == "checkpoint_cancelled" for e in read_events(tmp_path))


@pytest.mark.soak
@pytest.mark.usefixtures("small_files")
def test_cancels_on_an_object_store(s3_server: S3Server, tmp_path: Path) -> None:
    policy = Policy(strategy=Chunked(round_versions=2), when_busy="cancel", keep=3, deletion_delay_seconds=0)
    with (
        EventLog(tmp_path) as events,
        open_store(f"s3://{s3_server.bucket}/cancel", create=True, options=s3_server.options()) as store,
        store.lock_writer(),
    ):
        line = Lineage(store, policy, events)
        for _ in range(40):
            line.train()
            number = line.save()
        line.writer.close()
        assert check_store(store).versions[-1].version == number
        check_no_leftovers(line)
    assert any(e["event"] == "checkpoint_cancelled" for e in read_events(tmp_path))
