"""Which addresses a node may use: sockets in a private folder, or TCP with keys."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from holdfast.cluster.protocol.messages import Peer
from holdfast.cluster.runtime.transport.private import MOST_PATH_BYTES, check_private
from holdfast.errors import ConfigError

LOCAL = "ipc"
"""For ``bind``: Unix sockets in a folder that only this user can enter."""
_EXAMPLES = f'"{LOCAL}", or an address like tcp://127.0.0.1'


def check_shared(bind: str) -> None:
    """Raises ConfigError unless all processes of a job can listen there, each in its own place."""
    if bind != LOCAL and not listen_address(bind, encrypted=True).endswith(":*"):
        raise ConfigError(
            f"{bind!r} is an address for one process, but all of a job's listen on it: expected one without "
            f"a port: {_EXAMPLES}; each takes a port that is free"
        )


def address_of(bind: str, peer: Peer) -> str:
    """Where a node listens if all listen on ``bind``: a socket of its own in that folder, or any port."""
    return f"{bind}/{peer.role}-{peer.slot}-{peer.incarnation}" if bind.startswith("ipc://") else bind


def listen_address(bind: str, *, encrypted: bool) -> str:
    """The address to bind, with "*" for a port that is not given; raises ConfigError if it is not safe."""
    host, port = _parts(bind, encrypted)
    if not host:
        return bind
    address = "127.0.0.1" if host == "localhost" else host  # ZeroMQ binds to no names
    if _is_wildcard(address):
        raise ConfigError(
            f"{bind!r} is no address that others can connect to; name the address of one interface"
        )
    return f"tcp://[{address}]:{port or '*'}" if ":" in address else f"tcp://{address}:{port or '*'}"


def check_reachable(endpoint: str, *, encrypted: bool) -> None:
    """Raises ConfigError if no node of this job can be there."""
    host, port = _parts(endpoint, encrypted)
    if host and not _is_port(port):
        raise ConfigError(f"{endpoint!r} has no port: expected an address such as tcp://127.0.0.1:4000")


def _parts(address: str, encrypted: bool) -> tuple[str, str]:
    """Host and port; both empty for ipc."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest.startswith("/"):
        if len(rest.encode()) > MOST_PATH_BYTES:
            raise ConfigError(
                f"{address!r} is a path of {len(rest.encode())} bytes: expected at most {MOST_PATH_BYTES}; "
                "use a shorter folder"
            )
        check_private(Path(rest).parent)
        return "", ""
    if rest.startswith("["):
        host, _, port = rest[1:].partition("]")
        port = port.removeprefix(":")
    else:
        host, _, port = rest.partition(":")
    if scheme != "tcp" or not host or not (port in ("", "*") or _is_port(port)):
        raise ConfigError(f"{address!r} is no address: expected {_EXAMPLES}")
    if not encrypted:
        raise ConfigError(
            f"{address!r} is open to everybody who can reach it, other users of this machine too: expected "
            "keys (see holdfast.cluster.runtime.keys), or a socket in a private folder"
        )
    return host, port


def _is_port(port: str) -> bool:
    return port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"
