"""From what a user says, a configuration says and a log says to a situation that plans are made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from holdfast._version import __version__
from holdfast.errors import ConfigError
from holdfast.options import ErasureCode, Ray
from holdfast.policy.failure_log import FailureLog, read_failures
from holdfast.policy.increments import RowSize, Touches
from holdfast.policy.lifetimes import Fit, fit
from holdfast.policy.machines import all_failures
from holdfast.policy.planner import Plan, configuration
from holdfast.policy.protections import Wishes
from holdfast.policy.situation import Costs, Situation, check_failures
from holdfast.policy.units import (
    parse_bytes,
    parse_hours,
    parse_rate,
    show_bytes,
    show_hours,
    show_percent,
)
from holdfast.redaction import redacted
from holdfast.tables.plan import GroupPlan, OptimizerPlan, TablePlan
from holdfast.training.planning_options import Given

if TYPE_CHECKING:
    from holdfast.training.config import Config

OPTIMIZERS = ("sgd", "momentum", "adagrad", "rowwise-adagrad", "adam")
CHECKPOINTS = "checkpoints"
"""Where a planned configuration saves if nothing else is said."""
_MOST_WEIGHTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Question:
    """A situation, what is settled, and where it comes from."""

    situation: Situation
    wishes: Wishes
    assumed: tuple[str, ...]
    """What nobody said, in words."""
    measured: tuple[str, ...] = ()
    fits: tuple[Fit, ...] = ()
    log: FailureLog | None = None
    config: Config | None = None

    @classmethod
    def of(cls, situation: Situation, *, target_pls: float) -> Question:
        """A situation of which everything is known."""
        return cls(situation, Wishes(target_pls=target_pls), ())


class _Values:
    """Collects values, and what was assumed for want of better."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.assumed: list[str] = []

    def take(self, name: str, value: Any) -> bool:
        if value is not None:
            self.values[name] = value
        return value is not None

    def assume(self, name: str, value: Any, words: str) -> None:
        if name not in self.values:
            self.values[name] = value
            self.assumed.append(words)


def read_question(given: Given) -> Question:
    """All that a plan needs to know; ``ConfigError`` if it cannot be known or cannot be."""
    found = _Values()
    config = _model(given, found)
    measured = _rates(given, found)
    fits, log = _failures(given, found)
    _rest(given, found)
    situation = Situation(**found.values, stop_to_write=given.stop_to_write, costs=_costs(given.cost or ()))
    r = None if given.r is None else ErasureCode(k=1, r=given.r).r  # which says what it may be
    wishes = Wishes(k=given.k, r=r, target_pls=given.target_pls, auc_loss_per_pls=given.auc_loss_per_pls)
    return Question(situation, wishes, tuple(found.assumed), measured, fits, log, config)


def _model(given: Given, found: _Values) -> Config | None:
    """Sizes: as they are said, else the configuration's."""
    config = None
    if given.config is not None:
        from holdfast.training.config import load  # noqa: PLC0415
        from holdfast.training.sizing import model_size  # noqa: PLC0415

        config = load(given.config, lacks_servers=True)
        size = model_size(config)
        found.values.update(
            table_bytes=size.table_bytes, row=size.row, dense_bytes=size.dense_bytes,
            rows_per_batch=size.rows_per_batch,
        )  # fmt: skip
        if config.job.servers:
            found.values["servers"] = config.job.servers
        found.values["workers"] = config.job.workers
        if isinstance(config.job.engine, Ray):
            found.take("machines", config.job.engine.machines)
    elif given.size is None:
        raise ConfigError("the size of the model is unknown: give --size, such as 220GB, or a CONFIG.yaml")
    if given.size is not None:
        found.values["table_bytes"] = parse_bytes(given.size, "--size")
    if config is None or given.dim is not None or given.optimizer is not None:
        found.values["row"] = _row(given, found)
    found.take("servers", given.servers)
    found.take("workers", given.workers)
    found.take("machines", given.machines)
    if "servers" not in found.values:
        raise ConfigError("the number of servers is unknown: give --servers")
    servers = found.values["servers"]
    found.assume("workers", 3 * servers, f"{3 * servers} workers (--workers)")
    return config


def _row(given: Given, found: _Values) -> RowSize:
    dim = 64 if given.dim is None else given.dim
    optimizer = "adagrad" if given.optimizer is None else given.optimizer
    if not 1 <= dim <= _MOST_WEIGHTS:
        raise ConfigError(f"--dim is {dim}: expected 1 to {_MOST_WEIGHTS:,} weights in a row")
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"--optimizer is {optimizer!r}: expected one of {', '.join(OPTIMIZERS)}")
    if given.dim is None:
        found.assumed.append("rows of 64 weights (--dim)")
    if given.optimizer is None:
        found.assumed.append("Adagrad's state in the size (--optimizer)")
    return RowSize(dim, state_bytes=4.0 * record_words(optimizer, dim) - 4 * dim)


def record_words(optimizer: str, dim: int) -> int:
    """32-bit words of a row's record."""
    plan = OptimizerPlan(name=optimizer, lr=1.0)  # type: ignore[arg-type]
    return GroupPlan(name="", dim=dim, tables=(TablePlan("", 1),), optimizer=plan).words


