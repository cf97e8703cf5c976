"""Every error that Holdfast raises on purpose.

    HoldfastError
    ├── CheckpointError      a checkpoint that cannot be saved or restored
    │   ├── CorruptCheckpoint    a corrupt file or manifest
    │   ├── NoSuchVersion        a version that does not exist
    │   ├── ModelMismatch        a checkpoint of another model
    │   ├── UnsupportedState     a value that is not plain data
    │   ├── RankLost             a rank of the job that does not answer
    │   └── SaveFailed           a save failed in the background
    │       └── SaveVoid             rows changed before they were read
    ├── ConfigError          an invalid configuration or option
    ├── DataError            unreadable training data
    │   ├── BadLine          an invalid line, with file and line number
    │   └── WrongReaderState the state of another reader
    ├── JobFailed            a job that cannot continue
    │   ├── ServerLost           an unprotected server died
    │   ├── DataLoss             more servers died than the code covers
    │   └── WorkerFailed         a worker raised an error or dies repeatedly
    ├── TrainingDiverged     the loss is NaN or infinite
    └── StoreError           a store that cannot be read or written
        ├── ObjectMissing    an object does not exist
        ├── AlreadyExists    an object exists and must not be overwritten
        ├── StoreFull        no space left
        ├── StoreLocked      another writer holds the store
        ├── StoreUnreachable no connection to the store, or no file can be opened
        └── UnsafeName       a name that could point outside the store

A message is one sentence that names the object, what was expected, what was found, and the remedy. Any other
exception is a bug in Holdfast.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from holdfast.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Iterator


class HoldfastError(Exception):
    """Base class of all errors that Holdfast raises on purpose.

    Passwords in URLs are removed from the message.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact(arg) if isinstance(arg, str) else arg for arg in args))


class CheckpointError(HoldfastError):
    """A checkpoint cannot be saved or restored."""


class CorruptCheckpoint(CheckpointError):
    """A file of a checkpoint is truncated, modified or replaced: its checksum does not match."""


class NoSuchVersion(CheckpointError):
    """The requested version does not exist, or the store has no version at all."""


class ModelMismatch(CheckpointError):
    """A checkpoint does not match the objects to restore; the message lists the differences."""


class UnsupportedState(CheckpointError):
    """A ``state_dict`` contains a value that is not plain data; the message says where."""


class RankLost(CheckpointError):
    """Another rank of a distributed job has ended, or does not answer: nothing more can be saved together.

    Every version that was saved before is whole. Restart all ranks.
    """


class SaveFailed(CheckpointError):
    """A save failed in the background. Its rows stay marked as changed and are in the next version.

    Attributes:
        version: the version that does not exist; None if all exist and only rearranging files failed.
    """

    version: int | None = None


class SaveVoid(SaveFailed):
    """A save was given up because rows changed, unannounced, before they were read from memory.

    ``Checkpointer.step`` and ``save`` do not raise it: they save again, and copy such tables at once from
    then on. ``wait`` and ``close`` raise it, as the version does not exist.
    """


class ConfigError(HoldfastError):
    """An invalid configuration, option, or combination of options."""


class DataError(HoldfastError):
    """Training data is missing, empty or unreadable."""


class BadLine(DataError):
    """A line of a data file is not a valid sample.

    Attributes:
        path: the file.
        line: the line number, from 1.
        reason: what is wrong with the line.
    """

    def __init__(self, path: str, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason

    def __reduce__(self) -> tuple[type[BadLine], tuple[str, int, str]]:
        return BadLine, (self.path, self.line, self.reason)  # so that it can cross process boundaries


class WrongReaderState(DataError):
    """``load_state_dict`` got the state of another reader, or was called after iteration began."""


class JobFailed(HoldfastError):
    """A job ended early; the message says why, what is lost, and how to prevent it."""


class ServerLost(JobFailed):
    """An unprotected server died, and its rows are lost."""


class DataLoss(JobFailed):
    """More servers died at once than the code covers, so some rows cannot be recovered."""


class WorkerFailed(JobFailed):
    """A worker raised an error, or died repeatedly at the same batch."""


class TrainingDiverged(HoldfastError):
    """The loss became NaN or infinite."""


class StoreError(HoldfastError):
    """A store of checkpoints is missing, full, unreachable or damaged."""


class ObjectMissing(StoreError):
    """The requested object does not exist in the store."""


class AlreadyExists(StoreError):
    """An object exists under this name. It was not changed."""


class StoreFull(StoreError):
    """The disk of a store has no free block or inode, or a quota is exhausted."""


class StoreLocked(StoreError):
    """Another writer holds the store, or has taken it over.

    Attributes:
        host: the machine of that writer; "unknown" if it is not known.
        pid: the process id of that writer; 0 if it is not known.
    """

    def __init__(self, message: str, host: str, pid: int) -> None:
        super().__init__(message)
        self.host = host
        self.pid = pid

    def __reduce__(self) -> tuple[type[StoreLocked], tuple[str, str, int]]:
        return StoreLocked, (str(self), self.host, self.pid)


class StoreUnreachable(StoreError):
    """The store does not answer, even after retries, or this process is out of file descriptors or memory.

    The store may be intact.
    """


class UnsafeName(StoreError):
    """A name that no writer of Holdfast uses, or a link or device in place of a file."""


NO_THREAD = (
    "this machine cannot start another thread: raise the limit on processes (ulimit -u, or the container's "
    "limit on pids), or end other programs"
)


def is_lack_of_threads(error: BaseException) -> bool:
    """Whether this is Python's error for a thread that the system could not start."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


@contextlib.contextmanager
def threads_explained() -> Iterator[None]:
    """Turn that error into a CheckpointError that names the remedy."""
    try:
        yield
    except RuntimeError as error:
        if is_lack_of_threads(error):
            raise CheckpointError(NO_THREAD) from error
        raise


def message_of(error: BaseException) -> str:
    """The message to show for an error; errors of other packages are shown with their type."""
    if is_lack_of_threads(error):
        return NO_THREAD
    return str(error) if isinstance(error, HoldfastError) else redact(repr(error))
