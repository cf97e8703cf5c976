"""Messages between processes and machines over ZeroMQ.

A node that listens has a ROUTER; to each peer that listens a node opens a DEALER. A ROUTER answers a peer
where it last heard from it, so that workers need no port. A message is its header and its arrays, one
frame each.

Bytes from outside are checked before they are used, never executed, and never raise: what is no message of
this job for this node is dropped and counted. Nodes listen on this machine only unless there are keys; with
keys every connection is encrypted, and only holders of an allowed key get through the handshake.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, Final

import zmq
import zmq.utils.z85

from holdfast.cluster.keys import Keys
from holdfast.cluster.messages import Peer, Role
from holdfast.cluster.transport.address import check_reachable, listen_address
from holdfast.cluster.transport.base import Envelope, Frame
from holdfast.cluster.transport.links import Links, Reception
from holdfast.cluster.wire import Header, decode, encode
from holdfast.errors import ConfigError

COPY_BELOW_BYTES: Final = 512 << 10
"""Smaller frames are copied when they are sent: that is quicker than to keep track of them, for which a
thread of pyzmq's wakes up with every frame that has left."""
_ALIGN_BELOW_BYTES: Final = 16 << 10
"""Smaller frames are copied when they come in: ZeroMQ packs frames of up to 8 KB into one buffer, at any
offset, and an array there would not be aligned."""
_POLL_MESSAGES: Final = 1024
"""At most so many from one socket at a time, or a flood would keep ``poll`` from returning."""
_KNOWN_PEERS: Final = 16384
"""Routes that a ROUTER remembers; a peer whose route is forgotten is known again when it speaks."""
# Plain numbers: those of zmq are enums, and each operation on one costs a microsecond.
_NOW: Final = int(zmq.DONTWAIT)
_NOW_AND_MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_MONITOR_ENDPOINT: Final = "inproc://holdfast.monitor"
_HANDSHAKE_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a node takes from others, and what it keeps for them.

    Args:
        max_header_bytes: of a message's first frame.
        max_frames: arrays of one message.
        max_message_bytes: of all its frames. A single frame above this is not even read: its connection
            is closed.
        max_queued: messages that wait for one peer; further ones are dropped until it takes some.
    """

    max_header_bytes: int = 1 << 20
    max_frames: int = 1024
    max_message_bytes: int = 256 << 20
    max_queued: int = 256

    def __post_init__(self) -> None:
        for name in ("max_header_bytes", "max_frames", "max_message_bytes", "max_queued"):
            if not 1 <= getattr(self, name) < 1 << 31:
                raise ConfigError(f"Limits: {name} is {getattr(self, name)}: expected 1 to 2147483647")


@dataclass(slots=True)
class Counters:
    """What has gone through a transport, and what has not."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    malformed: int = 0
    """Came in and was no message, or above the limits."""
    other_job: int = 0
    """Came in from another job."""
    misdirected: int = 0
    """Came in for another role or slot."""
    unroutable: int = 0
    """Not sent: nothing leads to that peer (any more)."""
    full: int = 0
    """Not sent: too much waits for that peer already."""
    refused: int = 0
    """Connections that failed the handshake: no key, a key that is not allowed, not ZeroMQ at all."""


