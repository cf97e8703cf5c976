"""The process of a server. It does not import torch, and imports stores only if rows are saved, because
training waits for a replacement to start."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from holdfast.cluster.protocol.envelope import as_array
from holdfast.cluster.protocol.messages import View
from holdfast.cluster.redundancy.parity import Blocks, ParityShard
from holdfast.cluster.report.failures import lost_rows_path
from holdfast.cluster.runtime.loop import connect_servers, memory_bytes, open_transport, run_node
from holdfast.cluster.runtime.node import Assignment
from holdfast.cluster.runtime.transport.shared import SHARED_FROM_BYTES, Arena
from holdfast.cluster.runtime.transport.zmq import ZmqTransport
from holdfast.cluster.server.machine import Opened, Server
from holdfast.cluster.server.witness import Witness
from holdfast.coding.placement import Placement
from holdfast.errors import message_of
from holdfast.kernels.coding import within
from holdfast.kernels.compiled import note_compiled
from holdfast.kernels.compiling import in_turn
from holdfast.kernels.memory import new_bytes
from holdfast.kernels.teams import Team
from holdfast.tables.plan import GroupPlan, OptimizerName, OptimizerPlan, TablePlan
from holdfast.tables.shard import GroupShard

log = logging.getLogger(__name__)

_prepared = False
_PRESSURE_SECONDS = 0.25
_KEPT_BYTES = 64 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>


def run(assignment: Assignment) -> None:
    """Run a server until the job ends."""
    plan = assignment.plan
    _keep_freed_memory()
    with contextlib.nullcontext() if _prepared else in_turn():  # a spare is needed at once
        _warm_up(plan.groups, *{(p.k, p.r) for p in plan.placements if p.r})
    arena = _make_arena(assignment)
    with open_transport(assignment, arena=arena) as transport:
        fresh = plan.resume is None
        server = Server(
            assignment.me,
            plan,
            transport.endpoint,
            fresh=fresh,
            counters=transport.counters,
            measure=lambda: (memory_bytes(arena), time.process_time()),
            pressure=_Pressure(),
            rounds=True,
            witness=Witness(Path(assignment.folder), assignment.me) if plan.compare_recovered else None,
            allocate=arena.allocate if arena is not None else new_bytes,
            team=Team(plan.server_threads),
            on_lost=_LostRows(assignment),
            opens=plan.saving is not None,
        )
        opening = _Opening(server) if plan.saving is not None else None
        connect = _Connect(server, transport)

        def prepare() -> None:
            connect()
            if opening is not None:
                opening.hand_over()

        run_node(server, transport, until=lambda: server.over, prepare=prepare, end_round=server.end_round)


def _make_arena(assignment: Assignment) -> Arena | None:
    """Memory for what goes through lanes; None if servers may be on other machines, or there are no lanes."""
    if not assignment.plan.r or not assignment.bind.startswith("ipc:"):
        return None
    try:
        # In chaos runs tables are small, and everything is to be shared.
        return Arena(shared_from_bytes=1 if assignment.chaos else SHARED_FROM_BYTES)
    except OSError as error:
        log.warning("no shared memory (%s): all arrays go through sockets", error)
        return None


def _keep_freed_memory() -> None:
    """Let malloc keep some freed memory: messages of megabytes come and go, and pages that are new to the
    process cost more than what is done with them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES // 4)


class _Pressure:
    """For which share of the time in which this process could run it waited for a processor; 1 if the kernel
    does not tell. Measured anew every quarter of a second."""

    def __init__(self) -> None:
        self._at = 0.0
        self._ran, self._waited = _run_and_wait_seconds() or (0.0, 0.0)
        self._share = 1.0

    def __call__(self) -> float:
        now = time.monotonic()
        if now >= self._at + _PRESSURE_SECONDS:
            self._at = now
            found = _run_and_wait_seconds()
            if found is not None and found != (self._ran, self._waited):
                ran, waited = found[0] - self._ran, found[1] - self._waited
                self._share = waited / (ran + waited)
                self._ran, self._waited = found
        return self._share


