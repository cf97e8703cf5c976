"""What a job's end says of checkpoints that could not be saved, from reports made up here."""

from __future__ import annotations

import errno
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpoint.store.local import explain
from holdfast.cluster.protocol.messages import Evaluation, SaveFailure, Status
from holdfast.cluster.report.result import JobResult, SaveLedger, count, describe_lack
from holdfast.cluster.saving.failures import SaveFailures, cause_of, kind_of
from holdfast.cluster.session import resume_command, resuming, summary
from holdfast.errors import StoreLocked, StoreUnreachable
from holdfast.options import Kill
from holdfast.training.config import Config, load

FULL = "no space left to write a file in /a: free some"
RESULT = JobResult(
    steps=157, samples=1000, train_seconds=1.0, samples_per_second=1000.0, test=Evaluation(1, 0.7, 0.5, 10),
    tests=(), workers_replaced=0, bad_lines=0, kills_missed=(), records="", folder=Path("runs/r"),
    interrupted=False,
)  # fmt: skip


def explained(number: int) -> Exception:
    try:
        raise explain(OSError(number, "x"), "write", "y") from OSError(number, "x")
    except hf.StoreError as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (explained(errno.ENOSPC), "full"),
        (explained(errno.EDQUOT), "full"),
        (explained(errno.EACCES), "denied"),
        (explained(errno.EROFS), "denied"),
        (PermissionError(errno.EPERM, "x"), "denied"),
        (explained(errno.EIO), ""),
        (explained(errno.ENETDOWN), "unreachable"),
        (StoreUnreachable("x"), "unreachable"),
        (StoreLocked("x", "host", 3), "locked"),
        (MemoryError(), ""),
        (None, ""),
    ],
)
def test_kinds(error: Exception | None, kind: str) -> None:
    assert kind_of(error) == kind


def test_a_cause_has_no_name_of_a_file() -> None:
    text = "no space left to write {} in /it's 'here': free some"
    names = (
        "chunks/00000001-0000-baseline-5b75.safetensors",
        "dense/00000001-aa.safetensors",
        "manifests/1.json",
    )
    assert {cause_of(text.format(repr(name))) for name in names} == {text.format("a file")}
    assert cause_of("'other/1' is 'odd'") == "'other/1' is 'odd'"


def test_what_comes_again_is_counted_and_not_news() -> None:
    failures = SaveFailures()
    assert [failures.note(why, "") for why in ("a", "a", "b", "a")] == [True, False, True, True]
    assert failures.unsaved
    failures.note_saved()
    assert failures.note("a", ""), "somebody thought that it was over"
    assert failures() == (SaveFailure("a", "", 4), SaveFailure("b", "", 1))


def report(*failures: SaveFailure, last: int = 0, unsaved: bool = True) -> Status:
    return Status(
        "running", 9, 9, (), save_failures=failures, unsaved=unsaved and bool(failures), last_version=last
    )


def test_a_supervisor_that_dies_takes_no_failure_with_it() -> None:
    ledger = SaveLedger()
    for told in (report(), report(SaveFailure("a", "", 1)), report(SaveFailure("a", "", 3))):
        ledger.note(told)
    assert (ledger(), ledger.unsaved) == ((SaveFailure("a", "", 3),), True)
    ledger.note(report())  # its successor's first
    assert (ledger(), ledger.unsaved) == ((SaveFailure("a", "", 3),), True), "still nothing is saved"
    ledger.note(report(SaveFailure("b", "", 1), SaveFailure("a", "", 1)))
    assert count(ledger()) == 5
    ledger.note(report(SaveFailure("b", "", 1), SaveFailure("a", "", 1), last=7, unsaved=False))
    assert not ledger.unsaved
    ledger.end()  # and another job, from a checkpoint
    ledger.note(report(last=7))
    ledger.note(report(SaveFailure("a", "", 1), last=7))
    assert (ledger(), ledger.unsaved) == ((SaveFailure("a", "", 5), SaveFailure("b", "", 1)), True)


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        (
            {"save_failures": (SaveFailure(FULL, "full", 3),)},
            "all 3 checkpoints failed (no space left): the state after step 157 is not saved, and there is "
            "no checkpoint to resume from",
        ),
        (
            {"save_failures": (SaveFailure("odd", "", 1),)},
            "the only checkpoint failed (odd): the state after step 157 is not saved, and there is no "
            "checkpoint to resume from",
        ),
        (
            {"save_failures": (SaveFailure("x", "denied", 1),), "last_checkpoint": 4},
            "the only checkpoint failed (no permission): the state after step 157 is not saved",
        ),
        (
            {
                "save_failures": (SaveFailure("x", "locked", 1), SaveFailure("y", "locked", 1)),
                "versions": (1, 2),
                "last_checkpoint": 2,
            },
            "2 of 4 checkpoints failed, the last among them (another writer has the store): the state after "
            "step 157 is not saved",
        ),
    ],
)
def test_the_end_of_a_job_that_is_not_saved(figures: dict[str, Any], says: str) -> None:
    result = replace(RESULT, unsaved=True, **figures)
    assert describe_lack(result) == says
    assert not any("checkpoint" in line and "failed" in line for line in summary(result)), "it is said once"


def test_failures_before_a_version_was_saved_are_counted() -> None:
    result = replace(RESULT, versions=(3,), save_failures=(SaveFailure(FULL, "full", 2),))
    assert "2 checkpoints were not saved (no space left); later ones were" in summary(result)


def config(*overrides: str) -> Config:
    return load(None, ["job.servers=2", "checkpoint.path=a b/store", *overrides])


def job(tmp_path: Path, *overrides: str) -> hf.Job:
    made = hf.Job.from_config(config(*overrides))
    made.folder = tmp_path / "r"
    return made


def test_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/holdfast"])
    ours = ["holdfast", "train", str(tmp_path / "r" / "config.yaml")]
    for number in ("r", "r-2"):
        (tmp_path / number).mkdir()
    folder = tmp_path / "r"
    assert shlex.split(resume_command(config(), folder, [])) == ours
    assert shlex.split(resume_command(config(f"run={folder}"), folder, [])) == [
        *ours, "--run", str(tmp_path / "r-3"),
    ]  # fmt: skip
    kills = [str(Kill("worker", 0, 5)), str(Kill("server", 1, 9))]
    command = shlex.split(resume_command(config(f"job.kill={kills}"), folder, kills[1:]))
    assert load(None, ["job.servers=2", command[-1]]).job.kill == ("server:1@step:9",)
    assert shlex.split(resume_command(config(f"job.kill={kills}"), folder, kills)) == ours
    monkeypatch.setattr(sys, "argv", ["/src/holdfast/__main__.py"])
    assert shlex.split(resume_command(config(), folder, []))[:3] == [sys.executable, "-m", "holdfast"]


def test_what_can_be_resumed(tmp_path: Path) -> None:
    made = job(tmp_path)
    assert resuming(made, None, 0, 9, []) == ["nothing was saved"]
    assert resuming(made, 3, 120, 0, [])[0] == "saved up to step 120 (version 3); resume with:"
    assert resuming(made, 3, 1200, 1, [])[0] == (
        "the last step is not saved; resume from step 1,200 (version 3) with:"
    )
    assert resuming(made, 3, 120, 37, [])[0].startswith(
        "the last 37 steps are not saved; resume from step 120"
    )
    secret = job(tmp_path, "checkpoint.path=ftp://me:secret@host/store")
    first, *_, command = resuming(secret, 3, 120, 0, [])
    assert "***" in first
    assert "secret@" not in command
