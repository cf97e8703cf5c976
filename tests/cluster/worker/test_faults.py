"""Faults at named points, and what is written down of acknowledged pushes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cluster.protocol.messages import Position
from holdfast.cluster.worker.faults import Acknowledged, PushFault, acknowledged_path
from holdfast.errors import ConfigError


def test_what_is_written_is_read() -> None:
    assert PushFault.parse("kill@push:4:1") == PushFault("kill", "push", 4, 1)
    assert PushFault.parse("stop@pushed:3") == PushFault("stop", "pushed", 3, 0)
    assert PushFault.parse("kill@commit:*:2") == PushFault("kill", "commit", -1, 2)


@pytest.mark.parametrize(
    "text",
    ["kill", "kill@push", "burn@push:1", "kill@lunch:1", "kill@push:x", "kill@push:1:*", "kill@push:-1"],
)
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="fault"):
        PushFault.parse(text)


ANY_PUSH = """
import os, signal
from holdfast.cluster.worker.faults import Faults
faults = Faults(["kill@push:*:1"])
faults.reach("push", 7, 1)
print("armed", flush=True)
os.kill(os.getpid(), signal.SIGUSR1)
faults.reach("push", 8, 0)
print("another point", flush=True)
faults.reach("push", 8, 1)
print("too late", flush=True)
"""


def test_a_fault_of_any_push_waits_for_a_signal() -> None:
    done = subprocess.run([sys.executable, "-c", ANY_PUSH], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n") == ["armed", "another point", ""], done.stderr
    assert done.returncode == -signal.SIGKILL


def test_acknowledged_pushes_are_written_down_once_each(tmp_path: Path) -> None:
    acknowledged = Acknowledged(str(tmp_path), 1)
    for sequence in (0, 3, 3, 4):
        acknowledged.note(sequence, Position(0, 10 * sequence))
    successor = Acknowledged(str(tmp_path), 1)
    successor.note(5, Position(1, 2))
    lines = acknowledged_path(tmp_path, 1).read_text().splitlines()
    assert lines == ["3 0 30", "4 0 40", "5 1 2"]
    Acknowledged("", 0).note(9, Position())  # without a folder, nowhere
    assert [path.name for path in tmp_path.iterdir()] == ["acknowledged-1"]
