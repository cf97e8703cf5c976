"""Make the plan that all nodes of a job share from a configuration."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Adam, Optimizer, SparseAdam

from holdfast.checkpoint.format.dense import TablePlace, encode_tree, map_tree
from holdfast.checkpoint.format.records import WEIGHT
from holdfast.checkpoint.torch.values import copy_random_states, plain_leaf, random_states
from holdfast.cluster.protocol.plan import JobPlan, LaneOptions, SavePlan, Timing
from holdfast.cluster.saving.layout import MODEL, NETWORK, STEP, STEP_NUMBER, STEP_TENSOR
from holdfast.cluster.saving.resume import find_resume
from holdfast.cluster.worker.model import network_parts, plan_groups
from holdfast.errors import ConfigError
from holdfast.models.recommender import Recommender, table_dims
from holdfast.options import PartialRecovery
from holdfast.policy.pls import Decision, decide_recovery
from holdfast.tables.plan import GroupPlan, OptimizerPlan
from holdfast.training.config import Config, JobConfig, OptimizerConfig
from holdfast.training.networks import build_network
from holdfast.training.optimizers import build_optimizers
from holdfast.training.readers import build_readers, check_test_part
from holdfast.training.saving import CheckpointConfig

_Places = Mapping[int, tuple[TablePlace, GroupPlan]]
"""By ``id`` of a parameter: the place of its weights, and its group."""


def plan_job(
    config: Config,
    *,
    timing: Timing | None = None,
    lanes: LaneOptions | None = None,
) -> JobPlan:
    """Make the plan of a job. Builds the model and the readers once to check that they match.

    If the configuration has a ``checkpoint`` section and its path holds versions, the job resumes from the
    newest intact one (``plan.resume``): see ``saving.resume.find_resume`` for its errors.
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
            if job.engine != "local" and not job.engine.shared_paths:
                raise ConfigError(
                    f"checkpoint.path is {checkpoint.path}, but all machines of the cluster must reach it: "
                    "use a URL such as s3://bucket/run, or set job.engine.shared_paths if it is one folder "
                    "that they share"
                )
            checkpoint = msgspec.structs.replace(checkpoint, path=os.path.abspath(checkpoint.path))
        saving = plan_saving(checkpoint, network, rows, chosen, groups)
    plan = JobPlan(
        job=secrets.token_hex(8),
        seed=config.seed,
        groups=groups,
        servers=job.servers,
        workers=job.workers,
        server_processors=_processors(job.server_processors),
        server_threads=job.server_threads,
        atomic=job.protection.atomic,
        staleness=job.staleness,
        timing=timing or Timing(silent_seconds=_silent_seconds(job)),
        **protected,
        saving=saving,
        training=msgspec.to_builtins(config),
    )
    return plan if saving is None else msgspec.structs.replace(plan, resume=find_resume(plan))


def _silent_seconds(job: JobConfig) -> float:
    return job.silent_seconds if job.engine == "local" else job.engine.silent_seconds


