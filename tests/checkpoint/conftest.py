from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from holdfast.testing.s3 import S3Server, running_s3

# The first call of a kernel compiles it, which takes longer than any deadline.
settings.register_profile("holdfast", deadline=None)
settings.load_profile("holdfast")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server
