"""Passwords in what is shown and written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.errors import HoldfastError, StoreLocked
from holdfast.events import EventLog
from holdfast.redaction import Secrets, redact, redacted

SHOWN = {
    "sftp://ann:hunter2@host/run": "sftp://ann:***@host/run",
    "sftp://ann:hun@ter2@host:22/run": "sftp://ann:***@host:22/run",
    "sftp://ann:hun/ter2@host/run": "sftp://ann:***@host/run",
    "s3://AKIA:hunter2@bucket/run": "s3://AKIA:***@bucket/run",
    "sftp://:hunter2@host/run": "sftp://:***@host/run",
    "https://hunter2@host/run": "https://***@host/run",
    "github://hunter2@repository/run": "github://***@repository/run",
    "abfs://box/run?sig=hunter2&sv=hunter2": "abfs://box/run?sig=***&sv=***",
    "simplecache::sftp://ann:hunter2@host/run": "simplecache::sftp://ann:***@host/run",
    "no store at 'ftp://ann:hunter2@host/a' and 'ftp://bob:hunter2@host/b'": (
        "no store at 'ftp://ann:***@host/a' and 'ftp://bob:***@host/b'"
    ),
}
AS_IT_IS = [
    "/data/run", "s3://bucket/run", "s3://bucket/a:b@c", "sftp://ann@host/run", "abfs://box@account.net/run",
    "http://127.0.0.1:9000", "memory://faults/store", "it is 12:30 at ann@example.com", "file:///a/b?c", "a://b",
]  # fmt: skip


@pytest.mark.parametrize("text", SHOWN)
def test_what_is_shown_of_a_url(text: str) -> None:
    assert redact(text) == SHOWN[text]
    assert redact(SHOWN[text]) == SHOWN[text]
    assert str(HoldfastError(text)) == SHOWN[text]
    assert "hunter2" not in repr(HoldfastError(text))


@pytest.mark.parametrize("text", AS_IT_IS)
def test_what_holds_no_secret_stays(text: str) -> None:
    assert redact(text) == text
    assert str(StoreLocked(text, "host", 1)) == text


def test_values_in_values() -> None:
    value = {
        "path": "ftp://a:hunter2@b",
        "list": ["ftp://a:hunter2@b", ("x", 1, None)],
        "secret_access_key": "hunter2",
        "db_password": "hunter2",
        "api_key": "hunter2",
        "session_token": None,
        "tokenizer": "words",
        "token_count": 5,
    }
    assert redacted(value) == {
        "path": "ftp://a:***@b",
        "list": ["ftp://a:***@b", ["x", 1, None]],
        "secret_access_key": "***",
        "db_password": "***",
        "api_key": "***",
        "session_token": None,
        "tokenizer": "words",
        "token_count": 5,
    }
    assert value["db_password"] == "hunter2"


def test_secrets_of_a_store_wherever_they_are_said() -> None:
    secrets = Secrets.of(
        "ftp://ann:hunter%402@host/x", {"secret": "hunter3", "region": "somewhere", "token": "ab"}
    )
    text = "hunter%402 or hunter@2 or hunter3 at somewhere, about"
    assert secrets.scrub(text) == "*** or *** or *** at somewhere, about"
    error = OSError("hunter3")
    error.__cause__ = ValueError("somewhere")
    assert secrets.are_in(error)
    outer = OSError("somewhere")
    outer.__context__ = error
    assert secrets.are_in(outer)
    assert not secrets.are_in(OSError("somewhere"))


def test_events(tmp_path: Path) -> None:
    with EventLog(tmp_path) as events:
        events.emit("config", checkpoint={"path": "ftp://a:hunter2@b", "every_steps": 5})
    line = json.loads((tmp_path / "events.jsonl").read_text())
    assert line["checkpoint"] == {"path": "ftp://a:***@b", "every_steps": 5}
