"""A job that is run by a *controller* somewhere else, and whoever watches it.

The controller (``controller.py``) runs on a machine of the cluster and outlives the process that started it.
A *viewer* asks it for news over and over, copies what has been written to a folder of its own, and may leave
and come back at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import msgspec
from msgspec import Struct

from holdfast import errors
from holdfast.cluster.protocol.messages import Status
from holdfast.cluster.report.result import JobResult
from holdfast.cluster.runtime.files import FileNews, write_part
from holdfast.errors import HoldfastError, JobFailed, message_of

CONTROLLER: Final = "holdfast.cluster.controller:Controller"
State = Literal["running", "finished", "failed"]
_LOOK_SECONDS = 0.25
_AGAIN_SECONDS = 0.5
_GONE_SECONDS = 60.0


class Ended(Struct, frozen=True):
    """How a job ended."""

    result: bytes = b""
    """A ``JobResult``, or …"""
    error: str = ""
    """… the kind of an error, and its message."""
    message: str = ""


class ControllerNews(Struct, frozen=True):
    """What a controller tells a viewer."""

    status: Status | None
    """The last report."""
    files: tuple[FileNews, ...] = ()
    ended: Ended | None = None


class Hosted(Protocol):
    """An object in a process of the cluster."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method. Raises TimeoutError if there is no answer now."""

    def kill(self) -> None:
        """End it, and everything that it has started."""


class Remote:
    """A job that a controller runs.

    Args:
        hosted: the controller.
    """

    def __init__(self, hosted: Hosted) -> None:
        self._hosted = hosted

    def config(self) -> bytes:
        """The job's configuration, as JSON."""
        found: bytes = self._call("config")
        return found

    def state(self) -> State:
        """Whether the job runs, or how it has ended."""
        found: State = self._call("state")
        return found

    def stop(self) -> None:
        """Let workers finish their batch, test, save and end."""
        self._call("stop")

    def kill(self) -> None:
        """End the job at once."""
        self._hosted.kill()

    def follow(
        self, folder: Path, on_status: Callable[[Status], None], stop_requested: Callable[[], bool]
    ) -> JobResult:
        """Copy what the job writes to a folder until it ends. Returns its result, or raises its error.

        An exception here, such as Ctrl-C, does not end the job.
        """
        offsets: dict[str, int] = {}
        seen: Status | None = None
        stopped = False
        heard = time.monotonic()
        while True:
            try:
                if stop_requested() and not stopped:
                    self.stop()
                    stopped = True
                news = self._look(offsets)
            except TimeoutError:
                if time.monotonic() > heard + _GONE_SECONDS:
                    raise _gone() from None
                time.sleep(_AGAIN_SECONDS)
                continue
            heard = time.monotonic()
            for file in news.files:
                write_part(folder, file)
                offsets[file.name] = file.offset + len(file.data)
            if news.status is not None and news.status != seen:
                seen = news.status
                on_status(news.status)
            if news.ended is not None and not news.files:  # everything is here
                self._hosted.kill()
                return _outcome(news.ended, folder)

    def _call(self, method: str) -> Any:
        """Call a method, again until there is an answer: another controller may be taking over."""
        end = time.monotonic() + _GONE_SECONDS
        while True:
            try:
                return self._hosted.call(method)
            except TimeoutError:
                if time.monotonic() > end:
                    raise _gone() from None
            time.sleep(_AGAIN_SECONDS)

    def _look(self, offsets: Mapping[str, int]) -> ControllerNews:
        answer = self._hosted.call("look", dict(offsets), _LOOK_SECONDS)
        return msgspec.msgpack.decode(answer, type=ControllerNews)


def _gone() -> JobFailed:
    return JobFailed(
        f"the controller of the job has not answered for {_GONE_SECONDS:.0f} s; the job may go on: try "
        "holdfast attach later"
    )


def ended(outcome: JobResult | BaseException) -> Ended:
    """What to tell viewers."""
    if isinstance(outcome, BaseException):
        return Ended(error=type(outcome).__name__, message=message_of(outcome))
    return Ended(msgspec.json.encode(outcome, enc_hook=_encode))


def _outcome(said: Ended, folder: Path) -> JobResult:
    if said.error:
        kind = getattr(errors, said.error, None)
        if isinstance(kind, type) and issubclass(kind, HoldfastError):
            raise kind(said.message)
        raise JobFailed(f"{said.error}: {said.message}")
    return replace(msgspec.json.decode(said.result, type=JobResult, dec_hook=_decode), folder=folder)


def _encode(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"cannot encode a {type(value).__name__}")


def _decode(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"cannot decode a {kind.__name__}")
