"""Damage is worked around; a store that does not answer is not taken for a damaged one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpoint.format.manifest import read_newest
from holdfast.checkpoint.store import local as local_store
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.local_files import Entry, Files
from holdfast.checkpoint.tools.verify import verify_versions
from holdfast.events import EventLog, read_events
from holdfast.testing.proxy import breaking_proxy
from holdfast.testing.s3 import S3Server
from tests.checkpoint.by_hand import Rows

INCREMENTAL = hf.Policy(strategy="incremental")


class BadDisk(Files):
    """A disk that fails to open or read the files whose paths begin with ``bad``, or to list at all."""

    def __init__(self, bad: str, operation: str, code: int, *, lists: bool = True) -> None:
        super().__init__()
        self._bad = bad
        self._operation = operation
        self._error = OSError(code, os.strerror(code))
        self._lists = lists
        self._handles: set[int] = set()
        self.fired = 0

    def open_read(self, path: str) -> tuple[int, int]:
        """Open, or fail."""
        found = path.startswith(self._bad)
        if found and self._operation == "open_read":
            self._fail()
        handle, size = super().open_read(path)
        (self._handles.add if found else self._handles.discard)(handle)
        return handle, size

    def preadv(self, handle: int, view: memoryview, offset: int) -> int:
        """Read, or fail."""
        if handle in self._handles and self._operation == "preadv":
            self._fail()
        return super().preadv(handle, view, offset)

    def scan(self, path: str) -> list[Entry]:
        """List, or fail once something else has."""
        if self.fired and not self._lists:
            self._fail()
        return super().scan(path)

    def _fail(self) -> None:
        self.fired += 1
        raise self._error


def save_five(path: Any, **options: Any) -> list[list[list[float]]]:
    """Five versions; what the table was in each, and before."""
    run = Rows()
    values = [run.value()]
    with hf.Checkpointer(path, run.objects, INCREMENTAL, **options) as ckpt:
        for step in range(5):
            run.change(ckpt, step, 7)
            ckpt.save(step)
            ckpt.wait()
            values.append(run.value())
    return values


@pytest.fixture
def put_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Files], None]:
    """Lets stores that are opened from now on be on a given disk."""
    return lambda files: monkeypatch.setattr(local_store, "Files", lambda: files)


@pytest.mark.parametrize("bad", ["chunks/00000005-", "dense/00000005-"])
@pytest.mark.parametrize("operation", ["open_read", "preadv"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read_is_damage(
    tmp_path: Path, put_in: Callable[[Files], None], bad: str, operation: str, code: int
) -> None:
    values = save_five(tmp_path)
    disk = BadDisk(bad, operation, code)
    put_in(disk)
    run = Rows()
    with hf.Checkpointer(tmp_path, run.objects, INCREMENTAL) as ckpt:
        assert ckpt.restore() == 4
        assert run.value() == values[4]
        with pytest.raises(hf.StoreError, match=bad):
            ckpt.restore(5)
        report = verify_versions(ckpt.store)
        assert list(report.damaged) == [5]
    assert disk.fired


@pytest.mark.parametrize(
    ("code", "lists"),
    [
        pytest.param(errno.EHOSTUNREACH, True, id="no way to it"),
        pytest.param(errno.ENOTCONN, True, id="not connected"),
        pytest.param(errno.EIO, False, id="nothing can be read"),
        pytest.param(errno.EACCES, False, id="no permission"),
        pytest.param(errno.EMFILE, True, id="too many open files"),
        pytest.param(errno.ENFILE, True, id="too many open files in all"),
        pytest.param(errno.ENOMEM, True, id="no memory"),
    ],
)
@pytest.mark.parametrize("operation", ["open_read", "preadv"])
@pytest.mark.parametrize("bad", ["chunks/00000005-", "dense/00000005-", "manifests/"])
def test_a_disk_that_is_gone_is_not(
    tmp_path: Path, put_in: Callable[[Files], None], bad: str, operation: str, code: int, lists: bool
) -> None:
    (tmp_path / "log").mkdir()
    values = save_five(tmp_path / "store")
    run = Rows()
    with (
        EventLog(tmp_path / "log") as events,
        hf.Checkpointer(tmp_path / "store", run.objects, INCREMENTAL, events=events) as ckpt,
    ):
        disk = BadDisk(bad, operation, code, lists=lists)
        disk.open_root(str(tmp_path / "store"), create=False)
        well, ckpt.store._files = ckpt.store._files, disk  # type: ignore[attr-defined]
        known = bad == "manifests/"  # since the store was opened
        with nullcontext() if known else pytest.raises(hf.StoreError, match=os.strerror(code)):
            assert ckpt.restore() == 5
        with pytest.raises(hf.StoreError, match=os.strerror(code)):
            verify_versions(ckpt.store)
        assert disk.fired
        ckpt.store._files = well  # type: ignore[attr-defined]
        disk.close_root()
        assert ckpt.restore() == 5
        assert run.value() == values[5]
    assert "checkpoint_damaged" not in {event["event"] for event in read_events(tmp_path / "log")}


def test_a_connection_that_is_lost_while_restoring(s3_server: S3Server) -> None:
    url = f"s3://{s3_server.bucket}/unreachable"
    values = save_five(url, options=s3_server.options())
    with breaking_proxy(int(s3_server.endpoint.rpartition(":")[2])) as proxy:
        options = s3_server.options(
            endpoint=f"http://127.0.0.1:{proxy.port}", max_retries=1, retry_seconds=5.0, request_seconds=5.0
        )
        run = Rows()
        told: list[str] = []
        with hf.Checkpointer(url, run.objects, INCREMENTAL, options=options) as ckpt:
            start = proxy.sent_bytes
            assert ckpt.restore() == 5
            needed = proxy.sent_bytes - start
            for part in range(4):
                proxy.cut_after(needed * part // 4)
                with pytest.raises(hf.StoreUnreachable, match="lost the connection") as caught:
                    ckpt.restore()
                told.append(str(caught.value))
                proxy.mend()
                assert ckpt.restore() == 5
                assert run.value() == values[5]
        assert proxy.breaks
    assert any("to list" in text for text in told)
    assert any("'chunks/" in text or "'dense/" in text for text in told)


def test_a_folder_in_place_of_the_only_manifest(tmp_path: Path) -> None:
    (tmp_path / "manifests" / "0000000003.json").mkdir(parents=True)
    with (
        open_store(tmp_path, create=False) as store,
        pytest.raises(hf.CorruptCheckpoint, match=r"manifests/0000000003.json is a folder.*: remove it"),
    ):
        read_newest(store)
