from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import BadLine, DataError
from holdfast.policy.failure_log import FailureLog, read_failures


def read(tmp_path: Path, text: str) -> FailureLog:
    path = tmp_path / "failures.csv"
    path.write_text(text)
    return read_failures(path)


def test_failures_by_time(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        "# ours\ntime,server\n2026-03-01T12:30:00,4\n2026-03-01T00:30:00,1\n\n2026-03-02T00:30:00Z\n",
    )
    assert log.failed_hours == pytest.approx((12, 12))
    assert log.trace == ((0, 1), (12, 4), (24, None))


def test_hours_since_a_start(tmp_path: Path) -> None:
    log = read(tmp_path, "time\n3.5\n1\n")
    assert log.failed_hours == (2.5,)
    assert log.trace == ((0, None), (2.5, None))


def test_jobs_that_failed_or_not(tmp_path: Path) -> None:
    log = read(tmp_path, "hours,failed\n10,1\n72,0\n5.5,1\n")
    assert log == FailureLog((10, 5.5), (72,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 0: expected the names of the columns"),
        ("10\n20\n", "line 1: expected the names of the columns"),
        ("time,server\nyesterday,1\n", "line 2: 'yesterday' is not a time"),
        ("time,server\n1,first\n", "line 2: expected a time and a server's number"),
        ("hours,failed\n-1,1\n", "line 2: -1 hours: expected 0 or more"),
        ("hours,failed\nnan,1\n", "line 2: nan hours"),
        ("hours,failed\n1,yes\n", "line 2: expected hours and 1 or 0"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadLine, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize("text", ["time\n", "hours,failed\n3,0\n"])
def test_a_log_without_failures_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="contains no failure"):
        read(tmp_path, text)


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.csv cannot be read: No such file"):
        read_failures(tmp_path / "no.csv")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="it is not text"):
        read_failures(tmp_path / "bytes")
