"""What can be done in a store on a disk without a block or an inode left: run by ``test_full_disk``.

``unshare --mount python -m tests.checkpoint.saving.full_disk FOLDER`` mounts small file systems below a
folder. They are seen by this process alone, and gone with it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.tools.inspect import collect_garbage
from holdfast.checkpoint.tools.verify import verify_versions
from tests.checkpoint.by_hand import Rows

ROWS = 20_000
LEFT = "chunks/00000099-0000-increment-0123456789ab.safetensors"
STRATEGIES: dict[str, Any] = {"full": hf.Full(), "chunked": hf.Chunked(round_versions=2, dead_fraction=0.0)}


def mount(disk: Path) -> None:
    disk.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m,nr_inodes=100", "none", str(disk)],
        check=True,
        capture_output=True,
    )


def save(path: Path, policy: hf.Policy, run: Rows, steps: range) -> None:
    with hf.Checkpointer(path, run.objects, policy) as ckpt:
        ckpt.restore()
        for step in steps:
            run.change(ckpt, *range(step, ROWS, 2))
            ckpt.save(step)
            ckpt.wait()


def fill(disk: Path, what: str) -> None:
    """Leave no block, or no inode."""
    (disk / "filler").mkdir(exist_ok=True)
    (disk / "more").unlink(missing_ok=True)
    content = bytes(65536) if what == "blocks" else b""
    for number in range(10**6):
        try:
            with open(disk / "filler" / str(number), "wb", buffering=0) as file:
                while content and file.write(content):
                    pass
        except OSError:
            content = content[: len(content) // 2]
            if not content:
                break
    status = os.statvfs(disk)
    assert (status.f_bavail if what == "blocks" else status.f_favail) == 0
    with pytest.raises(OSError, match="No space left"):
        (disk / "more").write_bytes(b"x")


def restored(path: Path, version: int | None = None) -> list[list[float]]:
    fresh = Rows(ROWS)
    with hf.Checkpointer(path, fresh.objects) as ckpt:
        assert ckpt.restore(version)
    return fresh.value()


def contents(path: Path) -> dict[str, int]:
    return {str(p.relative_to(path)): p.stat().st_size for p in path.rglob("*") if p.name != "writer.lock"}


def opening_writes_nothing(path: Path, run: Rows) -> None:
    before = contents(path)
    assert restored(path) == run.value()
    assert contents(path) == before


def gc(path: Path, run: Rows) -> None:
    with open_store(path, create=False) as store:
        report = collect_garbage(store, hf.Policy(keep=2))
    assert len(report.kept_versions) == 2
    assert len(report.deleted_versions) >= 2
    assert report.freed_bytes > 0


def keep(path: Path, run: Rows) -> None:
    """The first save with another policy deletes what that does not keep, and goes on."""
    with hf.Checkpointer(path, run.objects, hf.Policy(strategy=hf.Full(), keep=2)) as ckpt:
        ckpt.restore()
        run.change(ckpt, 7)
        ckpt.save(50)
        ckpt.wait()
        assert len(ckpt.versions()) == 2


def lost_lock(path: Path, run: Rows) -> None:
    """The lock's file is missing, and there is no room for one: reading and deleting work all the same."""
    (path / "writer.lock").unlink()
    fill(path.parent, "inodes")
    opening_writes_nothing(path, run)
    gc(path, run)


def no_versions(path: Path, run: Rows) -> None:
    """A message says what helps: there is no version to be deleted."""
    fresh = Rows(ROWS)
    with hf.Checkpointer(path.parent / "other", fresh.objects) as ckpt:
        for _ in range(2):
            ckpt.save(0)
            with pytest.raises(hf.SaveFailed, match="free some") as failed:
                ckpt.wait()
            assert "fewer versions" not in str(failed.value)


CASES: dict[str, Callable[[Path, Rows], None]] = {
    "opening": opening_writes_nothing,
    "gc": gc,
    "keep": keep,
}


def check(root: Path, strategy: str, what: str, name: str, case: Callable[[Path, Rows], None]) -> str:
    disk = root / f"{strategy}-{what}-{name}"
    mount(disk)
    path, run = disk / "store", Rows(ROWS)
    save(path, hf.Policy(strategy=STRATEGIES[strategy]), run, range(6))
    (path / LEFT).write_bytes(b"left by a writer that died")
    (path / "chunks" / ".partial-1").write_bytes(b"half")
    try:
        # Twice: what was needed the first time is there again.
        for _ in range(2 if name == "gc" else 1):
            fill(disk, what)
            case(path, run)
            with open_store(path, create=False) as store:
                assert verify_versions(store).good
            assert restored(path) == run.value()
            if name == "gc":
                shutil.rmtree(disk / "filler")
                save(path, hf.Policy(strategy=STRATEGIES[strategy]), run, range(10, 12))
    except Exception as error:
        return repr(error)
    return ""


def main(root: Path) -> None:
    found = {
        f"{strategy}, no {what} left: {name}": check(root, strategy, what, name, case)
        for strategy in STRATEGIES
        for what in ("blocks", "inodes")
        for name, case in CASES.items()
    }
    found["the lock is missing"] = check(root, "full", "blocks", "lock", lost_lock)
    found["no version yet"] = check(root, "full", "blocks", "new", no_versions)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
