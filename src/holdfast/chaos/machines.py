"""``holdfast chaos --engine ray``: what happens to machines, in a lab of several hosts.

``run_on_machines`` makes a lab and waits for its result. In the lab, ``MachineTrial.run`` is the main path.
It starts a job on Ray, lets one thing after the other happen to machines, waits each time until the job is
whole again, stops the job, and compares what it has saved with a twin to which nothing happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.chaos.checker import Checker
from holdfast.chaos.run import ChaosOptions, ChaosResult, plan_chaos
from holdfast.chaos.schedule import draw
from holdfast.cluster.server.process import prepare
from holdfast.errors import HoldfastError, NoSuchVersion
from holdfast.options import Ray
from holdfast.testing.lab import Host, Lab, check_available, enclosed
from holdfast.testing.ray_cluster import CONTROLLER, NAME, NODE, RayCluster, RayJob, started_by
from holdfast.training.session import make_folder

MACHINE_KINDS: Final = {
    "poweroff": 3,
    "supervisor_poweroff": 2,
    "crash": 2,
    "cut": 2,
    "short_cut": 1,
    "freeze": 1,
    "slow": 1,
    "processes_kill": 1,
    "driver_kill": 1,
    "controller_kill": 1,
}
"""And how often they are drawn. The host with Ray's head is spared. The controller is there at first; once it
was killed, it is on a machine that may be lost."""
LOSSES: Final = ("poweroff", "supervisor_poweroff", "crash")
"""Those that take a machine with all that it has in memory; it is switched on again later."""
DESCRIPTIONS: Final = {
    "poweroff": "a machine with a server, and nobody is told",
    "supervisor_poweroff": "the same, with the supervisor's machine",
    "crash": "the kernel closes its connections",
    "cut": "a cable, mended when others have taken over",
    "short_cut": "for less than the time-out",
    "freeze": "all processes of a machine are stopped, and woken up when they were replaced",
    "slow": "all processes of a machine run half of the time",
    "processes_kill": "kill -9 of the job's processes on a machine",
    "driver_kill": "kill -9 of the user's process; another one attaches",
    "controller_kill": "kill -9 of the controller; a machine starts another one",
}
SILENT_SECONDS: Final = Ray().silent_seconds
_START_SECONDS = 600.0
_WHOLE_SECONDS = 120.0
_CALM_SECONDS = 1.0
_SLOW_SECONDS = 8.0
_SLICE_SECONDS = 0.08
_STEPS_BETWEEN = 50
_SCRUB_SECONDS = 2.0
_RAYLET = "/raylet/raylet"


def run_on_machines(options: ChaosOptions, on_line: Callable[[str], None]) -> ChaosResult:
    """Run the job in a lab, and check it. ``on_line`` is told what happens."""
    check_available()
    prepare()  # compiles what servers need, once, for all hosts
    folder = make_folder(options.run).absolute()
    (folder / "options.json").write_bytes(msgspec.json.encode(options))
    command = enclosed([sys.executable, "-m", "holdfast.chaos.machines", str(folder)])
    with (
        (folder / "lab.log").open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as lab,
    ):
        assert lab.stdout is not None
        try:
            for line in lab.stdout:
                on_line(line.rstrip("\n"))
        except BaseException:
            lab.terminate()
            raise
    found = folder / "result.json"
    if not found.exists():
        raise HoldfastError(f"the lab ended with code {lab.returncode}: see {folder / 'lab.log'}")
    result = msgspec.json.decode(found.read_bytes(), type=dict[str, Any])
    return ChaosResult(**{**result, "faults": Counter(result["faults"]), "folder": folder})


class MachineTrial:
    """One job in a lab.

    Args:
        cluster: Ray, on the hosts of the lab.
        options: of the run.
    """

    def __init__(self, cluster: RayCluster, options: ChaosOptions) -> None:
        self._cluster, self._options = cluster, options
        self._folder = cluster.folder
        self._dice = random.Random(f"machines {options.seed}")
        self._plan = plan_chaos(options, self._folder)
        self._checker = Checker(self._plan)
        self._attached = 0
        self.result = ChaosResult()

    def run(self) -> None:
        """Fill in the result; what is not as it must be is among its problems."""
        config = msgspec.to_builtins(self._options.config(self._folder / "store"))
        del config["job"]["engine"]
        path = self._folder / "job.json"
        path.write_text(json.dumps(config))
        settings = ["job.engine.shared_paths=true", f"job.protection.scrub_seconds={_SCRUB_SECONDS}"]
        began = time.monotonic()
        self._job = RayJob.start(self._cluster, settings, path)
        try:
            self._job.wait(lambda: self._job.step() > _STEPS_BETWEEN, _START_SECONDS)
            self._strike_for(60 * self._options.minutes)
            self._cluster.command("stop", NAME)
            ended = self._job.finish()
            self._check(ended)
        except (HoldfastError, subprocess.TimeoutExpired) as error:
            self.result.hangs += 1
            self.result.problems.append(str(error))
        self.result.seconds = time.monotonic() - began

    def _strike_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for kind in draw(self._dice, MACHINE_KINDS):
            if time.monotonic() > end:
                return
            began, whole = time.monotonic(), len(self._job.events("redundancy_restored"))
            getattr(self, f"_{kind}")()
            self._wait_until_whole()
            self._wait_until_spread()
            self._wait_until_whole()  # a server that has moved recovers its rows once more
            self.result.faults[kind] += 1
            with contextlib.suppress(NoSuchVersion):
                self._checker.check_version()
            restored = len(self._job.events("redundancy_restored")) - whole
            took = time.monotonic() - began
            _say(f"{kind}: whole again after {took:.1f} s, {restored} times redundancy restored")

    # What happens

    def _poweroff(self) -> None:
        self._lose(self._some_host(), Host.power_off)

    def _supervisor_poweroff(self) -> None:
        self._lose(self._job.host_of("supervisor"), Host.power_off)

    def _crash(self) -> None:
        self._lose(self._some_host(), Host.crash)

    def _lose(self, host: Host, how: Callable[[Host], None]) -> None:
        """A machine is lost; when others have taken over, it comes back."""
        found = len(self._job.events("machine_found"))
        how(host)
        self._job.wait(lambda: host.address not in self._job.machines(), _WHOLE_SECONDS)
        self._wait_until_whole()
        self._cluster.switch_on(host)
        self._job.wait(lambda: len(self._job.events("machine_found")) > found, _WHOLE_SECONDS)

    def _cut(self) -> None:
        host = self._some_host()
        lost, found = len(self._job.events("machine_lost")), len(self._job.events("machine_found"))
        host.cut()
        self._job.wait(lambda: host.address not in self._job.machines(), _WHOLE_SECONDS)
        host.heal()
        self._wait_until_whole()
        self._return(host, lost, found)

    def _short_cut(self) -> None:
        host = self._some_host()
        lost, found = len(self._job.events("machine_lost")), len(self._job.events("machine_found"))
        host.cut()
        time.sleep(self._dice.uniform(0.2, 0.6) * SILENT_SECONDS)
        host.heal()
        self._return(host, lost, found)

    def _freeze(self) -> None:
        host = self._some_host()
        lost, found = len(self._job.events("machine_lost")), len(self._job.events("machine_found"))
        host.signal(signal.SIGSTOP)
        self._job.wait(lambda: host.address not in self._job.machines(), _WHOLE_SECONDS)
        host.signal(signal.SIGCONT)
        self._wait_until_whole()
        self._return(host, lost, found)

    def _slow(self) -> None:
        host = self._some_host()
        lost, found = len(self._job.events("machine_lost")), len(self._job.events("machine_found"))
        end = time.monotonic() + _SLOW_SECONDS
        while time.monotonic() < end:
            host.signal(signal.SIGSTOP)
            time.sleep(_SLICE_SECONDS)
            host.signal(signal.SIGCONT)
            time.sleep(_SLICE_SECONDS)
        self._return(host, lost, found)

    def _return(self, host: Host, lost: int, found: int) -> None:
        """If Ray has given a host up meanwhile, its Ray has ended, as Ray documents it: start it again."""
        self._go_on()
        if len(self._job.events("machine_lost")) > lost:
            host.crash()
            self._cluster.switch_on(host)
            self._job.wait(lambda: len(self._job.events("machine_found")) > found, _WHOLE_SECONDS)

    def _processes_kill(self) -> None:
        host = self._some_host()
        started = len(self._job.events("process_started"))
        for pid in host.find(NODE):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._job.wait(lambda: len(self._job.events("process_started")) > started, _WHOLE_SECONDS)

    def _driver_kill(self) -> None:
        self._job.kill()
        time.sleep(_CALM_SECONDS)
        self._attached += 1
        self._job = RayJob.attach(self._cluster, f"attached-{self._attached}")
        self._go_on()

    def _controller_kill(self) -> None:
        replaced = len(self._job.events("controller_replaced"))
        for host in self._cluster.lab.hosts.values():
            for pid in host.find(CONTROLLER):
                os.kill(pid, signal.SIGKILL)
        self._job.wait(lambda: len(self._job.events("controller_replaced")) > replaced, _WHOLE_SECONDS)

    def _some_host(self) -> Host:
        """A machine with a server; not that of the supervisor."""
        spared = self._job.machine_of("supervisor", 0)
        servers = {self._job.machine_of("server", slot) for slot in range(self._options.servers)}
        return self._cluster.host_at(self._dice.choice(sorted(servers - {spared})))

    # What must come of it

    def _wait_until_whole(self) -> None:
        """Until all rows and parities are back, and training goes on."""
        self._go_on()
        self._job.wait(self._is_whole, _WHOLE_SECONDS)

    def _wait_until_spread(self) -> None:
        """Until each server has a machine of its own again. A machine that Ray has given up while nobody was
        there to say so, between two controllers, gets its Ray again."""
        end = time.monotonic() + _WHOLE_SECONDS
        while True:
            try:
                self._job.wait(lambda: self._is_spread() and self._all_have_vaults(), _WHOLE_SECONDS / 6)
                return
            except HoldfastError:
                if self._job.process.poll() is not None or time.monotonic() > end:
                    raise
            for host in self._cluster.machines:
                if not host.find(_RAYLET):
                    host.crash()
                    self._cluster.switch_on(host)

    def _is_whole(self) -> bool:
        started = [
            event["time"] for event in self._job.events("process_started") if event["role"] == "server"
        ]
        restored = [event["time"] for event in self._job.events("redundancy_restored")]
        return not started or restored[-1:] > started[-1:]

    def _is_spread(self) -> bool:
        """Whether servers that shared a machine have moved, so that the next machine may be lost."""
        changes = [*self._job.events("spread_lost"), *self._job.events("spread_restored")]
        return not changes or max(changes, key=lambda event: event["time"])["event"] == "spread_restored"

    def _all_have_vaults(self) -> bool:
        """Whether the vaults of all machines decide about the supervisor's state."""
        changes = self._job.events("vaults_changed")
        return not changes or len(changes[-1]["machines"]) == len(self._cluster.machines)

    def _go_on(self) -> None:
        at = self._job.step()
        self._job.wait(lambda: self._job.step() > at + _STEPS_BETWEEN, _WHOLE_SECONDS)

    def _check(self, ended: dict[str, Any]) -> None:
        """Compare the last version with the twin, and the job's own figures with it."""
        result, checker = self.result, self._checker
        events = Counter(event["event"] for event in self._job.events())
        if self._job.process.returncode:
            result.problems.append(f"the job ended with code {self._job.process.returncode}")
        result.data_losses = events["job_restored"]
        if result.data_losses:
            result.problems.append(
                f"the code covered all that happened, but {result.data_losses} times data was lost"
            )
        checker.check_version()
        if ended["steps"] != len(checker.batches):
            checker.complain(
                f"the job says {ended['steps']} batches, its newest version has {len(checker.batches)}"
            )
        if ended["parities_wrong"]:
            checker.complain(f"servers found {ended['parities_wrong']} parities that do not fit")
        result.lost, result.wrong, result.versions_checked = checker.lost, checker.wrong, checker.versions
        result.batches = len(checker.batches)
        result.updates_checked = checker.updates
        result.stripes_checked = ended["parities_checked"]
        result.recoveries = events["server_recovered"]
        result.workers_replaced = events["worker_lost"]
        result.supervisors_restarted = sum(
            process.get("role") == "supervisor"
            for event in self._job.events("process_started")
            for process in started_by(event)
        )
        result.machine_losses = sum(result.faults[kind] for kind in LOSSES)
        result.problems += checker.problems


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    """In the lab: run the job, and leave the result in its folder."""
    folder = Path(sys.argv[1])
    options = msgspec.json.decode((folder / "options.json").read_bytes(), type=ChaosOptions)
    with Lab(options.hosts) as lab, RayCluster(lab, folder) as cluster:
        trial = MachineTrial(cluster, options)
        trial.run()
    (folder / "result.json").write_bytes(msgspec.json.encode(trial.result, enc_hook=str))  # its folder


if __name__ == "__main__":
    main()
