"""The input of a plan: the model, the cluster, its failures, and the tolerated loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from holdfast.errors import ConfigError
from holdfast.policy.increments import RowSize, Touches


@dataclass(frozen=True, slots=True)
class Costs:
    """The measured costs of protections per training step.

    The defaults are what the papers measured on their clusters. A transfer that takes as long as a step costs
    the step its *exposed* share; the rest hides behind computing.

    Args:
        tracking: marking changed rows, as a share of a step (``bench checkpoint``; Check-N-Run, section
            4.1.2, reports 1 %).
        counting: what prioritised saving keeps for each row that is looked up.
        differences: exposed share of the servers' differences to parities (ECRM, section 4.3: 2.6 %).
        atomic: by how much more they are exposed where a batch counts at all servers or at none, because
            workers wait for them (ECRec, section 5.2: 5.2 % in place of 2.6 %).
        dense: exposed share of the network's gradients to a second server (ECRec, section 5.2: 18 to 22 %,
            less the 5.2 %).
        rebuild_share: of a server's network that rebuilding a lost one uses. A sixth gives the times of
            ECRM's Figure 5 and ECRec's Figure 12.
        rebuild_drop: how much slower training is meanwhile (ECRM, section 4.2: 6 to 12 %; ECRec: 7 to 13 %).
        pause_hours: until training goes on after a failure (ECRec, section 5.3: 30 seconds).
    """

    tracking: float = 0.004
    counting: float = 0.005
    differences: float = 0.15
    atomic: float = 2.0
    dense: float = 0.92
    rebuild_share: float = 1 / 6
    rebuild_drop: float = 0.10
    pause_hours: float = 30 / 3600

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"the cost {one.name} is {value:g}: expected 0 or more")
        if not 0 < self.rebuild_share <= 1:
            raise ConfigError(
                f"the cost rebuild_share is {self.rebuild_share:g}: expected above 0, up to 1, a share of a "
                "server's network"
            )
        if self.rebuild_drop > 1:
            raise ConfigError(
                f"the cost rebuild_drop is {self.rebuild_drop:g}: expected 0 to 1, a share of the speed of "
                "training"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The model and the cluster. Sizes are in bytes, speeds in bytes per second, times in hours.

    Args:
        table_bytes: of all tables in memory, optimizer state included.
        row: bytes of one of their rows.
        servers: that hold the tables.
        workers: that compute.
        hours: that training takes if nothing is protected and nothing fails.
        mtbf_hours: mean time between failures that take servers down.
        servers_per_failure: how many go down together.
        machines: that run the servers; None: as many as a protection needs.
        machine_mtbf_hours: mean time between failures of one machine, which ``mtbf_hours`` and
            ``servers_per_failure`` include; None: failures are not told apart.
        reschedule_hours: until there is a machine in a failed one's place, where it is not a warm spare.
        dense_bytes: of the network's gradients.
        rows_per_batch: different rows that a batch looks up.
        step_hours: of one batch at one worker.
        touches: how much of the tables changes in which time.
        write_rate: to the store, of the whole job.
        read_rate: from it.
        copy_rate: of one server within its memory.
        network_rate: of one server, in each direction.
        server_memory_bytes: of one server; None is enough for anything.
        tolerated_auc_loss: that restores and partial recovery may cost.
        stop_to_write: whether saves stop training until they are written, as in the papers' systems.
        save_every_hours: how often to save, if that is settled; None lets each protection choose.
        costs: what protections take from a step.
    """

    table_bytes: float
    row: RowSize
    servers: int
    workers: int
    hours: float
    mtbf_hours: float
    servers_per_failure: float = 1.0
    machines: int | None = None
    machine_mtbf_hours: float | None = None
    reschedule_hours: float = 5 / 60
    dense_bytes: float = 8e6
    rows_per_batch: float = 8900.0
    step_hours: float = 0.05 / 3600
    touches: Touches = field(default_factory=Touches)
    write_rate: float = 1e9
    read_rate: float = 1e9
    copy_rate: float = 2e9
    network_rate: float = 25e9 / 8
    server_memory_bytes: float | None = None
    tolerated_auc_loss: float = 1e-4
    stop_to_write: bool = False
    save_every_hours: float | None = None
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                continue
            _check(one.name, value)
        if self.machine_mtbf_hours is not None and self.machines is None:
            raise ConfigError("the failures of a machine are known but not how many machines there are")
        if self.servers_per_failure > self.servers:
            raise ConfigError(
                f"a failure takes {self.servers_per_failure:g} servers down but there are {self.servers}"
            )
        if self.server_memory_bytes is not None and self.server_memory_bytes < self.server_bytes:
            raise ConfigError(
                f"the tables take {self.server_bytes / 1e9:.3g} GB of each of {self.servers} servers, which "
                f"have {self.server_memory_bytes / 1e9:.3g} GB: use more servers or larger ones"
            )

    @property
    def server_bytes(self) -> float:
        """Bytes of tables per server."""
        return self.table_bytes / self.servers

    @property
    def parts(self) -> float:
        """N of CPR's equations: into how many parts the tables are cut, of which a failure takes one."""
        return self.servers / self.servers_per_failure

    @property
    def failures_per_server_hour(self) -> float:
        """Failure rate of one server."""
        return self.servers_per_failure / (self.servers * self.mtbf_hours)

    @property
    def process_failures_per_hour(self) -> float:
        """Rate of the failures that are not a machine's."""
        if self.machines is None or self.machine_mtbf_hours is None:
            return 1 / self.mtbf_hours
        return max(0.0, 1 / self.mtbf_hours - min(self.machines, self.servers) / self.machine_mtbf_hours)

    @property
    def failures(self) -> float:
        """Expected number of failures in the whole training."""
        return self.hours / self.mtbf_hours

    @property
    def steps_per_hour(self) -> float:
        """Steps per hour of all workers together."""
        return self.workers / self.step_hours


