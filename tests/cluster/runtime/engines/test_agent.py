"""An agent on a machine: it runs processes, and whoever asks for its news misses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.cluster.protocol.envelope import Envelope
from holdfast.cluster.protocol.messages import Ballot, Claim, Claimed, Exit, Peer, VaultAt
from holdfast.cluster.runtime.engines.agent import Agent, News
from holdfast.cluster.runtime.keys import JobKeys
from holdfast.cluster.runtime.transport.zmq import ZmqTransport
from tests.cluster.runtime.engines.test_local import COMMAND, PATHS, SERVER, assignment, is_alive, until

STATE = "state.json"


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent("127.0.0.1", STATE, {"PYTHONPATH": PATHS}, COMMAND)
    yield made
    made.close(1.0)
    made.remove()
    assert not made._folder.exists()


def look(
    agent: Agent, acknowledged: int = 0, offsets: dict[str, int] | None = None, seconds: float = 0.0
) -> News:
    return msgspec.msgpack.decode(agent.look(acknowledged, offsets or {}, seconds), type=News)


def start(agent: Agent, me: Peer = SERVER, **training: Any) -> None:
    agent.start(msgspec.json.encode(assignment(me, **training)))


def test_an_end_is_told_until_it_is_acknowledged(agent: Agent) -> None:
    start(agent)
    news = until(lambda: (found := look(agent)).exits and found)
    assert news.exits == ((1, Exit(SERVER, 0)),)
    assert look(agent).exits == news.exits  # the answer may have been lost
    assert look(agent, acknowledged=1).exits == ()
    assert look(agent).exits == ()  # a late call does not bring it back


def test_it_waits_for_news(agent: Agent, tmp_path: Path) -> None:
    start(agent, sleep=60.0, ready=str(tmp_path / "ready"))
    until((tmp_path / "ready").exists)
    [(peer, pid)] = look(agent).running
    assert peer == SERVER
    os.kill(pid, signal.SIGKILL)
    assert look(agent, seconds=60.0).exits == ((1, Exit(SERVER, -9)),)


def test_files_come_in_parts_and_only_once(agent: Agent) -> None:
    start(agent)
    until(lambda: look(agent).exits)
    files = {file.name: file for file in look(agent, 1).files}
    log = files["logs/server-2-1.log"]
    assert log.data.startswith(b"I am server 2")
    assert log.offset == 0
    some = {name: len(file.data) for name, file in files.items()}
    assert look(agent, 1, some).files == ()
    [rest] = look(agent, 1, {**some, log.name: 5}).files
    assert (rest.offset, rest.data) == (5, log.data[5:])


def test_a_signal_ends_a_process(agent: Agent, tmp_path: Path) -> None:
    start(agent, sleep=60.0, ready=str(tmp_path / "ready"))
    until((tmp_path / "ready").exists)
    agent.signal(SERVER, signal.SIGKILL)
    assert look(agent, seconds=60.0).exits == ((1, Exit(SERVER, -9)),)
    agent.signal(SERVER, signal.SIGKILL)


def test_one_that_cannot_be_started_counts_as_ended(agent: Agent, tmp_path: Path) -> None:
    start(agent, sleep=60.0)
    start(agent, sleep=60.0)  # of the same incarnation
    [(_, ended)] = look(agent, seconds=60.0).exits
    assert ended.code == 1
    assert "could not be started" in ended.reason


def test_the_end_of_the_agent_ends_its_processes(tmp_path: Path) -> None:
    agent = Agent("127.0.0.1", STATE, {"PYTHONPATH": PATHS}, COMMAND)
    start(agent, sleep=60.0, ready=str(tmp_path / "ready"))
    until((tmp_path / "ready").exists)
    [(_, pid)] = look(agent).running
    agent.close(0.1)
    assert not is_alive(pid)
    assert "logs/server-2-1.log" in {file.name for file in look(agent).files}  # last words
    agent.remove()


def test_its_vault_answers_the_supervisor_alone(agent: Agent) -> None:
    keys = JobKeys(1, 1, 1)
    vault = Peer("vault", 0)
    endpoint = agent.open_vault("job", 0, msgspec.json.encode(keys.of(vault)))
    claim = Claim(Ballot(3, 7))
    answers: dict[str, list[Any]] = {}
    for me in (Peer("worker", 0, 1), Peer("supervisor")):
        with ZmqTransport(me, "job", None, keys.of(me)) as transport:
            transport.connect("vault", 0, endpoint)
            transport.send(Envelope(me, vault, claim))
            end = time.monotonic() + (30.0 if me.role == "supervisor" else 1.0)
            found = answers.setdefault(me.role, [])
            while not found and time.monotonic() < end:
                found += [envelope.message for envelope in transport.poll(0.1)]
    assert answers == {"worker": [], "supervisor": [Claimed(Ballot(3, 7))]}


def test_a_machine_compiles_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty cache: afterwards a server finds all that it needs."""
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    first = Agent("127.0.0.1", STATE)
    try:
        assert first.compile()
        assert look(first).compiling
        until(lambda: not look(first).compiling, seconds=240.0)
        assert not look(first).files, "it has nothing to say"
        assert not first.compile()
    finally:
        first.close(1.0)
        first.remove()
    cached = set((tmp_path / "NUMBA_CACHE_DIR").rglob("*.nbi"))
    assert len(cached) > 20
    again = [sys.executable, "-m", "holdfast.cluster.runtime.node", "compile", str(os.getpid())]
    subprocess.run(again, check=True)
    assert set((tmp_path / "NUMBA_CACHE_DIR").rglob("*.nbi")) == cached


def test_closing_ends_a_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    other = Agent("127.0.0.1", STATE)
    assert other.compile()
    compiler = other._compiler
    assert compiler is not None
    other.close(1.0)
    other.remove()
    assert compiler.returncode == -signal.SIGKILL


def test_it_keeps_a_copy_of_the_log_for_the_next_controller(agent: Agent) -> None:
    for part in ((0, b"first "), (0, b"first "), (6, b"second")):
        agent.look(0, {}, 0.0, b"", part)
    news = look(agent)
    assert (news.journal, news.address, news.vault) == (12, "127.0.0.1", None)
    assert agent.read_journal(0) == b"first second"
    assert "journal" not in {file.name for file in news.files}, "the log is where it came from"
    endpoint = agent.open_vault("job", 4, msgspec.json.encode(JobKeys(1, 1, 5).of(Peer("vault", 4))))
    assert look(agent).vault == VaultAt(4, endpoint)
