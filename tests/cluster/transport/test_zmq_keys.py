"""Only holders of an allowed key get in (hole 36), and keys are kept as secrets are."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from holdfast.cluster.keys import Keys, load_keys, make_keys
from holdfast.cluster.messages import Commit, Peer, Pushed
from holdfast.cluster.transport.base import Envelope
from holdfast.cluster.transport.zmq import ZmqTransport
from holdfast.cluster.wire import Header, encode
from holdfast.errors import ConfigError
from tests.other_user import CAN_BE_ANOTHER, NOBODY

SERVER = Peer("server", 3)
WORKER = Peer("worker", 1, 2)
JOB = "job-a"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return make_keys(tmp_path / "keys")


@pytest.fixture
def server(keys: Keys) -> Iterator[ZmqTransport]:
    with ZmqTransport(SERVER, JOB, "tcp://127.0.0.1", keys) as transport:
        yield transport


def connected(server: ZmqTransport, keys: Keys | None) -> ZmqTransport:
    worker = ZmqTransport(WORKER, JOB, None, keys)
    worker.connect("server", 3, server.endpoint)
    worker.send(Envelope(WORKER, SERVER, Commit(1)))
    return worker


def poll_for(transport: ZmqTransport, seconds: float) -> list[Envelope]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if seen := transport.poll(0.02):
            return seen
    return []


def another_pair(keys: Keys) -> Keys:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return dataclasses.replace(keys, public=public, secret=secret)


def refused(server: ZmqTransport) -> None:
    deadline = time.monotonic() + 60
    while not server.counters.refused:
        assert server.poll(0.02) == []
        assert time.monotonic() < deadline
    assert server.counters.received == 0


def test_an_allowed_key_gets_in(server: ZmqTransport, keys: Keys) -> None:
    with connected(server, keys) as worker:
        [asked] = poll_for(server, 60)
        assert asked.message == Commit(1)
        assert server.send(Envelope(SERVER, WORKER, Pushed(1, True)))
        assert [answer.message for answer in poll_for(worker, 60)] == [Pushed(1, True)]
        assert server.counters.refused == 0


def test_a_second_key_gets_in_once_it_is_allowed(keys: Keys) -> None:
    theirs = another_pair(keys)
    ours = dataclasses.replace(keys, allowed=keys.allowed | {theirs.public})
    with ZmqTransport(SERVER, JOB, "tcp://127.0.0.1", ours) as server, connected(server, theirs):
        assert len(poll_for(server, 60)) == 1


def test_an_unknown_key_is_refused(server: ZmqTransport, keys: Keys) -> None:
    """It knows the server's public key and the job's name, and has a pair of its own."""
    with connected(server, another_pair(keys)):
        refused(server)
    with connected(server, keys):
        assert len(poll_for(server, 60)) == 1


def test_a_client_without_keys_is_refused(server: ZmqTransport, keys: Keys) -> None:
    with connected(server, None):
        refused(server)
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(server.endpoint)
        plain.send(encode(Header(JOB, WORKER, SERVER, Commit(1))))
        assert poll_for(server, 0.2) == []
    with connected(server, keys):
        assert len(poll_for(server, 60)) == 1


def test_a_client_with_other_mechanisms_is_refused(server: ZmqTransport) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.plain_username, plain.plain_password = b"a", b"b"
        plain.connect(server.endpoint)
        plain.send(encode(Header(JOB, WORKER, SERVER, Commit(1))))
        refused(server)


def test_a_server_that_pretends_learns_nothing(keys: Keys) -> None:
    """A client that has keys does not talk to one that has others, or none."""
    others = another_pair(keys)
    others = dataclasses.replace(others, server=others.public, allowed=frozenset({keys.public}))
    for pretended in (others, None):
        with ZmqTransport(SERVER, JOB, "tcp://127.0.0.1", pretended) as pretender, connected(pretender, keys):
            assert poll_for(pretender, 0.3) == []
            assert pretender.counters.received == 0


def test_a_recorded_connection_cannot_be_replayed(server: ZmqTransport, keys: Keys) -> None:
    """What an allowed client's connection carried, sent again over another one, does nothing."""
    import socket
    import threading

    host, port = server.endpoint.removeprefix("tcp://").split(":")
    recorded: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as relay:

        def carry(source: socket.socket, sink: socket.socket, record: bool) -> None:
            while data := source.recv(65536):
                if record:
                    recorded.append(data)
                sink.sendall(data)

        worker = ZmqTransport(WORKER, JOB, None, keys)
        worker.connect("server", 3, f"tcp://127.0.0.1:{relay.getsockname()[1]}")
        worker.send(Envelope(WORKER, SERVER, Commit(1)))
        client, _ = relay.accept()
        with client, socket.create_connection((host, int(port))) as upstream:
            threads = [
                threading.Thread(target=carry, args=(client, upstream, True)),
                threading.Thread(target=carry, args=(upstream, client, False)),
            ]
            for thread in threads:
                thread.start()
            assert len(poll_for(server, 60)) == 1
            worker.close()
            threads[0].join()
            upstream.shutdown(socket.SHUT_RDWR)
            threads[1].join()
    assert b"commit" not in b"".join(recorded)
    before = server.counters.received
    with socket.create_connection((host, int(port))) as replay:
        replay.sendall(b"".join(recorded))
        assert poll_for(server, 0.3) == []
    assert server.counters.received == before


