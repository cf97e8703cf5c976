"""What the processes of one machine have written, collected in the run's folder elsewhere."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from holdfast.cluster.runtime.files import FileNews, write_part
from holdfast.events import started_at

_LOG = "events.jsonl"


class Collected:
    """The copies of what one agent's processes write: logs in a folder of their machine, events in the run's
    log, with the machine's name and by this machine's clock.

    Args:
        folder: the run's.
        machine: the machine's name.
        again: whether the run's log has the agent's first events already, by an earlier controller.
    """

    def __init__(self, folder: Path, machine: str, *, again: bool = False) -> None:
        self.offsets: dict[str, int] = {}
        """How much of each file has arrived."""
        self._folder, self._machine = folder, machine
        self._known = _events_of(folder / _LOG, machine) if again else 0
        self._cut_line: dict[str, bytes] = {}
        """By file of events: the beginning of a line whose end has not arrived."""

    def write(self, file: FileNews, ahead: float) -> None:
        """Add a part; ``ahead`` is by how much this clock is ahead of the machine's."""
        self.offsets[file.name] = file.offset + len(file.data)
        path = Path(file.name)
        if path.name == _LOG:
            self._write_events(file, ahead)
            return
        if path.parent.name == "logs":
            file = FileNews(f"logs/{self._machine.replace(':', '-')}/{path.name}", file.offset, file.data)
        with contextlib.suppress(OSError):  # a full disk must not end the job
            write_part(self._folder, file)

    def _write_events(self, file: FileNews, ahead: float) -> None:
        text = self._cut_line.pop(file.name, b"") + file.data
        *lines, self._cut_line[file.name] = text.split(b"\n")
        log = self._folder / _LOG
        started = started_at(log)
        with contextlib.suppress(OSError), log.open("ab", buffering=0) as events:
            for line in lines:
                with contextlib.suppress(msgspec.DecodeError):
                    event = msgspec.json.decode(line)
                    if self._known:
                        self._known -= 1
                        continue
                    event["time"] += ahead
                    event["seconds"] = round(event["time"] - started, 6)
                    event["host"] = self._machine
                    events.write(msgspec.json.encode(event) + b"\n")


def _events_of(log: Path, machine: str) -> int:
    """How many events of the agent that runs on a machine now there are in a run's log."""
    count = 0
    with contextlib.suppress(FileNotFoundError), log.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):
                event = msgspec.json.decode(line)
                if event["event"] == "machine_found" and event["machine"] == machine:
                    count = 0
                count += event.get("host") == machine
    return count
