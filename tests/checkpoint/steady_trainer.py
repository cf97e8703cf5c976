"""A process that saves and deletes versions without pause, for tests that load them meanwhile.

``python -m tests.checkpoint.steady_trainer URL POLICY OPTIONS``, the last two as JSON. Each step changes a
fifth of the rows, and what a row holds after a step is a function of the step: ``weights_after``. The process
ends when its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import holdfast as hf

ROWS, DIM = 4000, 8


class Model(nn.Module):
    """A table and one number."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, DIM, sparse=True)
        self.step = nn.Parameter(torch.full((1,), -1.0))


def weights_after(step: int, rows: int = ROWS) -> Tensor:
    """Row r holds the last step up to this one in which it changed: when (7 r + step) % 5 was 0; or -1."""
    ids = torch.arange(rows)
    last = step - (7 * ids + step) % 5
    return last.clamp(min=-1).float()[:, None].expand(rows, DIM).contiguous()


def check(model: Model, step: int) -> None:
    """Fails unless the model is what it was after a step, to the last bit."""
    assert model.step.item() == step
    assert torch.equal(model.table.weight, weights_after(step))


@contextmanager
def training(url: str, policy: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[None]:
    """Run such a process; its first version is durable when the block begins."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.checkpoint.steady_trainer", url]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, json.dumps(policy), json.dumps(options)],
        stdin=pipe,
        stdout=pipe,
        env=environment,
        cwd=root,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"saved\n"
            yield
            assert process.poll() is None, "it ended before its time"
            process.communicate(timeout=120)
            assert process.returncode == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def train(url: str, policy: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Save a version a step until the input ends."""
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters())
    weight = model.table.weight.detach()
    weight[:] = -1
    objects = {"model": model, "optim": optimizer}
    with hf.Checkpointer(url, objects, hf.Policy(**policy), options=options) as ckpt:
        step = 0
        while not ended.is_set():
            weight[:] = weights_after(step)
            ckpt.mark("model.table.weight", ((torch.arange(ROWS) * 7 + step) % 5 == 0).nonzero())
            model.step.detach()[:] = step
            ckpt.save(step)
            if step == 0:
                ckpt.wait()
                print("saved", flush=True)
            step += 1


if __name__ == "__main__":
    train(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
