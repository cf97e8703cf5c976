"""A process of a job: it loads what its role needs, waits to be told who it is, and runs.

A launcher starts processes ahead of need, so that one that is wanted has its imports behind it. Who it is
comes as one line of JSON on standard input (``Assignment``); when standard input ends, whoever started the
process is gone, and the process ends too.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.cluster.messages import Peer
from holdfast.cluster.plan import JobPlan


class Assignment(Struct, frozen=True, kw_only=True):
    """Who a process is to be."""

    me: Peer
    plan: JobPlan
    supervisor: str
    """The supervisor's endpoint; for the supervisor itself, where to listen ("" picks a free port)."""
    folder: str
    """The run's folder."""
    bind: str = "tcp://127.0.0.1"
    keys: str = ""
    """The folder of CURVE keys; "" for none, on loopback only."""
    faults: tuple[str, ...] = ()
    """Where to end the process by force, for tests and ``--kill``."""