class ZmqTransport:
    """One node's sockets. Calls must not overlap, except that of ``wake``.

    Args:
        me: this node: only messages for its role and slot come through.
        job: the job's name: only its messages come through.
        bind: where to listen: "tcp://127.0.0.1" (on a free port), "tcp://127.0.0.1:4000", "ipc:///a/path";
            None for a node that others need not reach by themselves.
        keys: of the job; without them only addresses of this machine are taken.
        limits: of messages.
        links: which of them are broken on purpose; None: none is.

    Attributes:
        endpoint: where it really listens; "" if it does not.
        counters: of what came and went.
    """

    def __init__(
        self,
        me: Peer,
        job: str,
        bind: str | None,
        keys: Keys | None = None,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        links: Links | None = None,
    ) -> None:
        self.me = me
        self.endpoint = ""
        self.counters = Counters()
        self._job = job
        self._keys = keys
        self._limits = limits
        self._reception = Reception(me, links) if links is not None else None
        # Its own context: ZeroMQ asks one authenticator in each context who may connect.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, zmq.POLLIN)
        self._router: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._gate: zmq.Socket[bytes] | None = None
        self._routes: dict[Peer, bytes] = {}
        self._dealers: dict[tuple[Role, int], tuple[str, zmq.Socket[bytes]]] = {}
        if bind is not None:
            try:
                self._listen(listen_address(bind, encrypted=keys is not None))
            except BaseException:
                self.close(0.0)
                raise

    def connect(self, role: Role, slot: int, endpoint: str) -> None:
        """From now on what is sent to this role and slot goes to ``endpoint``; what still waited is dropped.

        Returns at once: there need be nobody yet, messages wait. The same endpoint again changes nothing.
        """
        known = self._dealers.get((role, slot))
        if known is not None and known[0] == endpoint:
            return
        check_reachable(endpoint, encrypted=self._keys is not None)
        dealer = self._socket(zmq.DEALER)
        # Messages wait while the connection is made, up to max_queued (no IMMEDIATE): otherwise the first
        # one to every peer would be lost, and cost a retry. To a peer that is gone they wait until its
        # replacement has another endpoint.
        dealer.ipv6 = "[" in endpoint
        dealer.reconnect_ivl = 20
        dealer.reconnect_ivl_max = 1000
        if self._keys is not None:
            dealer.curve_publickey = self._keys.public.encode()
            dealer.curve_secretkey = self._keys.secret.encode()
            dealer.curve_serverkey = self._keys.server.encode()
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            dealer.close(0)
            raise ConfigError(
                f"{role} {slot} cannot be at {endpoint!r} ({error}): expected an address such as "
                "tcp://127.0.0.1:4000"
            ) from None
        if known is not None:
            self._poller.unregister(known[1])
            known[1].close(0)
        self._dealers[role, slot] = (endpoint, dealer)
        self._poller.register(dealer, zmq.POLLIN)

    def send(self, envelope: Envelope) -> bool:
        """Hand a message over; it never waits. False: it was dropped (and counted), the peer is out of reach.

        True does not mean that it arrives. Arrays from ``COPY_BELOW_BYTES`` on are not copied, and nobody
        knows when they have left: they must not be changed after this call.
        """
        header = encode(Header(self._job, envelope.source, envelope.target, envelope.message))
        frames = [_flat(frame) for frame in envelope.frames]
        size = len(header) + sum(frame.nbytes for frame in frames)
        self._check_size(envelope, len(header), len(frames), size)
        known = self._dealers.get((envelope.target.role, envelope.target.slot))
        try:
            if known is not None:
                _send_all(known[1], header, frames)
            elif self._router is not None and envelope.target in self._routes:
                self._router.send(self._routes[envelope.target], _NOW_AND_MORE)
                _send_all(self._router, header, frames)
            else:
                self.counters.unroutable += 1
                return False
        except zmq.Again:
            self.counters.full += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            del self._routes[envelope.target]  # its connection is gone; it is known again when it speaks
            self.counters.unroutable += 1
            return False
        self.counters.sent += 1
        self.counters.sent_bytes += size
        return True

    def poll(self, timeout_seconds: float) -> list[Envelope]:
        """All messages that are there; waits for the first one, at most so long.

        The frames are read-only by agreement. They live as long as they are referred to, and larger ones
        are ZeroMQ's own memory, not a copy. The result can be empty before the time is up.
        """
        envelopes: list[Envelope] = []
        if self._reception is not None:
            timeout_seconds = self._reception.wait(timeout_seconds)
        for ready, _ in self._poller.poll(max(0, math.ceil(timeout_seconds * 1000))):
            if ready is self._gate:
                self._answer_gate()
            elif ready is self._monitor:
                self._count_refused()
            elif isinstance(ready, int):
                os.eventfd_read(ready)
            else:
                self._drain(ready, envelopes)
        return envelopes if self._reception is None else self._reception.hear(envelopes)

    def wake(self) -> None:
        """Let the ``poll`` that waits, or else the next, return at once. For any thread, until ``close``."""
        os.eventfd_write(self._wake, 1)

    def close(self, linger_seconds: float = 0.2) -> None:
        """Close all sockets; what has been sent may take so long to leave. Closing twice does no harm."""
        if self._context.closed:
            return
        if self._router is not None:
            self._router.disable_monitor()
        self._dealers.clear()
        self._routes.clear()
        # It closes all sockets that it has made; one that is forgotten would keep it waiting for ever.
        self._context.destroy(round(linger_seconds * 1000))
        os.close(self._wake)

    def __enter__(self) -> ZmqTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = self._limits.max_queued
        socket.maxmsgsize = self._limits.max_message_bytes
        socket.copy_threshold = COPY_BELOW_BYTES
        # A machine that lost its power closes no connection.
        socket.heartbeat_ivl = 5_000
        socket.heartbeat_timeout = 20_000
        return socket

    def _listen(self, address: str) -> None:
        router = self._router = self._socket(zmq.ROUTER)
        router.router_mandatory = True  # else what cannot be sent would vanish without a count
        router.ipv6 = "[" in address
        if self._keys is not None:
            self._guard(router, self._keys)
        self._watch(router)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{self.me} cannot listen on {address!r} ({error}): expected a free address of this machine"
            ) from None
        self.endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller.register(router, zmq.POLLIN)

    def _guard(self, router: zmq.Socket[bytes], keys: Keys) -> None:
        if keys.public != keys.server:
            raise ConfigError(
                f"{self.me} listens with the key {keys.public}: expected {keys.server}, which others look "
                "for; give it the server's pair of keys"
            )
        gate = self._gate = self._context.socket(zmq.REP)
        gate.linger = 0
        gate.bind(_ZAP_ENDPOINT)
        self._poller.register(gate, zmq.POLLIN)
        router.curve_server = True
        router.curve_publickey = keys.public.encode()
        router.curve_secretkey = keys.secret.encode()
        router.zap_domain = b"holdfast"
        router.zap_enforce_domain = True  # nobody gets in while there is no gate

    def _watch(self, router: zmq.Socket[bytes]) -> None:
        router.monitor(_MONITOR_ENDPOINT, _HANDSHAKE_FAILED)
        monitor = self._monitor = self._context.socket(zmq.PAIR)
        monitor.linger = 0
        monitor.rcvhwm = 0  # ZeroMQ's own thread would wait for room
        monitor.connect(_MONITOR_ENDPOINT)
        self._poller.register(monitor, zmq.POLLIN)

    def _answer_gate(self) -> None:
        """Say who may connect (ZeroMQ's RFC 27); asked by ZeroMQ in this process, once a connection."""
        gate, keys = self._gate, self._keys
        assert gate is not None
        assert keys is not None
        request = gate.recv_multipart()
        version, number, mechanism = request[0], request[1], request[5]
        allowed = (
            mechanism == b"CURVE"
            and len(request) == 7
            and len(request[6]) == 32
            and zmq.utils.z85.encode(request[6]).decode() in keys.allowed
        )
        verdict = (b"200", b"OK") if allowed else (b"400", b"this key is not allowed")
        gate.send_multipart([version, number, *verdict, b"", b""])

    def _count_refused(self) -> None:
        assert self._monitor is not None
        for _ in range(_POLL_MESSAGES):
            try:
                self._monitor.recv_multipart(_NOW)
            except zmq.Again:
                return
            self.counters.refused += 1

    def _drain(self, socket: zmq.Socket[bytes], envelopes: list[Envelope]) -> None:
        for _ in range(_POLL_MESSAGES):
            try:
                parts = [socket.recv(_NOW, copy=False)]
            except zmq.Again:
                return
            while parts[-1].more:  # all are there once the first is; `recv_multipart` asks by way of enums
                parts.append(socket.recv(_NOW, copy=False))
            route = parts.pop(0).bytes if socket is self._router else None
            envelope = self._open(parts)
            if envelope is not None:
                if route is not None:
                    self._learn(envelope.source, route)
                envelopes.append(envelope)
            if not int(socket.get(_EVENTS)) & _POLLIN:  # quicker than to be told by an exception
                return

    def _learn(self, peer: Peer, route: bytes) -> None:
        self._routes.pop(peer, None)  # to the end: the first one is the one that was silent for longest
        self._routes[peer] = route
        if len(self._routes) > _KNOWN_PEERS:
            del self._routes[next(iter(self._routes))]

    def _open(self, parts: list[zmq.Frame]) -> Envelope | None:
        """The message in these frames; None (and a count) if it is none for this node."""
        size = sum(len(part) for part in parts)
        limits = self._limits
        if (
            not 1 <= len(parts) <= limits.max_frames + 1
            or len(parts[0]) > limits.max_header_bytes
            or size > limits.max_message_bytes
        ):
            self.counters.malformed += 1
            return None
        try:
            header = decode(parts[0].buffer)
        except (ValueError, RecursionError):  # of msgspec, and of text that is no UTF-8
            self.counters.malformed += 1
            return None
        if header.job != self._job:
            self.counters.other_job += 1
            return None
        if (header.target.role, header.target.slot) != (self.me.role, self.me.slot):
            self.counters.misdirected += 1
            return None
        self.counters.received += 1
        self.counters.received_bytes += size
        frames = [part.bytes if len(part) < _ALIGN_BELOW_BYTES else part.buffer for part in parts[1:]]
        return Envelope(header.source, header.target, header.message, frames)

    def _check_size(self, envelope: Envelope, header: int, frames: int, size: int) -> None:
        limits = self._limits
        for what, found, most in (
            ("bytes of header", header, limits.max_header_bytes),
            ("frames", frames, limits.max_frames),
            ("bytes", size, limits.max_message_bytes),
        ):
            if found > most:
                raise ConfigError(
                    f"a {type(envelope.message).__name__} to {envelope.target} has {found} {what}: expected "
                    f"at most {most}, or the receiver drops it; use smaller batches, or raise Limits"
                )


def _flat(frame: Frame) -> memoryview[Any]:
    view: memoryview[Any] = memoryview(frame)  # type: ignore[arg-type]  # NumPy says so from 3.12 on
    return view if view.c_contiguous else memoryview(view.tobytes())


def _send_all(socket: zmq.Socket[bytes], header: bytes, frames: list[memoryview[Any]]) -> None:
    """Send a message without waiting; raises ``zmq.Again`` if it was dropped."""
    last = len(frames) - 1
    socket.send(header, _NOW_AND_MORE if frames else _NOW)
    for index, frame in enumerate(frames):
        flags = _NOW_AND_MORE if index < last else _NOW
        try:
            socket.send(frame, flags, copy=frame.nbytes < COPY_BELOW_BYTES)
        except zmq.Again:
            # The connection broke between two frames. ZeroMQ swallows frames up to the end of the message:
            # give it that end, or the next message goes the same way.
            if index < last:
                socket.send(b"", _NOW)
            raise
