"""Writers of one store whose lock does not hold: whatever they do to each other, no version is damaged.

A writer may be held up anywhere for as long as one likes, as a process is that sleeps through its lease, or
one of two on a file system whose locks are not seen by other hosts. Each goes on with the next save when
one fails, as a trainer does that only logs the error.
"""

from __future__ import annotations

import fcntl
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import holdfast as hf
from holdfast.checkpoint.format.manifest import name_of, read_newest
from holdfast.checkpoint.layout import rounds
from holdfast.checkpoint.saving import history
from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.tools.inspect import collect_garbage
from holdfast.checkpoint.tools.verify import verify_versions
from holdfast.errors import HoldfastError, SaveFailed, StoreLocked
from holdfast.events import EventLog, read_events
from holdfast.options import Chunked, Differential, Full, Incremental, Policy
from holdfast.testing.interleaving import SteppedStore, ThreadTurns
from holdfast.testing.s3 import S3Server
from tests.checkpoint.by_hand import Rows, restored
from tests.checkpoint.lineage import Lineage, QuickFiles, check_no_leftovers, check_store

STRATEGIES: dict[str, Any] = {
    "full": Full(),
    "differential": Differential(),
    "incremental": Incremental(),
    "chunked": Chunked(round_versions=1, dead_fraction=0.0),
    "chunked-2d": Chunked(layout="2d", threshold=0.0),
}
_places = itertools.count()


class Rivals:
    """Two writers, each of which is started twice, and what became of their saves."""

    def __init__(
        self, inner: Store, policy: Policy, seed: int, saves: int = 4, lost_answers: float = 0.0
    ) -> None:
        self.inner, self.policy, self.saves, self.lost_answers = inner, policy, saves, lost_answers
        self.turns = ThreadTurns(seed)
        self.promised: list[tuple[int, int]] = []
        self.outcomes: Counter[str] = Counter()

    def run(self, *, gc: bool = False) -> None:
        scripts = {"one": lambda: self.work("one", 0), "two": lambda: self.work("two", 1)}
        self.turns.run(scripts | ({"gc": self.collect} if gc else {}))
        self.deletes = gc or self.policy.keep is not None

    def collect(self) -> None:
        store = SteppedStore(self.inner, self.turns, "gc", self.lost_answers)
        for _ in range(4):
            try:
                collect_garbage(store, Policy(keep=2))
                self.outcomes["collected"] += 1
            except HoldfastError:
                self.outcomes["not collected"] += 1

    def work(self, who: str, number: int) -> None:
        for life in range(2):
            store = SteppedStore(self.inner, self.turns, who, self.lost_answers)
            try:
                line = Lineage(store, self.policy)
            except HoldfastError:
                self.outcomes["not opened"] += 1
                continue
            try:
                for _ in range(self.saves):
                    self.save(line, 2 * number + life)
            finally:
                line.writer._thread.close()

    def save(self, line: Lineage, remainder: int) -> None:
        """The step tells whose version it is: two writers never save the same one."""
        line.train()
        while line.step % 4 != remainder:
            line.train()
        try:
            number = line.save()
            line.writer.wait()
        except StoreLocked:
            self.outcomes["fenced off"] += 1
            return
        except SaveFailed as error:
            self.outcomes["failed"] += 1
            if "still marked" in str(error):
                return
        self.outcomes["saved"] += 1
        self.promised.append((number, line.step))

    def check(self) -> None:
        """Every version that is listed is right, and every version that was promised is listed."""
        manifest = check_store(self.inner)
        if manifest.versions:
            report = verify_versions(self.inner)
            assert report.good, report
        listed = {v.version: v.step for v in manifest.versions}
        oldest = min(listed, default=0) if self.deletes else 0
        lost = [(v, s) for v, s in self.promised if v >= oldest and listed.get(v) != s]
        assert not lost, f"versions {lost} were reported as saved, and {listed} are there"
        line = Lineage(self.inner, self.policy)
        line.train()
        line.save()
        line.writer.close()
        assert check_store(self.inner).versions[-1].step == line.step
        check_no_leftovers(line)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    # Segments at almost every save, as in long histories.
    monkeypatch.setattr(history, "RECENT_BYTES", 800)
    monkeypatch.setattr(history, "FANOUT", 2)


