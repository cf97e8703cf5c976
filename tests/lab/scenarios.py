"""What becomes of a job when something happens to a machine. Each function runs in a lab of its own:

    python -m holdfast.testing.lab python -m tests.lab.scenarios NAME FOLDER

The first host has Ray's head and the user; the job's machines are the others.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.testing.lab import Host, Lab, command_line
from holdfast.testing.ray_cluster import (
    CONTROLLER,
    CPUS,
    NAME,
    NODE,
    RayCluster,
    RayJob,
    local_job,
)

HOSTS = 5
STEPS = 3000
SETTINGS = (
    "job.servers=3", "job.protection={kind: erasure-code, k: 2, r: 1, scrub_seconds: 3}", "job.workers=2",
    f"max_steps={STEPS}", "batch_size=256", "data.samples=900000", "data.test_samples=5000",
    "data.max_rows=5000", "report_every=10", "model.dim=8", "model.bottom=[16,8]", "model.top=[16,1]",
)  # fmt: skip
ONE_AFTER_THE_OTHER = ("job.workers=1", "job.staleness=0")
"""The result is then the same to the bit, however long anything takes."""
ENDLESS = "max_steps=1000000", "data.samples=256000000"
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ray_own_model"
BEFORE = 100
"""Steps before anything happens."""
RACKS = {2: "rack=a", 3: "rack=a", 4: "rack=b", 5: "rack=b", 6: "rack=c", 7: "rack=c"}
"""Labels of hosts, where racks are lost."""
SCENARIOS: dict[str, Callable[[RayCluster], None]] = {}


def scenario(function: Callable[[RayCluster], None]) -> Callable[[RayCluster], None]:
    SCENARIOS[function.__name__] = function
    return function


def begin(cluster: RayCluster, *more: str) -> RayJob:
    job = RayJob.start(cluster, [*SETTINGS, *more])
    job.wait(lambda: job.step() > BEFORE, 300.0)
    assert cluster.jobs() == f"{NAME}  running"
    return job


def check_complete(job: RayJob, *, stopped: bool = False) -> dict[str, Any]:
    """Every batch counted once, and parities match their rows."""
    result = job.finish()
    assert job.process.returncode == 0, result
    assert stopped or result["steps"] == STEPS, result["steps"]
    assert result["interrupted"] == stopped
    assert result["parities_checked"] > 0
    assert result["parities_wrong"] == 0
    return result


def refusal(cluster: RayCluster, *settings: str) -> str:
    """What a user reads whose job is refused."""
    job = RayJob.start(cluster, [*SETTINGS, *settings], name=f"refused-{len(settings)}")
    assert job.process.wait(120) == 1
    return " ".join(job.log.read_text().split())


def processes_on(host: Host) -> list[str]:
    """The job's processes there."""
    return [command_line(pid) for pid in host.find(NODE)]


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
    expected = local_job(cluster.folder, [*SETTINGS, *ONE_AFTER_THE_OTHER])
    job = begin(cluster, *ONE_AFTER_THE_OTHER)
    # A worker that dies, too, computes batches again, from rows that have changed since.
    job.host_of("server", without=("supervisor", "worker")).power_off()
    job.wait(lambda: job.events("redundancy_restored"))
    result = check_complete(job)
    assert result["servers_replaced"] == 1
    assert result["records"] == expected["records"]


@scenario
def cut_and_heal(cluster: RayCluster) -> None:
    """A machine cannot be reached for a while. Whoever took its place stays, and its own processes end."""
    job = begin(cluster)
    lost = job.host_of("server", without=("supervisor",))
    slot = next(slot for slot in range(3) if job.machine_of("server", slot) == lost.address)
    assert processes_on(lost)
    lost.cut()
    job.wait(lambda: job.events("redundancy_restored"))
    assert job.machine_of("server", slot) != lost.address
    lost.heal()
    job.wait(lambda: not any("server" in line for line in processes_on(lost)))
    result = check_complete(job)
    assert result["servers_replaced"] == 1


def go_on(job: RayJob) -> None:
    """Wait until the job has trained for a while from now on."""
    at = job.step()
    job.wait(lambda: job.step() > at + BEFORE)