def _run_and_wait_seconds() -> tuple[float, float] | None:
    """How long this process has run, and waited for a processor; None if the kernel does not tell."""
    try:
        ran, waited, _ = Path("/proc/self/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return int(ran) / 1e9, int(waited) / 1e9


class _LostRows:
    """Writes lost rows to a CSV file: all of them, if the job continues without them; otherwise those found
    before it ends."""

    def __init__(self, assignment: Assignment) -> None:
        self._path = lost_rows_path(Path(assignment.folder), assignment.me, assignment.plan)
        self._begun = False
        self._groups = assignment.plan.groups

    def __call__(self, group: int, rows: NDArray[np.int64]) -> None:
        tables, firsts = self._groups[group].tables, self._groups[group].firsts
        numbers = np.searchsorted(firsts, rows, "right") - 1
        lines = [f"{tables[t].name},{row - firsts[t]}\n" for t, row in zip(numbers, rows, strict=True)]
        try:
            self._path.parent.mkdir(exist_ok=True)
            # Overwrite: a job that restarted from a checkpoint numbers its incarnations from 1 again.
            with self._path.open("a" if self._begun else "w") as file:
                file.writelines(lines if self._begun else ["table,row\n", *lines])
            self._begun = True
        except OSError:  # a full disk must not end the server
            traceback.print_exc()


class _Connect:
    """Connects a server to its neighbours whenever the view is new."""

    def __init__(self, server: Server, transport: ZmqTransport) -> None:
        self._server, self._transport = server, transport
        self._by: View | None = None
        self._neighbours = server.plan.neighbours[server.me.slot]

    def __call__(self) -> None:
        view = self._server.view
        if view is not self._by:
            self._by = view
            connect_servers(self._transport, view, self._neighbours)


class _Opening(threading.Thread):
    """Opens a server's store and reads its rows in a thread, which may take minutes, while the server sends
    beats.

    Until the rows are handed over, the job does not start, and no other thread touches them.
    """

    def __init__(self, server: Server) -> None:
        super().__init__(name="store", daemon=True)
        self._server = server
        self._opened: Opened | None = None
        self._error = ""
        self._told = False
        self.start()

    def run(self) -> None:
        from holdfast.cluster.saving.resume import open_rows  # noqa: PLC0415

        server = self._server
        try:
            self._opened = open_rows(server.plan, server.me, server.shards)
        except Exception as error:
            traceback.print_exc()
            self._error = message_of(error)

    def hand_over(self) -> None:
        """Pass the result to the server, once it is there; called by the thread that runs the server."""
        if self._told or self.is_alive():
            return
        self._told = True
        if self._opened is not None:
            self._server.open(self._opened)
        else:
            self._server.fail(self._error)


def load() -> None:
    """Let Numba load what all compiled loops share, once for all servers: it takes longer than the loops."""
    with in_turn():
        within(np.zeros(1, np.int64), 1)


def prepare() -> None:
    """Load the loops of every optimizer, and the modules that stores need."""
    from holdfast.cluster.saving import resume  # noqa: F401, PLC0415

    names = get_args(OptimizerName)
    groups = [
        GroupPlan(name=name, dim=1, tables=(), optimizer=OptimizerPlan(name=name, lr=0.0)) for name in names
    ]
    global _prepared  # noqa: PLW0603 (a process is prepared once)
    with in_turn():
        _warm_up(groups, (2, 1), (2, 2))
    note_compiled()
    _prepared = True


def _warm_up(groups: Iterable[GroupPlan], *codes: tuple[int, int]) -> None:
    """Compile every loop before the first beat: the first time it takes longer than ``silent_seconds``."""
    few = np.arange(3, dtype=np.uint32).tobytes()
    for group in groups:
        small = replace(group, tables=(TablePlan("few", 3),), initial="installed")
        shard = GroupShard(small, Placement(1), 0, 0, keep_changes=True)
        zeros = bytes(3 * 4 * group.dim)
        # Read-only, as arrays of messages are: for other kinds, Numba would compile other code.
        places = as_array(few, np.uint32, (3,))
        values = as_array(zeros, np.float32, (3, group.dim))
        shard.install(places, values)
        shard.push(places, values)
        shard.preview(places, values)
        shard.pull(places)
        shard.write(places, shard.records.copy())
        shard.write(np.arange(3), shard.records.copy())  # as in recovery
        shard.changes.keep(places)
        shard.changes.told(np.arange(3))
        ((_, blocks, differences),) = shard.changes.take()
        for k, r in codes:
            _warm_up_code(small, Placement(k + r, k, r), blocks, differences.tobytes())


def _warm_up_code(group: GroupPlan, placement: Placement, blocks: Blocks, differences: bytes) -> None:
    tables = (TablePlan("few", 3 * placement.k * placement.servers),)
    few = replace(group, tables=tables, initial="uniform")
    parity = ParityShard(few, placement, 0, 0)
    records = as_array(differences, np.uint32, (3, group.words))
    for t in range(placement.r):
        parity.change(t, 0, blocks, records)
        sums = parity.get(t, blocks)
        parity.code.add(sums, t, placement.k - 1, records)
        parity.add_to(sums, t, blocks)
        lost = tuple(range(min(t + 1, placement.k)))
        parity.code.solve(lost, {at: parity.get(at, blocks) for at in range(len(lost))})
    empty = ParityShard(few, placement, 0, None)
    empty.add(0, 0, blocks, records)
    empty.change(0, 0, blocks, records)
