"""Authentication where a node listens on TCP, and limits on memory for peers that are not authenticated yet.

ZeroMQ asks whether a key may connect (its RFC 27, ZAP), and reports the connections it has accepted. A
separate thread handles both: the node's own may compute for seconds, in which nobody could connect.

Before a peer is authenticated, ZeroMQ keeps at most one unfinished frame of it, of a size that
``ZmqTransport`` makes small, until the handshake times out. That leaves their number to limit: above
``MOST_UNPROVEN``, the oldest connection without a message from a member is closed. If it is a member's,
ZeroMQ reconnects.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
from typing import TYPE_CHECKING, Final

import zmq
import zmq.utils.z85

from holdfast.cluster.runtime.keys import Keys

if TYPE_CHECKING:
    from holdfast.cluster.protocol.envelope import Counters

MOST_UNPROVEN: Final = 256
"""Maximum number of connections without a message from a member."""
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_MONITOR_ENDPOINT: Final = "inproc://holdfast.monitor"
_NOW: Final = int(zmq.DONTWAIT)
_EVENTS_AT_ONCE: Final = 1024
"""A flood of events must not delay answers to members."""
_EVENT: Final = struct.Struct("=HI")
_ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)
_DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
_WATCHED: Final = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class Door(threading.Thread):
    """Guards a ROUTER that is about to be bound; its creator closes it before the context.

    Args:
        context: the ROUTER's own: ZeroMQ has one authenticator per context.
        router: gets the options that keep strangers out.
        keys: keys of this node, and of the nodes that may connect.
        counters: those of its transport.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        keys: Keys,
        counters: Counters,
    ) -> None:
        super().__init__(name="door", daemon=True)
        self._keys, self._counters = keys, counters
        self._unproven: dict[int, None] = {}
        """By file descriptor, oldest first."""
        self._ending = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._gate = context.socket(zmq.REP)
        self._gate.linger = 0
        self._gate.bind(_ZAP_ENDPOINT)
        router.curve_server = True
        router.curve_publickey = keys.public.encode()
        router.curve_secretkey = keys.secret.encode()
        router.zap_domain = b"holdfast"
        router.zap_enforce_domain = True  # nobody can connect while there is no authenticator
        router.monitor(_MONITOR_ENDPOINT, _WATCHED)
        self._router = router
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.linger = 0
        self._monitor.rcvhwm = 0  # otherwise ZeroMQ's own thread would block on a full queue
        self._monitor.connect(_MONITOR_ENDPOINT)
        self._port = 0

    def open(self, endpoint: str) -> None:
        """Start, once the ROUTER is bound there."""
        self._port = int(endpoint.rpartition(":")[2]) if endpoint.startswith("tcp://") else 0
        self.start()

    def proven(self, file: int) -> None:
        """Note that a member's message has arrived on this connection."""
        if self._unproven:
            self._unproven.pop(file, None)

    def close(self) -> None:
        """End the thread and close its sockets."""
        os.eventfd_write(self._ending, 1)
        if self.is_alive():
            self.join()
        self._router.disable_monitor()
        self._gate.close()
        self._monitor.close()
        os.close(self._ending)

    def run(self) -> None:
        """Run until ``close``."""
        poller = zmq.Poller()
        for ready in (self._gate, self._monitor, self._ending):
            poller.register(ready, zmq.POLLIN)
        while True:
            found = dict(poller.poll())
            if self._ending in found:
                return
            if self._gate in found:
                self._answer()
            if self._monitor in found:
                self._look()

    def _answer(self) -> None:
        """Answer whether a key may connect, and whose it is; ZeroMQ asks once per connection."""
        request = self._gate.recv_multipart()
        version, number, mechanism = request[0], request[1], request[5]
        name = None
        if mechanism == b"CURVE" and len(request) == 7 and len(request[6]) == 32:
            name = self._keys.names.get(zmq.utils.z85.encode(request[6]).decode())
        verdict = (b"400", b"this key is not allowed", b"")
        if name is not None:
            verdict = (b"200", b"OK", f"{name[0]} {name[1]}".encode())
        self._gate.send_multipart([version, number, *verdict, b""])

    def _look(self) -> None:
        """Process events: connections accepted and closed."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_EVENTS_AT_ONCE):
                event, value = _EVENT.unpack_from(self._monitor.recv_multipart(_NOW)[0])
                if event == _ACCEPTED:
                    self._unproven.pop(value, None)
                    self._unproven[value] = None
                elif event == _DISCONNECTED:
                    self._unproven.pop(value, None)
                else:
                    self._counters.refused += 1
                while len(self._unproven) > MOST_UNPROVEN:
                    self._shed()

    def _shed(self) -> None:
        """Close the connection that has been unproven for longest."""
        with contextlib.suppress(StopIteration, KeyError, RuntimeError, OSError):  # ``proven`` removes some
            file = next(iter(self._unproven))
            del self._unproven[file]
            # It may be closed by now, and another file may have its descriptor.
            if not stat.S_ISSOCK(os.fstat(file).st_mode):
                return
            with socket.socket(fileno=os.dup(file)) as connection:
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and connection.getsockname()[1] == self._port:
                    self._counters.shed += 1
                    connection.shutdown(socket.SHUT_RDWR)
