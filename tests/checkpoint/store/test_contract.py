"""Every store passes the same contract."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.store import Store, open_store
from holdfast.errors import ConfigError
from holdfast.testing.s3 import S3Server
from holdfast.testing.stores import Opener, StoreContract

_places = itertools.count()


class TestLocalFolder(StoreContract):
    reads_after_delete = True

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        def opened(*, create: bool) -> Store:
            return open_store(tmp_path / "new" / "store", create=create)

        return opened


class TestFileUrl(StoreContract):
    reads_after_delete = True
    many_objects = 3
    large_object_bytes = 10_000_000

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        def opened(*, create: bool) -> Store:
            return open_store((tmp_path / "a store").as_uri(), create=create)

        return opened


class TestS3(StoreContract):
    @pytest.fixture
    def opener(self, s3_server: S3Server) -> Opener:
        url = f"s3://{s3_server.bucket}/contract/{next(_places)}"

        def opened(*, create: bool) -> Store:
            return open_store(url, create=create, options=s3_server.options())

        return opened


class TestFsspecMemory(StoreContract):
    publishes_exclusively = False

    @pytest.fixture
    def opener(self) -> Iterator[Opener]:
        import fsspec

        url = f"memory://contract-{next(_places)}/deep"

        def opened(*, create: bool) -> Store:
            return open_store(url, create=create)

        yield opened
        fsspec.filesystem("memory").rm("/", recursive=True)


class TestFsspecLocal(StoreContract):
    publishes_exclusively = False
    many_objects = 30

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        def opened(*, create: bool) -> Store:
            return open_store(f"local://{tmp_path}/new/store", create=create)

        return opened


def test_the_package_needs_no_optional_package(tmp_path: Path) -> None:
    code = (
        "import sys, holdfast.checkpoint.store as s; s.open_store(sys.argv[1], create=False).list();"
        "print(sorted({'torch', 'obstore', 'fsspec', 'pickle'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [("s3://bucket/x", "obstore", "holdfast[s3]"), ("memory://x", "fsspec", "holdfast[fsspec]")],
)
def test_a_missing_package_is_named_with_its_cure(
    url: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("holdfast.buckets", "holdfast.checkpoint.store.s3", "holdfast.checkpoint.store.other"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as refused:
        open_store(url, create=True)
    assert f"pip install '{extra}'" in str(refused.value)


@pytest.mark.parametrize(
    ("url", "options", "reason"),
    [
        ("file://elsewhere/folder", None, "names the host 'elsewhere'"),
        ("file:///tmp/run#1", None, "write %3F or %23"),
        ("file:///tmp/run?1", None, "write %3F or %23"),
        ("file:///tmp/run#", None, "write %3F or %23"),
        ("file:/tmp/run", None, "neither a path nor a URL: write file:///path"),
        ("", None, "is empty"),
        ("sftp://user:***@host/x", None, "in place of a password"),
        ("sftp://***@host/x", None, "in place of a password"),
        ("memory://x?key=***", None, "in place of a password"),
        ("memory://run[1]", None, "takes for a pattern"),
        ("memory://run?1", None, "takes for a pattern"),
        ("memory://run*", None, "takes for a pattern"),
        ("s3://", None, "names no bucket"),
        ("s3://bucket/a//b", None, "cannot be a store's URL"),
        ("s3://bucket/a/../b", None, "cannot be a store's URL"),
        ("s3://bucket", {"acces_key": "x"}, "no option 'acces_key'"),
        ("no-such-scheme://x", None, "no-such-scheme"),
        ("folder", {"region": "x"}, "takes no options"),
    ],
)
def test_what_cannot_be_meant_is_refused(url: str, options: dict[str, object] | None, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        open_store(url, create=True, options=options)