def check_failures(*, machines: int, machine_mtbf_hours: float, mtbf_hours: float | None = None) -> None:
    """Raise ConfigError unless a situation may have these values."""
    _check("machines", machines)
    _check("machine_mtbf_hours", machine_mtbf_hours)
    if mtbf_hours is not None:
        _check("mtbf_hours", mtbf_hours)


def _check(name: str, value: float) -> None:
    least_is_allowed = name in _MAY_BE_ZERO
    if not math.isfinite(value) or value < 0 or (value == 0 and not least_is_allowed):
        expected = "0 or more" if least_is_allowed else "above 0"
        raise ConfigError(f"{_READABLE.get(name, name)} is {value:g}: expected {expected}")
    least, most = _RANGES.get(name, (0.0, math.inf))
    if not least <= value <= most:
        raise ConfigError(
            f"{_READABLE.get(name, name)} is {value:g}: expected "
            + (f"at least {least:g}" if value < least else f"at most {most:g}")
        )


_RANGES = {
    "table_bytes": (1.0, 1e24),
    "servers": (1.0, 1e6),
    "workers": (1.0, 1e9),
    "hours": (1 / 3600, 1e7),
    "mtbf_hours": (1 / 3600, 1e12),
    "machines": (1.0, 1e6),
    "machine_mtbf_hours": (1 / 3600, 1e12),
    "reschedule_hours": (0.0, 1e6),
    "dense_bytes": (0.0, 1e15),
    "rows_per_batch": (0.0, 1e12),
    "step_hours": (1e-12, 1e6),
    "write_rate": (1.0, 1e30),
    "read_rate": (1.0, 1e30),
    "copy_rate": (1.0, 1e30),
    "network_rate": (1.0, 1e30),
    "save_every_hours": (1e-9, 1e12),
}
"""Plausible ranges. Values beyond them are typing errors, and could overflow floats."""
_MAY_BE_ZERO = {"reschedule_hours", "dense_bytes", "rows_per_batch", "tolerated_auc_loss"}
_READABLE = {
    "table_bytes": "the size of the tables",
    "servers": "the number of servers",
    "workers": "the number of workers",
    "hours": "the length of the training in hours",
    "mtbf_hours": "the mean time between failures in hours",
    "servers_per_failure": "the number of servers of a failure",
    "machines": "the number of machines",
    "machine_mtbf_hours": "the mean time between failures of a machine in hours",
    "reschedule_hours": "the time to replace a machine in hours",
    "dense_bytes": "the size of the network",
    "rows_per_batch": "the number of rows of a batch",
    "step_hours": "the length of a step in hours",
    "write_rate": "the speed of writing to the store",
    "read_rate": "the speed of reading from the store",
    "copy_rate": "the speed of copying in memory",
    "network_rate": "the speed of the network",
    "server_memory_bytes": "the memory of a server",
    "tolerated_auc_loss": "the tolerated loss of AUC",
    "save_every_hours": "the time between saves in hours",
}
