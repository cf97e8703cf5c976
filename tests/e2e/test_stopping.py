"""Ctrl-C in runs as a user starts them: it is heard at once, nothing that is saved is lost, and the output
ends with what to do next."""

from __future__ import annotations

import shlex
import signal
import time
from pathlib import Path

import pytest

from holdfast.checkpoint.format.manifest import read_newest
from holdfast.checkpoint.store import open_store
from holdfast.events import read_events
from tests.e2e.commands import (
    ENDLESS,
    HOLDFAST,
    PATIENCE_SECONDS,
    SMALL,
    Pipe,
    Terminal,
    wait_for_event,
    wait_for_step,
)
from tests.e2e.test_job_commands import check_none_is_left

# A model whose steps wait in compiled code, in which Python handles no signals, and a reader that waits at a
# batch; both for a file of the working folder.
WAITING = '''
import ctypes, os, threading, time
import torch
import holdfast as hf

def compute():
    """Return when the file is gone, in C, where no signal ends it and Python handles none."""
    system, barrier = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    system.pthread_barrier_init(barrier, None, 2)

    def arrive():
        while os.path.exists("computing"):
            time.sleep(0.01)
        system.pthread_barrier_wait(barrier)

    threading.Thread(target=arrive).start()
    system.pthread_barrier_wait(barrier)

def leave_a_thread():
    """One that runs until the file is gone, and that Python waits for when it ends."""

    def run():
        while os.path.exists("thread"):
            time.sleep(0.01)

    if not any(thread.name == "left" for thread in threading.enumerate()):
        threading.Thread(target=run, name="left").start()
        print("left a thread", flush=True)
    while os.path.exists("step"):
        time.sleep(0.01)

class Model(torch.nn.Module):
    table_dim = 4

    def __init__(self, features):
        super().__init__()
        self.layer = torch.nn.Linear(features, 1)

    def forward(self, dense, embeddings):
        if self.training and os.path.exists("thread"):
            leave_a_thread()
        if self.training and os.path.exists("computing"):
            print("computing", flush=True)
            compute()
        return self.layer(dense).squeeze(1) + sum(e.sum(1) for e in embeddings)

def build(reader):
    if os.path.exists("building"):
        print("building", flush=True)
        while os.path.exists("building"):
            time.sleep(0.01)
    return Model(reader.dense_features)

class Reader(hf.Synthetic):
    def batch(self, index):
        while self.part == "train" and index >= 40 and os.path.exists("gate"):
            time.sleep(0.01)
        return super().batch(index)

def reader(part, batch_size):
    return Reader(samples=64 * 100, batch_size=batch_size, part=part, table_rows=[50] * 4, seed=1)
'''
OWN = [
    "--set=model=waiting:build", "--set=data.build=waiting:reader", "--set=batch_size=64", "--set=threads=1",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "waiting.py").write_text(WAITING)
    return tmp_path


def shows_cursor(terminal: Terminal) -> bool:
    """A live view hides it."""
    shown, hidden = terminal.shown.rfind(b"\x1b[?25h"), terminal.shown.rfind(b"\x1b[?25l")
    return shown >= hidden


def test_a_stop_is_heard_while_a_step_computes(folder: Path) -> None:
    (folder / "computing").touch()
    with Pipe("train", *OWN, "--run", "r", cwd=folder) as run:
        run.until("computing")
        run.stop()
        run.until("stopping…")
        (folder / "computing").unlink()
        assert run.end() == 130
    lines = run.lines()
    assert any(line.startswith("interrupted after 1 steps") for line in lines)
    assert "nothing was saved" in lines[-1]
    assert b"100%" not in run.shown
    assert read_events(folder / "r")[-1]["event"] == "run_finished"


def test_a_second_stop_ends_what_does_not_end_by_itself(folder: Path) -> None:
    """As a step that computes on and on."""
    (folder / "computing").touch()
    with Terminal("train", *OWN, "--run", "r", cwd=folder, columns=120) as run:
        run.until("computing")
        run.stop()
        run.until("stopping…")
        run.stop()
        assert run.end() == 130
    assert shows_cursor(run)


def test_a_second_stop_does_not_wait_for_threads(folder: Path) -> None:
    """The interpreter would, for ever."""
    (folder / "thread").touch()
    (folder / "step").touch()
    with Terminal("train", *OWN, "--run", "r", cwd=folder, columns=120) as run:
        run.until("left a thread")
        run.stop()
        run.until("stopping…")
        run.stop()
        assert run.end() == 130
    assert shows_cursor(run)


def test_a_second_stop_after_the_last_line(folder: Path) -> None:
    """The first has done all it can, but a thread keeps the process."""
    (folder / "thread").touch()
    with Terminal("train", *OWN, "--run", "r", cwd=folder, columns=120) as run:
        run.until("left a thread")
        run.stop()
        run.until("nothing was saved")
        time.sleep(0.5)
        assert run.process.poll() is None
        run.stop()
        assert run.end() in (-signal.SIGINT, 130)
    assert "Traceback" not in run.shown.decode()


