"""``holdfast chaos`` against real processes, and whether its checker sees what it is there to see."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from holdfast.chaos.checker import ROWS_OF_A_BATCH, Checker, last_acknowledged
from holdfast.chaos.counting import Twin, counted
from holdfast.chaos.run import ChaosOptions, ChaosResult, plan_chaos, run_chaos
from holdfast.cli.app import app
from holdfast.cluster.protocol.messages import Figures, NodeStatus, Peer, Status
from holdfast.cluster.saving.resume import restore_rows
from holdfast.cluster.worker.faults import acknowledged_path
from holdfast.errors import ConfigError
from holdfast.events import read_events
from holdfast.tables.shard import GroupShard
from tests.e2e.commands import holdfast

MINUTES = 0.1


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A short run: its folder and its figures."""
    folder = tmp_path_factory.mktemp("chaos")
    done = holdfast(
        "chaos", "--seed", "1", "--minutes", str(MINUTES), "--run", "r", "--json", "f.json", cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was lost, and nothing is wrong" in done.stdout
    assert "updates checked" in done.stdout
    assert "checking all stripes" in done.stdout
    return folder / "r", json.loads((folder / "f.json").read_text())["figures"]


@pytest.fixture
def checker(ran: tuple[Path, dict[str, float]]) -> Checker:
    return Checker(plan_chaos(ChaosOptions(seed=1), ran[0]))


def check_covered(folder: Path, r: int) -> None:
    """Never more servers were killed than the code covers while others had not come back."""
    gone: set[int] = set()
    for event in sorted(read_events(folder), key=lambda event: event["time"]):
        kind = event.get("kind", "")
        if "kill" in kind and not kind.startswith(("worker", "supervisor")):
            gone |= set(event["servers"])
            assert len(gone) <= r, event
        elif event["event"] == "server_recovered":
            gone.discard(event["slot"])
        elif event["event"] == "process_started" and event["role"] == "supervisor":
            gone.clear()  # the last one may have died before it said who had come back


def test_nothing_is_lost_or_wrong(ran: tuple[Path, dict[str, float]]) -> None:
    folder, figures = ran
    assert [figures[name] for name in ("lost", "wrong", "hangs", "orphans", "data_losses")] == [0] * 5
    kinds = {name: count for name, count in figures.items() if name.startswith("faults.")}
    assert figures["faults"] == sum(kinds.values()) > 0
    assert figures["faults.replacement_kill"] >= 1, "the first fault of this seed"
    assert figures["recoveries"] >= 1
    assert figures["acknowledged"] == figures["batches"] > 0
    assert figures["updates_checked"] >= figures["batches"] * ROWS_OF_A_BATCH
    assert figures["versions_checked"] >= 1
    assert figures["stripes_checked"] > 0
    check_covered(folder / "job-1", 1)


def test_what_it_leaves_can_be_checked_again(checker: Checker, ran: tuple[Path, dict[str, float]]) -> None:
    checker.check_version()
    assert checker.check_acknowledged(ran[0] / "job-1" / "chaos") == ran[1]["acknowledged"]
    assert (checker.lost, checker.wrong, checker.problems) == (0, 0, [])
    assert (len(checker.batches), checker.updates) == (ran[1]["batches"], ran[1]["updates_checked"])


def forget_an_update(shards: Sequence[GroupShard]) -> None:
    row = int(np.argmax(shards[0].field("sum")[:, 0]))
    shards[0].field("sum")[row] -= 1


def flip_a_bit(shards: Sequence[GroupShard]) -> None:
    shards[0].records[17, 2] ^= 1


def count_twice(shards: Sequence[GroupShard]) -> None:
    shards[-1].field("sum")[1] += 64


@pytest.mark.parametrize(
    ("spoil", "lost", "wrong"),
    [(forget_an_update, 1, 0), (flip_a_bit, 0, 1), (count_twice, 0, 1)],
    ids=["lost", "a bit", "twice"],
)
def test_a_row_that_is_not_right_is_found(
    checker: Checker,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Sequence[GroupShard]], None],
    lost: int,
    wrong: int,
) -> None:
    def restore_and_spoil(plan: Any, shards: Sequence[GroupShard], *where: Any) -> None:
        restore_rows(plan, shards, *where)
        spoil(shards)

    monkeypatch.setattr("holdfast.chaos.checker.restore_rows", restore_and_spoil)
    checker.check_version()
    assert (checker.lost, checker.wrong) == (lost, wrong)
    assert len(checker.problems) == 1


