"""What a crash can leave on a disk, worked out from a record of what a store did.

Use it in three steps:

1. run the code under test on a `LocalStore` with ``files=RecordingFiles(journal)``, and call
   ``journal.mark(label)`` where something was promised ("version 3 is saved");
2. go through ``crash_states(journal)``: for every prefix of the journal, what a crash there may leave;
3. ``materialise`` a state in a folder, open it, and check that every promise in ``state.marks`` holds.

The model is harsher than any real file system: what was not synced may be lost, kept, cut or zeroed, each
file and each name by itself. The writer's lock is not recorded, as a crash frees it; nor is the reserve, on
which nothing rests.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.checkpoint.store.base import RESERVE_PREFIX
from holdfast.checkpoint.store.local_files import Files, split

_FOLDER = -1  # stands in the place of a file's number


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that happened; which fields matter depends on ``kind``."""

    kind: str
    path: str = ""
    target: str = ""
    file: int = 0
    data: bytes = b""


@dataclass
class Journal:
    """What one or several stores on the same folder did, in order.

    Attributes:
        operations: the record.
        base: what was in the folder before, as durable content; None stands for a folder.
    """

    operations: list[Operation] = field(default_factory=list)
    base: dict[str, bytes | None] | None = None
    _files: int = 0
    _guard: threading.RLock = field(default_factory=threading.RLock)

    def mark(self, label: str) -> None:
        """Note that something was promised to the caller from here on."""
        with self._guard:
            self.operations.append(Operation("mark", label))

    def new_file(self) -> int:
        """Return a number for a new file."""
        self._files += 1
        return self._files


class RecordingFiles(Files):
    """Files that write down every change; several in turn may share one journal, as after a restart."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal
        self._open_files: dict[int, int] = {}

    def open_root(self, path: str, create: bool) -> None:
        """Open the root and, the first time, remember what is in it."""
        super().open_root(path, create)
        if self._journal.base is None:
            self._journal.base = read_folder(Path(path))

    def _note(self, operation: Operation) -> None:
        self._journal.operations.append(operation)

    def mkdir(self, path: str) -> None:
        """Make a folder."""
        with self._journal._guard:
            super().mkdir(path)
            self._note(Operation("mkdir", path))

    def rmdir(self, path: str) -> None:
        """Take a folder away."""
        with self._journal._guard:
            super().rmdir(path)
            self._note(Operation("unlink", path))

    def create(self, path: str) -> int:
        """Make a file."""
        with self._journal._guard:
            handle = super().create(path)
            if not path.startswith(RESERVE_PREFIX):
                self._open_files[handle] = self._journal.new_file()
                self._note(Operation("create", path, file=self._open_files[handle]))
            return handle

    def writev(self, handle: int, views: Sequence[memoryview]) -> int:
        """Append to a file; the bytes are kept, for their owner may change them."""
        with self._journal._guard:
            count = super().writev(handle, views)
            if handle in self._open_files:
                self._note(Operation("write", file=self._open_files[handle], data=b"".join(views)[:count]))
            return count

    def fsync(self, handle: int) -> None:
        """Make a file's content durable."""
        with self._journal._guard:
            super().fsync(handle)
            self._note(Operation("fsync", file=self._open_files[handle]))

    def close(self, handle: int) -> None:
        """Close a handle; nothing becomes durable by that."""
        with self._journal._guard:
            super().close(handle)
            self._open_files.pop(handle, None)

    def link(self, source: str, target: str) -> None:
        """Give a second name."""
        with self._journal._guard:
            super().link(source, target)
            self._note(Operation("link", source, target))

    def unlink(self, path: str) -> None:
        """Take a name away."""
        with self._journal._guard:
            super().unlink(path)
            if not path.startswith(RESERVE_PREFIX):
                self._note(Operation("unlink", path))

    def fsync_dir(self, path: str) -> None:
        """Make a folder's names durable."""
        with self._journal._guard:
            super().fsync_dir(path)
            self._note(Operation("fsync_dir", path))


