"""How quickly a store is read: a short measurement, for runs that have not restored anything yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from holdfast.checkpoint.format.manifest import FileEntry
from holdfast.checkpoint.format.records import Group
from holdfast.checkpoint.reading.stretches import (
    Stretch,
    open_file,
    read_checked,
    run_all,
    stretches,
    thread_buffer,
)
from holdfast.checkpoint.store import Store

MOST_BYTES = 32 << 20
LONGEST_SECONDS = 0.5
"""No stretch is begun after that."""


def measure_reading(store: Store, entries: Iterable[FileEntry], groups: Sequence[Group]) -> tuple[int, float]:
    """Read and check the first megabytes of some files as a restore does: how many bytes, how many seconds.

    They come from the disk, not from the page cache, if the operating system can be asked for that.
    """
    wanted: list[Stretch] = []
    done = 0
    lock = threading.Lock()

    def read(stretch: Stretch) -> None:
        nonlocal done
        if time.perf_counter() - started < LONGEST_SECONDS:
            read_checked(stretch, thread_buffer(stretch.bytes))
            with lock:
                done += stretch.bytes

    with ExitStack() as opened:
        for entry in entries:
            if sum(stretch.bytes for stretch in wanted) >= MOST_BYTES:
                break
            file = open_file(store, entry, groups)
            opened.callback(file.reader.close)
            file.reader.forget_cached()
            wanted += stretches([(file, piece) for piece in file.pieces])
        while wanted and sum(stretch.bytes for stretch in wanted[:-1]) >= MOST_BYTES:
            wanted.pop()
        started = time.perf_counter()
        run_all(read, wanted)
        return done, time.perf_counter() - started
