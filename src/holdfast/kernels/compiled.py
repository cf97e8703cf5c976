"""Whether all loops of jobs are in Numba's cache on this machine; found out without importing Numba."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from importlib.metadata import version
from pathlib import Path


def is_compiled() -> bool:
    """Whether ``note_compiled`` was called on a machine such as this one, for the loops as they are now."""
    return any((folder / _mark()).exists() for folder in _folders())


def note_compiled() -> None:
    """Note that all loops that processes of jobs need are in Numba's cache."""
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / _mark()).touch()
            return


def _mark() -> str:
    """The name of a file that says so: another one for other loops, another Numba or another processor."""
    loops = sorted(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in Path(__file__).parent.glob("*.py")
    )
    here = repr((sys.version, version("numba"), version("llvmlite"), _processor(), loops))
    return f"compiled-{hashlib.blake2b(here.encode(), digest_size=8).hexdigest()}"


def _processor() -> list[str]:
    """What distinguishes kinds of processors; empty if the system does not tell."""
    with contextlib.suppress(OSError):
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
        names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
        return [line for line in first.splitlines() if line.partition("\t")[0].strip() in names]
    return []


def _folders() -> list[Path]:
    """Where the mark may be, the best place first: with the cache, so that they go together."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    folders = [Path(chosen) if chosen else Path(__file__).parent / "__pycache__"]
    with contextlib.suppress(RuntimeError):  # a user without a home
        folders.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast")
    return folders
