"""Messages between processes and machines over ZeroMQ.

A node that listens has a ROUTER; for each peer that listens, a node opens a DEALER. A ROUTER answers a peer
on the connection it last heard from, so workers need no port. A message is its header and its arrays, one
frame each.

Bytes from outside are validated before use, never executed, and never raise: anything that is not an intact
message of this job for this node is dropped and counted. A node listens on a Unix socket in a
folder that only its user can enter (``private``), or on TCP with keys: then every connection is encrypted,
only members of the job pass the handshake (``door``), and none can impersonate another.

Large arrays in the lanes between servers on one machine are not sent, but read where they are (``shared``).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import zmq

from holdfast.cluster.protocol.envelope import Counters, Envelope, Frame
from holdfast.cluster.protocol.messages import Peer, Role
from holdfast.cluster.protocol.stripe_messages import LaneMessage
from holdfast.cluster.protocol.wire import Header
from holdfast.cluster.runtime.keys import Keys, Name
from holdfast.cluster.runtime.transport.address import check_reachable, listen_address
from holdfast.cluster.runtime.transport.door import Door
from holdfast.cluster.runtime.transport.links import Links, Reception
from holdfast.cluster.runtime.transport.packing import Damaged, Piece, pack, unpack
from holdfast.cluster.runtime.transport.shared import Arena, Offer, Returned, SharedView
from holdfast.errors import ConfigError

COPY_BELOW_BYTES: Final = 512 << 10
"""Smaller frames are copied when sent: faster than tracking them, for which a thread of pyzmq wakes up with
every frame that has been sent."""
_ALIGN_BELOW_BYTES: Final = 16 << 10
"""Smaller frames are copied when received: ZeroMQ packs frames of up to 8 KB into one buffer, at any
offset, and an array there would not be aligned."""
_TCP_PART_BYTES: Final = 64 << 10
"""Larger arrays are split on TCP: a peer that is not authenticated can have only one part waiting. Compared
with encryption, the cost is negligible."""
_TCP_OVERHEAD_BYTES: Final = 1 << 10
"""The most that encryption adds to a part."""
_HANDSHAKE_MILLISECONDS: Final = 5_000
_MOST_LOANS: Final = 64
"""Messages whose arrays others read in this node's arena; further ones are sent."""
_POLL_MESSAGES: Final = 1024
"""Messages to read from one socket at a time, so that a flood does not keep ``poll`` from returning."""
_KNOWN_PEERS: Final = 16384
"""Routes that a ROUTER remembers; a forgotten peer is known again when it sends a message."""
_OFFER: Final = b"\0arena: offer\0"
_MAPPED: Final = b"\0arena: taken\0"
_RETURNED: Final = b"\0arena: loans\0"
"""How nodes agree on shared memory, beside the messages: a checksum and a header begin otherwise."""
# Plain numbers: those of zmq are enums, and each operation on one takes a microsecond.
_NOW: Final = int(zmq.DONTWAIT)
_NOW_AND_MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_FILE: Final = int(zmq.SRCFD)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on messages that a node receives, and on its queues.

    Args:
        max_header_bytes: size of a message's first frame.
        max_frames: number of arrays in a message.
        max_message_bytes: total size of its frames. A single part above the limit of the wire (64 KB on TCP,
            else this) is not even read: its connection is closed.
        max_queued: messages that wait for one peer; further ones are dropped until it has received some.
    """

    max_header_bytes: int = 1 << 20
    max_frames: int = 1024
    max_message_bytes: int = 256 << 20
    max_queued: int = 256

    def __post_init__(self) -> None:
        for name in ("max_header_bytes", "max_frames", "max_message_bytes", "max_queued"):
            if not 1 <= getattr(self, name) < 1 << 31:
                raise ConfigError(f"Limits: {name} is {getattr(self, name)}: expected 1 to 2147483647")


class ZmqTransport:
    """One node's sockets. Calls must not overlap, except those of ``wake``.

    Args:
        me: this node: it receives only messages for its role and slot.
        job: the job's name: only its messages are received.
        bind: where to listen: "ipc:///a/path" in a folder of mode 0700, or with keys "tcp://127.0.0.1" (on a
            free port), "tcp://127.0.0.1:4000"; None for a node that others need not connect to.
        keys: keys of this node; required for TCP.
        limits: limits on messages.
        links: table of broken links, for chaos runs; None otherwise.
        arena: memory that this node shares with servers on this machine; None: everything is sent.

    Attributes:
        endpoint: the actual address it listens on; "" if it does not listen.
        counters: counts of messages.
    """

    def __init__(
        self,
        me: Peer,
        job: str,
        bind: str | None,
        keys: Keys | None = None,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        links: Links | None = None,
        arena: Arena | None = None,
    ) -> None:
        self.me = me
        self.endpoint = ""
        self.counters = Counters()
        self._job = job
        self._keys = keys
        self._limits = limits
        self._reception = Reception(me, links) if links is not None else None
        # A context of its own: ZeroMQ has one authenticator per context.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, zmq.POLLIN)
        self._router: zmq.Socket[bytes] | None = None
        self._door: Door | None = None
        self._routes: dict[Peer, bytes] = {}
        self._dealers: dict[Name, tuple[str, zmq.Socket[bytes]]] = {}
        self._names: dict[zmq.Socket[bytes], str] = {}
        """The peer of each DEALER."""
        self._arena = arena
        self._sharing: set[zmq.Socket[bytes]] = set()
        """DEALERs to peers that have mapped the arena."""
        self._views: dict[Name, tuple[Peer, SharedView]] = {}
        """The arenas of others."""
        self._loans: dict[int, tuple[zmq.Socket[bytes], Sequence[Frame]]] = {}
        """Arrays of the arena that others read, with the DEALER by which they know of them."""
        self._loan = 0
        self._part_bytes = limits.max_message_bytes if keys is None else _TCP_PART_BYTES
        self._max_parts = 1 + limits.max_frames + limits.max_message_bytes // self._part_bytes
        if bind is not None:
            try:
                self._listen(listen_address(bind, encrypted=keys is not None))
            except BaseException:
                self.close(0.0)
                raise

    def connect(self, role: Role, slot: int, endpoint: str) -> None:
        """Send messages for this role and slot to ``endpoint`` from now on; queued ones are dropped.

        Returns at once: the peer need not exist yet, messages wait. The same endpoint again changes nothing.
        """
        known = self._dealers.get((role, slot))
        if known is not None and known[0] == endpoint:
            return
        check_reachable(endpoint, encrypted=self._keys is not None)
        server_key = None if self._keys is None else self._keys.public_of(role, slot)
        dealer = self._socket(zmq.DEALER)
        # Messages wait while connecting, up to max_queued (no IMMEDIATE): otherwise the first one to every
        # peer would be lost, and cost a retry. Messages to a dead peer wait until its replacement has another
        # endpoint.
        dealer.ipv6 = "[" in endpoint
        dealer.reconnect_ivl = 20
        dealer.reconnect_ivl_max = 1000
        if self._keys is not None and server_key is not None:
            dealer.curve_publickey = self._keys.public.encode()
            dealer.curve_secretkey = self._keys.secret.encode()
            dealer.curve_serverkey = server_key.encode()
        try:
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            dealer.close(0)
            raise ConfigError(
                f"{role} {slot} has an invalid address {endpoint!r} ({error}): expected an address such as "
                "tcp://127.0.0.1:4000"
            ) from None
        if known is not None:
            self._poller.unregister(known[1])
            del self._names[known[1]]
            self._sharing.discard(known[1])
            self._loans = {n: loan for n, loan in self._loans.items() if loan[0] is not known[1]}
            known[1].close(0)
        self._dealers[role, slot] = (endpoint, dealer)
        self._names[dealer] = f"{role} {slot}"
        self._poller.register(dealer, zmq.POLLIN)
        if self._arena is not None and role == "server" and endpoint.startswith("ipc:"):
            dealer.send(_OFFER + msgspec.msgpack.encode(self._arena.offer(self._job, self.me)), _NOW)

    def send(self, envelope: Envelope) -> bool:
        """Queue a message without blocking. False: it was dropped (and counted), the peer is unreachable.

        True does not mean that it arrives. Arrays of ``COPY_BELOW_BYTES`` or more are not copied, and nobody
        knows when they have been sent: do not change them after this call. Of a lane's message, do not change
        arrays in the arena before the peer has acknowledged it.
        """
        known = self._dealers.get((envelope.target.role, envelope.target.slot))
        parts, loan = self._pack(envelope, known[1] if known is not None else None)
        size = sum(map(_bytes_of, parts))
        self._check_size(envelope, size)
        try:
            if known is not None:
                _send_all(known[1], parts)
            elif self._router is not None and envelope.target in self._routes:
                self._router.send(self._routes[envelope.target], _NOW_AND_MORE)
                _send_all(self._router, parts)
            else:
                self.counters.unroutable += 1
                return False
        except zmq.Again:
            self._loans.pop(loan, None)
            self.counters.full += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            del self._routes[envelope.target]  # its connection is gone; its next message restores it
            self.counters.unroutable += 1
            return False
        self.counters.sent += 1
        self.counters.sent_bytes += size
        return True

    def _pack(self, envelope: Envelope, dealer: zmq.Socket[bytes] | None) -> tuple[list[Piece], int]:
        """The parts of a message, and the number of the loan of its arrays; 0: there is none."""
        arena, most = self._arena, self._part_bytes
        if arena is None or dealer is None or dealer not in self._sharing:
            return pack(self._job, envelope, most), 0
        if isinstance(envelope.message, LaneMessage):
            return pack(self._job, envelope, most, arena.find), 0
        shared = any(isinstance(frame, np.ndarray) and arena.find(frame) >= 0 for frame in envelope.frames)
        if not shared or len(self._loans) >= _MOST_LOANS:
            return pack(self._job, envelope, most), 0
        self._loan += 1
        self._loans[self._loan] = dealer, envelope.frames
        return pack(self._job, envelope, most, arena.find, self._loan), self._loan

    def poll(self, timeout_seconds: float) -> list[Envelope]:
        """Receive all pending messages; waits for the first one, up to the timeout.

        The frames are read-only by convention. They live as long as they are referenced, and larger ones
        are ZeroMQ's own memory, not a copy. The result can be empty before the timeout.
        """
        envelopes: list[Envelope] = []
        self._return_loans()
        if self._reception is not None:
            timeout_seconds = self._reception.wait(timeout_seconds)
        for ready, _ in self._poller.poll(max(0, math.ceil(timeout_seconds * 1000))):
            if isinstance(ready, int):
                os.eventfd_read(ready)
            else:
                self._drain(ready, envelopes)
        return envelopes if self._reception is None else self._reception.hear(envelopes)

    def wake(self) -> None:
        """Let the current or the next ``poll`` return at once. Call it from any thread, until ``close``."""
        os.eventfd_write(self._wake, 1)

    def close(self, linger_seconds: float = 0.2) -> None:
        """Close all sockets, after giving sent messages this long to leave. Closing twice does no harm."""
        if self._context.closed:
            return
        if self._door is not None:
            self._door.close()
        self._dealers.clear()
        self._names.clear()
        self._routes.clear()
        # This closes all sockets of the context; a forgotten one would block it forever.
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
        socket.maxmsgsize = self._part_bytes + _TCP_OVERHEAD_BYTES
        socket.handshake_ivl = _HANDSHAKE_MILLISECONDS
        socket.copy_threshold = COPY_BELOW_BYTES
        # A machine that loses power closes no connection.
        socket.heartbeat_ivl = 5_000
        socket.heartbeat_timeout = 20_000
        return socket

    def _listen(self, address: str) -> None:
        router = self._router = self._socket(zmq.ROUTER)
        router.router_mandatory = True  # else unsendable messages would vanish uncounted
        router.ipv6 = "[" in address
        if self._keys is not None:
            self._door = Door(self._context, router, self._keys, self.counters)
        else:
            # In addition to the folder's mode.
            router.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{self.me} cannot listen on {address!r} ({error}): expected a free address of this machine"
            ) from None
        self.endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._door is not None:
            self._door.open(self.endpoint)
        self._poller.register(router, zmq.POLLIN)

    def _drain(self, socket: zmq.Socket[bytes], envelopes: list[Envelope]) -> None:
        for _ in range(_POLL_MESSAGES):
            try:
                parts = [socket.recv(_NOW, copy=False)]
            except zmq.Again:
                return
            while parts[-1].more:  # all have arrived if the first has; `recv_multipart` uses slow enums
                parts.append(socket.recv(_NOW, copy=False))
            route = parts.pop(0).bytes if socket is self._router else None
            if len(parts) == 1 and parts[0].bytes.startswith((_OFFER, _MAPPED, _RETURNED)):
                self._hear_of_memory(socket, route, parts[0].bytes)
                continue
            envelope = self._open(parts, self._names.get(socket) or self._proven_name(parts))
            if envelope is not None:
                if route is not None:
                    self._learn(envelope.source, route)
                    if self._door is not None:
                        self._door.proven(int(parts[0].get(_FILE)))
                envelopes.append(envelope)
            if not int(socket.get(_EVENTS)) & _POLLIN:  # faster than an exception
                return

    def _hear_of_memory(self, socket: zmq.Socket[bytes], route: bytes | None, message: bytes) -> None:
        """Map the arena that a server of this job offers, and tell it so; or note that a server has mapped
        this one's. Without keys, all who can connect are processes of this user."""
        if route is None:
            if message == _MAPPED and self._arena is not None:
                self._sharing.add(socket)
            return
        try:
            if self._keys is not None:
                raise ValueError("an arena offered over TCP")
            if message.startswith(_RETURNED):
                returned = msgspec.msgpack.decode(message[len(_RETURNED) :], type=Returned)
                for loan in returned.loans if returned.owner == self.me else ():
                    self._loans.pop(loan, None)
                return
            offer = msgspec.msgpack.decode(message[len(_OFFER) :], type=Offer)
            if offer.job != self._job or (offer.source.role, self.me.role) != ("server", "server"):
                raise ValueError(f"an arena of {offer.source}, job {offer.job}")
            name = offer.source.role, offer.source.slot
            if name in self._views and self._views[name][0].incarnation > offer.source.incarnation:
                raise ValueError(f"an arena of {offer.source}, which has been replaced")
            self._views[name] = offer.source, SharedView(offer)
            assert self._router is not None
            self._router.send(route, _NOW_AND_MORE)
            self._router.send(_MAPPED, _NOW)
        except (ValueError, OSError, zmq.ZMQError):  # its arrays are sent then
            self.counters.malformed += 1

    def _return_loans(self) -> None:
        """Tell owners which of their arrays nobody reads any more."""
        for name, (owner, view) in self._views.items():
            if view.returned and name in self._dealers:
                loans = tuple(view.returned.popleft() for _ in range(len(view.returned)))
                with contextlib.suppress(
                    zmq.Again
                ):  # it has not heard from here for long: it is being replaced
                    self._dealers[name][1].send(
                        _RETURNED + msgspec.msgpack.encode(Returned(owner, loans)), _NOW
                    )

    def _shared(self, header: Header, number: int) -> Frame:
        """An array in the arena of a peer."""
        source = header.source
        peer, view = self._views.get((source.role, source.slot), (None, None))
        if view is None or peer != source:
            raise ValueError(f"{source} has not offered an arena")
        return view.frame(header.places[number], header.sizes[number], header.loan)

    def _learn(self, peer: Peer, route: bytes) -> None:
        self._routes.pop(peer, None)  # move to the end: the first one has been silent longest
        self._routes[peer] = route
        if len(self._routes) > _KNOWN_PEERS:
            del self._routes[next(iter(self._routes))]

    def _proven_name(self, parts: list[zmq.Frame]) -> str | None:
        """The authenticated sender of a message; None: without keys there is none."""
        if self._keys is None or not parts:
            return None
        try:
            return str(parts[0].get("User-Id"))
        except zmq.ZMQError:
            return ""

    def _open(self, parts: list[zmq.Frame], name: str | None) -> Envelope | None:
        """Decode the message in these parts; None (and a count) if it is not a message for this node."""
        size = sum(map(len, parts))
        if not 1 <= len(parts) <= self._max_parts or size > self._limits.max_message_bytes:
            self.counters.malformed += 1
            return None
        try:
            pieces = [part.bytes if len(part) < _ALIGN_BELOW_BYTES else part.buffer for part in parts]
            header, frames = unpack(pieces, self._limits.max_header_bytes, self._shared)
        except Damaged:
            self.counters.damaged += 1
            return None
        except (ValueError, RecursionError):  # includes msgspec's errors and invalid UTF-8
            self.counters.malformed += 1
            return None
        if len(frames) > self._limits.max_frames:
            self.counters.malformed += 1
        elif header.job != self._job:
            self.counters.other_job += 1
        elif (header.target.role, header.target.slot) != (self.me.role, self.me.slot):
            self.counters.misdirected += 1
        elif name is not None and f"{header.source.role} {header.source.slot}" != name:
            self.counters.impostors += 1
        else:
            self.counters.received += 1
            self.counters.received_bytes += size
            return Envelope(header.source, header.target, header.message, frames)
        return None

    def _check_size(self, envelope: Envelope, size: int) -> None:
        limits, arrays = self._limits, envelope.nbytes()
        for what, found, most in (
            ("bytes of header", size - arrays, limits.max_header_bytes),
            ("frames", len(envelope.frames), limits.max_frames),
            ("bytes", size, limits.max_message_bytes),
        ):
            if found > most:
                raise ConfigError(
                    f"a {type(envelope.message).__name__} to {envelope.target} has {found} {what}: expected "
                    f"at most {most}, or the receiver drops it; use smaller batches, or raise Limits"
                )


def _bytes_of(part: Piece) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


def _send_all(socket: zmq.Socket[bytes], parts: list[Piece]) -> None:
    """Send a message without waiting; raises ``zmq.Again`` if it was dropped."""
    last = len(parts) - 1
    for index, part in enumerate(parts):
        flags = _NOW_AND_MORE if index < last else _NOW
        try:
            socket.send(part, flags, copy=_bytes_of(part) < COPY_BELOW_BYTES)
        except zmq.Again:
            # The connection broke between two parts. ZeroMQ discards parts up to the end of the message:
            # send that end, or it discards the next message, too.
            if 0 < index < last:
                socket.send(b"", _NOW)
            raise
