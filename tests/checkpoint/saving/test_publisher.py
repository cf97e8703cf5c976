"""From written rows to a version: which are baselines, and in which order files come to count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint.format.chunk import checksum
from holdfast.checkpoint.format.manifest import FileChange, Version, read_newest
from holdfast.checkpoint.format.records import Field, Rows, make_groups
from holdfast.checkpoint.layout.shard import Shard
from holdfast.checkpoint.saving.catalog import Catalog
from holdfast.checkpoint.saving.publisher import NewVersion, Publisher
from holdfast.checkpoint.saving.shard_rows import SaveCancelled
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import StoreError
from holdfast.options import Chunked, Policy
from tests.checkpoint.lineage import QuickFiles

ROWS = 1000
GROUPS = make_groups([("table", ROWS, (Field("record", "U32", 3),))])
FULL_BYTES = ROWS * 12


class Run:
    """A shard whose versions a publisher makes exist."""

    def __init__(self, folder: Path, strategy: Any = "chunked") -> None:
        self.store = LocalStore(folder, create=True, files=QuickFiles())
        self.policy = Policy(strategy=strategy)
        self.catalog = Catalog(self.store, self.policy)
        self.catalog.take_over()
        self.publisher = Publisher(self.catalog)
        self.shard = Shard(0, GROUPS, self.policy.strategy)  # type: ignore[arg-type]

    def write(self, number: int, rows: int, *, baseline: bool) -> FileChange:
        chosen = Rows(np.arange(rows, dtype=np.int64), (np.zeros((rows, 12), np.uint8),))
        change = self.shard.write(self.store, number, [(0, chosen)], baseline=baseline)
        self.shard.apply(change)
        return change.for_manifest()

    def save(self, number: int, rows: int = ROWS, *, baseline: bool = True, **how: Any) -> Version:
        new = NewVersion(number, 10 * number, baseline, {"number": number}, number % 2)
        changes = [self.write(number, rows, baseline=baseline)]
        layout = self.shard.layout_name
        return self.publisher.commit(new, GROUPS, layout, changes, [b"den", b"se"], **how)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "store")
    with run.store, run.store.lock_writer():
        yield run


def test_a_version_has_all_that_is_known_of_it(run: Run) -> None:
    version = run.save(1)
    assert (version.version, version.era, version.step, version.baseline) == (1, 1, 10, True)
    assert (version.metadata, version.restores, version.rows) == ({"number": 1}, 1, ROWS)
    assert version.dense.name.startswith("dense/00000001-")
    assert (version.dense.bytes, version.dense.checksum) == (5, checksum(b"dense"))
    with run.store.open(version.dense.name) as reader:
        assert reader.read() == b"dense"
    written = sum(file.bytes for file in run.catalog.manifest.era(1).files)
    assert version.bytes == written + 5
    # An increment is of the era of the last baseline.
    later = run.save(2, 10, baseline=False)
    assert (later.era, later.baseline, later.rows, later.restores) == (1, False, 10, 0)
    assert run.save(3).era == 3
    assert [v.version for v in read_newest(run.store).versions] == [1, 2, 3]


def test_all_shards_of_a_version_count_together(run: Run) -> None:
    parts = [run.write(1, 600, baseline=True), run.write(1, 400, baseline=True)]
    version = run.publisher.commit(NewVersion(1, 0, True, {}, 0), GROUPS, "Chunked", parts, [b"d"])
    assert version.rows == ROWS
    assert version.bytes == sum(change.bytes for change in parts) + 1
    assert len(run.catalog.manifest.era(1).files) == 2


def test_a_cancelled_version_does_not_exist(run: Run) -> None:
    def cancel() -> None:
        raise SaveCancelled

    with pytest.raises(SaveCancelled):
        run.save(1, check=cancel)
    assert run.catalog.manifest.versions == []
    assert run.publisher.baseline_is_due(0)
    assert len([*run.store.list("dense/")]) == 1, "the last moment is right before the manifest"


class TestBaselines:
    def test_the_first_version_is_one_and_the_next_is_not(self, run: Run) -> None:
        assert run.publisher.baseline_is_due(0)
        run.save(1)
        assert not run.publisher.baseline_is_due(0)
        run.save(2, 10, baseline=False)
        assert not run.publisher.baseline_is_due(0)

    def test_a_baseline_that_failed_is_still_due(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise StoreError("no")

        monkeypatch.setattr(run.store, "publish", fail)
        with pytest.raises(StoreError):
            run.save(1)
        assert run.publisher.baseline_is_due(0)

    def test_an_era_that_is_left_ends_with_the_next_baseline(self, run: Run) -> None:
        run.save(1)
        run.publisher.leave_era()
        assert run.publisher.baseline_is_due(0)
        assert run.save(2, 10, baseline=False).era == 1, "what was begun before is of the old one"
        assert run.publisher.baseline_is_due(0)
        run.save(3)
        assert not run.publisher.baseline_is_due(0)

    def test_by_how_much_a_restore_would_read(self, run: Run) -> None:
        """IncrCP's rule: a baseline costs its writing, an increment its own and what restores read more."""
        run.publisher.note_written(run.save(1), 1.0)
        increment = run.save(2, 100, baseline=False)
        run.publisher.note_written(increment, 1.0)
        left = FULL_BYTES - (increment.bytes - increment.dense.bytes)
        assert not run.publisher.baseline_is_due(left)
        assert run.publisher.baseline_is_due(left + 1)

    def test_what_tidying_rewrites_counts_as_written(self, tmp_path: Path) -> None:
        for rewritten, due in ((0, False), (4, True)):
            run = Run(tmp_path / str(rewritten), Chunked(extra_writes=1e-9))
            run.policy = Policy(strategy=run.policy.strategy, keep=2)
            run.catalog = Catalog(run.store, run.policy)
            run.catalog.take_over()
            run.publisher = Publisher(run.catalog)
            with run.store, run.store.lock_writer():
                run.publisher.note_written(run.save(1), 1.0)
                for number in (2, 3, 4):
                    run.publisher.note_written(run.save(number, 100, baseline=False), 1.0)
                    if rewritten:
                        moved = run.write(number, rewritten * number * 50, baseline=False)
                        run.publisher.replace([moved])
                assert run.publisher.baseline_is_due(0) is due

    def test_of_an_era_that_another_process_began(self, run: Run) -> None:
        run.save(1)
        again = Publisher(run.catalog)
        assert again.baseline_is_due(0)
        again.resume(run.catalog.manifest.era(1), GROUPS)
        assert not again.baseline_is_due(0)
        run.publisher = again
        assert run.save(2, 10, baseline=False).era == 1
        again.note_written(run.save(3, 10, baseline=False), 1.0)
        assert again.baseline_is_due(FULL_BYTES), "it knows how much a baseline takes"
        assert not again.baseline_is_due(FULL_BYTES // 2)


def test_rearranged_files_take_the_place_of_others(run: Run) -> None:
    run.save(1)
    run.save(2, 10, baseline=False)
    moved = run.write(2, 10, baseline=False)
    old = [f.name for f in run.catalog.manifest.era(1).files if f.kind == "increment"]
    run.publisher.replace([FileChange(moved.added, tuple(old))])
    names = [f.name for f in run.catalog.manifest.era(1).files if f.kind == "increment"]
    assert names == [f.name for f in moved.added]
    assert [v.version for v in run.catalog.manifest.versions] == [1, 2]


def test_a_version_that_exists_ends_a_row_of_cancelled_ones(run: Run) -> None:
    assert not run.publisher.last_was_cancelled
    run.publisher.last_was_cancelled = True
    run.save(1)
    assert not run.publisher.last_was_cancelled