def _processors(wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Validate the servers' processors: this machine has them, and others are left for workers."""
    here = os.sched_getaffinity(0)
    if wanted and not set(wanted) < here:
        raise ConfigError(
            f"job.server_processors is {sorted(set(wanted))}: expected some of {sorted(here)}, which this "
            "process may use, and at least one left for workers"
        )
    return tuple(sorted(set(wanted)))


def _protection(config: Config, lanes: LaneOptions | None) -> tuple[dict[str, Any], CheckpointConfig | None]:
    """The fields of a plan that configure protection, and the checkpoint configuration to use."""
    job, checkpoint = config.job, config.checkpoint
    code = job.code
    if code is not None:
        if code.beyond == "rows" and checkpoint is None:
            raise ConfigError(
                "job.protection.beyond is rows, but there is no checkpoint to restore them from: set "
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
    """Decide whether partial recovery pays off; None if the failure rate is unknown."""
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
    """The checkpoint configuration for partial recovery. By default, ``target_pls`` sets the interval."""
    if checkpoint is None:
        raise ConfigError(
            "job.protection is partial, but there is no checkpoint to restore rows from: set checkpoint.path"
        )
    changes: dict[str, Any] = {"prioritize": partial.prioritize, "fraction": partial.fraction}
    if checkpoint.every_steps is None and checkpoint.every_seconds is None:
        if decision is None:
            raise ConfigError(
                "the checkpoint interval is unknown: set job.protection.mtbf_hours (for target_pls), "
                "checkpoint.every_steps or checkpoint.every_seconds"
            )
        changes["every_seconds"] = decision.interval_hours * 3600
    return msgspec.structs.replace(checkpoint, **changes)


def plan_saving(
    config: CheckpointConfig,
    network: nn.Module,
    table_rows: Sequence[int],
    optimizer: OptimizerConfig,
    groups: Sequence[GroupPlan],
) -> SavePlan:
    """Plan how to save a job that trains this network.

    The objects of a version are "model", a ``Recommender``, and "optim"; if the trainer uses one optimizer
    for the network and one for the tables, "optim_network" and "optim_tables".
    """
    with torch.device("meta"):  # allocates no memory for tables
        model = Recommender(network, table_rows)
    optimizers = build_optimizers(optimizer, model)
    names = ("optim",) if len(optimizers) == 1 else ("optim_network", "optim_tables")
    by_name = dict(zip(names, optimizers, strict=True))
    places = _places(model, groups)
    state = model.state_dict(keep_vars=True)
    tree = {
        "objects": {
            MODEL: {key: _weight(value, key, places) for key, value in state.items()},
            **{name: _optimizer_state(one, places, name) for name, one in by_name.items()},
        },
        "optimizers": {name: type(one).__name__ for name, one in by_name.items()},
        "metadata": {MODEL: map_tree(dict(state._metadata), plain_leaf, MODEL)},  # type: ignore[attr-defined]
        "rng": random_states(copy_random_states()),
    }
    return SavePlan(
        config=config,
        table_optimizer=names[-1],
        parts=network_parts(network),
        template=b"".join(bytes(part) for part in encode_tree(tree)),
    )


def _places(model: Recommender, groups: Sequence[GroupPlan]) -> _Places:
    group_of = {table.name: group for group in groups for table in group.tables}
    places: dict[int, tuple[TablePlace, GroupPlan]] = {}
    for name, parameter in model.tables.named_parameters(prefix="tables"):
        place = TablePlace(f"{MODEL}.{name}", WEIGHT, tuple(parameter.shape))
        places[id(parameter)] = place, group_of[name]
    for name, parameter in model.network.named_parameters(prefix="network"):
        if parameter.requires_grad:
            place = TablePlace(f"{NETWORK}{name}", WEIGHT, tuple(parameter.shape))
            places[id(parameter)] = place, groups[-1]
    return places


def _weight(value: Any, key: str, places: _Places) -> Any:
    found = places.get(id(value))
    if found is not None:
        return found[0]
    plain = value.detach() if isinstance(value, Tensor) else value
    return map_tree(plain, plain_leaf, f"{MODEL}.{key}")


def _optimizer_state(optimizer: Optimizer, places: _Places, name: str) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    numbered = enumerate(p for group in optimizer.param_groups for p in group["params"])
    for number, parameter in numbered:
        if id(parameter) not in places:
            continue  # training does not change it
        weight, group = places[id(parameter)]
        fields = [f for f in group.fields if f.name not in (WEIGHT, STEP)]
        of_table = not weight.table.startswith(NETWORK)
        entry: dict[str, Any] = {}
        if isinstance(optimizer, (Adagrad, Adam, SparseAdam)):
            entry["step"] = TablePlace(_step_place(optimizer), STEP, ())
        for field in fields:
            shape = weight.shape if field.width == group.dim else weight.shape[:1]
            stored = f"{name}.{field.name}" if of_table else field.name
            entry[field.name] = TablePlace(weight.table, stored, shape)
        if entry:
            state[number] = entry
    groups = map_tree(optimizer.state_dict()["param_groups"], plain_leaf, name)
    return {"state": state, "param_groups": groups}


def _step_place(optimizer: Optimizer) -> str:
    return STEP_NUMBER if isinstance(optimizer, SparseAdam) else STEP_TENSOR
