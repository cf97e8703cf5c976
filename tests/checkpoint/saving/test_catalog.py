"""The catalog: which versions stand, which are kept, and when files may go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.chunk import OPEN, checksum
from holdfast.checkpoint.format.manifest import DenseEntry, FileChange, FileEntry, Version, read_newest
from holdfast.checkpoint.format.records import Field, make_groups
from holdfast.checkpoint.saving.catalog import Catalog
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import StoreError, StoreFull, StoreLocked
from holdfast.options import Policy
from tests.checkpoint.lineage import QuickFiles

GROUPS = make_groups([("a", 100, (Field("weight", "F32", 1),)), ("b", 50, (Field("weight", "F32", 2),))])


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e9
        monkeypatch.setattr(time, "time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Run:
    """A store and its writer; files hold a few bytes each."""

    def __init__(self, folder: Path, **policy: Any) -> None:
        self.folder = folder
        self.store = LocalStore(folder, create=True, files=QuickFiles())
        self.catalog = Catalog(self.store, Policy(**policy))

    def file(self, version: int, what: str, *, died: int = OPEN, kind: Any = "increment") -> FileEntry:
        name = f"chunks/{version:08}-0000-{kind}-{checksum(what.encode())[:12]}.safetensors"
        self.store.put(name, [b"chunk"])
        return FileEntry(
            name=name, bytes=5, header_bytes=1, header_checksum="x", kind=kind, shard=0,
            first_rank=0, first_born=version, last_died=died, rows=3,
        )  # fmt: skip

    def save(
        self, number: int | None = None, *, baseline: bool | None = None, died: int = OPEN, **more: Any
    ) -> Version:
        self.catalog.take_over()
        number = self.catalog.next_version() if number is None else number
        newest = self.catalog.newest
        baseline = newest is None if baseline is None else baseline
        dense = f"dense/{number:08}-{checksum(b'%d' % number)[:12]}.safetensors"
        self.store.put(dense, [b"dense"])
        version = Version(
            version=number, era=number if baseline or newest is None else newest.era, step=number,
            time=time.time(), baseline=baseline, rows=3, bytes=10,
            dense=DenseEntry(dense, 5, checksum(b"dense")),
        )  # fmt: skip
        kind = "baseline" if baseline else "increment"
        written = ((0, 2), (1, 1))
        change = FileChange((self.file(number, "save", died=died, kind=kind),), written=written)
        self.catalog.commit_version(version, GROUPS, "x", [change], **more)
        return version

    @property
    def versions(self) -> list[int]:
        return [v.version for v in read_newest(self.store).versions]

    def files(self, folder: str = "") -> list[str]:
        return sorted(
            str(path.relative_to(self.folder))
            for name in ("chunks", "dense")
            for path in (self.folder / name).glob("*")
            if str(path.relative_to(self.folder)).startswith(folder)
        )


@contextmanager
def running(folder: Path, **policy: Any) -> Iterator[Run]:
    run = Run(folder, **policy)
    with run.store, run.store.lock_writer():
        yield run


class TestRetention:
    @pytest.mark.parametrize(
        ("policy", "kept"),
        [
            ({}, [1, 2, 3, 4, 5, 6, 7]),
            ({"keep": 1}, [7]),
            ({"keep": 3}, [5, 6, 7]),
            ({"keep": 2, "keep_every": 3}, [3, 6, 7]),
            ({"keep_every": 2}, [2, 4, 6, 7]),
        ],
    )
    def test_by_number(self, tmp_path: Path, policy: dict[str, Any], kept: list[int]) -> None:
        with running(tmp_path, **policy) as run:
            for _ in range(7):
                run.save()
            assert run.versions == kept
            assert [v.version for v in run.catalog.retained()] == kept

    def test_by_age(self, tmp_path: Path, clock: Clock) -> None:
        with running(tmp_path, keep_seconds=100.0) as run:
            for _ in range(3):
                run.save()
                clock.now += 40
            assert run.versions == [1, 2, 3]
            clock.now += 19.9
            assert [v.version for v in run.catalog.retained()] == [2, 3]
            assert [v.version for v in run.catalog.retained(clock.now - 40)] == [1, 2, 3]
            clock.now += 1000
            run.save()
            assert run.versions == [4]

    def test_a_version_is_too_old_at_that_age(self, tmp_path: Path, clock: Clock) -> None:
        with running(tmp_path, keep_seconds=100.0) as run:
            run.save()
            run.save()
            clock.now += 100
            assert [v.version for v in run.catalog.retained()] == [2], "the newest stays, whatever its age"

    def test_what_only_deleted_versions_needed_goes_and_the_rest_stays(self, tmp_path: Path) -> None:
        with running(tmp_path, keep=2) as run:
            run.save()
            run.save()
            first = run.files()
            run.save(baseline=True)
            run.save()
            # Of the versions before, a manifest that a reader may have names the files until the next one.
            run.catalog.free_replaced()
            assert run.versions == [3, 4]
            assert not set(first) & set(run.files())
            assert len(run.files()) == 4


class TestNumbers:
    def test_none_is_used_twice(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            assert run.catalog.next_version() == 1
            run.save()
            run.save()
            run.catalog.delete_versions([2])
            assert run.versions == [1]
            assert run.catalog.next_version() == 3
        with running(tmp_path) as run:
            assert run.catalog.next_version() == 3

    def test_the_newest(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            found = [run.catalog.newest]
            for _ in range(2):
                run.save()
                found.append(run.catalog.newest)
            assert [v.version if v is not None else None for v in found] == [None, 1, 2]


class TestRecords:
    """How many records of each group a version reads; a reader counts them."""

    def records(self, run: Run) -> list[tuple[int, ...]]:
        return [v.records for v in run.catalog.manifest.versions]

    def test_versions_read_their_own_and_those_before(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            for _ in range(3):
                run.save()
            assert self.records(run) == [(2, 1), (4, 2), (6, 3)]
            run.save(baseline=True)
            assert self.records(run)[-1] == (2, 1)

    def test_what_a_differential_version_writes_is_of_no_other(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            run.save()
            run.save(died=3)
            run.save(died=4)
            assert self.records(run) == [(2, 1), (4, 2), (4, 2)]

    def test_replaced_records_are_read_by_older_versions_only(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            for _ in range(4):
                run.save()
            run.catalog.commit_round(1, [FileChange(replaced=((3, 0, 2), (3, 1, 1), (4, 0, 1)))])
            assert self.records(run) == [(2, 1), (4, 2), (4, 2), (5, 3)]
            run.save()
            assert self.records(run)[-1] == (7, 4), "from then on, too"

    def test_a_round_changes_its_own_era_alone(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            run.save()
            run.save()
            run.save(baseline=True)
            run.catalog.commit_round(1, [FileChange(replaced=((2, 0, 1),))])
            assert self.records(run) == [(2, 1), (3, 2), (2, 1)]
            assert [len(era.files) for era in run.catalog.manifest.eras] == [2, 1]


class TestRounds:
    def test_files_are_replaced_and_updated(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            for _ in range(3):
                run.save()
            _, second, third = run.catalog.manifest.era(1).files
            new = run.file(3, "round")
            kept = manifests.FileEntry(
                **{**{f: getattr(second, f) for f in second.__struct_fields__}, "dead_pieces": (0,)}
            )
            run.catalog.commit_round(1, [FileChange((new,), (third.name,), (kept,))])
            files = run.catalog.manifest.era(1).files
            assert [f.name for f in files][1:] == [second.name, new.name]
            assert files[1].dead_pieces == (0,)
            assert run.versions == [1, 2, 3]

    def test_replaced_files_go_with_the_manifest_after_the_next(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            run.save()
            run.save()
            old = run.catalog.manifest.era(1).files[1].name
            run.catalog.commit_round(1, [FileChange((run.file(2, "round"),), (old,))])
            assert old in run.files(), "who has read the manifest before may still open it"
            run.catalog.free_replaced()
            assert old not in run.files()


class TestDeletion:
    def test_files_stay_as_long_as_the_policy_says(self, tmp_path: Path, clock: Clock) -> None:
        with running(tmp_path, keep=1, deletion_delay_seconds=60.0) as run:
            run.save()
            old = run.files()
            run.save(baseline=True)
            clock.now += 59
            run.catalog.free_replaced()
            assert set(old) <= set(run.files())
            clock.now += 1
            run.catalog.free_replaced()
            assert not set(old) & set(run.files())

    def test_a_disk_keeps_open_files_and_an_object_store_waits(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            assert run.catalog.deletion_delay_seconds == 0
            run.store.keeps_open_files = False
            assert Catalog(run.store, Policy()).deletion_delay_seconds == 600
            assert Catalog(run.store, Policy(deletion_delay_seconds=5.0)).deletion_delay_seconds == 5

    def test_two_manifests_stand(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            for _ in range(5):
                run.save()
            last = run.catalog.manifest.number
            assert manifests.numbers(run.store) == [last, last - 1]

    def test_what_cannot_be_deleted_is_tried_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running(tmp_path, keep=1) as run:
            run.save()
            old = run.files()
            run.save(baseline=True)

            def fail(names: Any) -> None:
                raise StoreError("no")

            with monkeypatch.context() as broken:
                broken.setattr(run.store, "delete", fail)
                run.save(baseline=True)
            assert str(run.catalog.problem) == "no"
            assert run.versions == [3], "the version stands"
            run.save(baseline=True)
            assert run.catalog.problem is None
            run.catalog.free_replaced()
            assert not set(old) & set(run.files())
            assert manifests.numbers(run.store) == [
                run.catalog.manifest.number,
                run.catalog.manifest.number - 1,
            ]


class TestLeftovers:
    def test_what_a_dead_writer_left_goes_when_the_next_takes_over(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            run.save()
            named = run.files()
            left = run.file(2, "left").name
        with running(tmp_path) as run:
            assert run.catalog.delete_leftovers() == [], "not before it has taken over"
            assert run.catalog.take_over() == [left]
            assert run.catalog.take_over() == [], "once"
            assert run.files() == named

    def test_what_is_not_ours_is_left_alone(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            run.save()
            run.store.put("chunks/notes.txt", [b"mine"])
        with running(tmp_path) as run:
            assert run.catalog.take_over() == []
            assert "chunks/notes.txt" in run.files()

    def test_without_a_manifest_everything_is(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            found = run.file(7, "somebody's").name
            run.catalog = Catalog(run.store, Policy())
            run.save()
            assert run.catalog.delete_leftovers() == []
            assert found in run.files()

    def test_nothing_goes_while_a_manifest_is_damaged(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            for _ in range(3):
                run.save()
            number = run.catalog.manifest.number
        (tmp_path / manifests.name_of(number)).write_bytes(b"broken")
        with running(tmp_path) as run:
            assert len(run.catalog.complaints) == 1
            assert run.catalog.next_version() == 4, "its version may be there"
            before = run.files()
            assert run.catalog.take_over() == []
            assert run.files() == before

    def test_versions_can_be_left_out_on_taking_over(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            for _ in range(3):
                run.save()
        with running(tmp_path) as run:
            run.catalog.take_over(without=[1, 3])
            assert run.versions == [2]

    def test_a_file_of_a_save_that_failed_goes(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            run.save()
            left = run.file(2, "failed").name
            assert run.catalog.delete_leftovers() == [left]

    def test_where_nothing_is_left_nothing_is_asked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running(tmp_path) as run:
            run.save()
            monkeypatch.setattr(run.store, "delete", lambda names: pytest.fail(f"it deletes {names}"))
            assert run.catalog.delete_leftovers() == []


class TestRoom:
    def test_a_full_disk_makes_versions_go_early(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            for _ in range(4):
                run.save(baseline=True)
            run.catalog.policy = Policy(keep=2)
            assert run.catalog.make_room(needed={1})
            assert run.versions == [1, 3, 4]
            assert len(run.files("chunks")) == 3, "and their files with them"
            assert not run.catalog.make_room(needed={1}), "there is nothing more"

    def test_retired_files_are_room_too(self, tmp_path: Path) -> None:
        with running(tmp_path, keep=1) as run:
            run.save()
            run.save(baseline=True)
            before = len(run.files())
            assert run.catalog.make_room()
            assert len(run.files()) == before - 2
            assert not run.catalog.make_room()

    def test_advice_only_where_it_helps(self, tmp_path: Path) -> None:
        with running(tmp_path) as run:
            full, other = StoreFull("no space"), StoreError("no")
            run.save()
            assert run.catalog.with_advice(full) is full, "there is one version alone"
            run.save()
            assert run.catalog.with_advice(other) is other
            advised = run.catalog.with_advice(full, "checkpoint.keep=N")
            assert str(advised).startswith("no space, or keep fewer versions (holdfast ckpt gc ")
            assert str(advised).endswith("--keep N, or checkpoint.keep=N)")
            assert advised.__cause__ is full


def test_versions_that_may_lack_changes_are_flagged_once(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.save()
        run.save(unverified={1: "first"})
        run.catalog.flag_versions({1: "second", 2: "later", 9: "not there"})
        assert [v.unverified for v in read_newest(run.store).versions] == ["first", "later"]


def test_a_writer_that_was_overtaken_leaves_the_files_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as run:
        run.save()
        stale = run.catalog
        run.catalog = Catalog(run.store, Policy())
        run.catalog.take_over()
        run.save()
        written = run.file(3, "being written").name
        with pytest.raises(StoreLocked, match="another writer has taken"):
            stale.delete_leftovers()
        assert written in run.files()
        # Now that it knows, it does not even look: the store is none of its business.
        monkeypatch.setattr(run.store, "list", lambda folder: pytest.fail("it looks"))
        with pytest.raises(StoreLocked, match="another writer has taken"):
            stale.delete_leftovers()


def test_a_writer_that_was_overtaken_does_nothing_any_more(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.save()
        stale = run.catalog
        run.catalog = Catalog(run.store, Policy())
        run.save()
        stale.raise_if_fenced_off()  # it has not looked yet
        before = run.files()
        for act in (
            lambda: stale.delete_versions([1]),
            stale.raise_if_fenced_off,
            stale.delete_leftovers,
            stale.take_over,
            stale.free_replaced,
        ):
            with pytest.raises(StoreLocked, match="another writer has taken"):
                act()
        assert (run.versions, run.files()) == ([1, 2], before)
