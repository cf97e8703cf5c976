"""Run a state machine in a process: receive messages, send its outbox, and tick."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Protocol

from holdfast.cluster.protocol.envelope import Envelope, Node
from holdfast.cluster.protocol.messages import View
from holdfast.cluster.runtime.node import Assignment, announced_supervisor
from holdfast.cluster.runtime.transport.address import address_of
from holdfast.cluster.runtime.transport.links import Links
from holdfast.cluster.runtime.transport.shared import Arena
from holdfast.cluster.runtime.transport.zmq import ZmqTransport
from holdfast.errors import ConfigError

log = logging.getLogger(__name__)

TICK_SECONDS = 0.05
LINKS_FILE = "links"
"""Name of the file in the folder of ``holdfast chaos``."""


class HasOutbox(Protocol):
    """A state machine that sends messages."""

    outbox: list[Envelope]


@contextlib.contextmanager
def open_transport(
    assignment: Assignment, *, listens: bool = True, arena: Arena | None = None
) -> Iterator[ZmqTransport]:
    """Open a node's sockets, and connect it to the supervisor unless it is the supervisor."""
    me = assignment.me
    bind = address_of(assignment.bind, me) if listens else None
    if me.role == "supervisor" and assignment.supervisor:
        bind = assignment.supervisor
    links = broken_links(assignment)
    with ZmqTransport(me, assignment.plan.job, bind, assignment.keys, links=links, arena=arena) as transport:
        if me.role != "supervisor":
            transport.connect("supervisor", 0, assignment.supervisor)
        yield transport


def connect_servers(transport: ZmqTransport, view: View, slots: Collection[int]) -> None:
    """Connect a node to those of these servers whose address is in the view."""
    for server in view.servers:
        if server.endpoint and server.slot in slots:
            try:
                transport.connect("server", server.slot, server.endpoint)
            except ConfigError as error:  # the address came in a message: it must not end this node
                log.warning("server %d is unreachable: %s", server.slot, error)


def follow_supervisor(transport: ZmqTransport) -> None:
    """Connect a node to a supervisor that has moved."""
    endpoint = announced_supervisor()
    if endpoint:
        transport.connect("supervisor", 0, endpoint)


def broken_links(assignment: Assignment) -> Links | None:
    """The table of broken links, if this is a chaos run."""
    return Links(Path(assignment.chaos) / LINKS_FILE) if assignment.chaos else None


def run_node(
    node: Node,
    transport: ZmqTransport,
    until: Callable[[], bool],
    prepare: Callable[[], None] = lambda: None,
    end_round: Callable[[float], None] | None = None,
) -> None:
    """Run a machine until the condition holds. ``prepare`` is called before anything is sent, ``end_round``
    when all messages that have arrived were received."""
    # Exclude modules and compiled code from garbage collection, which took a tenth of a server's time.
    gc.freeze()
    next_tick = 0.0
    while not until():
        now = time.monotonic()
        if now >= next_tick:
            next_tick = now + TICK_SECONDS
            follow_supervisor(transport)
            node.tick(now)
            prepare()
            send_outbox(node, transport)
        arrived = transport.poll(max(0.0, next_tick - time.monotonic()))
        for envelope in arrived:
            node.receive(envelope, time.monotonic())
            prepare()
            send_outbox(node, transport)
        if arrived and end_round is not None:
            end_round(time.monotonic())
            send_outbox(node, transport)


def send_outbox(node: HasOutbox, transport: ZmqTransport) -> None:
    """Send the messages in a machine's outbox."""
    for envelope in node.outbox:
        transport.send(envelope)
    node.outbox.clear()


def memory_bytes(arena: Arena | None = None) -> int:
    """Resident memory of this process; of memory that processes share, only its own."""
    if arena is None:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/status", "rb") as file:
        fields = dict(line.split(b":", 1) for line in file)
    kibibytes = int(fields[b"VmRSS"].split()[0]) - int(fields[b"RssShmem"].split()[0])
    return kibibytes * 1024 + arena.resident_bytes()
