"""How long a server takes from the request to its first sign of life, with all its rows at hand.

Cold, there is no template yet whose copy it could be (``cluster.node``), as for the first server of a job;
forked, there is one, as for all others; warm, a copy has waited. What numba has compiled is on disk, as
after the first job in an environment; ``uncached`` is the first one ever, which compiles what it needs. The
processor time is the same beside other programs, the seconds are not; cold, the template's is not in it.
"""

from __future__ import annotations

import functools
import os
import signal
import tempfile
import time
from pathlib import Path

from holdfast.bench.harness import Report, Spread, interleave
from holdfast.cluster.protocol.messages import Peer, ServerBeat
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.runtime.engines.local import ONE_THREAD, LocalLauncher
from holdfast.cluster.runtime.node import Assignment
from holdfast.cluster.runtime.transport.address import address_of
from holdfast.cluster.runtime.transport.private import private_folder
from holdfast.cluster.runtime.transport.zmq import ZmqTransport
from holdfast.errors import HoldfastError

_MOST_SECONDS = 120.0
_QUIET_SECONDS = 3.5
"""A template that has not computed for so long has nothing left to load."""


def measure(report: Report, plan: JobPlan, rounds: int) -> None:
    """Start servers of a job one after the other, cold and warm in turns."""
    used: dict[str, list[float]] = {"cold": [], "forked": [], "warm": [], "uncached": []}
    me = Peer("supervisor")
    with (
        private_folder() as sockets,
        ZmqTransport(me, plan.job, address_of(f"ipc://{sockets}", me)) as transport,
    ):

        def start(how: str) -> float:
            with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as cache:
                environment = {"NUMBA_CACHE_DIR": cache} if how == "uncached" else {}
                seconds, processor = _start(plan, transport, environment, how)
            used[how].append(processor)
            return seconds

        start("cold")  # so that there is a cache
        used["cold"].clear()
        seconds = interleave(
            {how: functools.partial(start, how) for how in ("cold", "forked", "warm")}, rounds
        )
        seconds["uncached"] = [start("uncached") for _ in range(max(1, rounds // 3))]
    report.raw["job.server_start"] = {"seconds": seconds, "cpu_seconds": used}
    notes = {
        "cold": "from the request to the first beat",
        "forked": "all but a role's first",
        "warm": "of a spare that has waited",
        "uncached": "cold, and numba's cache is empty",
    }
    for name, values in seconds.items():
        report.figure(f"job.server_start_seconds.{name}", Spread.of(values), notes[name])
        report.figure(f"job.server_start_cpu_seconds.{name}", Spread.of(used[name]), "of its process by then")


def _start(
    plan: JobPlan, transport: ZmqTransport, environment: dict[str, str], how: str
) -> tuple[float, float]:
    """Seconds until the first beat, and the processor time that the server had used by then."""
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder,
        LocalLauncher(Path(folder), environment={**ONE_THREAD, **environment}) as engine,
    ):
        me = Peer("server", 0, time.monotonic_ns())  # no late word of an earlier one is taken for its own
        bind = transport.endpoint.rpartition("/")[0]
        assignment = Assignment(me=me, plan=plan, supervisor=transport.endpoint, folder=folder, bind=bind)
        if how in {"forked", "warm"}:
            engine.warm("server")  # as one that is thrown away: it was forked before all was loaded
            (waiting,) = engine.warm_pids("server")
            _wait_until_idle(engine.template_pid("server"))
            os.kill(waiting, signal.SIGKILL)
            os.waitid(os.P_PID, waiting, os.WEXITED | os.WNOWAIT)  # for the launcher to reap, and pass over
        if how == "warm":
            engine.warm("server")
            _wait_until_idle(engine.warm_pids("server")[-1])
        started = time.perf_counter()
        engine.start(assignment)
        while time.perf_counter() < started + _MOST_SECONDS:
            for envelope in transport.poll(0.1):
                if envelope.source == me and isinstance(envelope.message, ServerBeat):
                    cpu = dict(envelope.message.figures.cpu_seconds)["process"]
                    return time.perf_counter() - started, cpu
            for ended in engine.exited():
                raise HoldfastError(f"{ended.peer} ended with code {ended.code} as it started")
    raise HoldfastError(f"a server gave no sign of life within {_MOST_SECONDS:.0f} s")


def _wait_until_idle(pid: int) -> None:
    used, since = -1, 0.0
    while used != (now := _ticks(pid)) or time.monotonic() < since + _QUIET_SECONDS:
        if used != now:
            used, since = now, time.monotonic()
        time.sleep(0.02)


def _ticks(pid: int) -> int:
    """The processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
