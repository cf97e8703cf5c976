"""Which addresses a node may use: those of its own machine, and others only with keys."""

from __future__ import annotations

import ipaddress

from holdfast.errors import ConfigError

_EXAMPLES = "tcp://127.0.0.1"
_IPC_BYTES = 107  # the kernel's limit for the path of a socket


def listen_address(bind: str, encrypted: bool) -> str:
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


def check_shared(bind: str, encrypted: bool) -> None:
    """Raises ConfigError unless all processes of a job can listen there, each on a port of its own."""
    if not listen_address(bind, encrypted).endswith(":*"):
        raise ConfigError(
            f"{bind!r} is an address for one process, but all of a job's listen on it: expected one without "
            f"a port, such as {_EXAMPLES}; each takes a port that is free"
        )


def check_reachable(endpoint: str, encrypted: bool) -> None:
    """Raises ConfigError if no node of this job can be there."""
    host, port = _parts(endpoint, encrypted)
    if host and not _is_port(port):
        raise ConfigError(f"{endpoint!r} has no port: expected an address such as tcp://127.0.0.1:4000")


def _parts(address: str, encrypted: bool) -> tuple[str, str]:
    """Host and port; both empty for ipc."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        if len(rest.encode()) > _IPC_BYTES:
            raise ConfigError(
                f"{address!r} is a path of {len(rest.encode())} bytes: expected at most {_IPC_BYTES}; "
                "use a shorter folder, or tcp://127.0.0.1"
            )
        return "", ""
    if rest.startswith("["):
        host, _, port = rest[1:].partition("]")
        port = port.removeprefix(":")
    else:
        host, _, port = rest.partition(":")
    if scheme != "tcp" or not host or not (port in ("", "*") or _is_port(port)):
        raise ConfigError(f"{address!r} is no address: expected one like {_EXAMPLES}")
    if not encrypted and not _is_loopback(host):
        raise ConfigError(
            f"{address!r} is not on this machine: without keys anybody who can reach it could read and "
            "change the model; expected 127.0.0.1, ::1 or localhost, or make keys with "
            "holdfast.cluster.keys.make_keys"
        )
    return host, port


def _is_port(port: str) -> bool:
    return port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"
