"""Which modules are mutated, and the tests that are meant for each.

Tests that are quick and most specific come first: the run ends with the first failure. A folder stands for
all its test files, so that new ones count at once.
"""

from __future__ import annotations

from pathlib import Path

_STORE = "checkpoint/store/"
_READING = "checkpoint/reading/"
_TORCH = "checkpoint/torch/"
_SAVING = "checkpoint/saving/"
_REDUNDANCY = "cluster/redundancy/"
_QUICK_JOBS = (
    "sim/test_resuming.py",
    "sim/test_damaged_messages.py",
    "sim/test_ends.py",
    "sim/test_network_copies.py",
)
_SIMULATED = (*_QUICK_JOBS, "sim/test_schedules.py", "sim/test_protected.py")
_REAL_JOB = "cluster/test_partial_recovery.py::test_only_the_dead_servers_rows_go_back[from the start]"

# Module or folder below src/holdfast: tests below tests/. The longest name that fits counts.
TESTS: dict[str, tuple[str, ...]] = {
    "buckets.py": (
        _STORE + "test_s3_requests.py",
        _STORE + "test_contract.py::test_what_cannot_be_meant_is_refused",
        _STORE + "test_s3.py",
    ),
    "checkpoint/store/": (_STORE + "test_contract.py", _STORE + "test_local.py"),
    "checkpoint/store/base.py": (
        _STORE + "test_base.py",
        _STORE + "test_contract.py::TestLocalFolder",
        _STORE + "test_other.py",
    ),
    "checkpoint/store/holder.py": (_STORE + "test_holder.py", _STORE + "test_lease.py"),
    "checkpoint/store/lease.py": (_STORE + "test_lease.py",),
    "checkpoint/store/local.py": (
        _STORE + "test_local_reserve.py",
        _STORE + "test_local.py",
        _STORE + "test_local_faults.py",
        _STORE + "test_contract.py::TestLocalFolder",
        _STORE + "test_local_crash.py",
    ),
    "checkpoint/store/local_files.py": (
        _STORE + "test_local_files.py",
        _STORE + "test_local.py",
        _STORE + "test_local_faults.py",
        _STORE + "test_contract.py::TestLocalFolder",
        _STORE + "test_local_crash.py",
    ),
    "checkpoint/store/local_lock.py": (_STORE + "test_local_lock.py", _STORE + "test_local.py"),
    "checkpoint/store/other.py": (
        _STORE + "test_other.py",
        _STORE + "test_contract.py::test_what_cannot_be_meant_is_refused",
        _STORE + "test_contract.py::TestFsspecMemory",
        _STORE + "test_contract.py::TestFsspecLocal",
        "checkpoint/tools/test_secrets.py",
    ),
    "checkpoint/store/past_cache.py": (_STORE + "test_past_cache.py",),
    "checkpoint/store/s3.py": (
        _STORE + "test_s3_requests.py",
        _STORE + "test_contract.py::test_what_cannot_be_meant_is_refused",
        _STORE + "test_s3.py",
        _STORE + "test_contract.py::TestS3",
    ),
    "checkpoint/reading/": (_READING + "test_versions.py", _READING + "test_damage.py"),
    "checkpoint/reading/coverage.py": (
        _READING + "test_coverage.py",
        _READING + "test_version.py",
        _READING + "test_damage.py",
    ),
    "checkpoint/reading/loader.py": (
        _READING + "test_loader.py",
        _READING + "test_version.py",
        _READING + "test_loading.py",
    ),
    "checkpoint/reading/pipelines.py": (
        _READING + "test_pipelines.py",
        _READING + "test_version.py",
        _READING + "test_loading.py",
        _READING + "test_damage.py",
        _READING + "test_versions.py",
    ),
    "checkpoint/reading/speed.py": (_READING + "test_speed.py",),
    "checkpoint/reading/stretches.py": (
        _READING + "test_stretches.py",
        _READING + "test_version.py",
        _READING + "test_loading.py",
        _READING + "test_damage.py",
    ),
    "checkpoint/reading/version.py": (
        _READING + "test_version.py",
        _READING + "test_unreachable.py",
        _READING + "test_loading.py",
        _READING + "test_damage.py",
        _READING + "test_versions.py",
        _READING + "test_gc_under_restore.py",
    ),
    "checkpoint/torch/": (
        _TORCH + "test_state.py",
        _TORCH + "test_mismatch.py",
        _TORCH + "test_unseen.py",
        _TORCH + "test_resume.py",
        _TORCH + "test_unnamed.py",
        _TORCH + "test_fuzz.py",
    ),
    "checkpoint/torch/capture.py": (_TORCH + "test_capture.py", _TORCH + "test_state.py"),
    "checkpoint/torch/chosen.py": (_TORCH + "test_names.py", "checkpoint/test_loading.py"),
    "checkpoint/torch/fit.py": (
        _TORCH + "test_fit.py",
        _TORCH + "test_mismatch.py",
        _TORCH + "test_grown.py",
    ),
    "checkpoint/torch/names.py": (_TORCH + "test_names.py", "checkpoint/test_loading.py"),
    "checkpoint/torch/read_ahead.py": (_TORCH + "test_read_ahead.py",),
    "checkpoint/torch/source.py": (
        _TORCH + "test_source.py",
        _TORCH + "test_state.py",
        _TORCH + "test_unseen.py",
    ),
    "checkpoint/torch/sharded.py": (_TORCH + "test_sharded.py",),
    "checkpoint/torch/tables.py": (_TORCH + "test_tables.py", _TORCH + "test_state.py"),
    "checkpoint/torch/unseen.py": (_TORCH + "test_unseen.py",),
    "checkpoint/torch/values.py": (_TORCH + "test_values.py", _TORCH + "test_state.py"),
    "checkpoint/torch/watch.py": (
        _TORCH + "test_watch_marks.py",
        _TORCH + "test_watch.py",
        _TORCH + "test_unnamed.py",
        _TORCH + "test_foreign_writes.py",
    ),
    "checkpoint/saving/": (
        _SAVING + "test_writer_alone.py",
        _SAVING + "test_writer.py",
        _SAVING + "test_last_save.py",
        _SAVING + "test_prioritized.py",
        _SAVING + "test_cancel.py",
        _SAVING + "test_closing.py",
        _SAVING + "test_faults.py",
        "checkpoint/test_checkpointer.py",
    ),
    "checkpoint/saving/catalog.py": (
        _SAVING + "test_catalog.py",
        _SAVING + "test_history.py",
        _SAVING + "test_publishing.py",
        _SAVING + "test_stale_writers.py",
        _SAVING + "test_failed_sync.py",
        _SAVING + "test_full_disk.py",
        "checkpoint/tools/test_tools.py",
    ),
    "checkpoint/saving/history.py": (
        _SAVING + "test_history.py",
        "checkpoint/format/test_segments.py",
        _SAVING + "test_first_format.py",
        _SAVING + "test_catalog.py",
        "checkpoint/test_many_versions.py",
    ),
    "checkpoint/saving/publisher.py": (_SAVING + "test_publisher.py",),
    "checkpoint/saving/unseen.py": (
        _SAVING + "test_writer_alone.py",
        _SAVING + "test_row_copies.py",
        _SAVING + "test_writer.py",
        "checkpoint/memory/test_digests.py",
    ),
    "checkpoint/saving/schedule.py": (_SAVING + "test_schedule.py",),
    "checkpoint/format/segments.py": ("checkpoint/format/test_segments.py", _SAVING + "test_history.py"),
    "checkpoint/loading.py": ("checkpoint/test_loading.py",),
    "checkpoint/memory/parts.py": ("checkpoint/memory/test_parts.py",),
    "checkpoint/memory/shares.py": ("checkpoint/memory/test_shares.py",),
    "checkpoint/ranks/link.py": ("checkpoint/ranks/test_link.py",),
    "checkpoint/memory/copy_on_write.py": ("checkpoint/memory/test_copy_on_write.py",),
    "checkpoint/saving/row_copies.py": (_SAVING + "test_row_copies.py",),
    "checkpoint/saving/shard_rows.py": (_SAVING + "test_shard_rows.py", _SAVING + "test_row_copies.py"),
    "cluster/redundancy/": (
        _REDUNDANCY + "test_lanes.py",
        _REDUNDANCY + "test_parity.py",
        _REDUNDANCY + "test_replicator.py",
        _REDUNDANCY + "test_stripes.py",
        _REDUNDANCY + "test_recover.py",
        _REDUNDANCY + "test_throttle.py",
        _REDUNDANCY + "test_lanes_machine.py",  # after the others: what it finds, it shrinks
        "cluster/test_scenarios.py",
    ),
    "cluster/protocol/tenure.py": ("cluster/protocol/test_tenure.py",),
    "cluster/protocol/vault.py": ("cluster/protocol/test_tenure.py",),
    "coding/machines.py": ("coding/test_machines.py",),
    "coding/moves.py": ("coding/test_moves.py",),
    "cluster/server/": ("cluster/server/", *_SIMULATED, "cluster/protocol/test_hostile_messages.py"),
    "cluster/server/deferred.py": ("cluster/server/test_deferred.py", *_QUICK_JOBS),
    "cluster/server/durability.py": ("cluster/server/test_durability.py", *_QUICK_JOBS),
    "cluster/server/initial_values.py": ("cluster/server/test_initial_values.py", *_QUICK_JOBS),
    "cluster/server/ledger.py": ("cluster/server/test_ledger.py", *_QUICK_JOBS),
    "cluster/server/process.py": (
        "cluster/server/test_process.py",
        "cluster/server/test_machine.py",
        _REAL_JOB,
    ),
    "cluster/server/requests.py": ("cluster/server/test_requests.py", *_QUICK_JOBS),
    "cluster/server/witness.py": ("cluster/server/test_witness.py",),
    "cluster/supervisor/": ("cluster/supervisor/", *_SIMULATED, "sim/test_saving.py"),
    "cluster/supervisor/evaluations.py": ("cluster/supervisor/test_evaluations.py", *_QUICK_JOBS),
    "cluster/supervisor/members.py": (
        "cluster/supervisor/test_members.py",
        "cluster/supervisor/test_machine.py",
        *_QUICK_JOBS,
    ),
    "cluster/supervisor/process.py": ("cluster/supervisor/test_process.py", _REAL_JOB),
    "cluster/supervisor/recovery_log.py": ("cluster/supervisor/test_recovery_log.py", *_QUICK_JOBS),
    "cluster/supervisor/views.py": ("cluster/supervisor/test_views.py", *_QUICK_JOBS),
    "cluster/supervisor/watch.py": ("cluster/supervisor/test_watch.py",),
}


def modules(root: Path, only: str = "") -> list[str]:
    """All modules that are mutated, from the root of the repository.

    Args:
        root: of the repository.
        only: if given, the name of a module must contain it.
    """
    rooms = sorted(name for name in TESTS if name.endswith("/"))
    found = [path for room in rooms for path in sorted((root / "src/holdfast" / room).rglob("*.py"))]
    alone = sorted(name for name in TESTS if not name.startswith(tuple(rooms)))
    found += [root / "src/holdfast" / name for name in alone]
    names = [str(path.relative_to(root)) for path in found]
    return [name for name in names if only in name]


def meant_for(root: Path, module: str) -> tuple[str, ...]:
    """The tests that are meant for a module, both from the root of the repository."""
    name = module.removeprefix("src/holdfast/")
    best = max((key for key in TESTS if name.startswith(key)), key=len)
    found: dict[str, None] = {}
    for entry in TESTS[best]:
        path = root / "tests" / entry
        files = sorted(path.glob("test_*.py")) if entry.endswith("/") else [path]
        found.update(dict.fromkeys(str(file.relative_to(root)) for file in files))
    return tuple(found)
