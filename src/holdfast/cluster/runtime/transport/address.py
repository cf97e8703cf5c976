"""Addresses that a node may use: sockets in a private folder, or TCP with keys."""

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
    """Raise ConfigError unless all processes of a job can listen there, each at its own address."""
    if bind != LOCAL and not listen_address(bind, encrypted=True).endswith(":*"):
        raise ConfigError(
            f"{bind!r} is an address for one process, but all processes of a job use it: expected one "
            f"without a port: {_EXAMPLES}; each process takes a free port"
        )


def address_of(bind: str, peer: Peer) -> str:
    """The address of a node under ``bind``: its own socket in that folder, or any port."""
    return f"{bind}/{peer.role}-{peer.slot}-{peer.incarnation}" if bind.startswith("ipc://") else bind


def listen_address(bind: str, *, encrypted: bool) -> str:
    """The address to bind, with "*" for an unspecified port. Raises ConfigError if it is not safe."""
    host, port = _parts(bind, encrypted)
    if not host:
        return bind
    address = "127.0.0.1" if host == "localhost" else host  # ZeroMQ does not bind to names
    if _is_wildcard(address):
        raise ConfigError(
            f"{bind!r} is not an address that others can connect to; use the address of one interface"
        )
    return f"tcp://[{address}]:{port or '*'}" if ":" in address else f"tcp://{address}:{port or '*'}"


def check_reachable(endpoint: str, *, encrypted: bool) -> None:
    """Raise ConfigError if no node of this job can be there."""
    host, port = _parts(endpoint, encrypted)
    if host and not _is_port(port):
        raise ConfigError(f"{endpoint!r} has no port: expected an address such as tcp://127.0.0.1:4000")


def host_of(endpoint: str) -> str:
    """The host in a TCP endpoint."""
    return endpoint.partition("://")[2].rpartition(":")[0].strip("[]")


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
        raise ConfigError(f"{address!r} is not a valid address: expected {_EXAMPLES}")
    if not encrypted:
        raise ConfigError(
            f"{address!r} is open to everybody who can reach it, including other users of this machine: "
            "expected keys (see holdfast.cluster.runtime.keys), or a socket in a private folder"
        )
    return host, port


def _is_port(port: str) -> bool:
    return port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"
