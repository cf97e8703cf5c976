"""What becomes of a job when something happens to a machine. Each function runs in a lab of its own:

    python -m holdfast.testing.lab python -m tests.lab.scenarios NAME FOLDER

The first host has Ray's head and the user; the job's machines are the others.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdfast.testing.lab import Host, Lab
from tests.lab.ray_cluster import NAME, RayCluster, RayJob, local_job

HOSTS = 5
STEPS = 3000
SETTINGS = (
    "job.servers=3", "job.protection={kind: erasure-code, k: 2, r: 1, scrub_seconds: 3}", "job.workers=2",
    f"max_steps={STEPS}", "batch_size=256", "data.samples=900000", "data.test_samples=5000",
    "data.max_rows=5000", "report_every=10", "model.dim=8", "model.bottom=[16,8]", "model.top=[16,1]",
)  # fmt: skip
ONE_AFTER_THE_OTHER = ("job.workers=1", "job.staleness=0")
"""The result is then the same to the bit, however long anything takes."""
BEFORE = 100
"""Steps before anything happens."""
SCENARIOS: dict[str, Callable[[RayCluster], None]] = {}


def scenario(function: Callable[[RayCluster], None]) -> Callable[[RayCluster], None]:
    SCENARIOS[function.__name__] = function
    return function


def begin(cluster: RayCluster, *more: str) -> RayJob:
    job = RayJob.start(cluster, [*SETTINGS, *more])
    job.wait(lambda: job.step() > BEFORE, 300.0)
    assert cluster.jobs() == f"{NAME}  running"
    return job


def host_with(cluster: RayCluster, job: RayJob, role: str, *, without: Sequence[str] = ()) -> Host:
    """A machine that runs such a process, and none of the others."""
    others = {job.machine_of(other, slot) for other in without for slot in range(2)}
    for slot in range(3):
        address = job.machine_of(role, slot)
        if address and address not in others:
            return next(host for host in cluster.lab.hosts.values() if host.address == address)
    raise AssertionError(f"no machine runs a {role} and none of {without}")


def check_complete(job: RayJob) -> dict[str, Any]:
    """Every batch counted once, and parities match their rows."""
    result = job.finish()
    assert job.process.returncode == 0, result
    assert result["steps"] == STEPS, result["steps"]
    assert not result["interrupted"]
    assert result["parities_checked"] > 0
    assert result["parities_wrong"] == 0
    return result


def processes_on(host: Host) -> list[str]:
    """The job's processes there."""
    found = host.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.splitlines()
    return [line for line in found if "holdfast.cluster.runtime.node" in line]


@scenario
def nothing_happens(cluster: RayCluster) -> None:
    """Servers are on different machines, and events of all arrive."""
    job = begin(cluster)
    machines = {job.machine_of("server", slot) for slot in range(3)}
    assert len(machines) == 3, machines
    assert cluster.lab[1].address not in machines
    check_complete(job)
    supervised = job.machine_of("supervisor", 0)
    assert {event["host"] for event in job.events("worker_started")} == {supervised}


@scenario
def power_off(cluster: RayCluster) -> None:
    """A machine with a server loses power, and nobody is told. Nothing is lost, to the bit."""
    expected = local_job(cluster, [*SETTINGS, *ONE_AFTER_THE_OTHER])
    job = begin(cluster, *ONE_AFTER_THE_OTHER)
    # A worker that dies, too, computes batches again, from rows that have changed since.
    host_with(cluster, job, "server", without=("supervisor", "worker")).power_off()
    job.wait(lambda: job.events("redundancy_restored"))
    result = check_complete(job)
    assert result["servers_replaced"] == 1
    assert result["records"] == expected["records"]


@scenario
def cut_and_heal(cluster: RayCluster) -> None:
    """A machine cannot be reached for a while. Whoever took its place stays, and its own processes end."""
    job = begin(cluster)
    lost = host_with(cluster, job, "server", without=("supervisor",))
    slot = next(slot for slot in range(3) if job.machine_of("server", slot) == lost.address)
    assert processes_on(lost)
    lost.cut()
    job.wait(lambda: job.events("redundancy_restored"))
    assert job.machine_of("server", slot) != lost.address
    lost.heal()
    job.wait(lambda: not any("server" in line for line in processes_on(lost)))
    result = check_complete(job)
    assert result["servers_replaced"] == 1


@scenario
def supervisor_lost(cluster: RayCluster) -> None:
    """The machine with the supervisor loses power: another one takes over, knows all, and training goes
    on."""
    job = begin(cluster)
    lost = host_with(cluster, job, "supervisor")
    lost.power_off()
    job.wait(lambda: job.machine_of("supervisor", 0) != lost.address)
    at = job.step()
    job.wait(lambda: job.step() > at + BEFORE)
    check_complete(job)


@scenario
def user_killed(cluster: RayCluster) -> None:
    """The user's process is killed. The job goes on, and whoever attaches later misses nothing."""
    job = begin(cluster)
    job.process.kill()
    job.process.wait()
    at = job.step()
    later = RayJob.attach(cluster)
    later.wait(lambda: later.step() > at + BEFORE)
    check_complete(later)
    assert [event["step"] for event in later.events("progress")][:5] == [
        event["step"] for event in job.events("progress")
    ][:5]
    assert cluster.jobs() == "no job is on the cluster"


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    signal.alarm(800)
    with Lab(HOSTS) as lab, RayCluster(lab, folder) as cluster:
        SCENARIOS[name](cluster)


if __name__ == "__main__":
    main()
