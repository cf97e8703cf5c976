"""A job that a controller runs for viewers who come and go; here both are in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast.cluster import remote
from holdfast.cluster.controller import Controller
from holdfast.cluster.protocol.messages import Status
from holdfast.cluster.remote import Remote, ended
from holdfast.cluster.runtime.files import FileNews, write_part, written
from holdfast.errors import DataLoss, JobFailed, UnsafeName
from holdfast.events import read_events
from holdfast.training.config import Config, load

SMALL = (
    "job.servers=2", "job.workers=1", "data.samples=20000", "data.test_samples=500", "data.max_rows=300",
    "batch_size=100", "model.dim=4", "model.bottom=[8,4]", "model.top=[8,1]", "report_every=10",
)  # fmt: skip


class Here:
    """A controller in this process."""

    def __init__(self, config: Config) -> None:
        self.controller = Controller(msgspec.json.encode(config))
        self.is_gone = False
        self.late = 0
        """How many calls get no answer in time."""

    def call(self, method: str, *arguments: Any) -> Any:
        if self.late:
            self.late -= 1
            raise TimeoutError
        return getattr(self.controller, method)(*arguments)

    def kill(self) -> None:
        self.controller.remove()
        self.is_gone = True


@pytest.fixture
def hosted() -> Iterator[Here]:
    made = Here(load(None, SMALL))
    yield made
    made.controller.stop()
    while made.controller.state() == "running":
        time.sleep(0.05)
    made.kill()


def follow(hosted: Here, folder: Path, statuses: list[Status] | None = None) -> hf.JobResult:
    return Remote(hosted).follow(folder, (statuses if statuses is not None else []).append, lambda: False)


def test_a_viewer_gets_all_there_is(hosted: Here, tmp_path: Path) -> None:
    statuses: list[Status] = []
    result = follow(hosted, tmp_path, statuses)
    assert result.steps == 200
    assert result.folder == tmp_path
    assert statuses[-1].steps == 200
    events = [event["event"] for event in read_events(tmp_path)]
    assert events[-1] == "run_finished"
    assert {"job_started", "worker_started", "progress", "test"} <= set(events)
    assert hosted.is_gone
    assert msgspec.json.decode(hosted.controller.config(), type=Config) == load(None, SMALL)


def test_one_leaves_and_another_comes(hosted: Here, tmp_path: Path) -> None:
    """The second one misses nothing, and the first one's end is not the job's."""

    def leave(status: Status) -> None:
        if status.steps:
            raise KeyboardInterrupt

    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        Remote(hosted).follow(first, leave, lambda: False)
    assert Remote(hosted).state() == "running"
    hosted.late = 1
    assert follow(hosted, second).steps == 200
    known = (first / "events.jsonl").read_bytes()
    assert known
    assert (second / "events.jsonl").read_bytes().startswith(known)


def test_a_viewer_can_stop_it(hosted: Here, tmp_path: Path) -> None:
    begun = threading.Event()
    result = Remote(hosted).follow(
        tmp_path, lambda status: begun.set() if status.steps else None, begun.is_set
    )
    assert result.interrupted
    assert 0 < result.steps < 200


def test_a_job_that_cannot_start_says_why(tmp_path: Path) -> None:
    hosted = Here(load(None, [*SMALL, "model={build: 'no_such_module:build'}"]))
    with pytest.raises(hf.ConfigError, match="no_such_module"):
        follow(hosted, tmp_path)
    assert [event["event"] for event in read_events(tmp_path)] == ["run_failed"]


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (DataLoss("server 3 is gone"), DataLoss, "server 3 is gone"),
        (ZeroDivisionError("by zero"), JobFailed, "ZeroDivisionError"),
    ],
)
def test_errors_arrive_as_what_they_are(error: Exception, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        remote._outcome(ended(error), Path())


def test_a_controller_that_is_silent_for_long(
    hosted: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_GONE_SECONDS", 0.2)
    monkeypatch.setattr(remote, "_AGAIN_SECONDS", 0.01)
    hosted.late = 1000
    with pytest.raises(JobFailed, match=r"may go on.*attach"):
        follow(hosted, tmp_path)
    hosted.late = 0


class TestFiles:
    def test_a_copy_grows_with_its_file(self, tmp_path: Path) -> None:
        source, target = tmp_path / "source", tmp_path / "target"
        (source / "logs").mkdir(parents=True)
        offsets: dict[str, int] = {}
        for text in ("first ", "second ", "third"):
            for name in ("events.jsonl", "logs/server-0-1.log", "logs/server-warm-1.log", "config.yaml"):
                with (source / name).open("a") as file:
                    file.write(text)
            while parts := written(source, offsets, most_bytes=4):
                for part in parts:
                    write_part(target, part)
                    offsets[part.name] = part.offset + len(part.data)
        copied = {str(path.relative_to(target)): path.read_text() for path in target.rglob("*.*")}
        assert copied == dict.fromkeys(("events.jsonl", "logs/server-0-1.log"), "first second third")

    @pytest.mark.parametrize(
        "name", ["../events.jsonl", "/events.jsonl", "logs/../../x.log", "config.yaml", "lost/../../a/lost/x"]
    )
    def test_a_name_that_leads_elsewhere(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(UnsafeName):
            write_part(tmp_path, FileNews(name, 0, b"x"))
        assert not list(tmp_path.iterdir())
