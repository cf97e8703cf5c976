"""From a configuration to the plan that all nodes of a job share."""

from __future__ import annotations

import os
import secrets
from typing import Any

import msgspec
import torch

from holdfast.cluster.model import plan_groups
from holdfast.cluster.plan import JobPlan, LaneOptions, Timing
from holdfast.cluster.resuming import find_resume
from holdfast.cluster.template import plan_saving
from holdfast.models.recommender import table_dims
from holdfast.tables.plan import OptimizerPlan
from holdfast.training.config import Config
from holdfast.training.networks import build_network
from holdfast.training.readers import build_readers


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
    code = job.code
    protected: dict[str, Any] = {}
    if code is not None:
        k, r = code.k, code.r
        protected = {
            "k": k,
            "r": r,
            "rings": job.servers // (k + r) if code.rings else 1,
            "dense": code.dense,
            "compare_recovered": job.compare_recovered,
            "lanes": lanes
            or LaneOptions(
                chunk_rows=code.chunk_rows, share=code.recovery_share, scrub_seconds=code.scrub_seconds
            ),
        }
    partial = job.protection if isinstance(job.protection, PartialRecovery) else None
    checkpoint = config.checkpoint
    if partial is not None:
        protected = {"dense": "workers", "partial": decide(partial, job.servers)}
        checkpoint = _saving_for(partial, job.servers, checkpoint)
    torch.manual_seed(config.seed)
    reader, _ = build_readers(config)
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
        atomic=job.protection.atomic,
        staleness=job.staleness,
        timing=timing or Timing(silent_seconds=job.silent_seconds),
        **protected,
        saving=saving,
        training=msgspec.to_builtins(config),
    )
    return plan if saving is None else msgspec.structs.replace(plan, resume=find_resume(plan))
