"""The folder of a job's sockets: nobody else can enter it, and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.runtime.transport.address import address_of
from holdfast.cluster.runtime.transport.private import MOST_PATH_BYTES, private_folder
from holdfast.cluster.runtime.transport.zmq import ZmqTransport
from holdfast.errors import ConfigError
from tests.cluster.test_job import network, reader
from tests.other_user import CAN_BE_ANOTHER, NOBODY


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where folders are made, and nowhere else."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:
        use(Path(name), monkeypatch)
        yield Path(name)


def use(folder: Path, monkeypatch: pytest.MonkeyPatch, runtime: str = "") -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is looked up once a process


def test_only_its_user_can_enter_and_it_is_gone_at_the_end(base: Path) -> None:
    with private_folder() as folder, private_folder() as other:
        assert folder.parent == other.parent == base
        assert folder != other
        status = folder.stat()
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o700, os.geteuid())
    assert list(base.iterdir()) == []


def test_the_users_runtime_folder_comes_first(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base / "runtime").mkdir(mode=0o700)
    use(base, monkeypatch, runtime=str(base / "runtime"))
    with private_folder() as folder:
        assert folder.parent == base / "runtime"
    for unusable in ("relative", str(base / "missing"), str(base / ("x" * 80))):
        use(base, monkeypatch, runtime=unusable)
        with private_folder() as folder:
            assert folder.parent == base


def test_a_socket_has_a_short_path_wherever_temporary_files_go(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = base / ("x" * 90)
    long.mkdir()
    use(long, monkeypatch)
    with private_folder() as folder:
        assert folder.parent == Path("/tmp")
        endpoint = address_of(f"ipc://{folder}", Peer("supervisor", 0, 0))
        longest = address_of(
            f"ipc://{'x' * (MOST_PATH_BYTES - 48)}/{folder.name}", Peer("server", 1023, 99_999)
        )
        assert len(longest) - len("ipc://") <= MOST_PATH_BYTES
        with ZmqTransport(Peer("supervisor"), "job", endpoint):
            pass


def test_where_others_could_replace_it_none_is_made(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base.chmod(0o777)
    with private_folder() as folder:
        assert folder.parent == Path("/tmp")
    monkeypatch.setattr("holdfast.cluster.runtime.transport.private._make_in", refuse)
    with (
        pytest.raises(
            ConfigError, match=r"cannot make a folder for the job's sockets: .*set TMPDIR \(.*full"
        ),
        private_folder(),
    ):
        pass
    assert list(base.iterdir()) == []


def refuse(base: str) -> tuple[Path, int]:
    raise OSError(28, "the disk is full")


_LEAVES = """
import sys
from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.runtime.transport.private import private_folder
from holdfast.cluster.runtime.transport.zmq import ZmqTransport
with private_folder() as folder, ZmqTransport(Peer("server", 3), "job", f"ipc://{folder}/a"):
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_the_next_job_removes_what_a_killed_one_left(base: Path) -> None:
    """And nothing else: not the folder of one that runs, nor what only looks like one."""
    processes = [
        subprocess.Popen([sys.executable, "-c", _LEAVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        folders = [Path(p.stdout.readline().decode().strip()) for p in processes if p.stdout is not None]
        (base / "holdfast-ipc-mine").mkdir()
        (base / "holdfast-ipc-mine" / "file").touch()
        (base / "holdfast-ipc-link").symlink_to(folders[1])
        processes[0].send_signal(signal.SIGKILL)
        processes[0].wait()
        assert (folders[0] / "a").is_socket()
        with private_folder():
            assert not folders[0].exists()
            assert (folders[1] / "a").is_socket()
            assert (base / "holdfast-ipc-mine" / "file").exists()
            assert (base / "holdfast-ipc-link").is_symlink()
    finally:
        for process in processes:
            process.communicate()
    assert not folders[1].exists()


@pytest.mark.skipif(not CAN_BE_ANOTHER, reason="takes root, to give files away")
def test_a_folder_of_another_user_is_left_alone(base: Path) -> None:
    theirs = base / "holdfast-ipc-theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, NOBODY, NOBODY)
    with private_folder():
        pass
    assert theirs.exists()


def test_many_at_once(base: Path) -> None:
    """Each removes what the others leave, and none of what they use."""
    failed: list[BaseException] = []

    def make() -> None:
        try:
            for _ in range(30):
                with private_folder() as folder:
                    (folder / "a").touch()
                    assert folder.is_dir()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert list(base.iterdir()) == []


def test_a_job_leaves_no_folder_whatever_its_own_path(base: Path) -> None:
    run = base / ("y" * 150) / "run"
    seen: set[str] = set()

    def look(progress: object) -> None:
        seen.update(path.name for folder in base.glob("holdfast-ipc-*") for path in folder.iterdir())

    job = hf.Job(
        network(),
        reader(samples=300),
        test_data=reader(samples=100, part="test"),
        servers=2,
        workers=1,
        run=run,
    )
    with contextlib.chdir(base):
        assert job.run(look).steps == 3
    assert {"supervisor-0-0", "server-0-1", "server-1-1"} <= seen
    assert list(base.glob("holdfast-ipc-*")) == []