def test_an_acknowledged_batch_that_is_not_there_is_lost(
    checker: Checker, ran: tuple[Path, dict[str, float]], tmp_path: Path
) -> None:
    checker.check_version()
    last = last_acknowledged(ran[0] / "job-1" / "chaos", 1)
    acknowledged_path(tmp_path, 1).write_text(f"7 0 {last}\n9 0 {last + 4}\n8 0 {last + 2}\n")
    checker.check_acknowledged(tmp_path)
    assert checker.lost == 2 * ROWS_OF_A_BATCH


def test_servers_with_other_bits_are_found(checker: Checker) -> None:
    checker.check_version()
    steps = len(checker.batches)

    def status(*digests: str) -> Status:
        nodes = [
            NodeStatus(Peer("server", slot, 1), "ready", 0.0, Figures(digest=digest))
            for slot, digest in enumerate(digests)
        ]
        return Status("stopping", steps, 0, tuple(nodes))

    right = [checker.expected_digest(slot) for slot in range(4)]
    assert checker.check_memory(status(*right), steps)
    assert not checker.check_memory(status(*right[:3], ""), steps), "one did not say it"
    assert checker.wrong == 0
    assert checker.check_memory(status(right[1], *right[1:]), steps)
    assert checker.wrong == 1
    checker.check_memory(status(*right), steps + 1)
    assert checker.wrong == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"protect": "2-1"}, "such as 2.1"),
        ({"protect": "none"}, "expected a code"),
        ({"protect": "3+2"}, "needs 5 or more"),
        ({"dense": "none"}, "dense is 'none'"),
        ({"protect": "3+4"}, "1 to 3 parities"),
        ({"minutes": 0}, "minutes are 0"),
        ({"minutes": float("nan")}, "minutes are nan"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 10**30}, "expected 0 to"),
        ({"workers": 0}, "0 workers"),
        ({"servers": 0}, "0 servers"),
        ({"servers": 65}, "65 servers"),
        ({"engine": "slurm"}, "engine is 'slurm'"),
        ({"engine": "ray", "hosts": 3}, "3 hosts: expected 4 to"),
        ({"engine": "ray", "servers": 5}, "use at most 4 servers"),
        ({"engine": "ray", "servers": 3, "beyond": True}, "beyond is for engine=local"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ChaosOptions(**options)


def test_a_folder_that_has_been_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job-1").mkdir()
    with pytest.raises(ConfigError, match="holds an earlier run: name another folder, or remove it"):
        run_chaos(ChaosOptions(run=str(tmp_path)))


def test_a_folder_may_have_any_name() -> None:
    store = Path("it's: {here}, #1") / "store"
    checkpoint = ChaosOptions().config(store).checkpoint
    assert checkpoint is not None
    assert checkpoint.path == str(store)


@pytest.mark.parametrize(
    ("options", "text"),
    [(["--seed", "-1"], "seed is -1"), (["--servers", "2"], "needs 3 or more"), (["--minutes", "0"], "0")],
    ids=str,
)
def test_the_command_says_what_is_wrong_with_its_options(options: list[str], text: str) -> None:
    shown = CliRunner().invoke(app, ["chaos", *options])
    assert shown.exit_code == 1
    assert isinstance(shown.exception, SystemExit | ConfigError)
    assert text in shown.output + str(shown.exception)


@pytest.mark.parametrize(
    ("spoilt", "text"),
    [
        ({"lost": 3}, "lost: 3 updates"),
        ({"wrong": 2}, "wrong: 2"),
        ({"hangs": 1}, "hung"),
        ({"orphans": 1}, "left behind"),
        ({"problems": ["the job failed"]}, "the job failed"),
    ],
    ids=str,
)
def test_the_command_fails_if_something_is_lost_or_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spoilt: dict[str, Any], text: str
) -> None:
    result = ChaosResult(Counter(server_kill=2), recoveries=2, updates_checked=100, **spoilt)
    monkeypatch.setattr("holdfast.chaos.session.run_chaos", lambda options, show: result)
    shown = CliRunner().invoke(app, ["chaos", "--json", str(tmp_path / "f.json")])
    assert shown.exit_code == 1
    assert text in shown.output
    assert "nothing was lost" not in shown.output
    figures = json.loads((tmp_path / "f.json").read_text())["figures"]
    assert (figures["faults"], figures["faults.server_kill"], figures["updates_checked"]) == (2, 2, 100)
    assert (figures["lost"], figures["wrong"]) == (spoilt.get("lost", 0), spoilt.get("wrong", 0))


