"""Who holds a lock, as its note says, and whether that process lives."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from holdfast.checkpoint.store import holder


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel says of processes: this one, and one that ended."""
    mine = tmp_path / str(os.getpid())
    for folder in (mine / "ns", mine / "task/1", tmp_path / "sys/kernel/random"):
        folder.mkdir(parents=True)
    (tmp_path / "self").symlink_to(str(os.getpid()))
    (tmp_path / "sys/kernel/random/boot_id").write_text("boot\n")
    (mine / "ns/pid").symlink_to("pid:[1]")
    (mine / "ns/time").symlink_to("time:[2]")
    write_stat(mine, "S")
    monkeypatch.setattr(holder, "_PROC", tmp_path)
    monkeypatch.setattr(holder, "_machine", holder._machine.__wrapped__)  # it is asked only once
    return tmp_path


def write_stat(process: Path, state: str, started: int = 4711, name: str = "a) (b") -> None:
    others = [str(number) for number in range(4, 22)]
    (process / "stat").write_text(f"{process.name} ({name}) {state} {' '.join(others)} {started} 23 24\n")


def note(**others: object) -> bytes:
    return json.dumps(holder.note() | others).encode()


def test_a_note_says_which_process_of_which_machine(proc: Path) -> None:
    found = holder.note()
    assert (found["pid"], found["started"]) == (os.getpid(), 4711)
    assert found["machine"] == "boot pid:[1] time:[2]"
    assert holder.read_holder(note()) == (found["host"], os.getpid())


def test_an_older_kernel_has_one_time_for_all(proc: Path) -> None:
    (proc / str(os.getpid()) / "ns/time").unlink()
    assert holder.note()["machine"] == "boot pid:[1]"


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"host": "h"}', b'{"host": "h", "pid": "x"}'])
def test_a_note_that_makes_no_sense_names_nobody(content: bytes) -> None:
    assert holder.read_holder(content) == ("unknown", 0)
    assert holder.is_alive(content) is None


def test_a_process_lives_if_it_was_started_when_the_note_says(proc: Path) -> None:
    assert holder.is_alive(note()) is True
    assert holder.is_alive(note(started=4710)) is False


def test_a_process_that_is_gone_is_dead(proc: Path) -> None:
    assert holder.is_alive(note(pid=2**22 + 1)) is False


def test_the_first_process_can_hold_a_lock(proc: Path) -> None:
    """In a container it is often the trainer."""
    (proc / "1").mkdir()
    write_stat(proc / "1", "S")
    assert holder.is_alive(note(pid=1)) is True


@pytest.mark.parametrize(
    "other", [{"machine": "boot pid:[2]"}, {"machine": ""}, {"started": None}, {"started": "x"}, {"pid": 0}]
)
def test_of_what_is_not_known_for_sure_nothing_is_said(proc: Path, other: dict[str, object]) -> None:
    assert holder.is_alive(note(**other)) is None


def test_where_no_machine_is_known_nobody_is_known_to_be_dead(proc: Path) -> None:
    (proc / "sys/kernel/random/boot_id").unlink()
    assert holder.note()["machine"] == ""
    assert holder.is_alive(note(pid=2**22 + 1)) is None


def test_what_the_kernel_says_of_another_namespace_is_not_used(proc: Path) -> None:
    """As in a container that sees the /proc of its host."""
    (proc / "self").unlink()
    (proc / "self").symlink_to("1")
    assert holder.note()["machine"] == ""


@pytest.mark.parametrize("state", ["Z", "X"])
def test_a_corpse_is_dead_once_its_last_thread_has_ended(proc: Path, state: str) -> None:
    mine = proc / str(os.getpid())
    said = note()
    write_stat(mine, state)
    assert holder.is_alive(said) is False
    (mine / "task/2").mkdir()  # its main thread has ended, another has not
    assert holder.is_alive(said) is True


def test_a_process_of_which_nothing_can_be_said(proc: Path) -> None:
    said = note()
    (proc / str(os.getpid()) / "stat").unlink()
    assert "started" not in holder.note()
    assert holder.is_alive(said) is None
