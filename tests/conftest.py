"""What every test gets: quiet threads, and a check that it leaves no processes behind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from holdfast.testing.s3 import S3Server, running_s3
from tests import processes

# Before torch is imported: spinning OpenMP threads starve the other processes of a test.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell that starts something in the background lets it ignore SIGINT, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

processes.mark()

# No example has a time limit: the first one of a loop compiles it, and the machine may be busy.
settings.register_profile("unhurried", settings.default, deadline=None)
settings.load_profile("unhurried")


# Files whose tests take a minute or more, the longest first, and folders of other long ones. Begun last, one
# processor would wait for the others at the end.
_LONGEST = (
    "e2e/test_commands.py", "cluster/test_server_deaths.py", "cluster/saving/test_saving.py",
    "tests/test_tutorials.py", "e2e/test_stopping.py", "e2e/test_job_commands.py", "sim/test_protected.py",
    "cluster/test_partial_recovery.py", "cluster/test_kills.py", "e2e/test_failing_checkpoints.py",
    "e2e/test_ckpt_commands.py", "e2e/test_planning_commands.py", "checkpoint/saving/test_crash.py",
    "sim/test_emulator.py", "checkpoint/torch/test_foreign_writes.py",
)  # fmt: skip
_LONG = ("cluster", "e2e", "sim", "bench", "chaos", "test_docs.py", "test_readme.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run them first."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    path = item.path.as_posix()
    turn = next((n for n, name in enumerate(_LONGEST) if path.endswith(name)), len(_LONGEST))
    return turn + (turn == len(_LONGEST) and not any(part in _LONG for part in item.path.parts))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture(autouse=True)
def _no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    left = processes.left_by(request.node.nodeid, grace_seconds=10.0)
    for pid in left:  # they shall not trouble the tests that follow
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, "processes of this test still run"