def test_copies_are_a_code_too() -> None:
    code = ChaosOptions(protect="replicate", atomic=False).code
    assert (code.k, code.r, code.atomic) == (1, 1, False)


def test_what_a_network_lacks_must_have_been_told(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where workers have its only copies, a push may go with a worker; none may count twice."""

    def check(batches: int) -> tuple[bool, bool]:
        def restore_and_spoil(plan: Any, shards: Sequence[GroupShard], *where: Any) -> None:
            restore_rows(plan, shards, *where)
            shards[-1].field("sum")[1] += 64 * batches

        monkeypatch.setattr("holdfast.chaos.checker.restore_rows", restore_and_spoil)
        checker.lost = checker.wrong = 0
        checker.check_version()
        return checker.lost > 0, checker.wrong > 0

    assert check(0) == (False, False)
    assert check(-2) == (True, False)
    checker.network_lost.update(dict.fromkeys(range(4), 2))
    assert check(-2) == (False, False)
    assert check(-3) == (True, False)
    assert check(1) == (False, True)


def test_sgd_counts_as_well(tmp_path: Path) -> None:
    twin = Twin(plan_chaos(ChaosOptions(dense="workers"), tmp_path))
    assert twin.go_to(np.arange(1000))
    found = counted(twin.shards, twin.first)
    assert [counts.tolist() for counts in found] == [counts.tolist() for counts in twin.counts]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("servers", "workers", "protect", "atomic", "dense"),
    [
        (4, 2, "2+1", True, "replicate"),
        (3, 2, "2+1", False, "replicate"),
        (5, 2, "2+2", True, "replicate"),
        (2, 1, "replicate", False, "replicate"),
        (4, 2, "2+1", False, "workers"),
    ],
)
def test_two_minutes(
    tmp_path: Path, servers: int, workers: int, protect: str, atomic: bool, dense: str, seed: int
) -> None:
    options = ChaosOptions(seed, 2.0, servers, workers, protect, atomic, dense, run=str(tmp_path / "r"))
    result = run_chaos(options)
    assert result.good, result.problems
    assert result.recoveries > 3
    assert dense == "workers" or not result.data_losses
    check_covered(tmp_path / "r" / "job-1", options.code.r)


@pytest.mark.soak
def test_two_minutes_beyond_the_code(tmp_path: Path) -> None:
    """Hole 17: what is lost is said, and the job goes on from its checkpoint."""
    result = run_chaos(ChaosOptions(5, 2.0, beyond=True, run=str(tmp_path / "r")))
    assert result.good, result.problems
    assert result.data_losses > 0
