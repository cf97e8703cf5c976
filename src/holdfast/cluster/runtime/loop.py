"""A machine in a process: what comes over the wire goes in, what comes out is sent, and time passes."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from holdfast.cluster.protocol.envelope import Node
from holdfast.cluster.protocol.messages import View
from holdfast.cluster.runtime.node import Assignment
from holdfast.cluster.runtime.transport.address import address_of
from holdfast.cluster.runtime.transport.links import Links
from holdfast.cluster.runtime.transport.zmq import ZmqTransport
from holdfast.errors import ConfigError

log = logging.getLogger(__name__)

TICK_SECONDS = 0.05
LINKS_FILE = "links"
"""In the folder of ``holdfast chaos``."""


@contextlib.contextmanager
def open_transport(assignment: Assignment, *, listens: bool = True) -> Iterator[ZmqTransport]:
    """The sockets of a node, connected to its supervisor if it is not that itself."""
    me = assignment.me
    bind = address_of(assignment.bind, me) if listens else None
    if me.role == "supervisor" and assignment.supervisor:
        bind = assignment.supervisor
    links = broken_links(assignment)
    with ZmqTransport(me, assignment.plan.job, bind, assignment.keys, links=links) as transport:
        if me.role != "supervisor":
            transport.connect("supervisor", 0, assignment.supervisor)
        yield transport


def connect_servers(transport: ZmqTransport, view: View, slots: Collection[int]) -> None:
    """Connect a node to those of these servers that a view names an address of."""
    for server in view.servers:
        if server.endpoint and server.slot in slots:
            try:
                transport.connect("server", server.slot, server.endpoint)
            except ConfigError as error:  # it came in a message: it must not end this node
                log.warning("server %d is out of reach: %s", server.slot, error)


def broken_links(assignment: Assignment) -> Links | None:
    """The links that are broken on purpose, if somebody does that to this job."""
    return Links(Path(assignment.chaos) / LINKS_FILE) if assignment.chaos else None


def run_node(
    node: Node,
    transport: ZmqTransport,
    until: Callable[[], bool],
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Run a machine until the condition holds; ``prepare`` is called before anything is sent."""
    # What was loaded and compiled stays: to look through it again and again was a tenth of a server's time.
    gc.freeze()
    next_tick = 0.0
    while not until():
        now = time.monotonic()
        if now >= next_tick:
            next_tick = now + TICK_SECONDS
            node.tick(now)
            prepare()
            send_outbox(node, transport)
        for envelope in transport.poll(max(0.0, next_tick - time.monotonic())):
            node.receive(envelope, time.monotonic())
            prepare()
            send_outbox(node, transport)


def send_outbox(node: Node, transport: ZmqTransport) -> None:
    """Send what a machine wants to send."""
    for envelope in node.outbox:
        transport.send(envelope)
    node.outbox.clear()


def memory_bytes() -> int:
    """What this process has in memory."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
