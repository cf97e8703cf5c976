"""A job of real processes that is killed as a whole and goes on from its checkpoint, in another shape."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import holdfast as hf
from holdfast.checkpoint.format.manifest import read_newest
from holdfast.checkpoint.store import open_store
from holdfast.training.config import Config, load
from holdfast.training.trainer import Trainer
from tests.e2e.commands import PATIENCE_SECONDS, holdfast

SAMPLES, BATCH = 38_400, 64
SETTINGS = [
    f"data.samples={SAMPLES}", "data.test_samples=1000", "data.max_rows=500", "model.dim=4",
    "model.bottom=[8, 4]", "model.top=[8, 1]", f"batch_size={BATCH}", "threads=1", "optimizer.name=adam",
]  # fmt: skip

RUN = """
import json, sys
from pathlib import Path
from holdfast.cluster.runner import Runner
from holdfast.cluster.runtime.engines.local import LocalLauncher
from holdfast.cluster.make_plan import plan_job
from holdfast.events import EventLog
from holdfast.training.config import load

folder, servers, workers, *settings = sys.argv[1:]
plan = plan_job(load(overrides=[*settings, f"job.servers={servers}", f"job.workers={workers}"]))
resume = plan.resume
print(json.dumps({"resumed": resume and [resume.version, resume.steps, resume.samples]}), flush=True)
Path(folder).mkdir()
with EventLog(Path(folder)) as events:
    result = Runner(plan, LocalLauncher(Path(folder)), Path(folder), events).run()
print(json.dumps({"steps": result.steps, "samples": result.samples, "auc": result.auc,
                  "versions": result.versions, "errors": result.save_failures}))
"""


def settings(tmp_path: Path) -> list[str]:
    return [*SETTINGS, f"checkpoint.path={tmp_path / 'store'}", "checkpoint.every_steps=40"]


def start(tmp_path: Path, name: str, servers: int, workers: int) -> subprocess.Popen[str]:
    arguments = [str(tmp_path / name), str(servers), str(workers), *settings(tmp_path)]
    return subprocess.Popen([sys.executable, "-c", RUN, *arguments], stdout=subprocess.PIPE, text=True)


def versions(tmp_path: Path) -> list[Any]:
    if not (tmp_path / "store").exists():
        return []
    with open_store(str(tmp_path / "store"), create=False) as store:
        return read_newest(store).versions


def ckpt(*arguments: str) -> subprocess.CompletedProcess[str]:
    return holdfast("ckpt", *arguments, cwd=Path.cwd())


def test_a_job_is_killed_and_goes_on_with_other_servers_and_workers(tmp_path: Path) -> None:
    first = start(tmp_path, "first", 3, 2)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(versions(tmp_path)) < 2 and time.monotonic() < deadline:
        assert first.poll() is None, "it ended before it was killed"
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    saved = versions(tmp_path)
    assert len(saved) >= 2

    second = start(tmp_path, "second", 2, 3)
    out, _ = second.communicate(timeout=PATIENCE_SECONDS)
    resumed, result = map(json.loads, out.splitlines())
    version, steps, samples = resumed["resumed"]
    assert version >= saved[-1].version  # one more may have been on its way
    assert steps * BATCH == samples  # all batches are full
    assert 0 < steps < SAMPLES // BATCH
    # Exactly once in all: what was trained on before is not trained on again, and nothing is left out.
    assert (result["steps"], result["samples"]) == (SAMPLES // BATCH, SAMPLES)
    assert result["errors"] == []
    assert result["versions"]
    assert versions(tmp_path)[-1].step == SAMPLES // BATCH - 1

    checked = ckpt("verify", str(tmp_path / "store"))
    assert checked.returncode == 0, checked.stderr
    compare_with_the_servers(tmp_path, result["auc"])


def compare_with_the_servers(tmp_path: Path, auc: float) -> None:
    """What was saved is what servers held: the model that it makes tests as a worker tested it."""
    model = tmp_path / "model.safetensors"
    exported = ckpt("export", str(tmp_path / "store"), "--format", "safetensors", "--out", str(model))
    assert exported.returncode == 0, exported.stderr
    trainer = Trainer(config())
    trainer.model.load_state_dict(load_file(model))
    assert trainer.test().auc == auc
    # The same version in a single process, with its optimizers.
    other = Trainer(config())
    objects = {
        "model": other.model,
        "optim_network": other.optimizers[0],
        "optim_tables": other.optimizers[1],
    }
    with hf.Checkpointer(tmp_path / "store", objects) as checkpointer:
        assert checkpointer.restore() == SAMPLES // BATCH
    # And its model alone, and with one of its optimizers.
    third = Trainer(config())
    assert hf.load(tmp_path / "store", {"model": third.model}).step == SAMPLES // BATCH - 1
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name
        assert torch.equal(tensor, third.model.state_dict()[name]), name
    assert set(hf.saved_shapes(tmp_path / "store").tables) == {
        f"model.{name}" for name in other.model.state_dict() if name.startswith("tables.")
    }
    hf.load(tmp_path / "store", {"model": third.model, "optim_tables": third.optimizers[1]})
    for mine, its in zip(third.model.tables.parameters(), other.model.tables.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            state = third.optimizers[1].state[mine][key]
            assert torch.equal(state, other.optimizers[1].state[its][key])
    states = other.optimizers[1].state.values()
    assert any((state["exp_avg_sq"] > 0).any() for state in states)
    other.advance(1)


def config() -> Config:
    return load(overrides=SETTINGS)
