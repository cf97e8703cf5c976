"""A whole job of real processes that speak only to members, over TCP, and save to an object store."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.checkpoint.format.manifest import read_newest
from holdfast.checkpoint.store import open_store
from holdfast.cluster import runner as job_module
from holdfast.cluster.report.progress import JobProgress
from holdfast.cluster.runtime.keys import JobKeys
from holdfast.events import read_events
from holdfast.testing.s3 import ACCESS_KEY, SECRET_KEY, S3Server
from tests.cluster.test_job import network, reader, twin_of

VERSION = b"\xff" + bytes(8) + b"\x7f\x03\x00"
"""What a ZeroMQ client says first, before it says how it wants to speak: ZMTP 3.0."""


def listening_ports(pid: int) -> set[int]:
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    sockets = set(re.findall(r"socket:\[(\d+)\]", " ".join(links)))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and line[9] in sockets}


def mechanism(port: int) -> str:
    """How whoever listens there wants to be spoken to."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(VERSION)
        with client.makefile("rb") as answer:
            return answer.read(32)[12:].rstrip(b"\0").decode()


def test_a_job_with_keys_goes_on_from_an_object_store(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: its second half is what it would have been without the break."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    store = f"s3://{s3_server.bucket}/job"
    mechanisms: list[str] = []
    secrets = [SECRET_KEY.encode()]
    shown: list[bytes] = []

    class Recorded(JobKeys):
        def __init__(self, servers: int, workers: int, vaults: int) -> None:
            super().__init__(servers, workers, vaults)
            secrets.extend(pair.secret.encode() for pair in self.pairs)

    monkeypatch.setattr(job_module, "JobKeys", Recorded)

    def look(progress: JobProgress) -> None:
        if progress.phase == "running" and not mechanisms:
            started = next(e for e in read_events(tmp_path / "first") if e["event"] == "job_started")
            pids = [process["pid"] for process in started["processes"]]
            mechanisms.extend(mechanism(port) for pid in pids for port in listening_ports(pid))
            shown.extend(
                Path(f"/proc/{pid}/{name}").read_bytes() for pid in pids for name in ("cmdline", "environ")
            )

    def job(run: str, max_steps: int | None) -> hf.Job:
        return hf.Job(
            network(), reader(samples=40_000), test_data=reader(samples=500, part="test"),
            servers=2, workers=1,
            training=hf.Training(staleness=0, optimizer="adam", max_steps=max_steps),
            engine=hf.Local(bind="tcp://127.0.0.1"), checkpoint={"path": store, "every_steps": 40},
            run=tmp_path / run,
        )  # fmt: skip

    first = job("first", max_steps=170).run(look)
    assert (first.steps, first.save_failures) == (170, ())
    assert first.versions
    assert mechanisms == ["CURVE"] * 3, "the supervisor's and the servers'"
    with open_store(store, create=False) as opened:
        assert [v.version for v in read_newest(opened).versions] == list(first.versions)
        assert read_newest(opened).versions[-1].step == 169

    whole = job("second", max_steps=None)
    second = whole.run()
    assert (second.steps, second.samples) == (400, 40_000)
    assert min(second.versions) > max(first.versions)
    assert second.records == twin_of(whole, servers=2).records()
    assert len(secrets) == 1 + 2 * (2 + 2 + 1), "each job has made its own"
    paths = [
        path for folder in ("first", "second") for path in (tmp_path / folder).rglob("*") if path.is_file()
    ]
    shown += [path.read_bytes() for path in paths]
    # The object store's own is in the environment, where it was put.
    assert not any(secret in text for secret in secrets[1:] for text in shown)
    assert not any(secrets[0] in path.read_bytes() for path in paths)
    for folder in ("first", "second"):
        assert (tmp_path / folder / "supervisor.json").stat().st_mode & 0o777 == 0o600
