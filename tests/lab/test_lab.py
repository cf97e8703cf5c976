"""Jobs on several hosts survive what happens to hosts."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.chaos.machines import run_on_machines
from holdfast.chaos.run import ChaosOptions
from holdfast.testing.lab import enclosed, unavailable
from tests.lab.scenarios import SCENARIOS, WITH_REDIS

WHY_NOT = unavailable() or ("" if importlib.util.find_spec("ray") else "Ray is not installed")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def test_a_lab_never_changes_the_machine() -> None:
    """However it is started: its first process is in namespaces of its own."""
    show = [
        sys.executable,
        "-c",
        "import os; print(*(os.readlink(f'/proc/self/ns/{n}') for n in ('net', 'mnt')))",
    ]
    here = subprocess.run(show, capture_output=True, text=True, check=True).stdout.split()
    for command in ([sys.executable, "-m", "holdfast.testing.lab", *show], enclosed(show)):
        there = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert len(there) == 2
        assert not set(there) & set(here)


IN_SUITE = ("power_off", "cut_and_heal", "supervisor_lost", "controller_lost", "user_killed")


@pytest.mark.soak
def test_chaos(tmp_path: Path) -> None:
    """What a seed decides happens to machines, for a minute."""
    said: list[str] = []
    options = ChaosOptions(seed=5, minutes=1.0, run=str(tmp_path / "run"), engine="ray")
    result = run_on_machines(options, said.append)
    assert result.good, result.problems
    assert result.updates_checked > 1000
    assert len(said) == result.faults.total()


NEEDS_REDIS = pytest.mark.skipif(
    not shutil.which("redis-server"), reason="redis-server is missing: install Debian's package redis-server"
)


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in IN_SUITE
        else pytest.param(name, marks=[pytest.mark.soak, *([NEEDS_REDIS] if name in WITH_REDIS else [])])
        for name in SCENARIOS
    ],
)
def test_scenario(name: str, tmp_path: Path) -> None:
    command = enclosed([sys.executable, "-m", "tests.lab.scenarios", name, str(tmp_path)])
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    said = "".join(path.read_text()[-4000:] for path in tmp_path.glob("*.log") if "ray" not in path.name)
    assert ended.returncode == 0, f"{ended.stderr[-4000:]}\n{said}"