class FailedSyncFiles(RecordingFiles):
    """The ``at``-th call of ``operation``, "fsync" or "fsync_dir", fails once.

    What it was to make durable never will be: the kernel has dropped it, and later calls, which succeed, do
    not look at it again. Only what is written or named anew is safe.

    Attributes:
        fired: whether it has failed yet.
    """

    def __init__(self, journal: Journal, operation: str, at: int) -> None:
        super().__init__(journal)
        self._operation = operation
        self._left = at
        self.fired = False

    def _fails(self, operation: str) -> bool:
        self._left -= operation == self._operation
        if self._left or self.fired:
            return False
        self.fired = True
        return True

    def fsync(self, handle: int) -> None:
        """Fail or make a file's content durable."""
        if self._fails("fsync"):
            self._note(Operation("failed fsync", file=self._open_files[handle]))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fsync(handle)

    def fsync_dir(self, path: str) -> None:
        """Fail or make a folder's names durable."""
        if self._fails("fsync_dir"):
            self._note(Operation("failed fsync_dir", path))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fsync_dir(path)


@dataclass(frozen=True, slots=True)
class Content:
    """A file after a crash: the first ``kept`` bytes of it, then ``zeros`` bytes of nothing."""

    file: int
    kept: int
    zeros: int = 0


@dataclass(frozen=True, slots=True)
class CrashState:
    """One thing that a crash may leave.

    Attributes:
        prefix: how many operations had happened.
        kind: what became of what was not synced: "lost", "kept", "names kept", or "mixed".
        marks: what had been promised by then.
        tree: content by path; None stands for a folder.
    """

    prefix: int
    kind: str
    marks: tuple[str, ...]
    tree: dict[str, Content | None]
    _written: dict[int, list[bytes]] = field(repr=False)

    def content(self, path: str) -> bytes:
        """Return the bytes of a file."""
        return _bytes_of(self.tree[path], self._written)


class _Disk:
    """A disk that remembers which of its state is durable."""

    def __init__(self, base: dict[str, bytes | None]) -> None:
        self.written: dict[int, list[bytes]] = {}
        self.length: dict[int, int] = {}
        self.synced: dict[int, int] = {}
        self.names: dict[str, int] = {}
        for number, (path, content) in enumerate(base.items(), start=1):
            file = _FOLDER if content is None else -1 - number  # not a number that a journal gives
            self.names[path] = file
            if content is not None:
                self.written[file] = [content]
                self.length[file] = self.synced[file] = len(content)
        self.durable = dict(self.names)
        self.pending: list[tuple[str, int | None]] = []  # a name, and its file or None if it was taken away
        self.dropped: list[tuple[str, int | None]] = []  # the same, of which a sync failed
        self.dropped_files: set[int] = set()

    def apply(self, operation: Operation) -> None:
        file = operation.file
        match operation.kind:
            case "mkdir":
                self._set(operation.path, _FOLDER)
            case "create":
                self.written[file] = []
                self.length[file] = self.synced[file] = 0
                self._set(operation.path, file)
            case "write":
                self.written[file].append(operation.data)
                self.length[file] += len(operation.data)
            case "fsync" if file not in self.dropped_files:
                self.synced[file] = self.length[file]
            case "failed fsync":
                self.dropped_files.add(file)
            case "failed fsync_dir":
                self._drop(operation.path)
            case "link":
                self._set(operation.target, self.names[operation.path])
            case "unlink":
                self._set(operation.path, None)
            case "fsync_dir":
                self._sync_folder(operation.path)

    def _set(self, path: str, file: int | None) -> None:
        _change(self.names, path, file)
        self.pending.append((path, file))

    def _sync_folder(self, folder: str) -> None:
        for path, file in self._take_pending(folder):
            _change(self.durable, path, file)
            self.dropped = [(name, other) for name, other in self.dropped if name != path]

    def _drop(self, folder: str) -> None:
        self.dropped += self._take_pending(folder)

    def _take_pending(self, folder: str) -> list[tuple[str, int | None]]:
        taken = [(path, file) for path, file in self.pending if split(path)[0] == folder]
        self.pending = [(path, file) for path, file in self.pending if split(path)[0] != folder]
        return taken