def run_on_disk(root: Path, strategy: str, seeds: Iterator[int] | range) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        with LocalStore(root / str(seed), create=True, files=QuickFiles()) as store:
            policy = Policy(strategy=STRATEGIES[strategy], keep=(None, 1, 3)[seed % 3])
            rivals = Rivals(store, policy, seed, lost_answers=0.05 * (seed % 4 == 3))
            rivals.run(gc=seed % 5 == 4)
            rivals.check()
            outcomes += rivals.outcomes
            outcomes["segments"] += len(store.list("segments/"))
    return outcomes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rivals_on_a_disk(tmp_path: Path, strategy: str) -> None:
    outcomes = run_on_disk(tmp_path, strategy, range(12))
    assert outcomes["fenced off"] > 10, outcomes
    assert outcomes["saved"] > 30, outcomes
    assert outcomes["collected"], outcomes
    assert outcomes["segments"] > 12, outcomes


@pytest.mark.soak
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rivals_on_a_disk_for_long(tmp_path: Path, strategy: str) -> None:
    run_on_disk(tmp_path, strategy, range(100, 500))


def run_on_s3(server: S3Server, strategy: str, seeds: range) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        url = f"s3://{server.bucket}/rivals/{next(_places)}"
        with open_store(url, create=True, options=server.options()) as store:
            # No delay: what is not to be deleted must not be whatever the time.
            policy = Policy(
                strategy=STRATEGIES[strategy], keep=(3, None, 1)[seed % 3], deletion_delay_seconds=0.0
            )
            rivals = Rivals(store, policy, seed, saves=3)
            rivals.run()
            rivals.check()
            outcomes += rivals.outcomes
    return outcomes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rivals_on_s3(s3_server: S3Server, strategy: str) -> None:
    first = 10 * list(STRATEGIES).index(strategy)
    outcomes = run_on_s3(s3_server, strategy, range(first, first + 1))
    assert outcomes["saved"], outcomes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rivals_behind_fsspec(strategy: str) -> None:
    """As long as two do not publish at the very same instant: there, looking and writing are two steps."""
    for seed in range(2):
        with open_store(f"memory://rivals/{next(_places)}", create=True) as store:
            policy = Policy(strategy=STRATEGIES[strategy], keep=3, deletion_delay_seconds=0.0)
            rivals = Rivals(store, policy, seed, saves=3)
            rivals.run()
            rivals.check()
    fsspec.filesystem("memory").rm("/rivals", recursive=True)


def test_a_manifest_that_was_replaced_behind_fsspec() -> None:
    """Two looked, and both found the name free: the one whose manifest is gone notices at its next save."""
    with open_store(f"memory://rivals/{next(_places)}", create=True) as store:
        line = Lineage(store, Policy())
        line.train()
        line.save()
        line.writer.wait()
        newest = name_of(read_newest(store).number)
        fsspec.filesystem("memory").pipe_file(f"{store.url.removeprefix('memory:/')}/{newest}", b"another's")
        line.train()
        line.save()
        with pytest.raises(StoreLocked, match="another writer has taken"):
            line.writer.wait()
        line.writer.close()
        assert [info.name for info in store.list("manifests/")][-1] == newest
    fsspec.filesystem("memory").rm("/rivals", recursive=True)


def test_a_trainer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is one that other hosts do not see. Who was there first is told, and can save no more."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    (tmp_path / "log").mkdir()
    path, policy, one, two = tmp_path / "store", hf.Policy(keep=2), Rows(), Rows()
    with (
        EventLog(tmp_path / "log") as events,
        hf.Checkpointer(path, one.objects, policy, events=events) as first,
    ):
        first.save(0)
        first.wait()
        with hf.Checkpointer(path, two.objects, policy) as second:
            second.restore()
            for step in range(1, 5):
                two.change(second, step)
                second.save(step)
            second.wait()
            one.change(first, 7)
            assert first.save(9) == 2
            with pytest.raises(StoreLocked, match=r"another writer has taken over .*stop one of the two"):
                first.wait()
            for _ in range(2):
                with pytest.raises(StoreLocked, match="another writer has taken"):
                    first.save(10)
            assert [v.step for v in second.versions()] == [3, 4]
            second.save(5)
    told = [(e["event"], e["version"]) for e in read_events(tmp_path / "log") if "version" in e]
    assert told == [("checkpoint_saved", 1), ("checkpoint_failed", 2)]
    assert restored(path) == two.value()


@pytest.mark.soak
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rivals_on_s3_for_long(s3_server: S3Server, strategy: str) -> None:
    run_on_s3(s3_server, strategy, range(100, 150))
