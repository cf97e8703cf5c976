"""Run a compiled loop on the threads of an OpenMP runtime that is already loaded, normally PyTorch's.

A save copies rows right after a training step. PyTorch's threads then still spin on all processors for some
milliseconds, waiting for the next parallel loop. A thread of our own would have to share a processor with
them; a loop that is given to them starts at once.

Gain: with a thread of our own, ``Checkpointer.save`` stalls training 1.46 times as long (0.98 to 1.59, the
middle half of 31 rounds on 2 cores; ``holdfast bench kernels``).

Fallback: ``threads()`` returns 1 if no runtime is loaded, if PyTorch is set to one thread, after a fork, or
if the environment variable ``HOLDFAST_OPENMP`` is ``0``. Callers then use a thread of their own.
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

ENABLED = os.environ.get("HOLDFAST_OPENMP") != "0"


def threads() -> int:
    """The number of threads that ``run_on_all`` would use; 1: do not call it."""
    runtime = _runtime() if ENABLED and not _forked else None
    return int(runtime.omp_get_max_threads()) if runtime is not None else 1


def run_on_all(function: Callable[[int], None], argument: int) -> None:
    """Call a function on every thread at once, and return when all calls have returned.

    Args:
        function: compiled by Numba. It takes one address.
        argument: that address.

    The GIL is released meanwhile. Call this only if ``threads()`` is more than 1.
    """
    runtime = _runtime()
    assert runtime is not None
    # 0: the runtime's own number. Any other number would make it start or end threads.
    runtime.GOMP_parallel(_compiled(function).address, argument, 0, 0)


def prepare(function: Callable[[int], None]) -> None:
    """Compile a function for ``run_on_all``, or load what was compiled."""
    _compiled(function)


@cache
def _runtime() -> ctypes.CDLL | None:
    """The loaded runtime; PyTorch's if there are several, since each has its own threads."""
    try:
        with open("/proc/self/maps") as file:
            paths = {line.split(maxsplit=5)[-1].strip() for line in file}
    except OSError:
        return None
    for path in sorted(filter(_RUNTIME.search, paths), key=lambda path: ("/torch/" not in path, path)):
        try:
            runtime = ctypes.CDLL(path)
            # The entry point that GCC compiles parallel loops to; LLVM's and Intel's runtimes have it, too.
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
    _forked = True  # a forked process has the runtime but not its threads


os.register_at_fork(after_in_child=_note_fork)