def lose_supervisor(job: RayJob) -> None:
    """The supervisor's machine loses power; another supervisor starts elsewhere, and training goes on."""
    lost = job.host_of("supervisor")
    lost.power_off()
    job.wait(lambda: job.machine_of("supervisor", 0) != lost.address)
    go_on(job)


def stop(cluster: RayCluster, job: RayJob) -> None:
    """Stop the job as a user does."""
    cluster.command("stop", NAME)
    check_complete(job, stopped=True)


@scenario
def supervisor_lost(cluster: RayCluster) -> None:
    """A machine loses power, and later that of the supervisor: another one takes over, knows all, and
    training goes on. Of four vaults two are left: they decide alone since the first loss was noticed."""
    job = begin(cluster, *ENDLESS)
    job.host_of("server", without=("supervisor",)).power_off()
    job.wait(lambda: job.events("redundancy_restored") and job.events("vaults_changed"))
    go_on(job)
    lose_supervisor(job)
    stop(cluster, job)


def lose_and_return(cluster: RayCluster, job: RayJob, host: Host) -> None:
    """A machine loses power; when others have taken over, it is switched on again."""
    found = len(job.events("machine_found"))
    host.power_off()
    job.wait(lambda: host.address not in job.machines())
    go_on(job)
    cluster.switch_on(host)
    job.wait(lambda: len(job.events("machine_found")) > found)


@scenario
def machines_come_and_go(cluster: RayCluster) -> None:
    """Every machine is lost once, and comes back: no vault of the beginning is left in the end."""
    job = begin(cluster, *ENDLESS)
    for host in cluster.machines:
        lose_and_return(cluster, job, host)
    lose_supervisor(job)
    stop(cluster, job)


@scenario
def placement_is_mended(cluster: RayCluster) -> None:
    """Of four servers on four machines, two share one after a loss. When the machine is back, one moves
    there. Then the machine that they shared may be lost, too."""
    job = begin(cluster, *ENDLESS, "job.servers=4")
    lose_and_return(cluster, job, job.host_of("server", without=("supervisor",)))
    assert job.events("spread_lost")
    job.wait(lambda: job.events("spread_restored"))
    (moved,) = job.events("server_moved")
    job.wait(lambda: len(job.events("redundancy_restored")) == 2)
    cluster.host_at(moved["machine"]).power_off()
    job.wait(lambda: len(job.events("redundancy_restored")) == 3)
    go_on(job)
    stop(cluster, job)


def drain(cluster: RayCluster, job: RayJob, host: Host, seconds: int | None) -> None:
    """A machine is drained, and nothing of the job is there any more when it loses power."""
    cluster.drain(host, seconds)
    job.wait(lambda: host.address in [event["machine"] for event in job.events("machine_drained")])
    assert host.address not in job.machines()
    moved_at = max((event["time"] for event in job.events("server_moved")), default=0.0)
    job.wait(lambda: any(event["time"] > moved_at for event in job.events("redundancy_restored")))
    lost = len(job.events("server_lost"))
    host.power_off()
    gone = len(job.events("machine_lost")) + 1
    job.wait(lambda: len(job.events("machine_lost")) == gone)
    go_on(job)
    assert len(job.events("server_lost")) == lost, "nothing was there to be lost"
    assert host.address not in job.machines()


@scenario
def machines_drained(cluster: RayCluster) -> None:
    """Machines are drained before they lose power: one with a server and a worker, then the supervisor's."""
    job = begin(cluster, *ENDLESS)
    host = job.host_of("worker", without=("supervisor",))
    here = {slot for slot in range(3) if job.machine_of("server", slot) == host.address}
    drain(cluster, job, host, None)
    assert {event["slot"] for event in job.events("server_moved")} == here
    assert len(job.events("worker_moved")) == 1
    assert not job.events("supervisor_moved")
    host = job.host_of("supervisor")
    drain(cluster, job, host, 120)
    assert [event["machine"] for event in job.events("supervisor_moved")] == [host.address]
    moved = job.events("server_moved")
    assert len(job.events("server_lost")) == len(moved), "only servers that moved came back"
    stop(cluster, job)


