"""A password for a store reaches nothing that a run writes, shows or raises."""

from __future__ import annotations

import logging
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import holdfast as hf
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.s3 import S3Options
from holdfast.cli.app import main
from holdfast.events import EventLog
from holdfast.testing.s3 import S3Server
from holdfast.training.config import load, to_yaml
from tests.checkpoint.by_hand import Rows

SECRET = "hunter2secret"
URL = f"memory://ann:{SECRET}@host/run"


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that nobody listens on, and nobody else can take."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


class Talkative(MemoryFileSystem):  # type: ignore[misc]
    """A file system whose errors say all that it knows."""

    protocol = "talkative"
    broken: tuple[str, ...] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if "init" in self.broken:
            raise LookupError(f"{options} of {SECRET}")

    def __getattribute__(self, name: str) -> Any:
        if name in type(self).broken:
            raise OSError(f"{name} with {self.storage_options} failed for {SECRET}")
        return super().__getattribute__(name)


@pytest.fixture(autouse=True)
def _talkative() -> Iterator[None]:
    fsspec.register_implementation("talkative", Talkative, clobber=True)
    yield
    Talkative.broken = ()
    Talkative.clear_instance_cache()
    fsspec.filesystem("memory").rm("/", recursive=True)


def check_silent(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, *texts: str
) -> None:
    """Fails if the secret is in anything that was written under a folder, printed, logged, or in a text."""
    captured = capsys.readouterr()
    logged = [f"{one.getMessage()} {one.args}" for one in caplog.records if one.name.startswith("holdfast")]
    for text in (*texts, captured.out, captured.err, *logged):
        assert SECRET not in text
    for path in folder.rglob("*"):
        assert SECRET not in path.name
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path


def shown(error: BaseException) -> str:
    """All that Python shows of an error that nobody catches, and what it is made of."""
    return "".join(traceback.format_exception(error)) + repr(error)


def test_a_run_that_goes_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "holdfast")
    rows = Rows()
    options = {"password": SECRET, "secret_access_key": SECRET}
    with (
        EventLog(tmp_path) as events,
        hf.Checkpointer(URL, rows.objects, options=options, events=events) as ckpt,
    ):
        ckpt.restore()
        ckpt.save(1)
        ckpt.wait()
        assert ckpt.restore() == 2
        texts = [repr(ckpt), repr(ckpt.store), ckpt.store.url, repr(ckpt.reports)]
        assert ckpt.store.url == "memory://ann:***@host/run"
    check_silent(tmp_path, capsys, caplog, *texts)


@pytest.mark.parametrize("broken", ["makedirs", "exists", "find", "open", "mv", "cat_file", "info", "init"])
def test_a_store_that_fails_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    caplog.set_level(logging.DEBUG, "holdfast")
    url = f"talkative://ann:{SECRET}@host/run"
    rows = Rows()
    texts = []
    with EventLog(tmp_path) as events:
        try:
            if broken in ("open", "mv", "info", "exists"):
                with hf.Checkpointer(url, rows.objects, events=events) as ckpt:
                    Talkative.broken = (broken,)
                    ckpt.save(1)
                    ckpt.wait()
            else:
                Talkative.broken = (broken,)
                hf.Checkpointer(url, rows.objects, options={"password": SECRET}, events=events)
        except hf.HoldfastError as error:
            texts.append(shown(error))
        else:
            pytest.fail("nothing was raised")
        finally:
            Talkative.broken = ()
    assert "talkative://ann:***@host/run" in texts[0]
    check_silent(tmp_path, capsys, caplog, *texts)


