"""From a configuration to the plan that all nodes of a job share."""

from __future__ import annotations

import secrets

import msgspec
import torch

from holdfast.cluster.model import plan_groups
from holdfast.cluster.plan import JobPlan, Timing
from holdfast.models.recommender import table_dims
from holdfast.tables.plan import OptimizerPlan
from holdfast.training.config import Config
from holdfast.training.networks import build_network
from holdfast.training.readers import build_readers


def plan_job(
    config: Config,
    *,
    servers: int,
    workers: int,
    atomic: bool = False,
    staleness: int = 1,
    timing: Timing | None = None,
) -> JobPlan:
    """The plan of a job that trains as configured; builds model and readers once to see that they fit."""
    torch.manual_seed(config.seed)
    reader, _ = build_readers(config)
    network = build_network(config, reader)
    rows = reader.table_rows
    chosen = config.optimizer
    optimizer = OptimizerPlan(name=chosen.name, lr=chosen.rate, eps=chosen.eps, momentum=chosen.momentum)
    return JobPlan(
        job=secrets.token_hex(8),
        seed=config.seed,
        groups=plan_groups(network, rows, table_dims(network, len(rows)), optimizer, optimizer),
        servers=servers,
        workers=workers,
        atomic=atomic,
        staleness=staleness,
        timing=timing or Timing(),
        training=msgspec.to_builtins(config),
    )
