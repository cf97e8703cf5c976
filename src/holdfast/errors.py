"""Every error that Holdfast raises on purpose.

    HoldfastError
    ├── CheckpointError      a checkpoint that cannot be saved or restored
    │   ├── CorruptCheckpoint    bytes that are not the ones that were written
    │   ├── NoSuchVersion        a version that is not in the store
    │   ├── ModelMismatch        a checkpoint of another model
    │   ├── UnsupportedState     a value that cannot be stored without running code to read it
    │   └── SaveFailed           a save behind the trainer's back went wrong
    ├── ConfigError          a configuration or an option that cannot be meant
    ├── DataError            training data that cannot be read
    │   ├── BadLine          one line of it, with file and line number
    │   └── WrongReaderState a reader was given a state that is not its own
    ├── JobFailed            a job that cannot go on
    │   ├── ServerLost           a server is gone, and its rows with it
    │   ├── DataLoss             more servers are gone than the code covers
    │   └── WorkerFailed         a worker cannot do its part, however often it is started
    ├── TrainingDiverged     the loss is no longer a number
    └── StoreError           a store of checkpoints that cannot be read or written
        ├── ObjectMissing    an object that is not there
        ├── AlreadyExists    an object that is there and must not be overwritten
        ├── StoreFull        no space left for an object
        ├── StoreLocked      another writer holds the store
        ├── StoreUnreachable the connection to the store is lost, or no file can be opened
        └── UnsafeName       a name that could lead out of the store

A message is one sentence that names the thing, what was expected, what was
found, and the cure. Anything else that escapes is a bug in Holdfast.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from holdfast.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Iterator


class HoldfastError(Exception):
    """The root: ``except HoldfastError`` catches all that Holdfast raises on purpose.

    Passwords in URLs are taken out of its message.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact(arg) if isinstance(arg, str) else arg for arg in args))


class CheckpointError(HoldfastError):
    """A checkpoint that cannot be saved or restored."""


class CorruptCheckpoint(CheckpointError):
    """A file of a checkpoint is truncated, altered or swapped: its bytes are not those that were written."""


class NoSuchVersion(CheckpointError):
    """The store holds no such version, or none at all."""


class ModelMismatch(CheckpointError):
    """A checkpoint does not fit the objects that it is restored into: the message names what differs."""


class UnsupportedState(CheckpointError):
    """A ``state_dict`` holds a value that cannot be written as plain data; the message says where."""


class SaveFailed(CheckpointError):
    """A save in the background failed; what it was to save is still marked as changed.

    Attributes:
        version: the version that does not exist; None if all do, and only files could not be rearranged.
    """

    version: int | None = None


class ConfigError(HoldfastError):
    """A configuration, an option or a combination of them that cannot be meant."""


class DataError(HoldfastError):
    """Training data that is missing, empty or cannot be read."""


class BadLine(DataError):
    """A line of a data file that is not a sample.

    Attributes:
        path: the file.
        line: its line number, from 1.
        reason: what is wrong with it.
    """

    def __init__(self, path: str, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}")
        self.path = path
        self.line = line
        self.reason = reason

    def __reduce__(self) -> tuple[type[BadLine], tuple[str, int, str]]:
        return BadLine, (self.path, self.line, self.reason)  # else it could not come out of a process


class WrongReaderState(DataError):
    """``load_state_dict`` got a state that another reader wrote, or came too late."""


class JobFailed(HoldfastError):
    """A job ended before its time; the message says why, what is lost, and what would have helped."""


class ServerLost(JobFailed):
    """A server is gone, and nothing protects the rows that it held."""


class DataLoss(JobFailed):
    """More servers died at once than the code covers: some rows cannot be recovered from the others."""


class WorkerFailed(JobFailed):
    """A worker raised an error, or died again and again at the same batch."""


class TrainingDiverged(HoldfastError):
    """The loss became NaN or infinite: nothing that training does from there on can help."""


class StoreError(HoldfastError):
    """A store of checkpoints that is missing, full, unreachable or damaged."""


class ObjectMissing(StoreError):
    """An object was asked for that the store does not hold."""


class AlreadyExists(StoreError):
    """An object was to be created under a name that is taken; it was left as it was."""


class StoreFull(StoreError):
    """The disk of a store has no block or no inode left, or a quota is used up."""


class StoreLocked(StoreError):
    """Another writer holds the store, or has taken it over.

    Attributes:
        host: the machine of the writer that holds it, "unknown" if it did not say.
        pid: that writer's process, 0 if it did not say.
    """

    def __init__(self, message: str, host: str, pid: int) -> None:
        super().__init__(message)
        self.host = host
        self.pid = pid

    def __reduce__(self) -> tuple[type[StoreLocked], tuple[str, str, int]]:
        return StoreLocked, (str(self), self.host, self.pid)


class StoreUnreachable(StoreError):
    """The connection to a store is lost, also after retries, or this process is out of handles or memory.

    Nothing is known of what the store holds.
    """


class UnsafeName(StoreError):
    """A name that no writer of Holdfast chooses, or a link or device in place of a file."""


NO_THREAD = (
    "this machine cannot start another thread: raise the limit on processes (ulimit -u, or the container's "
    "limit on pids), or end other programs"
)


def is_lack_of_threads(error: BaseException) -> bool:
    """Whether an error is Python's for a thread that the system did not start."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


@contextlib.contextmanager
def threads_explained() -> Iterator[None]:
    """Raise CheckpointError, which names the cure, in place of that error."""
    try:
        yield
    except RuntimeError as error:
        if is_lack_of_threads(error):
            raise CheckpointError(NO_THREAD) from error
        raise


def message_of(error: BaseException) -> str:
    """What to say of any error: those of Holdfast are sentences, of others the kind must be named, too."""
    if is_lack_of_threads(error):
        return NO_THREAD
    return str(error) if isinstance(error, HoldfastError) else redact(repr(error))
