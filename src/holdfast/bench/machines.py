"""``bench machines``: a job on Ray, and what the loss of a machine costs it, on five hosts in a lab.

The hosts are namespaces of this machine (``holdfast.testing.lab``), and share its processors. The first has
Ray's head and the user; servers, workers and the supervisor are on the other four: 3 servers with a code of
2 + 1, 2 workers. All options have their default values, so a process counts as dead after 3 seconds of
silence. Each round makes a new lab.

- ``machines.ray_over_local.samples_per_second``: of a job on Ray relative to the same job without Ray, on the
  same processors, before Ray is started. The model is that of ``bench job``; the other figures are of a small
  one, whose steps are short.
- ``machines.KIND.resume_seconds``: from a failure until batches count again, after the longest pause since.
  *process* is a server process that is killed, *poweroff* a machine with a server that is switched off
  without anybody being told, *supervisor* the same with the machine of the supervisor, *controller* that of
  the controller, with a server on it. A job reports its steps four times a second, so these figures are up
  to a quarter of a second too long or too short.
- ``machines.driver.pause_seconds``: the longest time without a batch that counts, in the five seconds after
  the user's process was killed, from report to report.
- ``machines.bit_exact``: 1 if a job that loses a machine ends with the rows, to the bit, of one on a single
  machine that loses nothing. One worker, one batch after the other: in other orders, sums of floats differ.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.bench.harness import Report, Spread, ratio
from holdfast.errors import HoldfastError
from holdfast.testing.lab import Lab, check_available, enclosed
from holdfast.testing.ray_cluster import NAME, RayCluster, RayJob, local_job

HOSTS = 5
JOB = ("job.servers=3", "job.protection={kind: erasure-code, k: 2, r: 1}", "job.workers=2")
SETTINGS = (
    *JOB, "batch_size=256", "data.test_samples=5000", "data.max_rows=5000", "report_every=1",
    "model.dim=8", "model.bottom=[16,8]", "model.top=[16,1]",
)  # fmt: skip
"""A small model, which reports its steps often."""
SPEED_SETTINGS = (
    *JOB, "model.preset=criteo-kaggle", "data.cardinalities=kaggle", "data.max_rows=100000",
    "batch_size=2048", f"data.samples={2048 * 600}", "data.test_samples=1",
)  # fmt: skip
"""The model of ``bench job``."""
ENDLESS = ("data.samples=1000000000",)
ONE_AFTER_THE_OTHER = ("job.workers=1", "job.staleness=0")
_ROUNDS = 3
_STEPS = 3000
_BEFORE = 100
"""Steps before anything happens."""
_DRIVER_SECONDS = 5.0
_SETTLE_SECONDS = 2.0
_CALM_SECONDS = 20.0
"""So long after its start, Ray's own processes still need the processors."""


def run(report: Report) -> None:
    """All figures; quickly, a single round, and no comparison of bits."""
    check_available()
    rounds = 1 if report.quick else _ROUNDS
    report.settings.update(
        hosts=HOSTS, rounds=rounds, steps=_STEPS, job=list(SETTINGS), speed=list(SPEED_SETTINGS)
    )
    speeds = [_in_a_lab("speed") for _ in range(rounds)]
    report.raw["speed"] = speeds
    report.figure(
        "machines.ray_over_local.samples_per_second",
        ratio([one["ray"] for one in speeds], [one["local"] for one in speeds]),
    )
    losses = [_in_a_lab("losses") | _in_a_lab("controller") for _ in range(rounds)]
    report.raw["losses"] = losses
    for kind in ("process", "poweroff", "supervisor", "controller"):
        report.figure(f"machines.{kind}.resume_seconds", Spread.of([one[kind] for one in losses]))
    report.figure("machines.driver.pause_seconds", Spread.of([one["driver"] for one in losses]))
    if not report.quick:
        report.figure("machines.bit_exact", float(_in_a_lab("exact")["same"]))


