"""The papers' 30 and 60 minutes between checkpoints, for models of another size on other disks.

ECRM (§4.1, §4.3) and ECRec (§5.1, §5.2) stop training while a full checkpoint of 220 GB, tables and
optimizer state, is written. Every 30 minutes, that costs 9.0 % of the training time (ECRec says it in another
way: 65 % for a model of eight times the size is 7.2 times as much), so one takes 2.7 minutes. What carries
over is the ratio of the two: here the 30 minutes are the time of which such a checkpoint would take 9.0 %.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
from dataclasses import dataclass

from msgspec.structs import replace

from holdfast.bench.harness import stopwatch
from holdfast.bench.live import LiveJob, happened
from holdfast.cluster.make_plan import plan_job
from holdfast.cluster.protocol.messages import Status
from holdfast.cluster.protocol.plan import JobPlan
from holdfast.cluster.saving.resume import open_saving, restore_rows
from holdfast.tables.shard import GroupShard
from holdfast.training.config import Config
from holdfast.training.saving import CheckpointConfig

PAUSE_SHARE = 0.09
"""Of 30 minutes, what a full checkpoint took that stopped training."""


def interval_seconds(pause_seconds: float, minutes: int) -> float:
    """What so many of the papers' minutes are where a full checkpoint takes so long while training waits."""
    return pause_seconds / PAUSE_SHARE * minutes / 30


@dataclass(frozen=True, slots=True)
class FullCheckpoint:
    """What a full checkpoint of a job takes."""

    pause_seconds: float
    """To write it while workers wait; the median."""
    restore_seconds: float
    """To read it, if all cores that servers have do."""


def full_checkpoint(config: Config, rounds: int) -> FullCheckpoint:
    """Save a job that many times, and read its last version."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        saving = CheckpointConfig(
            path=f"{folder}/store", every_seconds=0.0, strategy="full", keep=1, background_share=1.0
        )
        config = replace(config, checkpoint=saving)
        with LiveJob(config) as job:
            _pause(job)  # the first one opens the store
            pause = statistics.median(_pause(job) for _ in range(rounds))
        return FullCheckpoint(pause, _restore(plan_job(config)))


def _pause(job: LiveJob) -> float:
    before = job.hold()
    job.go_on()

    def saving(status: Status) -> bool:
        # Nobody else makes workers hold: a cut is being made.
        return status.steps > before.steps and status.phase == "holding"

    job.wait(saving, "a checkpoint to begin")
    job.hold()
    saved = job.wait(lambda status: len(status.versions) > len(before.versions), "a checkpoint")
    return float(happened(saved, "checkpoint_saved")[-1].figures["seconds_taken"])


def _restore(plan: JobPlan) -> float:
    """As each server reads its rows when a job goes on, one after the other, shared out over their cores."""
    assert plan.resume is not None
    seconds = 0.0
    with open_saving(plan) as store:
        for slot in range(plan.servers):
            shards = [
                GroupShard(group, placement, slot, plan.seed, empty=True)
                for group, placement in zip(plan.groups, plan.placements, strict=True)
            ]
            seconds += stopwatch(functools.partial(restore_rows, plan, shards, store, plan.resume.version))
    return seconds / min(plan.servers, len(plan.server_processors) or os.cpu_count() or 1)
