"""Write a large file past the page cache.

The kernel would take a fresh page for every 4 KiB of a file, copy the bytes, and write them back in bursts:
several times the work of the rest of a save, and other things that were cached make room for it. Here bytes
are gathered in a small buffer that is used again and again, and the disk reads them from there.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Iterator, Sequence

from holdfast.checkpoint.store.local_files import Files

LEAST_BYTES = 4 << 20
"""Smaller files are better off in the page cache: whoever reads them soon finds them there."""
SLICE_BYTES = 2 << 20
_MULTIPLE = 4096  # of the memory, the offset and the length of such a write: enough for any disk


def aligned_slice() -> memoryview:
    """The buffer of a slice."""
    return memoryview(mmap.mmap(-1, SLICE_BYTES))


def write_past_cache(
    files: Files,
    handle: int,
    views: Sequence[memoryview],
    space: memoryview,
    pause: Callable[[], None],
) -> None:
    """Append ``views`` to a new file; through the page cache where its file system refuses.

    ``space`` is an ``aligned_slice``. Nothing is durable before ``Files.fsync``.
    """
    direct = files.bypass_cache(handle, True)
    for size in _gathered(views, space):
        pause()
        filled = space[:size]
        done = 0
        if direct and size % _MULTIPLE == 0:
            try:
                done = files.writev(handle, [filled])
            except OSError as error:
                if error.errno != errno.EINVAL:  # which some file systems say only now
                    raise
        if done < size:  # the end of the file, most often
            if direct:
                files.bypass_cache(handle, False)
                direct = False
            while done < size:
                done += files.writev(handle, [filled[done:]])


def _gathered(views: Sequence[memoryview], space: memoryview) -> Iterator[int]:
    """Copy the bytes to ``space``, as many at a time as it holds: how many."""
    used = 0
    for view in views:
        at = 0
        while at < view.nbytes:
            count = min(view.nbytes - at, len(space) - used)
            space[used : used + count] = view[at : at + count]
            at, used = at + count, used + count
            if used == len(space):
                yield used
                used = 0
    if used:
        yield used
