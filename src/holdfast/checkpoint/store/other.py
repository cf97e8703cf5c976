"""A store at any other URL that fsspec knows: ``gs://``, ``abfs://``, ``sftp://``, ``memory://`` and more.

What fsspec offers is weaker than what the other two stores are made of: most of its file systems have no
conditional write and no atomic rename. Here a name is looked up first and written afterwards, so `publish`
keeps a single writer's versions whole, but two writers at the same instant can both believe that they were
first. Keep to one writer (`lock_writer` warns of a second), or use a folder or ``s3://``.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.store.base import (
    LEASE_OBJECT,
    PARTIAL_PREFIX,
    ObjectInfo,
    ObjectReader,
    ReadRequest,
    Store,
    WriterLock,
    byte_views,
    check_name,
    check_prefix,
    is_connection_lost,
    is_full,
    is_name,
    is_out_of_resources,
)
from holdfast.checkpoint.store.lease import Lease, LeaseChanged
from holdfast.errors import (
    AlreadyExists,
    ConfigError,
    ObjectMissing,
    StoreError,
    StoreFull,
    StoreUnreachable,
)
from holdfast.redaction import Secrets, redact

try:
    import fsspec
except ImportError as error:  # pragma: no cover - needs an environment without the extra
    raise ConfigError("this URL needs the package fsspec: pip install 'holdfast[fsspec]'") from error

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LEASE_SECONDS = 60.0
_PATTERN_MARKS = "*?["  # a move would look for what matches, find nothing, and say nothing
_MISSING = (FileNotFoundError, NotADirectoryError)
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


@contextmanager
def _explained(doing: str, what: str, secrets: Secrets) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except _MISSING:
        raise ObjectMissing(f"there is no object {what}: it was deleted or never written") from None
    except Exception as error:
        # What is shown of an error shows its cause as well.
        raise _explain(error, doing, what, secrets) from (None if secrets.are_in(error) else error)


def _explain(error: Exception, doing: str, what: str, secrets: Secrets) -> StoreError:
    """Translate any error: each file system behind fsspec raises its own."""
    reason = " ".join(secrets.scrub(str(error)).split())
    if isinstance(error, PermissionError):
        return StoreError(f"no permission to {doing} {what} ({reason}): check the credentials")
    if is_full(error):
        return StoreFull(f"no space left to {doing} {what} ({reason}): free some there")
    if is_connection_lost(error) or is_out_of_resources(error):
        return StoreUnreachable(
            f"could not {doing} {what} ({type(error).__name__}: {reason}): check the URL and the network, "
            "then try again"
        )
    return StoreError(f"could not {doing} {what} ({type(error).__name__}: {reason}): try again later")


class FsspecReader(ObjectReader):
    """An object behind fsspec, read range by range."""

    def __init__(self, system: Any, path: str, name: str, url: str, size: int, secrets: Secrets) -> None:
        self._system = system
        self._secrets = secrets
        self._path = path
        self._what = f"{name!r} in {url}"
        self.name = name
        self.size = size

    def _fill(self, requests: list[ReadRequest]) -> None:
        with _explained("read", self._what, self._secrets):
            found = self._system.cat_ranges(
                [self._path] * len(requests),
                [request.offset for request in requests],
                [request.end for request in requests],
                on_error="raise",
            )
        for request, content in zip(requests, found, strict=True):
            if len(content) != request.into.nbytes:
                raise self._too_short(request.end, request.offset + len(content))
            request.into[:] = content

    def close(self) -> None:
        """Nothing is held open."""


class FsspecStore(Store):
    """Objects behind fsspec; see `Store` for the contract and this module for what is weaker here."""

    publishes_exclusively = False

    def __init__(self, url: str, *, create: bool, options: dict[str, Any]) -> None:
        self.url = redact(url.rstrip("/"))
        self._secrets = Secrets.of(url, options)
        scheme = url.partition("://")[0]
        try:
            self._system, root = fsspec.core.url_to_fs(url, **options)
        except Exception as error:  # some connect at once, and each raises errors of its own
            explained: ConfigError | StoreError = _explain(
                error, "open", f"the store {self.url}", self._secrets
            )
            if isinstance(error, ImportError | ValueError | TypeError):
                reason = self._secrets.scrub(str(error))
                explained = ConfigError(f"fsspec cannot open {scheme}:// URLs such as {self.url!r}: {reason}")
            raise explained from (None if self._secrets.are_in(error) else error)
        self._root = str(root).rstrip("/")
        if any(mark in self._root for mark in _PATTERN_MARKS):
            raise ConfigError(
                f"{self.url!r} has one of {' '.join(_PATTERN_MARKS)} in it, which fsspec takes for a "
                "pattern: choose another path"
            )
        with _explained("open", f"the store {self.url}", self._secrets):
            if create:
                self._system.makedirs(self._root, exist_ok=True)
            elif not self._system.exists(self._root):
                raise StoreError(f"no store at {self.url}: check the URL, or save a checkpoint there first")

    def put(self, name: str, parts: Sequence[Buffer]) -> int:
        """Write a new object under a hidden name, then move it; see `Store.put`."""
        views = byte_views(parts)
        self._create(name, views)
        return sum(view.nbytes for view in views)

    def publish(self, name: str, data: bytes) -> None:
        """Write the object under a hidden name, then move it; see `Store.publish` and this module."""
        self._create(name, byte_views([data]))

    def open(self, name: str) -> ObjectReader:
        """Look an object up; see `Store.open`."""
        path = self._path(check_name(name))
        with _explained("open", f"{name!r} in {self.url}", self._secrets):
            info = self._fresh().info(path)
            if info["type"] != "file":
                raise FileNotFoundError(path)
        return FsspecReader(self._system, path, name, self.url, int(info["size"]), self._secrets)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """List objects by prefix; see `Store.list`."""
        folder = check_prefix(prefix).rpartition("/")[0]
        with _explained("list", f"the store {self.url}", self._secrets):
            try:
                found = self._fresh().find(self._path(folder) if folder else self._root, detail=True)
            except FileNotFoundError:
                return []
            cut = len(self._root) + 1
            named = ((str(path)[cut:], info) for path, info in found.items())
            return sorted(
                (
                    ObjectInfo(name, int(info["size"]), _modified(self._system, info))
                    for name, info in named
                    if name.startswith(prefix) and is_name(name)
                ),
                key=lambda info: info.name,
            )

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects one by one; see `Store.delete`."""
        for name in [check_name(name) for name in names]:
            with _explained("delete", f"{name!r} in {self.url}", self._secrets), suppress(*_MISSING):
                self._system.rm_file(self._path(name))

    def lock_writer(self, wait_seconds: float | None = 0.0) -> WriterLock:
        """Take a lease, renewed in the background; see `Store.lock_writer` and this module."""
        lease = _FsspecLease(self._system, self._path(LEASE_OBJECT), self.url, self._secrets)
        return Lease(lease, self.url, _LEASE_SECONDS, wait_seconds)

    def close(self) -> None:
        """Nothing is held open: fsspec keeps file systems for the life of the process."""

    def _create(self, name: str, views: Sequence[memoryview]) -> None:
        path = self._path(check_name(name))
        folder, _, _ = path.rpartition("/")
        partial = f"{folder}/{PARTIAL_PREFIX}{secrets.token_hex(8)}"
        with _explained("write", f"{name!r} in {self.url}", self._secrets):
            if self._fresh().exists(path):
                raise AlreadyExists(
                    f"{self.url} has an object {name!r} already: another writer may be at work"
                )
            self._system.makedirs(folder, exist_ok=True)
            try:
                with self._system.open(partial, "wb") as file:
                    for view in views:
                        file.write(view)
                self._system.mv(partial, path)
            except BaseException:
                with suppress(Exception):
                    self._system.rm_file(partial)
                raise

    def clear_unfinished(self) -> None:
        """Delete hidden files; see `Store.clear_unfinished`."""
        with _explained("list", f"the store {self.url}", self._secrets):
            try:
                found = self._fresh().find(self._root)
            except FileNotFoundError:
                return
        for path in map(str, found):
            folder, _, last = path[len(self._root) + 1 :].rpartition("/")
            # Folders that no object can be in are not the store's.
            if last.startswith(PARTIAL_PREFIX) and (not folder or is_name(folder)):
                with suppress(Exception):  # it is never listed, and the next writer tries again
                    self._system.rm_file(path)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _fresh(self) -> Any:
        """Return the file system with its cached listings dropped: other writers change them."""
        self._system.invalidate_cache()
        return self._system


