"""Processes of a job on this machine: they start, say how they ended, and none is ever left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.cluster.protocol.messages import Exit, Peer
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.runtime.engines import local
from holdfast.cluster.runtime.engines.local import ONE_THREAD, LocalLauncher
from holdfast.cluster.runtime.node import Assignment
from holdfast.errors import ConfigError

ROOT = Path(__file__).parents[4]
COMMAND = [sys.executable, "-m", "tests.cluster.runtime.engines.roles"]
PATHS = os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH", "")) if path)
SERVER = Peer("server", 2, 1)


def assignment(me: Peer = SERVER, server_processors: tuple[int, ...] = (), /, **training: Any) -> Assignment:
    plan = JobPlan(
        job="job", seed=1, groups=(), servers=3, workers=1, server_processors=server_processors,
        training=training,
    )  # fmt: skip
    return Assignment(me=me, plan=plan, supervisor="", folder="")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[LocalLauncher]:
    with LocalLauncher(tmp_path, COMMAND, {**ONE_THREAD, "PYTHONPATH": PATHS}) as made:
        yield made


def until(done: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def number_in(path: Path) -> int:
    return int(until(lambda: path.exists() and path.read_text()))


def is_alive(pid: int) -> bool:
    """Whether it runs or is stopped: not whether somebody has yet to ask how it ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_a_process_from_start_to_end(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.start(assignment())
    pid = launcher.pids()[SERVER]
    assert until(launcher.exited) == [Exit(SERVER, 0)]
    assert launcher.exited() == []
    assert launcher.pids() == {}
    log = (tmp_path / "logs" / "server-2-1.log").read_text()
    assert log == f"I am server 2, process {pid}, with 1 thread\nan error\n"
    assert (tmp_path / "logs" / "server-template.log").read_text() == "loaded\n"
    assert len(list((tmp_path / "logs").iterdir())) == 2


def test_a_warm_process_is_the_one_that_is_used(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.warm("server")
    launcher.warm("server")
    launcher.warm("worker")
    first, second = launcher.warm_pids("server")
    logs = tmp_path / "logs"
    assert (logs / "server-template.log").read_text() == "loaded\n"  # once, before they know who they are
    launcher.start(assignment(sleep=60.0))
    assert launcher.pids() == {SERVER: first}
    assert launcher.warm_pids("server") == [second]
    until(lambda: "I am server 2" in (logs / "server-2-1.log").read_text())
    os.kill(second, signal.SIGKILL)
    until(lambda: not is_alive(second))
    other = Peer("server", 0)
    launcher.start(assignment(other))  # one that died meanwhile is passed over
    assert launcher.pids()[other] not in (first, second)
    assert until(launcher.exited) == [Exit(other, 0)]
    [worker] = launcher.warm_pids("worker")
    launcher.close()
    assert not is_alive(worker)
    assert not is_alive(first)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor cannot be shared out")
def test_servers_have_processors_that_workers_have_not(launcher: LocalLauncher) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    worker, supervisor = Peer("worker", 0, 1), Peer("supervisor")
    for me in (SERVER, worker, supervisor):
        launcher.start(assignment(me, (first,), sleep=60))
    pids = launcher.pids()
    until(lambda: os.sched_getaffinity(pids[SERVER]) == {first})
    until(lambda: os.sched_getaffinity(pids[worker]) == set(others))
    assert os.sched_getaffinity(pids[supervisor]) == {first, *others}


def test_how_processes_end(launcher: LocalLauncher, tmp_path: Path) -> None:
    raising, killed, hanging = (Peer("worker", slot) for slot in range(3))
    launcher.start(assignment(raising, **{"raise": "what went wrong"}))
    launcher.start(assignment(killed, sleep=60.0, ready=str(tmp_path / "ready")))
    launcher.start(assignment(hanging, thread=True))  # a thread does not keep it
    number_in(tmp_path / "ready")
    launcher.signal(killed, signal.SIGKILL)
    ended: dict[Peer, int] = {}
    until(lambda: ended.update((one.peer, one.code) for one in launcher.exited()) or len(ended) == 3)
    assert ended == {raising: 1, killed: -signal.SIGKILL, hanging: 0}
    launcher.signal(killed, signal.SIGKILL)  # left alone
    log = (tmp_path / "logs" / "worker-0-0.log").read_text()
    assert 'raise ValueError(what["raise"])\nValueError: what went wrong' in log


def test_the_same_incarnation_only_once(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.start(assignment(sleep=60.0))
    with pytest.raises(ConfigError, match="server 2, incarnation 1, is running"):
        launcher.start(assignment())
    launcher.signal(SERVER, signal.SIGKILL)
    assert until(launcher.exited) == [Exit(SERVER, -signal.SIGKILL)]
    launcher.start(assignment())  # another run in the same folder
    assert until(launcher.exited) == [Exit(SERVER, 0)]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "server-2-1.2.log",
        "server-2-1.log",
        "server-template.log",
    ]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_large_assignment_does_not_make_the_launcher_wait(
    launcher: LocalLauncher, tmp_path: Path, stopped: bool
) -> None:
    launcher.warm("server")
    [pid] = launcher.warm_pids("server")
    os.kill(pid, signal.SIGSTOP)
    launcher.start(assignment(text="x" * 1_000_000, ready=str(tmp_path / "ready")))
    if stopped:
        launcher.close(0.1)
        assert not is_alive(pid)
    else:
        os.kill(pid, signal.SIGCONT)
        assert until(launcher.exited) == [Exit(SERVER, 0)]
        assert number_in(tmp_path / "ready") == pid


def test_closing_ends_all(launcher: LocalLauncher, tmp_path: Path) -> None:
    """Those that work, those that wait, and those that are stopped; and what they started."""
    stopped = Peer("worker", 0)
    launcher.start(assignment(sleep=60.0, ready=str(tmp_path / "a"), child=str(tmp_path / "child")))
    launcher.start(assignment(stopped, sleep=60.0, ready=str(tmp_path / "b")))
    launcher.warm("server")
    pids = [number_in(tmp_path / name) for name in ("a", "b", "child")] + launcher.warm_pids("server")
    launcher.signal(stopped, signal.SIGSTOP)
    assert all(is_alive(pid) for pid in pids)
    launcher.close(0.3)
    until(lambda: not any(is_alive(pid) for pid in pids))
    launcher.close()


def test_the_end_of_input_ends_a_process(launcher: LocalLauncher, tmp_path: Path) -> None:
    """Working or waiting, without any other sign."""
    launcher.start(assignment(sleep=60.0, ready=str(tmp_path / "ready")))
    launcher.warm("server")
    pids = [number_in(tmp_path / "ready"), *launcher.warm_pids("server")]
    nodes = [*launcher._running.values(), *launcher._warm["server"]]
    for node in nodes:
        os.close(node.stdin)
        node.stdin = -1
    until(lambda: not any(is_alive(pid) for pid in pids))
    assert launcher.exited() == [Exit(SERVER, 0)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"nonsense\n", "msgspec.DecodeError"),
        (msgspec.json.encode(assignment(Peer("worker"))) + b"\n", "a server process was assigned worker 0"),
    ],
)
def test_what_is_no_assignment(launcher: LocalLauncher, tmp_path: Path, line: bytes, says: str) -> None:
    launcher.warm("server")
    (node,) = launcher._warm["server"]
    node.tell(line)
    until(node.ended)
    assert node.returncode == 1
    assert says in (tmp_path / "logs" / "server-warm-1.log").read_text()


