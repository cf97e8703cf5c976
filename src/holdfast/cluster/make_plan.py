"""From a configuration to the plan that all nodes of a job share."""

from __future__ import annotations

import os
import secrets
from typing import Any

import msgspec
import torch

from holdfast.cluster.protocol.plan import JobPlan, LaneOptions, Timing
from holdfast.cluster.saving.resume import find_resume
from holdfast.cluster.template import plan_saving
from holdfast.cluster.worker.model import plan_groups
from holdfast.errors import ConfigError
from holdfast.models.recommender import table_dims
from holdfast.options import PartialRecovery
from holdfast.policy.pls import Decision, decide_recovery
from holdfast.tables.plan import OptimizerPlan
from holdfast.training.config import Config
from holdfast.training.networks import build_network
from holdfast.training.readers import build_readers, check_test_part
from holdfast.training.saving import CheckpointConfig


def plan_job(
    config: Config,
    *,
    timing: Timing | None = None,
    lanes: LaneOptions | None = None,
) -> JobPlan:
    """The plan of a job that trains as configured; builds model and readers once to see that they fit.

    If the configuration has a ``checkpoint`` section and its path holds versions, the job goes on from the
    newest one that is whole (``plan.resume``): see ``resuming.find_resume`` for what it raises.
    """
    job = config.job
    protected, checkpoint = _protection(config, lanes)
    torch.manual_seed(config.seed)
    reader, test_reader = build_readers(config)
    check_test_part(test_reader)
    network = build_network(config, reader)
    rows = reader.table_rows
    chosen = config.optimizer
    optimizer = OptimizerPlan(name=chosen.name, lr=chosen.rate, eps=chosen.eps, momentum=chosen.momentum)
    groups = plan_groups(network, rows, table_dims(network, len(rows)), optimizer, optimizer)
    saving = None
    if checkpoint is not None:
        if "://" not in checkpoint.path:  # processes may run in other folders
            checkpoint = msgspec.structs.replace(checkpoint, path=os.path.abspath(checkpoint.path))
        saving = plan_saving(checkpoint, network, rows, chosen, groups)
    plan = JobPlan(
        job=secrets.token_hex(8),
        seed=config.seed,
        groups=groups,
        servers=job.servers,
        workers=job.workers,
        server_processors=_processors(job.server_processors),
        atomic=job.protection.atomic,
        staleness=job.staleness,
        timing=timing or Timing(silent_seconds=job.silent_seconds),
        **protected,
        saving=saving,
        training=msgspec.to_builtins(config),
    )
    return plan if saving is None else msgspec.structs.replace(plan, resume=find_resume(plan))


def _processors(wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Those that servers are to have, if this machine has them and more."""
    here = os.sched_getaffinity(0)
    if wanted and not set(wanted) < here:
        raise ConfigError(
            f"job.server_processors is {sorted(set(wanted))}: expected some of {sorted(here)}, which this "
            "process may use, and at least one left for workers"
        )
    return tuple(sorted(set(wanted)))


def _protection(config: Config, lanes: LaneOptions | None) -> tuple[dict[str, Any], CheckpointConfig | None]:
    """The fields of a plan that say how rows are protected, and how they are saved."""
    job, checkpoint = config.job, config.checkpoint
    code = job.code
    if code is not None:
        if code.beyond == "rows" and checkpoint is None:
            raise ConfigError(
                "job.protection.beyond is rows, but there is no checkpoint that they could go back to: set "
                "checkpoint.path"
            )
        share = code.recovery_share or (1.0 if job.server_processors else LaneOptions().share)
        usual = LaneOptions(chunk_rows=code.chunk_rows, share=share, scrub_seconds=code.scrub_seconds)
        return {
            "k": code.k,
            "r": code.r,
            "rings": job.servers // (code.k + code.r) if code.rings else 1,
            "dense": code.dense,
            "beyond": code.beyond,
            "compare_recovered": job.compare_recovered,
            "lanes": lanes or usual,
        }, checkpoint
    if isinstance(job.protection, PartialRecovery):
        decision = _decide(job.protection, job.servers)
        return {
            "dense": "workers",
            "partial": "partial" if decision is None or decision.partial else "full",
            "partial_reason": decision.reason if decision else "job.protection.mtbf_hours is not given",
        }, _saving_of(job.protection, checkpoint, decision)
    return {}, checkpoint


def _decide(partial: PartialRecovery, servers: int) -> Decision | None:
    """Whether partial recovery pays; None where nothing is known of failures."""
    if partial.mtbf_hours is None:
        return None
    return decide_recovery(
        target_pls=partial.target_pls,
        servers=servers,
        mtbf_hours=partial.mtbf_hours,
        save_hours=partial.save_seconds / 3600,
        load_hours=partial.load_seconds / 3600,
        reschedule_hours=partial.reschedule_seconds / 3600,
        partial_load_hours=partial.load_seconds / 3600 / servers,
    )


def _saving_of(
    partial: PartialRecovery, checkpoint: CheckpointConfig | None, decision: Decision | None
) -> CheckpointConfig:
    """How rows are saved that may have to go back: as the checkpoint says, or as often as the target asks."""
    if checkpoint is None:
        raise ConfigError(
            "job.protection is partial, but there is no checkpoint that rows could go back to: set "
            "checkpoint.path"
        )
    changes: dict[str, Any] = {"prioritize": partial.prioritize, "fraction": partial.fraction}
    if checkpoint.every_steps is None and checkpoint.every_seconds is None:
        if decision is None:
            raise ConfigError(
                "nothing says how often to save: set job.protection.mtbf_hours (target_pls then says it), "
                "checkpoint.every_steps or checkpoint.every_seconds"
            )
        changes["every_seconds"] = decision.interval_hours * 3600
    return msgspec.structs.replace(checkpoint, **changes)