class _FsspecLease:
    """The lease as a file whose content is compared before it is replaced; not atomic."""

    def __init__(self, system: Any, path: str, url: str, secrets: Secrets) -> None:
        self._system = system
        self._secrets = secrets
        self._path = path
        self._what = f"the lease of {url}"

    def read(self) -> tuple[bytes, str] | None:
        with _explained("read", self._what, self._secrets):
            self._system.invalidate_cache()
            try:
                content = bytes(self._system.cat_file(self._path))
            except FileNotFoundError:
                return None
            return content, hashlib.sha256(content).hexdigest()

    def create(self, content: bytes) -> str:
        if self.read() is not None:
            raise LeaseChanged
        return self._write(content)

    def replace(self, content: bytes, tag: str) -> str:
        found = self.read()
        if found is None or found[1] != tag:
            raise LeaseChanged
        return self._write(content)

    def _write(self, content: bytes) -> str:
        with _explained("write", self._what, self._secrets):
            self._system.pipe_file(self._path, content)
        return hashlib.sha256(content).hexdigest()


def _modified(system: Any, info: dict[str, Any]) -> float:
    """Return when a file changed, in Unix seconds; each file system says it under a name of its own."""
    for key in _TIME_KEYS:
        moment = info.get(key)
        if isinstance(moment, datetime):
            return moment.timestamp()
        if isinstance(moment, int | float):
            return float(moment)
        if isinstance(moment, str):
            with suppress(ValueError):
                return datetime.fromisoformat(moment).timestamp()
    with suppress(Exception):  # asked one by one only where a listing has no times
        return float(system.modified(info["name"]).timestamp())
    return 0.0
