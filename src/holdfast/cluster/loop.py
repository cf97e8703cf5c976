"""A machine in a process: what comes over the wire goes in, what comes out is sent, and time passes."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.cluster.keys import load_keys
from holdfast.cluster.node import Assignment
from holdfast.cluster.transport.base import Node
from holdfast.cluster.transport.links import Links
from holdfast.cluster.transport.zmq import ZmqTransport

TICK_SECONDS = 0.05
LINKS_FILE = "links"
"""In the folder of ``holdfast chaos``."""


@contextlib.contextmanager
def open_transport(assignment: Assignment, *, listens: bool = True) -> Iterator[ZmqTransport]:
    """The sockets of a node, connected to its supervisor."""
    keys = load_keys(Path(assignment.keys)) if assignment.keys else None
    bind = assignment.bind if listens else None
    transport = ZmqTransport(assignment.me, assignment.plan.job, bind, keys, links=broken_links(assignment))
    try:
        transport.connect("supervisor", 0, assignment.supervisor)
        yield transport
    finally:
        transport.close()


def broken_links(assignment: Assignment) -> Links | None:
    """The links that are broken on purpose, if somebody does that to this job."""
    return Links(Path(assignment.chaos) / LINKS_FILE) if assignment.chaos else None


def run_node(
    node: Node,
    transport: ZmqTransport,
    until: Callable[[], bool],
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Run a machine until the condition holds; ``prepare`` is called before something is sent."""
    # What was loaded and compiled stays: to look through it again and again was a tenth of a server's time.
    gc.freeze()
    next_tick = 0.0
    while not until():
        now = time.monotonic()
        if now >= next_tick:
            next_tick = now + TICK_SECONDS
            node.tick(now)
            flush(node, transport)
        for envelope in transport.poll(max(0.0, next_tick - time.monotonic())):
            node.receive(envelope, time.monotonic())
            prepare()
            flush(node, transport)


def flush(node: Node, transport: ZmqTransport) -> None:
    """Send what a machine wants to send."""
    for envelope in node.outbox:
        transport.send(envelope)
    node.outbox.clear()


def memory_bytes() -> int:
    """What this process has in memory."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
