"""Training runs that have nothing to do with each other, on all cores, with the same results as on one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from typing import TypeVar

import torch

from holdfast.stopping import WorkerPool

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_all(
    work: Callable[[Task], Result], tasks: Sequence[Task], processes: int | None = None
) -> Iterator[tuple[Task, Result]]:
    """Each task with what ``work``, a function of a module, makes of it, in the order in which they end.

    Each runs on one thread: sums are taken in the same order, so that equal tasks give equal bits.
    """
    processes = min(processes or os.cpu_count() or 1, len(tasks))
    if processes <= 1:
        yield from _here(work, tasks)
        return
    with WorkerPool(processes, torch.set_num_threads, 1) as pool:
        futures = {pool.submit(work, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _here(work: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[tuple[Task, Result]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for task in tasks:
            yield task, work(task)
    finally:
        torch.set_num_threads(threads)