def test_a_bucket_that_cannot_be_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, closed_port: int
) -> None:
    options = {
        "endpoint": f"http://ann:{SECRET}@127.0.0.1:{closed_port}", "access_key_id": "AKIA",
        "secret_access_key": SECRET, "session_token": SECRET, "max_retries": 0, "region": "us-east-1",
    }  # fmt: skip
    with pytest.raises(hf.StoreUnreachable) as caught:
        hf.Checkpointer("s3://bucket/run", Rows().objects, options=options)
    made = S3Options.from_mapping(options)
    assert "AKIA" in repr(made)
    with pytest.raises(hf.ConfigError, match=r"s3://AKIA:\*\*\*@bucket/run.*access_key_id") as refused:
        hf.Checkpointer(f"s3://AKIA:{SECRET}@bucket/run", Rows().objects)
    check_silent(tmp_path, capsys, caplog, shown(caught.value), repr(made), shown(refused.value))


def test_a_bucket_that_refuses_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, s3_server: S3Server
) -> None:
    options = s3_server.options() | {"secret_access_key": SECRET}
    with pytest.raises(hf.StoreError, match="no permission") as caught:
        open_store(f"s3://{s3_server.bucket}/run", create=True, options=options)
    check_silent(tmp_path, capsys, caplog, shown(caught.value))


def test_configurations(tmp_path: Path) -> None:
    config = load(None, [f"checkpoint.path={URL}"], job={"servers": 1})
    assert config.checkpoint is not None
    assert config.checkpoint.path == URL
    for text in (repr(config), str(config.checkpoint), to_yaml(config)):
        assert SECRET not in text
        assert "memory://ann:***@host/run" in text
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load(tmp_path / "config.yaml")
    assert again.checkpoint is not None
    # Nothing that Holdfast writes has the password in it, so what was written cannot be used as it is.
    with pytest.raises(
        hf.ConfigError, match=r"memory://ann:\*\*\*@host/run has \*\*\* in place of a password"
    ):
        open_store(again.checkpoint.path, create=True)


Failing = Callable[[int], list[str]]
COMMANDS: dict[str, Failing] = {
    "ls": lambda port: ["ckpt", "ls", f"ftp://ann:{SECRET}@127.0.0.1:{port}/run"],
    "verify": lambda port: ["ckpt", "verify", f"ftp://ann:{SECRET}@127.0.0.1:{port}/run"],
    "train": lambda port: [
        "train", "--servers", "1", "--run", "r", "--set", "data.samples=1000",
        "--set", f"checkpoint.path=ftp://ann:{SECRET}@127.0.0.1:{port}/run",
    ],
    "a wrong key": lambda port: ["train", "--set", f"checkpoint.paht=ftp://ann:{SECRET}@host/run"],
    "no key": lambda port: ["train", "--set", f"ftp://ann:{SECRET}@host/run"],
    "no section": lambda port: [
        "train", "--set", f"run=ftp://ann:{SECRET}@host/run", "--set", "run.x=1",
    ],
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_fail(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    closed_port: int,
    command: str,
) -> None:
    """An unreachable fsspec store: one sentence, exit code 1, and a run's folder without the password."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["holdfast", *COMMANDS[command](closed_port)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert SECRET not in captured.out + captured.err
    if command in ("ls", "verify", "train"):
        assert "ftp://ann:***@127.0.0.1" in captured.err
    assert (tmp_path / "r" / "config.yaml").exists() == (command == "train")
    check_silent(tmp_path, capsys, caplog, captured.err)


def test_what_a_job_keeps_in_its_checkpoints() -> None:
    """The configuration is kept with every version, for whoever reads it later."""
    from holdfast.cluster.saving.layout import JobState, dense_tree
    from holdfast.sim.cluster import counting_plan
    from holdfast.sim.saving import saved_plan
    from holdfast.training.saving import CheckpointConfig

    plan = saved_plan(counting_plan(servers=2, workers=1, atomic=False), CheckpointConfig(path=URL))
    plan = msgspec.structs.replace(plan, training={"checkpoint": {"path": URL}})
    tree = dense_tree(plan, None, 1, JobState((), 0, 2, 1, 1, 0))
    assert SECRET not in str(tree)
    assert SECRET not in repr(plan)
    assert "memory://ann:***@host/run" in tree["job"]["config"]
