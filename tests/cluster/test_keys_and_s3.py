"""A whole job of real processes that speak only to holders of keys, and save to an object store."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.checkpoint.manifest import read_newest
from holdfast.checkpoint.store import open_store
from holdfast.cluster.keys import load_keys, make_keys
from holdfast.cluster.progress import JobProgress
from holdfast.events import read_events
from holdfast.testing.s3 import ACCESS_KEY, SECRET_KEY, S3Server
from tests.cluster.test_api import network, reader, twin_of

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
    make_keys(tmp_path / "keys")
    mechanisms: list[str] = []

    def look(progress: JobProgress) -> None:
        if progress.phase == "running" and not mechanisms:
            started = next(e for e in read_events(tmp_path / "first") if e["event"] == "job_started")
            ports = [port for process in started["processes"] for port in listening_ports(process["pid"])]
            mechanisms.extend(mechanism(port) for port in ports)

    def job(run: str, max_steps: int | None) -> hf.Job:
        return hf.Job(
            network(), reader(samples=40_000), test_data=reader(samples=500, part="test"),
            servers=2, workers=1, staleness=0, optimizer="adam", max_steps=max_steps,
            keys=tmp_path / "keys", checkpoint={"path": store, "every_steps": 40}, run=tmp_path / run,
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
    secrets = [SECRET_KEY.encode(), load_keys(tmp_path / "keys").secret.encode()]
    for folder in ("first", "second"):
        for path in (path for path in (tmp_path / folder).rglob("*") if path.is_file()):
            assert not any(secret in path.read_bytes() for secret in secrets), path
