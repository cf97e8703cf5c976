"""Jobs of which no checkpoint can be saved: they train to their end, and it is not silent."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.events import read_events
from tests.e2e.commands import HOLDFAST, PATIENCE_SECONDS, SMALL
from tests.e2e.test_job_commands import check_none_is_left

AS_ROOT = os.geteuid() == 0
ALONE = ["unshare", "--mount"] if AS_ROOT else ["unshare", "--user", "--map-root-user", "--mount"]
SMALL_DISK = [*ALONE, "sh", "-c", 'mount -t tmpfs -o size=300k none disk && exec "$@"', "sh"]
"""Seen by the command alone, and gone with it."""
LIKE_OTHERS = ["setpriv", "--bounding-set=-dac_override"] if AS_ROOT else []
"""What root may not do."""


def full(folder: Path) -> list[str]:
    (folder / "disk").mkdir()
    return SMALL_DISK


def denied(folder: Path) -> list[str]:
    (folder / "disk" / "store" / "chunks").mkdir(parents=True)
    (folder / "disk" / "store" / "chunks").chmod(0o555)
    return LIKE_OTHERS


@pytest.mark.parametrize(
    ("disk", "kind", "short", "cure"),
    [
        (full, "full", "no space left", "free some on its disk, or inodes (df -i)"),
        (denied, "denied", "no permission", "check its owner, mode and mount"),
    ],
    ids=["full", "denied"],
)
def test_it_ends_with_a_code_of_its_own_and_says_why_once(
    tmp_path: Path, disk: Callable[[Path], list[str]], kind: str, short: str, cure: str
) -> None:
    way = disk(tmp_path)
    probe = subprocess.run([*way, "true"], cwd=tmp_path, capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no such disk can be made here: {probe.stderr}")
    saving = ["--set", "checkpoint.path=disk/store", "--set", "checkpoint.every_steps=20"]
    done = subprocess.run(
        [*way, *HOLDFAST, "train", *SMALL, "--set=data.samples=20000", "--servers=2", "--run=r", *saving],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 3, (done.stdout, done.stderr)
    finished = read_events(tmp_path / "r")[-1]
    assert (finished["event"], finished["steps"], finished["interrupted"]) == ("run_finished", 157, False)
    failed = finished["checkpoints_failed"]
    assert failed > 1
    assert (finished["unsaved"], finished["last_checkpoint"], finished["unsaved_steps"]) == (True, None, 157)
    (failure,) = finished["save_failures"]
    assert (failure["kind"], failure["count"]) == (kind, failed)
    said = [line for line in done.stdout.splitlines() if short in line]
    assert len(said) == 1, said
    assert said[0].startswith("version 1 was not saved, training continues: ")
    assert cure in said[0]
    assert "fewer versions" not in said[0], "there are none"
    assert " ".join(done.stderr.split()) == (
        f"error: all {failed} checkpoints failed ({short}): the state after step 157 is not saved, and there "
        "is no checkpoint to resume from"
    )
    assert "finished after 157 steps" in done.stdout
    check_none_is_left(tmp_path / "r")
