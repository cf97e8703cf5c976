"""The check that every test is under finds what a test leaves, though its parent is gone."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from tests import processes

ORPHAN = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid)"


def test_a_process_without_a_parent_is_found(request: pytest.FixtureRequest) -> None:
    test = request.node.nodeid
    assert processes.left_by(test) == {}
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())  # not to its end: the orphan keeps it open
        parent.wait()
    try:
        assert processes.left_by(test) == {orphan: "sleep 60 "}
        assert processes.left_by("tests/test_processes.py::test_another") == {}
    finally:
        subprocess.run(["kill", "-9", str(orphan)], check=True)
    assert processes.left_by(test, grace_seconds=10.0) == {}


def test_a_process_that_is_about_to_end_is_waited_for(request: pytest.FixtureRequest) -> None:
    child = subprocess.Popen(["sleep", "60"])
    timer = threading.Timer(0.2, child.kill)
    timer.start()
    assert processes.left_by(request.node.nodeid, grace_seconds=30.0) == {}
    timer.join()
    child.wait()


def test_a_number_that_was_a_strangers_may_be_a_tests(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "60"]) as mine:
        pid = str(mine.pid)
        began = processes._began(pid)
        monkeypatch.setattr(processes, "_strangers", {pid: began, "999999999": b"1"})
        assert mine.pid not in processes.left_by(request.node.nodeid), "it is known as one that is not"
        assert "999999999" not in processes._strangers, "those that have ended are forgotten"
        processes._strangers[pid] = b"1"  # another one had its number, and has ended unnoticed
        assert mine.pid in processes.left_by(request.node.nodeid)
        mine.kill()
