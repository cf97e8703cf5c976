"""Loops on the threads of an OpenMP runtime that is loaded already, torch's as a rule.

After each of its loops torch's threads go on looking for the next one for some milliseconds, on all
processors. A thread of our own would have to share one with them; what is handed to them begins at once.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from numba import cfunc, types

_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)\b[^/]*$")
_forked = False


def threads() -> int:
    """How many a loop of this thread's would run on; 1 if there is no runtime."""
    runtime = None if _forked else _runtime()
    return int(runtime.omp_get_max_threads()) if runtime is not None else 1


def run_on_all(function: Callable[[int], None], argument: int) -> None:
    """Call a function that Numba can compile with an address, on each thread at once; ask ``threads`` before.

    Returns when all calls have. The GIL is not held meanwhile.
    """
    runtime = _runtime()
    assert runtime is not None
    # No number of threads: another one than torch's would make the runtime end and start some.
    runtime.GOMP_parallel(_compiled(function).address, argument, 0, 0)


@cache
def _runtime() -> ctypes.CDLL | None:
    """That of torch if there are several; each has threads of its own."""
    try:
        with open("/proc/self/maps") as file:
            paths = {line.split(maxsplit=5)[-1].strip() for line in file}
    except OSError:
        return None
    for path in sorted(filter(_RUNTIME.search, paths), key=lambda path: ("/torch/" not in path, path)):
        try:
            runtime = ctypes.CDLL(path)
            # What compilers translate loops to: a part of the binary interface, which others have, too.
            runtime.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            runtime.GOMP_parallel.restype = None
            runtime.omp_get_max_threads.restype = ctypes.c_int
        except (OSError, AttributeError):
            continue
        return runtime
    return None


@cache
def _compiled(function: Callable[[int], None]) -> Any:
    return cfunc(types.void(types.voidptr), cache=True)(function)


def _note_fork() -> None:
    global _forked  # noqa: PLW0603 (once forked, for good)
    _forked = True  # a process that is forked off has the runtime but not its threads


os.register_at_fork(after_in_child=_note_fork)