def _rates(given: Given, found: _Values) -> tuple[str, ...]:
    """Speeds: as they are said, else measured, else assumed."""
    said = {"write_rate": "write", "read_rate": "read", "copy_rate": "copy", "network_rate": "network"}
    for name, option in said.items():
        text = getattr(given, option)
        found.take(name, None if text is None else parse_rate(text, f"--{option}"))
    measured: list[str] = []
    if given.measure is not None:
        from holdfast.training.measuring import measure_rates  # noqa: PLC0415

        rates = measure_rates(given.measure)
        for name, option in said.items():
            if name not in found.values:
                found.values[name] = getattr(rates, option)
                measured.append(f"{option} {show_bytes(found.values[name])}/s")
    found.assume("write_rate", 1e9, "1 GB/s to the store (--write, --measure)")
    found.assume("read_rate", found.values["write_rate"], "the same from it (--read)")
    found.assume("copy_rate", 2e9, "2 GB/s within memory (--copy)")
    found.assume("network_rate", 25e9 / 8, "25 Gbit/s of network at each server (--network)")
    return tuple(measured)


def _failures(given: Given, found: _Values) -> tuple[tuple[Fit, ...], FailureLog | None]:
    if given.mtbf is not None:
        found.values["mtbf_hours"] = parse_hours(given.mtbf, "--mtbf")
    fits: tuple[Fit, ...] = ()
    log = None
    if given.failure_log is not None:
        log = read_failures(given.failure_log)
        fits = tuple(fit(log.failed_hours, log.unfailed_hours))
        found.values.setdefault("mtbf_hours", fits[0].lifetime.mean_hours)
    if given.machine_mtbf is not None:
        _failures_of_machines(given, found)
    if "mtbf_hours" not in found.values:
        raise ConfigError(
            "the failure rate is unknown: give --mtbf, such as 20h, --machine-mtbf or --failure-log FILE"
        )
    return fits, log


def _failures_of_machines(given: Given, found: _Values) -> None:
    """Add failures of machines to those of processes."""
    assert given.machine_mtbf is not None
    if given.servers_per_failure is not None:
        raise ConfigError(
            "--servers-per-failure and --machine-mtbf both say how many servers fail together: give one"
        )
    servers = found.values["servers"]
    found.assume("machines", servers, "a machine for each server (--machines)")
    machine_mtbf = parse_hours(given.machine_mtbf, "--machine-mtbf")
    if "mtbf_hours" not in found.values:
        found.assumed.append("servers fail only with their machine (--mtbf)")
    of_processes = found.values.get("mtbf_hours")
    check_failures(
        machines=found.values["machines"], machine_mtbf_hours=machine_mtbf, mtbf_hours=of_processes
    )
    found.values["machine_mtbf_hours"] = machine_mtbf
    found.values["mtbf_hours"], found.values["servers_per_failure"] = all_failures(
        servers=servers,
        machines=found.values["machines"],
        machine_mtbf_hours=machine_mtbf,
        process_mtbf_hours=of_processes,
    )


def _rest(given: Given, found: _Values) -> None:
    times = {
        "hours": "hours",
        "reschedule_hours": "reschedule",
        "save_every_hours": "save_every",
        "step_hours": "step",
    }
    for name, option in times.items():
        text = getattr(given, option)
        found.take(name, None if text is None else parse_hours(text, f"--{option.replace('_', '-')}"))
    found.take("server_memory_bytes", None if given.memory is None else parse_bytes(given.memory, "--memory"))
    found.take("dense_bytes", None if given.dense is None else parse_bytes(given.dense, "--dense"))
    found.take("rows_per_batch", given.batch_rows)
    found.take("servers_per_failure", given.servers_per_failure)
    found.take("tolerated_auc_loss", given.tolerance)
    if given.touched is not None:
        found.values["touches"] = Touches(share=given.touched)
    found.assume("hours", 72.0, "72 hours of training (--hours)")
    found.assume("reschedule_hours", 5 / 60, "5 min to replace a machine (--reschedule)")
    found.assume("touches", Touches(), "26 % of the rows touched in 30 min (--touched)")
    found.assume("step_hours", 0.05 / 3600, "a step of 50 ms (--step)")
    found.assume("rows_per_batch", 8900.0, "8,900 rows a batch (--batch-rows)")
    found.assume("dense_bytes", 8e6, "8 MB of the network's gradients (--dense)")
    found.assume("tolerated_auc_loss", 1e-4, "0.0001 of AUC may be lost (--tolerance)")


def _costs(texts: Sequence[str]) -> Costs:
    names = [one.name for one in fields(Costs)]
    values: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = None
        if not equals or name not in names or value is None:
            raise ConfigError(f"--cost {text}: expected NAME=NUMBER with a name of {', '.join(names)}")
        values[name] = value
    return Costs(**values)


def write_configuration(
    plan: Plan, config: Config | None, out: Path, store: str | None, *, force: bool
) -> None:
    """Write the recommended protection as a configuration for ``holdfast train``."""
    if out.exists() and not force:
        raise ConfigError(f"{out} already exists: name another file, or overwrite it with --force")
    situation = plan.situation
    saved = config.checkpoint.path if config is not None and config.checkpoint is not None else None
    values = configuration(
        plan.best,
        servers=situation.servers,
        workers=situation.workers,
        path=store or saved or CHECKPOINTS,
        base=msgspec.to_builtins(config) if config is not None else None,
    )
    header = (
        f"# Planned by holdfast {__version__}: {plan.best.name}.\n"
        f"# {show_bytes(situation.table_bytes)} on {situation.servers} servers, a failure every "
        f"{show_hours(situation.mtbf_hours)}: expected to add {show_percent(plan.best.overhead)}\n"
        "# to the training time.\n"
    )
    try:
        out.write_text(header + yaml.safe_dump(redacted(values), sort_keys=False))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