def test_nodes_outlive_their_template(launcher: LocalLauncher, tmp_path: Path) -> None:
    """Whoever kills it: it is no point at which all servers can be lost."""
    launcher.start(assignment(sleep=1.0, ready=str(tmp_path / "ready")))
    first = number_in(tmp_path / "ready")
    template = launcher._templates["server"]
    os.kill(launcher.template_pid("server"), signal.SIGKILL)
    until(template.ended)
    other = Peer("server", 0)
    launcher.start(assignment(other))  # by another template
    assert until(launcher.exited) == [Exit(other, 0)]
    assert is_alive(first)
    assert until(launcher.exited) == [Exit(SERVER, 0)]


def test_a_template_that_hangs_is_given_up(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.warm("server")
    assert launcher.warm_pids("server")
    launcher.start(assignment(ready=str(tmp_path / "ready")))
    assert until(launcher.exited) == [Exit(SERVER, 0)]
    os.kill(launcher.template_pid("server"), signal.SIGSTOP)
    monkeypatch.setattr(local, "_FORK_SECONDS", 0.1)
    launcher.start(assignment(other := Peer("server", 0)))
    assert until(launcher.exited) == [Exit(other, 1)]
    monkeypatch.undo()
    launcher.start(assignment(again := Peer("server", 0, 2)))
    assert until(launcher.exited) == [Exit(again, 0)]


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    """Nodes that are never forked have ended as their template has, and their logs say why."""
    command = [sys.executable, "-c", "import sys; print('in vain', flush=True); sys.exit(3)"]
    with LocalLauncher(tmp_path, command) as launcher:
        launcher.start(assignment())
        launcher.signal(SERVER, signal.SIGSTOP)
        assert until(launcher.exited) == [Exit(SERVER, 3)]
        launcher.warm("server")
        launcher.start(assignment())
        assert until(launcher.exited) == [Exit(SERVER, 3)]
    assert (tmp_path / "logs" / "server-2-1.log").read_text() == "in vain\n"


def test_what_the_launcher_runs_by_default(tmp_path: Path) -> None:
    with LocalLauncher(tmp_path) as launcher:
        me = Peer("launcher")  # it starts the others, nobody starts it
        launcher.start(assignment(me))
        assert until(launcher.exited) == [Exit(me, 1)]
    log = (tmp_path / "logs" / "launcher-0-0.log").read_text()
    assert "ConfigError: the role is 'launcher': expected one of server, worker, supervisor\n" in log


_PARENT = """
import sys, threading, time
from pathlib import Path
from holdfast.cluster.runtime.engines.local import LocalLauncher
from holdfast.cluster.protocol.messages import Exit, Peer
from tests.cluster.runtime.engines.test_local import COMMAND, assignment

folder = Path(sys.argv[1])
launcher = LocalLauncher(folder, COMMAND)
def begin():  # in a thread that ends: its processes must not
    for slot in range(2):
        launcher.start(assignment(Peer("server", slot), sleep=60.0, ready=str(folder / f"ready-{slot}")))
    launcher.warm("server")
thread = threading.Thread(target=begin)
thread.start()
thread.join()
try:
    print(launcher.warm_pids("server")[0], flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print(len(launcher.pids()) - len(launcher.exited()), "alive", flush=True)
    launcher.close()
    print("closed", flush=True)
"""


@contextlib.contextmanager
def a_parent(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that has launched two servers and a warm one."""
    environment = {**os.environ, "PYTHONPATH": PATHS}
    command = [sys.executable, "-c", _PARENT, str(folder)]
    pids: list[int] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, process_group=0
    ) as parent:
        try:
            assert parent.stdout is not None
            pids.append(int(parent.stdout.readline()))
            pids += [number_in(folder / f"ready-{slot}") for slot in range(2)]
            assert all(is_alive(pid) for pid in pids)
            yield parent, pids
        finally:
            for pid in (parent.pid, *pids):
                with contextlib.suppress(ProcessLookupError):
                    if is_alive(pid):
                        os.kill(pid, signal.SIGKILL)


def test_no_orphans_when_the_parent_is_killed(tmp_path: Path) -> None:
    with a_parent(tmp_path) as (parent, pids):
        os.kill(pids[1], signal.SIGSTOP)
        parent.kill()
        parent.wait()
        until(lambda: not any(is_alive(pid) for pid in pids))


def test_an_interrupt_at_the_terminal_reaches_only_the_parent(tmp_path: Path) -> None:
    with a_parent(tmp_path) as (parent, pids):
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout is not None
        assert parent.stdout.read() == "2 alive\nclosed\n"
        assert not any(is_alive(pid) for pid in pids)


def test_the_launcher_leaves_no_thread(launcher: LocalLauncher) -> None:
    launcher.warm("server")
    launcher.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("launcher")]


def test_closing_does_not_wait_for_good_for_one_that_is_being_forked(tmp_path: Path) -> None:
    """The template is dead, but somebody still has its end of the line: what was asked for never was."""
    forks = "import os, time; time.sleep(3 if os.fork() == 0 else 60)"
    with LocalLauncher(tmp_path, [sys.executable, "-c", forks]) as launcher:
        launcher.warm("worker")
        time.sleep(0.5)  # the template has forked, and says nothing
    assert launcher.pids() == {}
    launcher.close()
