"""A disk that is full to its last block or inode: restoring, deleting, and saving less work all the same."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.layout import rounds
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.tools.inspect import collect_garbage
from holdfast.errors import SaveFailed
from holdfast.options import Policy
from holdfast.testing.faults import SmallDisk
from tests.checkpoint.lineage import STRATEGIES, Lineage, check_no_leftovers, check_store

ALONE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]


def test_on_real_file_systems(tmp_path: Path) -> None:
    (tmp_path / "try").mkdir()
    probe = [*ALONE, "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path / "try")]
    try:
        subprocess.run(probe, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system of one's own can be mounted here: {error}")
    command = [*ALONE, sys.executable, "-m", "tests.checkpoint.saving.full_disk", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 14
    assert not {case: problem for case, problem in found.items() if problem}


class Disk(SmallDisk):
    """A small disk that is quick: it does not crash."""

    def fsync(self, handle: int) -> None:
        """Nothing."""

    def fsync_dir(self, path: str) -> None:
        """Nothing."""


def check_message(text: str, versions: int) -> None:
    assert "no space left" in text
    assert ("fewer versions" in text) == (versions > 1)


def save_until_full(store: LocalStore, policy: Policy) -> int:
    """Save until there is no space left; every failure is told. Returns the newest version that was saved."""
    line = Lineage(store, policy)
    newest = 0
    for _ in range(200):
        line.train()
        number = line.save()
        try:
            line.writer.wait()
        except SaveFailed as error:
            check_message(str(error), len(line.writer.catalog.manifest.versions))
            if "still marked" in str(error):
                break
        newest = number
    line.writer._thread.close()
    return newest


def leave_full_disk(root: Path, strategy: Any, seed: int) -> None:
    chance = random.Random(seed)
    disk = Disk(10**9, 10**9)
    with LocalStore(root, create=True, files=disk) as store, store.lock_writer():
        line = Lineage(store, Policy(strategy=strategy))
        line.train()
        line.save()
        line.writer.close()
        used, count = disk.used()
        by_inodes = chance.random() < 0.4
        disk.most_bytes = 10**9 if by_inodes else used + chance.randrange(3_000, 15_000)
        disk.most_files = count + chance.randrange(6, 24) if by_inodes else 10**9
        newest = save_until_full(store, Policy(strategy=strategy))
    disk = Disk(*disk.used())
    with LocalStore(root, create=True, files=disk) as store:
        versions = [v.version for v in check_store(store).versions]
        assert versions[-1] == newest
        report = collect_garbage(store, Policy(keep=2))
        assert list(report.kept_versions) == versions[-2:]
        assert [v.version for v in check_store(store).versions] == versions[-2:]
        # What has been freed is enough to go on, and what keeps few versions never needs gc.
        disk.most_bytes, disk.most_files = disk.most_bytes + 20_000, disk.most_files + 20
        with store.lock_writer():
            line = Lineage(store, Policy(strategy=strategy, keep=1))
            for _ in range(4):
                line.train()
                line.save()
                line.writer.wait()
            line.writer.close()
            check_no_leftovers(line)
        check_store(store)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_any_disk_can_be_left(tmp_path: Path, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    for seed in range(4):
        leave_full_disk(tmp_path / str(seed), strategy, seed)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_any_of_many_disks_can_be_left(
    tmp_path: Path, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    for seed in range(100, 200):
        leave_full_disk(tmp_path / str(seed), strategy, seed)
