"""Where a node may listen: on this machine only, unless it has keys (hole 36)."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cluster.messages import Peer
from holdfast.cluster.transport.zmq import ZmqTransport
from holdfast.errors import ConfigError
from tests.cluster.transport.test_zmq import JOB, SERVER, pair, works


@pytest.mark.parametrize(
    "bind",
    [
        "tcp://0.0.0.0",
        "tcp://192.168.1.5:4000",
        "tcp://*",
        "tcp://[::]",
        "tcp://eth0",
        "tcp://10.0.0.1",
        "tcp://a.b",
    ],
)
def test_only_this_machine_without_keys(bind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ZmqTransport(SERVER, JOB, bind)
    assert repr(bind) in str(caught.value)
    assert "make_keys" in str(caught.value)


def test_addresses_of_this_machine(tmp_path: Path) -> None:
    for bind, expected in [
        ("tcp://127.0.0.1", "tcp://127.0.0.1:"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:"),
        ("tcp://127.3.2.1", "tcp://127.3.2.1:"),
        ("tcp://localhost", "tcp://127.0.0.1:"),
        (f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/a"),
    ]:
        with pair(bind) as (server, worker):
            assert server.endpoint.startswith(expected)
            works(server, worker)
    for bind in (
        "127.0.0.1",
        "tcp://",
        "tcp://127.0.0.1:x",
        "ipc://",
        "ipc:///" + "x" * 200,
        "inproc://a",
        "",
    ):
        with pytest.raises(ConfigError):
            ZmqTransport(SERVER, JOB, bind)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_the_loopback_of_ipv6() -> None:
    try:
        with pair("tcp://[::1]") as (server, worker):
            works(server, worker)
    except ConfigError:
        pytest.skip("no ::1 here")


def test_an_address_that_is_taken() -> None:
    taken = r"server 4 cannot listen on 'tcp://127\.0\.0\.1:\d+' \(.*in use"
    with ZmqTransport(SERVER, JOB, "tcp://127.0.0.1") as server, pytest.raises(ConfigError, match=taken):
        ZmqTransport(Peer("server", 4), JOB, server.endpoint)
