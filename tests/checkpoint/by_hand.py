"""A table whose rows are changed by hand: what is marked is all that a save can know of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast as hf

SECONDS = 30.0


class Rows:
    """A table without an optimizer, whose rows are changed by hand."""

    def __init__(self, rows: int = 40) -> None:
        self.table = nn.Embedding(rows, 3)
        self.table.weight.requires_grad_(False)
        self.objects = {"m": self.table}
        self.changes = 0

    def change(self, ckpt: hf.Checkpointer, *ids: int) -> None:
        self.changes += 1
        with torch.no_grad():
            # Past PyTorch's count of changes: only the marks tell.
            self.table.weight.data.numpy()[list(ids)] = float(self.changes)
        ckpt.mark("m.weight", list(ids))

    def value(self) -> list[list[float]]:
        found: list[list[float]] = self.table.weight.tolist()
        return found


def restored(path: Path, version: int | None = None) -> list[list[float]]:
    fresh = Rows()
    with hf.Checkpointer(path, fresh.objects) as ckpt:
        ckpt.restore(version)
    return fresh.value()


def in_time(work: Callable[[], Any]) -> BaseException | None:
    """Do it in a thread; the error that it raised. Fails if it hangs."""
    caught: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it hangs"
    return caught[0] if caught else None