def _change(names: dict[str, int], path: str, file: int | None) -> None:
    if file is None:
        names.pop(path, None)
    else:
        names[path] = file


def crash_states(
    journal: Journal, *, mixed: int = 2, seed: int = 0, distinct: bool = True
) -> Iterator[CrashState]:
    """Yield, for every prefix of ``journal`` from none to all of it, what a crash there may leave.

    Per prefix: everything unsynced lost; everything kept; names kept but unsynced content lost; and ``mixed``
    random selections, the same for the same ``seed``. With ``distinct``, a tree that was yielded before with
    the same marks is not yielded again: checking it twice would find nothing new.
    """
    disk = _Disk(journal.base or {})
    chance = random.Random(seed)
    marks: tuple[str, ...] = ()
    seen: set[tuple[object, ...]] = set()
    for prefix in range(len(journal.operations) + 1):
        if prefix:
            operation = journal.operations[prefix - 1]
            if operation.kind == "mark":
                marks = (*marks, operation.path)
            else:
                disk.apply(operation)
        for kind, tree in _trees(disk, mixed, chance):
            key = (marks, frozenset(tree.items()))
            if not distinct or key not in seen:
                seen.add(key)
                yield CrashState(prefix, kind, marks, tree, disk.written)


def _trees(disk: _Disk, mixed: int, chance: random.Random) -> Iterator[tuple[str, dict[str, Content | None]]]:
    synced = {file: Content(file, length) for file, length in disk.synced.items()}
    yield "lost", _tree(disk.durable, synced)
    unsynced = [file for file, length in disk.length.items() if length > disk.synced[file]]
    changes = [*disk.dropped, *disk.pending]
    if not changes and not unsynced:
        return
    whole = {file: Content(file, length) for file, length in disk.length.items()}
    yield "kept", _tree(disk.names, whole)
    yield "names kept", _tree(disk.names, synced)
    for _ in range(mixed):
        names = dict(disk.durable)
        for path, file in changes:
            if chance.random() < 0.5:
                _change(names, path, file)
        damaged = {file: _damage(disk, file, chance) for file in unsynced}
        yield "mixed", _tree(names, {**synced, **damaged})


def _damage(disk: _Disk, file: int, chance: random.Random) -> Content:
    """Return a file whose unsynced end is cut somewhere, or reads as zeros from there on."""
    kept = chance.randint(disk.synced[file], disk.length[file])
    zeros = chance.choice((0, disk.length[file] - kept))
    return Content(file, kept, zeros)


def _tree(names: dict[str, int], contents: dict[int, Content]) -> dict[str, Content | None]:
    """Return what can be reached: a name in a folder that was lost is lost with it."""
    tree: dict[str, Content | None] = {}
    for path in sorted(names):  # a folder comes before what is in it
        folder = split(path)[0]
        if folder and folder not in tree:
            continue
        tree[path] = None if names[path] == _FOLDER else contents[names[path]]
    return tree


def materialise(state: CrashState, folder: Path, cache: Path | None = None) -> None:
    """Write ``state`` into ``folder``, which must be new or empty.

    With ``cache``, a folder on the same file system that is kept from state to state of one journal, each
    content is written once and hard-linked after that. Safe as long as nobody changes a file in place.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in state.tree.items():
        where = folder / path
        if content is None:
            where.mkdir()
        elif cache is None:
            where.write_bytes(_bytes_of(content, state._written))
        else:
            cached = cache / f"{content.file}-{content.kept}-{content.zeros}"
            if not cached.exists():
                cache.mkdir(parents=True, exist_ok=True)
                cached.write_bytes(_bytes_of(content, state._written))
            os.link(cached, where)


def _bytes_of(content: Content | None, written: dict[int, list[bytes]]) -> bytes:
    if content is None:
        raise IsADirectoryError("a folder has no content")
    return b"".join(written[content.file])[: content.kept] + bytes(content.zeros)


def read_folder(folder: Path) -> dict[str, bytes | None]:
    """Return everything below ``folder`` by relative path; None stands for a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        found[path.relative_to(folder).as_posix()] = None if path.is_dir() else path.read_bytes()
    return found