@scenario
def drained_in_a_hurry(cluster: RayCluster) -> None:
    """Of a machine with two servers, both leave at once if it goes soon: the code covers that."""
    code = "job.protection={kind: erasure-code, k: 4, r: 2, scrub_seconds: 3}"
    job = begin(cluster, *ENDLESS, "job.servers=6", code)
    machines = [job.machine_of("server", slot) for slot in range(6)]
    host = cluster.host_at(max(machines, key=machines.count))
    here = [slot for slot, machine in enumerate(machines) if machine == host.address]
    assert len(here) == 2, machines
    drain(cluster, job, host, 8)
    moved = job.events("server_moved")
    assert [event["slot"] for event in moved] == here
    assert moved[1]["time"] - moved[0]["time"] < 0.5
    stop(cluster, job)


@scenario
def own_model(cluster: RayCluster) -> None:
    """The example of a model that only the user's machine has. Ray takes it to all others, also to one that
    starts a process later, when the user's folder is gone."""
    folder = cluster.folder / "example"
    shutil.copytree(EXAMPLE, folder)
    cluster.user_folder = folder
    job = RayJob.start(
        cluster, ["data.arguments.samples=256000000", "report_every=10", SETTINGS[1]], folder / "job.yaml"
    )
    job.wait(lambda: job.step() > BEFORE, 300.0)
    pids = [pid for host in cluster.machines for pid in host.find(NODE)]
    folders = {str(Path(f"/proc/{pid}/cwd").readlink().parent.name) for pid in pids}
    assert folders == {"working_dir_files"}, folders
    shutil.rmtree(folder)
    worker = job.host_of("worker", without=("supervisor",))
    worker.power_off()
    job.wait(lambda: job.events("redundancy_restored"))
    job.wait(lambda: [event for event in job.events("worker_started") if event["incarnation"] > 1])
    go_on(job)
    stop(cluster, job)
    assert job.finish()["auc"] > 0.6


@scenario
def no_room(cluster: RayCluster) -> None:
    """A job that reserves more memory than machines have is refused, with both numbers."""
    job = RayJob.start(cluster, [*SETTINGS, "job.engine.server_memory=1000000000000"])
    job.process.wait(240.0)
    said = " ".join(job.log.read_text().split())
    assert job.process.returncode == 1, said
    assert "no room for 4 machines with 2 CPUs and 2 TB of memory free on each: it has 10.77.0." in said
    assert f"{CPUS} CPUs and " in said


@scenario
def first_job(cluster: RayCluster) -> None:
    """Machines that never ran a job all compile before any process starts, each for itself, and say so."""
    empty = cluster.lab[1].private / "numba"
    variables = f"{{NUMBA_CACHE_DIR: {empty}, XDG_CACHE_HOME: {empty}}}"
    job = begin(cluster, f"job.engine.runtime_env={{env_vars: {variables}}}")
    addresses = {host.address for host in cluster.machines}
    assert {event["machine"] for event in job.events("machine_compiling")} == addresses
    compiled = job.events("machine_compiled")
    assert {event["machine"] for event in compiled} == addresses
    assert max(event["time"] for event in compiled) < job.events("job_started")[0]["time"]
    assert min(event["after_seconds"] for event in compiled) > 1.0
    check_complete(job)


@scenario
def user_killed(cluster: RayCluster) -> None:
    """The user's process is killed. The job goes on, and whoever attaches later misses nothing."""
    job = begin(cluster)
    assert cluster.lab[1].find(" train ")
    job.kill()
    assert not cluster.lab[1].find(" train ")
    at = job.step()
    later = RayJob.attach(cluster)
    later.wait(lambda: later.step() > at + BEFORE)
    check_complete(later)
    assert [event["step"] for event in later.events("progress")][:5] == [
        event["step"] for event in job.events("progress")
    ][:5]
    assert cluster.jobs() == "no job is on the cluster"


