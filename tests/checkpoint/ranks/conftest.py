from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint.ranks.jobs import Jobs, running_jobs


@pytest.fixture(scope="session")
def jobs() -> Iterator[Jobs]:
    with running_jobs() as running:
        yield running
