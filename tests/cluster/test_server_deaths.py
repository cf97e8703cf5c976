"""Real servers that are killed in the midst of training (holes 15, 16, 17, 22)."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.cluster.make_plan import plan_job
from holdfast.cluster.protocol.messages import Peer, Status
from holdfast.cluster.protocol.plan import JobPlan, Timing
from holdfast.cluster.report.result import JobResult
from holdfast.cluster.runner import Runner
from holdfast.cluster.runtime.engines.local import LocalLauncher
from holdfast.events import EventLog, read_events
from holdfast.kernels.teams import LEAST_BYTES
from holdfast.training.config import load
from holdfast.training.readers import build_readers
from tests.cluster.test_kills import counted, expected

COUNTING = [
    "model=holdfast.chaos.counting:Counting",
    "data.build=holdfast.chaos.counting:Numbered",
    "optimizer.name=sgd",
    "optimizer.lr=1.0",
    "batch_size=8",
]


def plan_of(folder: Path, batches: int, servers: int, protection: str, *more: str) -> JobPlan:
    values = [
        *COUNTING,
        f"data.arguments={{batches: {batches}}}",
        f"checkpoint.path={folder / 'store'}",
        f"job.servers={servers}",
        f"job.protection={protection}",
        *more,
    ]
    return plan_job(load(None, values), timing=Timing(silent_seconds=30.0, retry_seconds=0.3))


class Killer:
    """Kills servers when the job has come so far; the next ones when the last are whole again.

    With ``saved``, not before there is a version to go back to.
    """

    def __init__(
        self, engine: LocalLauncher, turns: list[tuple[int, ...]], every: int, saved: bool = False
    ) -> None:
        self._engine = engine
        self._turns = turns
        self._every = every
        self._saved = saved
        self._next = every
        self.killed = 0

    def __call__(self, status: Status) -> None:
        ready = all(node.state == "ready" for node in status.nodes if node.peer.role == "server")
        whole = ready and not status.degraded  # parities, too: as many as the code covers may die again then
        if not self._turns or status.steps < self._next or not whole or (self._saved and not status.versions):
            return
        self._next = status.steps + self._every
        current = {p.slot: p for p in self._engine.pids() if p.role == "server"}
        for slot in self._turns.pop(0):
            self.killed += 1
            self._engine.signal(current[slot], signal.SIGKILL)


def run(plan: JobPlan, folder: Path, engine: LocalLauncher, on_status: Callable[[Status], None]) -> JobResult:
    with EventLog(folder) as events:
        return Runner(plan, engine, folder, events).run(on_status)


def save_a_version(values: list[str], steps: int, folder: Path) -> None:
    """Begin a job and end it with a version: whoever dies in the next one, there is one to go back to."""
    values = [*values, "job.kill=[]", f"max_steps={steps}", f"run={folder}"]
    assert hf.Job.from_config(load(None, values)).run().versions


@pytest.mark.parametrize(
    ("servers", "protection", "turns"),
    [
        # `holdfast chaos` does this to 2 + 1 for longer, in the suite, too.
        pytest.param(
            4, "{kind: erasure-code, k: 2, r: 1, atomic: true}", [(1,), (1,)], marks=pytest.mark.soak
        ),
        (3, "{kind: erasure-code, k: 2, r: 1, atomic: false, dense: workers}", [(0,), (2,)]),
        (4, "{kind: erasure-code, k: 2, r: 2}", [(0, 1), (2, 3)]),
        pytest.param(3, "{kind: replication, copies: 2}", [(2,), (0,)], marks=pytest.mark.soak),
    ],
    ids=["2+1", "as ECRM", "two at once", "copies"],
)
def test_nothing_is_lost(tmp_path: Path, servers: int, protection: str, turns: list[tuple[int, ...]]) -> None:
    batches = 500
    plan = plan_of(tmp_path, batches, servers, protection)
    engine = LocalLauncher(tmp_path)
    killer = Killer(engine, list(turns), every=80)
    result = run(plan, tmp_path, engine, killer)
    assert killer.killed == sum(len(turn) for turn in turns)
    assert (result.steps, result.samples) == (batches, 8 * batches)
    assert np.array_equal(counted(plan, tmp_path / "store"), expected(batches))
    recovered = [e for e in read_events(tmp_path) if e["event"] == "server_recovered"]
    assert len(recovered) >= killer.killed
    assert all(e["rows"] > 0 for e in recovered)


def test_what_comes_back_is_the_same_to_the_bit(tmp_path: Path) -> None:
    """A job with one worker that uses no stale rows gives the same bits, whether a server dies or not."""
    values = [
        "data.samples=40000", "data.max_rows=2000", "batch_size=128", "optimizer.name=adam",
        "job.servers=3", "job.workers=1", "job.staleness=0", "job.protection={kind: erasure-code, k: 2}",
        "data.test_samples=256", "max_steps=240",
    ]  # fmt: skip
    records = []
    plans: list[list[tuple[int, ...]]] = [[], [(1,), (2,)]]
    for turns in plans:
        folder = tmp_path / str(len(turns))
        folder.mkdir()
        engine = LocalLauncher(folder)
        killer = Killer(engine, turns, every=60)
        result = run(plan_job(load(None, values)), folder, engine, killer)
        records.append(result.records)
        assert killer.killed == (2 if folder.name == "2" else 0)
    assert records[0] == records[1] != ""


def test_servers_with_threads_leave_the_same_bits(tmp_path: Path) -> None:
    """Also if one dies: its rows are recovered from parities that threads have changed."""
    values = [
        "data.samples=200000", "data.max_rows=5000", "batch_size=2048", "optimizer.name=adam",
        "model.dim=64", "model.bottom=[64, 64]", "model.top=[32, 1]", "data.test_samples=256", "max_steps=80",
        "job.servers=3", "job.workers=1", "job.staleness=0", "job.protection={kind: erasure-code, k: 2}",
    ]  # fmt: skip
    config = load(None, values)
    tables = plan_job(config).groups[0]
    batch = next(iter(build_readers(config)[0]))
    rows = sum(len(np.unique(ids)) for ids in batch.ids)
    # Of each server's share of a push: enough for two threads.
    assert rows / 3 * (tables.words + tables.dim) * 4 > 2.5 * LEAST_BYTES
    records = []
    for threads, turns in ((1, []), (2, [(1,)])):
        folder = tmp_path / str(threads)
        folder.mkdir()
        engine = LocalLauncher(folder)
        killer = Killer(engine, list(turns), every=30)
        plan = plan_job(load(None, [*values, f"job.server_threads={threads}"]))
        records.append(run(plan, folder, engine, killer).records)
        assert killer.killed == len(turns)
    assert records[0] == records[1] != ""


@pytest.mark.parametrize(
    ("protection", "dead", "says"),
    [
        (
            "",
            ("server:1", "server:2"),
            r"could not recover .*: more servers have died than a code of 2 \+ 1 covers; .* perhaps not all: "
            r".*one/lost/first-found-server-[12]-2\.csv",
        ),
        (", atomic: false, dense: workers", ("server:1", "worker:0"), "rows of the network .* only workers"),
    ],
    ids=["servers", "the network's last copy"],
)
def test_more_deaths_than_the_code_covers(
    tmp_path: Path, protection: str, dead: tuple[str, ...], says: str
) -> None:
    """Hole 17: said, never guessed; with a checkpoint the job goes back to it, and batches count once."""
    batches = 300
    settings = [
        *COUNTING,
        f"data.arguments={{batches: {batches}}}",
        "job.servers=4",
        f"job.workers={1 if protection else 2}",
        f"job.protection={{kind: erasure-code, k: 2, r: 1{protection}}}",
        f"job.kill={[f'{one}@step:90' for one in dead]}",
    ]
    with pytest.raises(hf.DataLoss, match=says) as lost:
        hf.Job.from_config(load(None, [*settings, f"run={tmp_path / 'one'}"])).run()
    for path in (tmp_path / "one").glob("lost/*"):
        assert len(path.read_text().splitlines()) > 1
        assert path.name.startswith("first-found-"), lost
    saved = [*settings, f"checkpoint.path={tmp_path / 'store'}", "checkpoint.every_steps=40"]
    save_a_version(saved, 50, tmp_path / "first")
    config = load(None, [*saved, f"run={tmp_path / 'two'}"])
    result = hf.Job.from_config(config).run()
    assert len(result.losses) == 1
    assert result.steps == batches
    assert np.array_equal(counted(plan_job(config), tmp_path / "store"), expected(batches))
    events = [e["event"] for e in read_events(tmp_path / "two")]
    assert events.index("data_lost") < events.index("job_restored")


def test_only_lost_rows_go_back_where_more_die_than_the_code_covers(tmp_path: Path) -> None:
    batches = 500
    plan = plan_of(
        tmp_path, batches, 4, "{kind: erasure-code, k: 2, r: 1, beyond: rows, scrub_seconds: 1}",
        "checkpoint.every_steps=60",
    )  # fmt: skip
    engine = LocalLauncher(tmp_path)
    killer = Killer(engine, [(1, 2, 3)], every=200, saved=True)  # all parities of 3 are at 1 and 2
    result = run(plan, tmp_path, engine, killer)
    assert killer.killed == 3
    assert (result.steps, result.losses) == (batches, ())
    assert 0 < result.pls < 3 / 4
    found, wanted = counted(plan, tmp_path / "store"), expected(batches)
    owner = plan.placement.owner(np.arange(len(found)))
    for slot, failure in zip((1, 2, 3), sorted(result.failures, key=lambda one: one.slot), strict=True):
        lost = (wanted - found)[owner == slot]
        assert (lost >= 0).all(), "nothing counts twice"
        assert 0 < np.count_nonzero(lost) <= failure.went_back
        assert f"{failure.went_back:,} rows of " in failure.what
        assert failure.version
        lines = (tmp_path / "lost" / f"server-{slot}-2.csv").read_text().splitlines()
        assert sum(not line.startswith("network,") for line in lines) == 1 + failure.went_back
        assert failure.whole_seconds is not None
    assert sum(failure.rows for failure in result.failures), "some come back as they were"
    assert np.array_equal(found[owner == 0], wanted[owner == 0])
    assert result.parities_checked
    assert result.parities_wrong == 0


def test_a_server_that_was_stopped_and_wakes_up_replaced(tmp_path: Path) -> None:
    """Hole 15: nothing that it does then counts."""
    batches = 900
    values = [
        *COUNTING,
        f"data.arguments={{batches: {batches}}}",
        f"checkpoint.path={tmp_path / 'store'}",
        "job.servers=3",
        "job.protection={kind: erasure-code, k: 2}",
    ]
    plan = plan_job(load(None, values), timing=Timing(silent_seconds=3.0, retry_seconds=0.3))
    engine = _Forgiving(tmp_path)
    stopped: list[Peer] = []

    def on_status(status: Status) -> None:
        if not stopped and status.steps > 100:
            stopped.append(Peer("server", 1, 1))
            engine.signal(stopped[0], signal.SIGSTOP)
        elif stopped and any(n.peer == Peer("server", 1, 2) and n.state == "ready" for n in status.nodes):
            engine.signal(stopped[0], signal.SIGCONT)

    result = run(plan, tmp_path, engine, on_status)
    assert stopped
    assert result.steps == batches
    assert np.array_equal(counted(plan, tmp_path / "store"), expected(batches))
    assert "server_recovered" in [e["event"] for e in read_events(tmp_path)]


class _Forgiving(LocalLauncher):
    """Does not kill those who are replaced."""

    def signal(self, peer: Peer, number: int) -> None:
        if number != signal.SIGKILL:
            super().signal(peer, number)