def test_a_second_stop_ends_what_nobody_reads(folder: Path) -> None:
    """As behind a pager: a full pipe blocks every line, also "stopping…"."""
    with Pipe("train", *OWN, "--run", "r", cwd=folder, full=True) as run:
        wait_for_event(folder / "r", "run_started")
        run.stop()
        time.sleep(2.0)
        run.stop()
        assert run.process.wait(PATIENCE_SECONDS) == 130


def test_a_second_stop_ends_a_background_command(folder: Path) -> None:
    """A command that a script runs in the background inherits that SIGINT is ignored."""
    (folder / "thread").touch()
    (folder / "step").touch()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = Pipe("train", *OWN, "--run", "r", cwd=folder)
    finally:
        signal.signal(signal.SIGINT, before)
    with run:
        run.until("left a thread")
        run.stop()
        run.until("stopping…")
        time.sleep(0.5)
        run.stop()
        assert run.end() == 130


def test_a_job_ends_with_the_command_that_resumes_it(tmp_path: Path) -> None:
    """Exactly: run as it stands, it goes on behind the last step, and does not kill again what was killed."""
    kills = ["--kill", "worker:1@step:5", "--kill", "worker:0@step:99999999"]
    saved = ["--set", "checkpoint.path=the store", *kills]
    arguments = ["train", *SMALL, ENDLESS, "--servers", "2", "--run", "r", *saved]
    with Terminal(*arguments, cwd=tmp_path, columns=120) as run:
        run.until("worker 1 #2")
        run.stop()
        run.until("stopping…")
        assert run.end() == 130
    assert b"100%" not in run.shown
    seen = [line for line in run.screen() if line.startswith("stopping…")]
    assert seen == ["stopping… finishing batches, testing, saving; Ctrl-C again ends at once"]
    assert sum(line.startswith("process ") for line in run.screen()) == 1
    last = read_events(tmp_path / "r")[-1]
    assert (last["interrupted"], last["last_checkpoint"], last["unsaved_steps"]) == (True, 1, 0)
    shares = [event["fraction"] for event in read_events(tmp_path / "r") if event["event"] == "progress"]
    assert shares[-1] < 1
    *_, said, command = run.lines()
    assert said == f"saved up to step {last['steps']:,} (version 1); resume with:"
    program, resumed = shlex.split(command)[: len(HOLDFAST)], shlex.split(command)[len(HOLDFAST) :]
    assert program == HOLDFAST

    with Pipe(*resumed, cwd=tmp_path) as again:
        again.until(f"resuming from version 1, step {last['steps']:,}")
        wait_for_step(tmp_path / "r-2", last["steps"] + 1)
        again.stop_reading()
        again.stop()
        assert again.process.wait(PATIENCE_SECONDS) == 130
    events = read_events(tmp_path / "r-2")
    assert events[-1]["event"] == "run_finished"
    assert events[-1]["steps"] > last["steps"]
    assert not [event for event in events if event["event"] == "killed"]
    assert events[-1]["kills_missed"] == ["worker:0@step:99999999"]
    with open_store(str(tmp_path / "the store"), create=False) as store:
        assert read_newest(store).versions[-1].step == events[-1]["steps"] - 1
    check_none_is_left(tmp_path / "r-2")


@pytest.mark.parametrize("shape", [[], ["--servers", "2"]], ids=["one process", "job"])
def test_a_stop_before_training_begins(folder: Path, shape: list[str]) -> None:
    (folder / "building").touch()
    with Terminal("train", *OWN, *shape, "--run", "r", cwd=folder, columns=120) as run:
        run.until("building")
        run.stop()
        run.until("stopping…")
        assert run.end() == 130
    *_, said, saved = run.lines()
    assert said == "stopped before training began"
    assert saved.startswith("nothing was saved")
    assert "Traceback" not in run.shown.decode()
    assert shows_cursor(run)


@pytest.mark.parametrize(
    ("command", "begun"),
    [
        pytest.param(["chaos", "--minutes=9", "--run=r"], "batches", marks=pytest.mark.soak),
        pytest.param(["chaos", "--simulated=99999"], "faults", marks=pytest.mark.soak),
        (["emulate", "--seeds=99"], "training"),
    ],
    ids=["chaos", "simulated", "emulate"],
)
def test_other_long_commands(tmp_path: Path, command: list[str], begun: str) -> None:
    with Terminal(*command, cwd=tmp_path, columns=120) as run:
        run.until(begun)
        run.stop()
        run.until("stopping…")
        assert run.end() == 130
    assert "Traceback" not in run.shown.decode()
    assert shows_cursor(run)


def test_a_command_that_is_killed_leaves_no_processes(tmp_path: Path) -> None:
    """Those of its pool wait for work that nobody is left to give them. Every test is checked for what it
    leaves behind."""
    with Pipe("chaos", "--simulated=99999", cwd=tmp_path) as run:
        run.until("faults")
        run.process.kill()
