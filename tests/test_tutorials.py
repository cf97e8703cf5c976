"""The tutorials, followed from the first block to the last."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.blocks import DOCS, Follower, blocks_of

TUTORIALS = DOCS / "tutorials"


@pytest.fixture
def follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Follower:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Follower(tmp_path)


def test_protect_a_loop(follower: Follower) -> None:
    follower.follow(TUTORIALS / "protect-a-loop.md", {})
    crashed, resumed, uninterrupted, versions = follower.printed
    assert crashed == "starting at step 0\nexit code 137\n"
    first, loss = resumed.splitlines()
    assert int(first.removeprefix("starting at step ")) in range(50, 201, 50)  # the newest that was durable
    assert uninterrupted.splitlines() == ["starting at step 0", loss]
    assert "5 versions" in versions


def test_survive_a_kill(follower: Follower, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(DOCS / "examples" / "own_model.py", follower.folder)
    smaller = {
        "samples: 200_000": "samples: 45_000\n  max_rows: 2_000\n  test_samples: 5_000",
        "batch_size: 512": "batch_size: 150",
        "samples=200_000, batch_size=512": "samples=45_000, batch_size=150",
    }
    follower.follow(TUTORIALS / "survive-a-kill.md", smaller)
    survived, events, restored, versions, own = follower.printed
    assert "finished after 300 steps, 45,000 samples" in survived
    assert survived.count("killed by signal 9") >= 2
    assert events.count("training_resumed") == 1
    assert "data was lost" in restored
    assert "finished after 300 steps, 45,000 samples" in restored
    assert "chunked" in versions
    assert "test AUC" in own
    assert "rows recovered after" in capsys.readouterr().out


def test_choose_protection(follower: Follower) -> None:
    smaller = {"samples: 100_000": "samples: 10_000\n  max_rows: 2_000\n  test_samples: 5_000"}
    follower.follow(TUTORIALS / "choose-protection.md", smaller)
    first, strict, explained, from_log, simulated, trained = follower.printed
    assert "Use partial" in first
    assert "needs 132 GB of memory" in strict
    assert "Use code 4+1" in strict
    assert "updating parities" in explained
    assert "of tables on 5 servers" in from_log
    assert "1,000 servers" in simulated
    assert "1 checkpoint was saved" in trained


def test_restore_and_export(follower: Follower, capsys: pytest.CaptureFixture[str]) -> None:
    follower.follow(TUTORIALS / "restore-and-export.md", {})
    printed = capsys.readouterr().out
    assert "users: (50000, 16)\nloaded version 5 saved after step 99\n" in printed
    assert "{'model.users.weight': (50000, 60000)}\n" in printed
    assert "version 3 resumes at step 60" in printed
    looked, *_, cleaned = follower.printed
    assert "intact: versions 1 to 5" in looked
    assert "2 versions stay" in cleaned


def test_every_tutorial_is_followed() -> None:
    followed = {"protect-a-loop.md", "survive-a-kill.md", "choose-protection.md", "restore-and-export.md"}
    assert {page.name for page in TUTORIALS.iterdir()} == followed
    assert all(any(block.language == "sh" for block in blocks_of(page)) for page in TUTORIALS.iterdir())