@scenario
def rack_lost(cluster: RayCluster) -> None:
    """Both machines of a rack lose power at once, with the supervisor and the servers on them."""
    said = refusal(cluster, "job.engine.domain=zone")
    assert "6 of 6 machines of the Ray cluster have no label 'zone'" in said, said
    assert "ray start --labels zone=VALUE" in said, said
    said = refusal(cluster, "job.engine.domain=rack", "job.servers=4")
    assert "4 servers with a code of 2 + 1 on 6 machines in 3 domains (rack)" in said, said
    assert "use 4 domains or 6 servers" in said, said

    job = begin(cluster, *ENDLESS, "job.servers=6", "job.engine.domain=rack")
    rack_of = {cluster.lab[number].address: label for number, label in RACKS.items()}
    at = [job.machine_of("server", slot) for slot in range(6)]
    assert len(set(at)) == 6, "each machine has a server"
    assert all(len({rack_of[at[(slot + i) % 6]] for i in range(3)}) == 3 for slot in range(6)), (
        "the records of a stripe, on three servers that follow each other, are in three racks"
    )
    lost = rack_of[job.machine_of("supervisor", 0)]
    for host in cluster.machines:
        if rack_of[host.address] == lost:
            host.power_off()
    job.wait(lambda: len(job.events("server_recovered")) == 2 and job.events("redundancy_restored"))
    assert lost not in {rack_of[address] for address in job.machines()}
    assert job.events("spread_lost")
    go_on(job)
    for host in cluster.machines:
        if rack_of[host.address] == lost:
            cluster.switch_on(host)
    job.wait(lambda: job.events("spread_restored"))
    at = [job.machine_of("server", slot) for slot in range(6)]
    assert all(len({rack_of[at[(slot + i) % 6]] for i in range(3)}) == 3 for slot in range(6))
    stop(cluster, job)


@scenario
def controller_lost(cluster: RayCluster) -> None:
    """The machine with the user's process, the controller and a server loses power. A machine that is left
    starts another controller, the job goes on, and whoever attaches finds the whole log."""
    cluster.user = lost = cluster.lab[2]
    job = begin(cluster, *ENDLESS, "job.servers=4")
    assert lost.find(CONTROLLER)
    before = [event["step"] for event in job.events("progress")]
    others = {job.machine_of("server", slot) for slot in range(4)} - {lost.address}
    assert len(others) == 3
    lost.power_off()
    cluster.user = cluster.lab[1]
    later = RayJob.attach(cluster)
    later.wait(lambda: later.events("controller_replaced") and later.events("redundancy_restored"))
    go_on(later)
    assert {later.machine_of("server", slot) for slot in range(4)} == others
    stop(cluster, later)
    assert [event["step"] for event in later.events("progress")][: len(before) - 1] == before[:-1]
    assert cluster.jobs() == "no job is on the cluster"


@scenario
def controllers_die(cluster: RayCluster) -> None:
    """One controller after the other is killed. The processes of the job do not notice."""
    job = begin(cluster, *ENDLESS)
    started = len(job.events("process_started"))
    for _ in range(3):
        replaced = len(job.events("controller_replaced"))
        (host,) = [host for host in cluster.lab.hosts.values() if host.find(CONTROLLER)]
        (pid,) = host.find(CONTROLLER)
        os.kill(pid, signal.SIGKILL)
        while len(job.events("controller_replaced")) == replaced:
            go_on(job)
    assert len(job.events("process_started")) == started
    stop(cluster, job)


@scenario
def head_lost(cluster: RayCluster) -> None:
    """Ray's head loses power, and comes back with what Redis has kept. The job, whose controller is
    elsewhere, does not notice; then it can be stopped as ever."""
    cluster.user = cluster.lab[2]
    job = begin(cluster, *ENDLESS)
    cluster.lab[1].power_off()
    go_on(job)
    cluster.switch_on(cluster.lab[1])
    go_on(job)
    assert not job.events("server_lost")
    assert not job.events("controller_replaced")
    stop(cluster, job)


@scenario
def head_lost_with_controller(cluster: RayCluster) -> None:
    """The same, with the controller and the user's process beside the head."""
    job = begin(cluster, *ENDLESS)
    cluster.lab[1].power_off()
    cluster.user = cluster.lab[2]
    cluster.switch_on(cluster.lab[1])
    later = RayJob.attach(cluster)
    later.wait(lambda: later.events("controller_replaced"))
    go_on(later)
    assert not later.events("server_lost")
    assert later.step() > job.step()
    stop(cluster, later)


WITH_REDIS = ("head_lost", "head_lost_with_controller")


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    signal.alarm(800)
    labels = RACKS if name == rack_lost.__name__ else {}
    hosts = max(labels, default=HOSTS)
    with Lab(hosts) as lab, RayCluster(lab, folder, redis=name in WITH_REDIS, labels=labels) as cluster:
        SCENARIOS[name](cluster)


if __name__ == "__main__":
    main()
