"""How much memory the processes of a job need, so that a cluster leaves room for them.

Sizes of tables and parities are those that servers allocate. The rest was measured on jobs of the reference
models: what a process takes before it has any row, and how often the rows of a batch are in memory at once.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.checkpoint.memory.copy_on_write import default_max_memory
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.options import Ray
from holdfast.tables.plan import GroupPlan

_WORD_BYTES = 4
_SERVER_BYTES = 128 << 20
_WORKER_BYTES = 384 << 20
_RECORD_MORE_BYTES = 24
"""For each record: what tells which have changed, and which are lacking."""
_BATCHES_AT_SERVER = 8
"""Pulled, pushed, staged, and on their way to parity servers."""
_BATCHES_AT_WORKER = 20
"""Several batches are pulled, computed and pushed at a time, and PyTorch keeps what gradients need."""
_NETWORKS_AT_WORKER = 4


def with_estimates(options: Ray, plan: JobPlan) -> Ray:
    """The options with an estimate wherever the user has not said how much memory a process needs."""
    server, worker = options.server_memory, options.worker_memory
    return replace(
        options,
        server_memory=server_bytes(plan) if server is None else server,
        worker_memory=worker_bytes(plan) if worker is None else worker,
    )


def server_bytes(plan: JobPlan) -> int:
    """The memory of a server, with its parities and what saving takes at most."""
    held = batch = 0
    for group, at in zip(plan.groups, plan.placements, strict=True):
        records, parities = at.records(group.rows), at.blocks(group.rows) * at.r
        held += (records + parities) * group.words * _WORD_BYTES + records * _RECORD_MORE_BYTES
        batch += _rows_of_a_batch(plan, group) * group.words * _WORD_BYTES
    batches = _BATCHES_AT_SERVER * plan.workers * batch // plan.servers
    saving = 0
    if plan.saving is not None:
        saving = plan.saving.config.policy.max_memory or default_max_memory(held)
    return _SERVER_BYTES + held + batches + saving


def worker_bytes(plan: JobPlan) -> int:
    """The memory of a worker. What its reader keeps in memory is not known."""
    *tables, network = plan.groups
    batch = sum(_rows_of_a_batch(plan, group) * group.dim * _WORD_BYTES for group in tables)
    networks = _NETWORKS_AT_WORKER * network.rows * network.dim * _WORD_BYTES
    return _WORKER_BYTES + _BATCHES_AT_WORKER * batch + networks


def _rows_of_a_batch(plan: JobPlan, group: GroupPlan) -> int:
    """How many rows of a group a batch looks up, with one id for each sample and table."""
    samples: int = plan.training["batch_size"]
    if group is plan.groups[-1]:
        return group.rows
    return sum(min(table.rows, samples) for table in group.tables)
