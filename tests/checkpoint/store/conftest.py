from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.testing.s3 import S3Server, running_s3


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server