def test_with_keys_a_node_may_leave_the_machine(keys: Keys) -> None:
    with pytest.raises(ConfigError, match="interface"):
        ZmqTransport(SERVER, JOB, "tcp://0.0.0.0", keys)
    with ZmqTransport(WORKER, JOB, None, keys) as worker:
        worker.connect("server", 3, "tcp://192.0.2.1:4000")
    with pytest.raises(ConfigError, match="cannot listen"):
        ZmqTransport(SERVER, JOB, "tcp://192.0.2.1", keys)  # kept for examples: nobody has it


def test_who_listens_needs_the_servers_pair(keys: Keys) -> None:
    with pytest.raises(ConfigError, match="server's pair"):
        ZmqTransport(SERVER, JOB, "tcp://127.0.0.1", another_pair(keys))


def test_a_folder_of_keys(tmp_path: Path) -> None:
    made = make_keys(tmp_path / "a" / "keys")
    assert load_keys(str(tmp_path / "a" / "keys")) == made
    assert made.server == made.public
    assert made.allowed == {made.public}
    secret = tmp_path / "a" / "keys" / "secret.key"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert made.secret not in repr(made)
    with pytest.raises(ConfigError, match="exists"):
        make_keys(tmp_path / "a" / "keys")
    assert load_keys(tmp_path / "a" / "keys") == made
    with (secret.parent / "allowed.keys").open("a") as file:
        file.write(f"\n# a worker of another team\n{another_pair(made).public}\n")
    assert len(load_keys(secret.parent).allowed) == 2


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    make_keys(tmp_path / "keys")
    os.chmod(tmp_path / "keys" / "secret.key", mode)
    with pytest.raises(ConfigError, match=f"mode 0{mode:o}.*chmod 600"):
        load_keys(tmp_path / "keys")


@pytest.mark.parametrize("name", ["public.key", "server.key", "allowed.keys", "."])
@pytest.mark.parametrize("mode", [0o622, 0o664, 0o646, 0o777])
def test_keys_that_others_can_write_are_refused(tmp_path: Path, name: str, mode: int) -> None:
    """Whoever can write there can let themselves in, or put another server in the place of ours."""
    make_keys(tmp_path / "keys")
    mode |= 0o700 if name == "." else 0
    os.chmod(tmp_path / "keys" / name, mode)
    with pytest.raises(ConfigError, match=f"mode 0{mode:o}.*others can write.*chmod go-w"):
        load_keys(tmp_path / "keys")


@pytest.mark.parametrize("sticky", [False, True])
def test_a_folder_above_the_keys_that_others_can_write(tmp_path: Path, sticky: bool) -> None:
    """Whoever can rename a folder can put another in its place. In /tmp, which is sticky, nobody can."""
    make_keys(tmp_path / "shared" / "mine" / "keys")
    os.chmod(tmp_path / "shared", 0o1777 if sticky else 0o777)
    if sticky:
        load_keys(tmp_path / "shared" / "mine" / "keys")
        return
    with pytest.raises(ConfigError, match=r"shared has mode 0777.*chmod go-w"):
        load_keys(tmp_path / "shared" / "mine" / "keys")


@pytest.mark.skipif(not CAN_BE_ANOTHER, reason="takes root, to give files away")
@pytest.mark.parametrize("name", ["secret.key", "allowed.keys", ".", ".."])
def test_keys_of_another_user_are_refused(tmp_path: Path, name: str) -> None:
    make_keys(tmp_path / "mine" / "keys")
    os.chown(tmp_path / "mine" / "keys" / name, NOBODY, -1)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}.*chown"):
        load_keys(tmp_path / "mine" / "keys")


@pytest.mark.parametrize("name", ["secret.key", "public.key", "server.key", "allowed.keys"])
@pytest.mark.parametrize("text", [None, "", "short", "é" * 40, "~" * 40, "x" * 41, "\0" * 40])
def test_damaged_keys(tmp_path: Path, name: str, text: str | None) -> None:
    make_keys(tmp_path / "keys")
    path = tmp_path / "keys" / name
    path.unlink() if text is None else path.write_text(text)
    if not text and text is not None and name == "allowed.keys":
        assert load_keys(tmp_path / "keys").allowed == frozenset()  # nobody gets in
        return
    with pytest.raises(ConfigError) as caught:
        load_keys(tmp_path / "keys")
    if name == "secret.key" and text:
        assert text not in str(caught.value)


def test_pairs_that_do_not_belong_together(tmp_path: Path) -> None:
    make_keys(tmp_path / "a")
    make_keys(tmp_path / "b")
    (tmp_path / "a" / "public.key").write_text((tmp_path / "b" / "public.key").read_text())
    with pytest.raises(ConfigError, match="does not belong"):
        load_keys(tmp_path / "a")