def _in_a_lab(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hf-bench-", dir="/tmp") as folder:
        command = enclosed([sys.executable, "-m", "holdfast.bench.machines", name, folder])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise HoldfastError(f"a lab ended with code {done.returncode}: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# In the lab


def measure_speed(lab: Lab, folder: Path) -> dict[str, float]:
    """Samples a second of both."""
    local = local_job(folder, SPEED_SETTINGS)
    with RayCluster(lab, folder) as cluster:
        time.sleep(_CALM_SECONDS)
        result = RayJob.start(cluster, SPEED_SETTINGS).finish()
    return {"local": local["samples_per_second"], "ray": result["samples_per_second"]}


def measure_losses(lab: Lab, folder: Path) -> dict[str, float]:
    """Seconds that a job pauses for one failure after the other."""
    found: dict[str, float] = {}
    with RayCluster(lab, folder) as cluster:
        first = RayJob.start(cluster, [*SETTINGS, *ENDLESS, f"job.kill=['server:0@step:{_BEFORE}']"])
        first.wait(lambda: first.events("redundancy_restored"), 300.0)
        _go_on(first)
        at = first.events("killed")[0]["time"]
        found["process"] = _resumed_at(first, at) - at

        first.kill()
        at = time.time()
        job = RayJob.attach(cluster)
        job.wait(lambda: job.times()[-1:] > [at + _DRIVER_SECONDS])
        found["driver"] = _longest_pause(
            [one for one in job.times() if at - 1.0 < one < at + _DRIVER_SECONDS]
        )

        at = time.time()
        job.host_of("server", without=("supervisor",)).power_off()
        job.wait(lambda: len(job.events("redundancy_restored")) == 2)
        _go_on(job)
        found["poweroff"] = _resumed_at(job, at) - at

        lost = job.host_of("supervisor")
        at = time.time()
        lost.power_off()
        job.wait(lambda: job.machine_of("supervisor", 0) != lost.address)
        _go_on(job)
        found["supervisor"] = _resumed_at(job, at) - at
        cluster.command("stop", NAME)
        job.finish()
    return found


def measure_controller(lab: Lab, folder: Path) -> dict[str, float]:
    """Seconds that a job pauses when the machine with its controller loses power. Each machine has a
    server."""
    with RayCluster(lab, folder) as cluster:
        cluster.user = lost = cluster.lab[2]
        job = RayJob.start(cluster, [*SETTINGS, *ENDLESS, "job.servers=4"])
        job.wait(lambda: job.step() > _BEFORE, 300.0)
        at = time.time()
        lost.power_off()
        cluster.user = cluster.lab[1]
        later = RayJob.attach(cluster)
        later.wait(lambda: later.events("controller_replaced") and later.events("redundancy_restored"))
        _go_on(later)
        resumed = _resumed_at(later, at)
        cluster.command("stop", NAME)
        later.finish()
    return {"controller": resumed - at}


def measure_exact(lab: Lab, folder: Path) -> dict[str, bool]:
    """Whether the records of both jobs are the same."""
    settings = [*SETTINGS, *ONE_AFTER_THE_OTHER, f"data.samples={256 * _STEPS}"]
    expected = local_job(folder, settings)
    with RayCluster(lab, folder) as cluster:
        job = RayJob.start(cluster, settings)
        job.wait(lambda: job.step() > _BEFORE, 300.0)
        # A worker that dies, too, computes batches again, from rows that have changed since.
        job.host_of("server", without=("supervisor", "worker")).power_off()
        result = job.finish()
    return {"same": result["records"] == expected["records"] and result["servers_replaced"] == 1}


def _go_on(job: RayJob) -> None:
    """Wait until the job has trained for a while from now on."""
    now = time.time()
    job.wait(lambda: job.times()[-1:] > [now + _SETTLE_SECONDS])


def _resumed_at(job: RayJob, failed: float) -> float:
    """When batches counted again after the longest pause since."""
    times = [at for at in job.times() if at > failed - 1.0]
    after = [(first, second) for first, second in pairwise(times) if second > failed]
    return max(after, key=lambda pair: pair[1] - pair[0])[1]


def _longest_pause(times: Sequence[float]) -> float:
    return max(second - first for first, second in pairwise(times))


SCENARIOS: dict[str, Callable[[Lab, Path], dict[str, Any]]] = {
    "speed": measure_speed,
    "losses": measure_losses,
    "controller": measure_controller,
    "exact": measure_exact,
}


def main() -> None:
    """In the lab: run one of the scenarios, and print what it found."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    with Lab(HOSTS) as lab:
        print(json.dumps(SCENARIOS[name](lab, folder)))


if __name__ == "__main__":
    main()
