"""``torchrun --max-restarts``: a rank dies, all are started again, and go on from the last version."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.ranks.jobs import ROOT, Jobs

SCRIPT = Path(__file__).with_name("elastic.py")


@pytest.mark.soak
def test_torchrun_starts_the_ranks_again(jobs: Jobs, tmp_path: Path) -> None:
    straight = jobs.run(tmp_path, 2, steps=14).all_ended_well()
    store = tmp_path / "elastic"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", "1", str(SCRIPT), str(store), "14", "3",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    # Otherwise init_process_group may find addresses of the first attempt in the store, and fail.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True) as process:
        try:
            assert process.wait(timeout=200) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: these processes and no others
    assert not list(tmp_path.glob("elastic.*.0.json")), "nobody ended in the first attempt"
    for rank in (0, 1):
        said = json.loads((tmp_path / f"elastic.{rank}.1.json").read_text())
        assert said["begun"] == 6, "version 3 was never whole"
        assert said["digests"] == straight.one(rank, "trained")["digests"]
