"""A Ray cluster in a lab (see ``lab``), and users' commands on it.

The first host has Ray's head and the user; a job's machines are the others. Ray is started by its own
command, as users start it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.errors import HoldfastError
from holdfast.testing.lab import Host, Lab

PORT = 6379
CPUS = 8
NAME = "job"
AGENT = "ray::_AgentActor"
"""How the process of an agent calls itself."""
CONTROLLER = "ray::_Host"
NODE = "holdfast.cluster.runtime.node"
"""In the command line of each process of a job."""
HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
"""By default, Ray waits about a minute for a machine that does not answer before another may take over."""
_RAY = str(Path(sys.executable).with_name("ray"))
_HOLDFAST = [sys.executable, "-m", "holdfast"]
_NODE_ID = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print(next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] == sys.argv[2]))
"""
_STORE_BYTES = 80_000_000
_UP = b"Ray runtime started"
_UP_SECONDS = 120.0
_DONE_SECONDS = 240.0
_MOST_SLOTS = 16
_REDIS_PORT = 6390


class RayCluster:
    """Ray on the hosts of a lab, its head on the first; use as a context manager.

    Args:
        lab: the hosts.
        folder: for logs.
        redis: whether Ray's head keeps its state in Redis, on the last host.
        labels: of Ray's nodes, such as "rack=a", by the number of the host.
    """

    def __init__(
        self, lab: Lab, folder: Path, *, redis: bool = False, labels: Mapping[int, str] | None = None
    ) -> None:
        self.lab, self.folder = lab, folder
        self._labels = labels or {}
        self.address = f"{lab[1].address}:{PORT}"
        self.user = lab[1]
        """Where users' commands run, …"""
        self.user_folder: Path | None = None
        """… and in which folder. Default: that of this process."""
        self.environment = {
            "RAY_raylet_start_wait_time_s": "120",
            **HEALTH,
            # Ray's default depends on whether the account has a token already.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        """Variables for Ray and for users' commands."""
        self._logged: dict[int, int] = {}
        self._redis = list(lab.hosts.values())[-1] if redis else None
        if self._redis is not None:
            self.environment["RAY_REDIS_ADDRESS"] = f"{self._redis.address}:{_REDIS_PORT}"

    def __enter__(self) -> Self:
        if self._redis is not None:
            with (self.folder / "redis.log").open("wb") as log:
                command = ["redis-server", "--bind", self._redis.address, "--port", str(_REDIS_PORT)]
                command += ["--protected-mode", "no", "--save", ""]
                self._redis.popen(command, stdout=log, stderr=log)
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
            subprocess.run(host.command(copy), check=False, capture_output=True)

    @property
    def machines(self) -> list[Host]:
        """The hosts that jobs may use."""
        return [host for host in self.lab.hosts.values() if host.number > 1]

    def host_at(self, address: str) -> Host:
        """The host with this address."""
        return next(host for host in self.lab.hosts.values() if host.address == address)

    def start(self, host: Host) -> None:
        """Start Ray on a host; see ``is_up``."""
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
        if host.number in self._labels:
            command += ["--labels", self._labels[host.number]]
        with self._log(host).open("ab") as log:
            self._logged[host.number] = log.tell()
            host.popen(command, self.environment, stdout=log, stderr=log)

    def is_up(self, host: Host) -> bool:
        """Whether Ray runs on a host since it was started last."""
        with contextlib.suppress(FileNotFoundError), self._log(host).open("rb") as log:
            log.seek(self._logged.get(host.number, 0))
            return host.is_on() and _UP in log.read()
        return False

    def wait_for(self, host: Host) -> None:
        """Wait until Ray runs on a host."""
        end = time.monotonic() + _UP_SECONDS
        while not self.is_up(host):
            if time.monotonic() > end:
                raise HoldfastError(
                    f"Ray did not start on host {host.number} within {_UP_SECONDS:.0f} s: see "
                    f"{self._log(host)}"
                )
            time.sleep(0.1)

    def switch_on(self, host: Host) -> None:
        """Start a host that was off, and Ray there."""
        host.start()
        self.start(host)
        self.wait_for(host)

    def drain(self, host: Host, seconds: int | None = None) -> None:
        """Let Ray tell that a host will be taken away, after so many seconds; nobody takes it away."""
        ask = [sys.executable, "-c", _NODE_ID, self.address, host.address]
        node = self._as_user(ask)
        drain = [
            _RAY, "drain-node", "--address", self.address, "--node-id", node,
            "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test",
            *([] if seconds is None else ["--deadline-remaining-seconds", str(seconds)]),
        ]  # fmt: skip
        self._as_user(drain)

    def _log(self, host: Host) -> Path:
        return self.folder / f"ray-{host.number}.log"

    def command(self, *arguments: str) -> str:
        """Run a command of ``holdfast`` that asks the cluster, as a user does. Its output."""
        return self._as_user([*_HOLDFAST, *arguments, "--address", self.address])

    def _as_user(self, command: Sequence[str]) -> str:
        ended = self.user.run(command, self.environment, capture_output=True, text=True, timeout=_UP_SECONDS)
        said: str = ended.stdout
        return said.strip()

    def jobs(self) -> str:
        """What ``holdfast jobs`` says."""
        return self.command("jobs")


class EventReader:
    """Reads a run's log while it is written.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events.jsonl"
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """The events since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        found = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found


class RayJob:
    """A user's command that watches a job on the cluster.

    Args:
        cluster: where to run.
        command: the command of ``holdfast``, without the run's folder.
        name: of the run's folder.
    """

    def __init__(self, cluster: RayCluster, command: Sequence[str], name: str = "run") -> None:
        self.run = cluster.folder / name
        self.log = cluster.folder / f"{name}.log"
        self._cluster, self._host = cluster, cluster.user
        self._reader = EventReader(self.run)
        self._events: list[dict[str, Any]] = []
        with self.log.open("wb") as output:
            folder = ["env", "--chdir", str(cluster.user_folder)] if cluster.user_folder else []
            self.process = self._host.popen(
                [*folder, *_HOLDFAST, *command, "--run", str(self.run)],
                cluster.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @classmethod
    def start(
        cls, cluster: RayCluster, settings: Sequence[str], config: Path | None = None, name: str = "run"
    ) -> RayJob:
        """Start a job as a user does, with settings as ``key=value`` over those of a file."""
        engine = (f"address={cluster.address}", f"machines={len(cluster.machines)}", f"name={NAME}")
        command = ["train", *([str(config)] if config else []), "--engine", "ray"]
        for setting in [*(f"job.engine.{each}" for each in engine), *settings]:
            command += ["--set", setting]
        return cls(cluster, command, name)

    @classmethod
    def attach(cls, cluster: RayCluster, name: str = "attached") -> RayJob:
        """Watch the job from another process."""
        return cls(cluster, ["attach", NAME, "--address", cluster.address], name)

    def kill(self) -> None:
        """Kill -9 the user's process. The job goes on."""
        self._host.kill(self.process)

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """What the run's log has, of this name or all."""
        self._events += self._reader.new()
        return [event for event in self._events if not name or event["event"] == name]

    def wait(self, condition: Callable[[], Any], seconds: float = 120.0) -> Any:
        """Wait until it is true, and return it."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            if self.process.poll() is not None:
                raise HoldfastError(f"the job ended with code {self.process.returncode}: see {self.log}")
            if time.monotonic() > end:
                last = [event for event in self.events() if event["event"] != "progress"][-5:]
                raise HoldfastError(f"not within {seconds} s, at step {self.step()}; last events: {last}")
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
            for process in started_by(event)
            if (process.get("role"), process.get("slot")) == (role, slot)
        ]
        return str(started[-1].get("machine", "")) if started else ""

    def machines(self) -> set[str]:
        """The addresses of the hosts on which the newest process of some slot was started."""
        found: dict[tuple[str, int], str] = {}
        for event in self.events():
            for process in started_by(event):
                found[process["role"], process["slot"]] = str(process.get("machine", ""))
        return set(found.values())

    def host_of(self, role: str, *, without: Sequence[str] = ()) -> Host:
        """A host that runs such a process, and none of the others."""
        others = {self.machine_of(other, slot) for other in without for slot in range(_MOST_SLOTS)}
        for slot in range(_MOST_SLOTS):
            address = self.machine_of(role, slot)
            if address and address not in others:
                return self._cluster.host_at(address)
        raise HoldfastError(f"no host runs a {role} and none of {', '.join(without)}")

    def times(self) -> list[float]:
        """When steps were logged, Unix seconds."""
        return [event["time"] for event in self.events("progress")]

    def finish(self, seconds: float = _DONE_SECONDS) -> dict[str, Any]:
        """Wait for the end; the event that has the result."""
        self.process.wait(seconds)
        finished = self.events("run_finished")
        if not finished:
            raise HoldfastError(f"the job ended with code {self.process.returncode}: see {self.log}")
        return finished[-1]


def started_by(event: dict[str, Any]) -> list[dict[str, Any]]:
    """The processes that have started, as an event says it."""
    if event["event"] == "job_started":
        found: list[dict[str, Any]] = event["processes"]
        return found
    return [event] if event["event"] == "process_started" else []


def local_job(
    folder: Path, settings: Sequence[str], config: Path | None = None, name: str = "local"
) -> dict[str, Any]:
    """The result of the same job on one machine."""
    command = [*_HOLDFAST, "train", *([str(config)] if config else []), "--run", str(folder / name)]
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(command, check=True, capture_output=True, env=dict(os.environ))
    return [event for event in EventReader(folder / name).new() if event["event"] == "run_finished"][-1]
