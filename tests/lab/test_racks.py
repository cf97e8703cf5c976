"""Machines of a job on Ray are where its nodes' labels say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.testing.lab import enclosed, unavailable

WHY_NOT = unavailable() or ("" if importlib.util.find_spec("ray") else "Ray is not installed")


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_machines_are_in_the_racks_that_are_planned(tmp_path: Path) -> None:
    command = enclosed([sys.executable, "-m", "tests.lab.racks", str(tmp_path)])
    patient = {**os.environ, "RAY_raylet_start_wait_time_s": "120"}
    ended = subprocess.run(command, env=patient, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
