"""The folder of a job's sockets: only the user who started the job can get at them.

Unix sockets need no keys: who may connect is decided by the kernel, before a single byte is read, from the
folder's owner and mode. The folder has a short path (a socket's may have 107 bytes) wherever the run's is,
and whoever made it holds a lock on it, so that the next job removes what one that was killed has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.errors import ConfigError

MOST_PATH_BYTES: Final = 107
"""The kernel's limit for the path of a socket."""
_PREFIX: Final = "holdfast-ipc-"
_ROOM_BYTES: Final = 48  # for the folder's own name and a socket's in it


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder that nobody else can enter, removed at the end. Raises ConfigError if none can be made."""
    folder, lock = _make()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def check_private(folder: Path) -> None:
    """Raises ConfigError unless only this user can enter a folder, and nobody else can replace it."""
    try:
        real = folder.resolve(strict=True)
        statuses = [(path, path.stat()) for path in (real, *real.parents)]
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be read ({error.strerror}): expected the folder of a job's sockets, which is "
            "there as long as the job runs"
        ) from None
    status = statuses[0][1]
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077 or not stat.S_ISDIR(status.st_mode):
        raise ConfigError(
            f"{folder} belongs to user {status.st_uid} and has mode {mode:04o}: expected a folder of user "
            f"{os.geteuid()} with mode 0700; others could talk to the job"
        )
    trusted = {0, os.geteuid(), *_nobodies()}
    for path, above in statuses[1:]:
        # In a folder such as /tmp, which is sticky, nobody can rename what belongs to somebody else.
        mode = stat.S_IMODE(above.st_mode)
        if (mode & 0o022 and not mode & stat.S_ISVTX) or above.st_uid not in trusted:
            raise ConfigError(
                f"{path} belongs to user {above.st_uid} and has mode {mode:04o}, so others can replace "
                f"{folder}: set TMPDIR to a folder that only you can write, or that is sticky as /tmp is"
            )


def _nobodies() -> list[int]:
    """Who seems to own the system's folders in a namespace that knows some users only, as a sandbox does."""
    with contextlib.suppress(OSError, ValueError):
        mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
        if mapped < (1 << 32) - 1:
            return [int(Path("/proc/sys/kernel/overflowuid").read_text())]
    return []


def _make() -> tuple[Path, int]:
    """The folder, and the file that holds its lock."""
    refused = []
    for base in dict.fromkeys([os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]):
        if not os.path.isabs(base) or len(os.fsencode(base)) + _ROOM_BYTES > MOST_PATH_BYTES:
            continue
        try:
            _remove_left(Path(base))
            return _make_in(base)
        except (OSError, ConfigError) as error:
            refused.append(f"{base}: {error}")
    raise ConfigError(
        "no folder for a job's sockets can be made: expected XDG_RUNTIME_DIR, TMPDIR or /tmp to be writable, "
        f"safe from other users, and a path of at most {MOST_PATH_BYTES - _ROOM_BYTES} bytes; set TMPDIR "
        f"({'; '.join(refused) or 'all are too long'})"
    )


def _make_in(base: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        lock = _lock(folder)  # first: until then another job may take it for one that was left
        if lock is None:
            continue
        try:
            check_private(folder)
        except ConfigError:
            folder.rmdir()
            os.close(lock)
            raise
        return folder, lock


def _lock(folder: Path) -> int | None:
    """Lock a folder for as long as the file is open, which that of a process that was killed is not; None if
    another process has locked it, or has just removed it."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.lstat(folder)):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return None


def _remove_left(base: Path) -> None:
    """Remove the folders of jobs that were killed."""
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or gone
            if folder.lstat().st_uid == os.geteuid() and (lock := _lock(folder)) is not None:
                if all(stat.S_ISSOCK(entry.lstat().st_mode) for entry in folder.iterdir()):
                    shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
