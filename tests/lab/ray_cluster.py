"""A Ray cluster in a lab, and a job on it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.events import read_events
from holdfast.testing.lab import Host, Lab

PORT = 6379
CPUS = 8
NAME = "job"
_RAY = str(Path(sys.executable).with_name("ray"))
_HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
_STORE_BYTES = 80_000_000


class RayCluster:
    """Ray on the hosts of a lab, its head on the first; use as a context manager.

    Args:
        lab: the hosts.
        folder: for logs.
    """

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.address = f"{lab[1].address}:{PORT}"

    def __enter__(self) -> Self:
        head, *others = self.lab.hosts.values()
        for some in [[head], *(others[first : first + 2] for first in range(0, len(others), 2))]:
            for host in some:
                self.start(host)
            for host in some:
                self.wait_for(host)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keep Ray's logs after an error; the lab ends all processes."""
        for host in [host for host in self.lab.hosts.values() if error is not None and host.is_on()]:
            logs = host.private / "session_latest" / "logs"
            copy = ["cp", "-r", str(logs), str(self.folder / f"ray-logs-{host.number}")]
            subprocess.run(host.command(copy), check=False)

    def wait_for(self, host: Host, seconds: float = 90.0) -> None:
        """Wait until Ray runs on a host."""
        end = time.monotonic() + seconds
        while "Ray runtime started" not in (self.folder / f"ray-{host.number}.log").read_text():
            assert time.monotonic() < end, f"Ray did not start on host {host.number} within {seconds} s"
            time.sleep(0.1)

    def jobs(self) -> str:
        """What ``holdfast jobs`` says."""
        command = [_HOLDFAST, "jobs", "--address", self.address]
        said: str = self.lab[1].run(command, capture_output=True, text=True).stdout
        return said.strip()

    def start(self, host: Host) -> None:
        """Start Ray on a host."""
        is_head = host.number == 1
        where = (
            ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={host.private}"]
            if is_head
            else [f"--address={self.address}"]
        )
        command = [
            _RAY, "start", *where, f"--node-ip-address={host.address}",
            f"--num-cpus={0 if is_head else CPUS}",
            f"--object-store-memory={_STORE_BYTES}", "--disable-usage-stats", "--block",
        ]  # fmt: skip
        with (self.folder / f"ray-{host.number}.log").open("ab") as log:
            host.popen(command, {"RAY_raylet_start_wait_time_s": "120"}, stdout=log, stderr=log)


class RayJob:
    """A command of ``holdfast`` that watches a job on the cluster; it runs on the first host.

    Args:
        cluster: where to run.
        command: the command, without the run's folder.
        name: of the run's folder.
    """

    def __init__(self, cluster: RayCluster, command: Sequence[str], name: str = "run") -> None:
        self.run = cluster.folder / name
        self._output = (cluster.folder / f"{name}.log").open("wb")
        self.process = cluster.lab[1].popen(
            [_HOLDFAST, *command, "--run", str(self.run)], stdout=self._output, stderr=subprocess.STDOUT
        )

    @classmethod
    def start(cls, cluster: RayCluster, settings: Sequence[str]) -> RayJob:
        """Start a job as a user does, with settings as ``key=value``."""
        machines = len(cluster.lab.hosts) - 1
        engine = (f"address={cluster.address}", f"machines={machines}", f"name={NAME}")
        command = ["train", "--engine", "ray"]
        for setting in [*(f"job.engine.{each}" for each in engine), *settings]:
            command += ["--set", setting]
        return cls(cluster, command)

    @classmethod
    def attach(cls, cluster: RayCluster) -> RayJob:
        """Watch the job from another process."""
        return cls(cluster, ["attach", NAME, "--address", cluster.address], "attached")

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """What the run's log has, of this name or all."""
        try:
            lines = (self.run / "events.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if not name or event["event"] == name:
                found.append(event)
        return found

    def wait(self, condition: Callable[[], Any], seconds: float = 120.0) -> Any:
        """Wait until it is true, and return it."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert self.process.poll() is None, f"the job ended with code {self.process.returncode}"
            assert time.monotonic() < end, f"not within {seconds} s; events: {self.events()[-5:]}"
            time.sleep(0.05)
        return found

    def step(self) -> int:
        """The last step that was logged."""
        return max((event["step"] for event in self.events("progress")), default=0)

    def machine_of(self, role: str, slot: int) -> str:
        """Where a process runs that was started last."""
        started = [
            process
            for event in self.events()
            for process in (event.get("processes", []) if event["event"] == "job_started" else [event])
            if event["event"] in ("job_started", "process_started")
            and (process.get("role"), process.get("slot")) == (role, slot)
        ]
        return str(started[-1].get("machine", "")) if started else ""

    def finish(self, seconds: float = 180.0) -> dict[str, Any]:
        """Wait for the end; the event that has the result."""
        self.process.wait(seconds)
        self._output.close()
        return self.events("run_finished")[-1]


def local_job(cluster: RayCluster, settings: Sequence[str]) -> dict[str, Any]:
    """The result of the same job on one machine."""
    run = cluster.folder / "local"
    command = [_HOLDFAST, "train", "--run", str(run)]
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(command, check=True, capture_output=True)
    return next(event for event in read_events(run) if event["event"] == "run_finished")
