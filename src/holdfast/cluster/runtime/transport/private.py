"""The folder of a job's sockets, which only the user who started the job can access.

Unix sockets need no keys: the kernel decides who may connect, before a single byte is read, by the
folder's owner and mode. The folder has a short path (a socket's is limited to 107 bytes) independent of the
run's folder. Its creator holds a lock on it, so that the next job can remove the folder of a killed one.
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
_ROOM_BYTES: Final = 48  # for the names of the folder and of a socket in it


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder that only this user can enter; removed at the end. Raises ConfigError on failure."""
    folder, lock = _make()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def check_private(folder: Path) -> None:
    """Raise ConfigError unless only this user can enter a folder, and nobody else can replace it."""
    try:
        real = folder.resolve(strict=True)
        statuses = [(path, path.stat()) for path in (real, *real.parents)]
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be read ({error.strerror}): expected the folder of a job's sockets, which "
            "exists while the job runs"
        ) from None
    status = statuses[0][1]
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077 or not stat.S_ISDIR(status.st_mode):
        raise ConfigError(
            f"{folder} belongs to user {status.st_uid} and has mode {mode:04o}: expected a folder of user "
            f"{os.geteuid()} with mode 0700; others could connect to the job"
        )
    trusted = {0, os.geteuid(), *_nobodies()}
    for path, above in statuses[1:]:
        # In a sticky folder such as /tmp, nobody can rename the files of another user.
        mode = stat.S_IMODE(above.st_mode)
        if (mode & 0o022 and not mode & stat.S_ISVTX) or above.st_uid not in trusted:
            raise ConfigError(
                f"{path} belongs to user {above.st_uid} and has mode {mode:04o}, so others can replace "
                f"{folder}: set TMPDIR to a folder that only you can write, or that is sticky like /tmp"
            )


def _nobodies() -> list[int]:
    """The uid that system folders have in a user namespace that does not map their owner, as in a sandbox."""
    with contextlib.suppress(OSError, ValueError):
        mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
        if mapped < (1 << 32) - 1:
            return [int(Path("/proc/sys/kernel/overflowuid").read_text())]
    return []


def _make() -> tuple[Path, int]:
    """Make the folder. Returns it, and the file descriptor that holds its lock."""
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
        "cannot make a folder for the job's sockets: expected XDG_RUNTIME_DIR, TMPDIR or /tmp to be "
        f"writable, safe from other users, and a path of at most {MOST_PATH_BYTES - _ROOM_BYTES} bytes; "
        f"set TMPDIR ({'; '.join(refused) or 'all are too long'})"
    )


def _make_in(base: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        lock = _lock(folder)  # first: until then another job may remove it as abandoned
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
    """Lock a folder for as long as the returned file is open, which ends when the process is killed; None if
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
        with contextlib.suppress(OSError):  # another user's, or gone
            if folder.lstat().st_uid == os.geteuid() and (lock := _lock(folder)) is not None:
                if all(stat.S_ISSOCK(entry.lstat().st_mode) for entry in folder.iterdir()):
                    shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
