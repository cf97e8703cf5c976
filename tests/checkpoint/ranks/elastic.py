"""A training script as ``torchrun`` starts it: ``elastic.py STORE STEPS DIE``; in its first attempt rank 1 is
killed in the save of version DIE."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast as hf
from tests.checkpoint.ranks.trainer import Run, die_at


def main(store: str, steps: int, die: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    run = Run({}, rank, dist.get_world_size())
    if attempt == 0 and rank == 1:
        die_at("after-files", die)
    with hf.Checkpointer(store, run.objects, hf.Policy(every_steps=3)) as ckpt:
        begun = ckpt.restore()
        batches = iter(run.loader)
        for step in range(begun, steps):
            run.train(next(batches))
            ckpt.step(step)
            ckpt.wait()
    said = {"rank": rank, "attempt": attempt, "begun": begun, "digests": run.digests()}
    Path(f"{store}.{rank}.{attempt}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
