"""Files in the folder that ``holdfast train`` is started in: found, but never in the place of a package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import PATIENCE_SECONDS, SMALL

OWN = """
import holdfast as hf
import torch

def build(reader):
    print("own module of", torch.__name__)
    tables = len(reader.table_rows)
    return hf.DLRM(dense_features=reader.dense_features, tables=tables, dim=8, bottom=(16, 8), top=(16, 1))
"""


@pytest.mark.parametrize("servers", [0, 1])
def test_a_package_is_not_taken_from_the_current_folder(tmp_path: Path, servers: int) -> None:
    for name in ("torch", "numpy", "msgspec", "yaml", "zmq", "numba", "json", "holdfast"):
        (tmp_path / f"{name}.py").write_text("import os; os.write(2, b'shadowed'); os._exit(66)")
    (tmp_path / "my_model.py").write_text(OWN)
    # As the installed command does it, Python does not put the current folder first.
    command = [sys.executable, "-P", "-m", "holdfast", "train", *SMALL, "--run", "r"]
    own = ["--set", "model={build: 'my_model:build'}", "--set", "data.samples=3000"]
    small = [part for part in command if not part.startswith("--set=model")]
    done = subprocess.run(
        [*small, *own, *(["--servers", str(servers), "--workers", "1"] if servers else [])],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert "shadowed" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert "finished after" in done.stdout
    logs = "".join(path.read_text() for path in (tmp_path / "r").glob("logs/*"))
    assert "shadowed" not in logs
    assert "own module of torch" in (logs if servers else done.stdout)
