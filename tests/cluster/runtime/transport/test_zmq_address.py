"""Where a node may listen: in a folder that only its user can enter, or anywhere with keys (hole 36)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.runtime.transport.address import host_of
from holdfast.cluster.runtime.transport.private import private_folder
from holdfast.cluster.runtime.transport.zmq import ZmqTransport
from holdfast.errors import ConfigError
from tests.cluster.runtime.transport.test_zmq import JOB, KEYS, SERVER, WORKER, works
from tests.other_user import CAN_BE_ANOTHER, NOBODY


def connects(bind: str) -> str:
    """A server there and a worker can talk; where the server is."""
    keys = bind.startswith("tcp")
    with (
        ZmqTransport(SERVER, JOB, bind, KEYS.of(SERVER) if keys else None) as server,
        ZmqTransport(WORKER, JOB, None, KEYS.of(WORKER) if keys else None) as worker,
    ):
        worker.connect("server", 3, server.endpoint)
        works(server, worker)
        return server.endpoint


@pytest.mark.parametrize(
    "bind",
    [
        "tcp://127.0.0.1",
        "tcp://[::1]",
        "tcp://localhost:4000",
        "tcp://192.168.1.5:4000",
        "tcp://*",
        "tcp://a.b",
    ],
)
def test_tcp_takes_keys_even_on_this_machine(bind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ZmqTransport(SERVER, JOB, bind)
    assert repr(bind) in str(caught.value)
    assert "other users of this machine" in str(caught.value)
    with ZmqTransport(WORKER, JOB, None) as worker, pytest.raises(ConfigError, match="expected keys"):
        worker.connect("server", 3, "tcp://127.0.0.1:4000")


def test_addresses() -> None:
    for bind, expected in [
        ("tcp://127.0.0.1", "tcp://127.0.0.1:"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:"),
        ("tcp://127.3.2.1", "tcp://127.3.2.1:"),
        ("tcp://localhost", "tcp://127.0.0.1:"),
    ]:
        assert connects(bind).startswith(expected)
    for bind in (
        "127.0.0.1",
        "tcp://",
        "tcp://127.0.0.1:x",
        "ipc://",
        "ipc://@hidden",
        "ipc://a",
        "inproc://a",
        "",
    ):
        with pytest.raises(ConfigError):
            ZmqTransport(SERVER, JOB, bind, KEYS.of(SERVER))
    for bind in ("tcp://0.0.0.0", "tcp://[::]", "tcp://*"):
        with pytest.raises(ConfigError, match="one interface"):
            ZmqTransport(SERVER, JOB, bind, KEYS.of(SERVER))


def test_a_socket_in_a_private_folder() -> None:
    with private_folder() as folder:
        bind = f"ipc://{folder}/a"
        assert connects(bind) == bind
        with pytest.raises(ConfigError, match=r"path of \d+ bytes: expected at most 107"):
            ZmqTransport(SERVER, JOB, f"ipc://{folder}/{'x' * 100}")


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o770, 0o1777])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f").chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}: expected a folder of user {os.geteuid()}"):
        ZmqTransport(SERVER, JOB, f"ipc://{tmp_path}/f/a")
    with ZmqTransport(WORKER, JOB, None) as worker, pytest.raises(ConfigError, match="others could connect"):
        worker.connect("server", 3, f"ipc://{tmp_path}/f/a")


@pytest.mark.parametrize("sticky", [False, True])
def test_a_folder_that_others_can_replace_is_refused(tmp_path: Path, sticky: bool) -> None:
    (tmp_path / "shared" / "f").mkdir(parents=True)
    (tmp_path / "shared" / "f").chmod(0o700)
    (tmp_path / "shared").chmod(0o1777 if sticky else 0o777)
    if sticky:
        connects(f"ipc://{tmp_path}/shared/f/a")
        return
    with pytest.raises(ConfigError, match=r"shared belongs .* mode 0777, so others can replace"):
        ZmqTransport(SERVER, JOB, f"ipc://{tmp_path}/shared/f/a")


@pytest.mark.skipif(not CAN_BE_ANOTHER, reason="takes root, to give files away")
@pytest.mark.parametrize("whose", [".", ".."])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, whose: str) -> None:
    (tmp_path / "theirs" / "f").mkdir(parents=True)
    (tmp_path / "theirs" / "f").chmod(0o700)
    os.chown(tmp_path / "theirs" / "f" / whose, NOBODY, -1)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}"):
        ZmqTransport(SERVER, JOB, f"ipc://{tmp_path}/theirs/f/a")


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_the_loopback_of_ipv6() -> None:
    try:
        assert connects("tcp://[::1]").startswith("tcp://[::1]:")
    except ConfigError:
        pytest.skip("no ::1 here")


def test_an_address_that_is_taken() -> None:
    taken = r"server 4 cannot listen on 'tcp://127\.0\.0\.1:\d+' \(.*in use"
    other = Peer("server", 4)
    with (
        ZmqTransport(SERVER, JOB, "tcp://127.0.0.1", KEYS.of(SERVER)) as server,
        pytest.raises(ConfigError, match=taken),
    ):
        ZmqTransport(other, JOB, server.endpoint, KEYS.of(other))


@pytest.mark.parametrize("host", ["10.0.0.1", "fe80::1"])
def test_the_host_of_an_endpoint(host: str) -> None:
    assert host_of(f"tcp://[{host}]:4000" if ":" in host else f"tcp://{host}:4000") == host
