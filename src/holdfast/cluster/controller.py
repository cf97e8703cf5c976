"""The controller of a job on a cluster: it runs the job, on one of the machines, for viewers elsewhere.

It is the only process that starts and ends others of the job. An engine makes an actor of it that outlives
the process which started the job (see ``remote``).
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.cluster.job import Job
from holdfast.cluster.protocol.messages import Status
from holdfast.cluster.remote import ControllerNews, Ended, State, ended
from holdfast.cluster.report.progress import Reports
from holdfast.cluster.runtime.files import Journal, written
from holdfast.events import EventLog
from holdfast.training.config import Config

_MOST_BYTES = 4 << 20
_LOG = "events.jsonl"


class Controller:
    """Runs a job. Any thread may call it.

    Args:
        config: the job's configuration, as JSON.
        number: 1 for the one that starts the job; others take over from one that was lost.
    """

    def __init__(self, config: bytes, number: int = 1) -> None:
        self._config = config
        self._number = number
        self._folder = Path(tempfile.mkdtemp(prefix="holdfast-"))
        self._journal = Journal(self._folder / _LOG)
        self._news = threading.Condition()
        self._status: Status | None = None
        self._ended: Ended | None = None
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="job", daemon=True).start()

    def config(self) -> bytes:
        """The job's configuration, as JSON."""
        return self._config

    def state(self) -> State:
        """Whether the job runs, or how it has ended."""
        if self._ended is None:
            return "running"
        return "failed" if self._ended.error else "finished"

    def stop(self) -> None:
        """Let workers finish their batch, test, save and end."""
        self._stop.set()

    def look(self, offsets: Mapping[str, int], seconds: float) -> bytes:
        """The news (``ControllerNews``, as MessagePack); waits so long for a report.

        Args:
            offsets: how much of each file the caller has.
            seconds: how long to wait.
        """
        with self._news:
            before = self._status
            self._news.wait_for(lambda: self._status is not before or self._ended is not None, seconds)
            status, end = self._status, self._ended
        # Of the log only what the next controller would have, too: then a viewer's copy stays a copy.
        files = tuple(written(self._folder, offsets, _MOST_BYTES, {_LOG: self._journal.kept()}))
        return msgspec.msgpack.encode(ControllerNews(status, files, end))

    def remove(self) -> None:
        """Remove its files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        outcome: Ended
        try:
            job = Job.from_config(msgspec.json.decode(self._config, type=Config))
            succession = job.succeed(self._number, self._journal)
            with EventLog(self._folder) as events:
                reports = Reports(job.config, events)

                def note(status: Status) -> None:
                    reports.note(status, stopped=self._stop.is_set())
                    with self._news:
                        self._status = status
                        self._news.notify_all()

                outcome = ended(
                    job.run_here(self._folder, events, note, self._stop.is_set, succession=succession)
                )
        except BaseException as error:
            with contextlib.suppress(OSError):
                traceback.print_exc()
            outcome = ended(error)
        with self._news:
            self._ended = outcome
            self._news.notify_all()
