"""An object in a bucket as a file that is read from the front to the back, by ranged gets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from holdfast.buckets import Bucket, BucketOptions, failure_of, obstore, obstore_errors
from holdfast.errors import ConfigError, DataError, WrongReaderState
from holdfast.redaction import Secrets

if TYPE_CHECKING:
    from obstore import ObjectMeta

RANGE_BYTES = 4 << 20
"""How much one request asks for: two of them are held, the one that is read and the next one."""

# obstore panics at a bucket's name that no URL can hold.
_BUCKET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_first_user: int | None = None
"""The process that made the first request: obstore's threads are there, and not in one that it forks."""


def _check_not_forked(url: str) -> None:
    global _first_user  # noqa: PLW0603 (one set of threads per process)
    if _first_user is None:
        _first_user = os.getpid()
    elif _first_user != os.getpid():
        raise ConfigError(
            f"{url} cannot be read in a process forked from one that has read objects: spawn the process"
            ' instead (multiprocessing_context="spawn" for a DataLoader)'
        )


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """What tells an object from the one that replaces it."""

    size: int
    tag: str
    """The ETag; when it was last modified, where the server gives no ETag."""

    @classmethod
    def of(cls, meta: ObjectMeta) -> ObjectVersion:
        """That of an object that the server describes."""
        return cls(meta["size"], meta["e_tag"] or meta["last_modified"].isoformat())


class _Object:
    """One object, and what its requests raise."""

    def __init__(self, url: str) -> None:
        bucket, _, self._key = url.removeprefix("s3://").partition("/")
        if not _BUCKET_NAME.fullmatch(bucket) or not self._key:
            raise ConfigError(
                f"{url!r} names no object: write s3://bucket/key; keys and endpoint come from"
                " AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL"
            )
        self.url = url
        options = BucketOptions()
        self._secrets = Secrets.of(url, options.secrets())
        with self._explained():
            self._bucket = Bucket(bucket, **options.bucket_settings())

    def version(self) -> ObjectVersion:
        with self._explained():
            return ObjectVersion.of(obstore.head(self._bucket, self._key))

    def get(self, start: int, end: int) -> tuple[memoryview, ObjectVersion]:
        with self._explained():
            found = obstore.get(self._bucket, self._key, options={"range": (start, end)})
            return memoryview(found.bytes()).cast("B"), ObjectVersion.of(found.meta)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        _check_not_forked(self.url)
        try:
            yield
        except (obstore_errors.BaseError, OSError, ValueError) as error:
            # What is shown of an error shows its cause as well.
            raise self._explain(error) from (None if self._secrets.are_in(error) else error)

    def _explain(self, error: Exception) -> DataError | ConfigError:
        reason = self._secrets.scrub(str(error)).split("\n", 1)[0][:300]
        if isinstance(error, FileNotFoundError):
            if self._bucket_is_missing():
                return DataError(f"{self.url} cannot be read: there is no such bucket, check the URL")
            return DataError(f"{self.url} cannot be read: there is no such object, check the URL")
        if isinstance(error, ValueError):
            return ConfigError(f"{self.url!r} cannot be an object's URL: {reason}")
        cure = {
            "refused": "no permission, check the access key and the bucket's policy",
            "no bucket": "there is no such bucket, check the URL",
            "lost": "lost the connection, also after retries: check the endpoint (AWS_ENDPOINT_URL) and the"
            " network, then try again",
            "other": "the server failed or refused, try again",
        }[failure_of(error, reason)]
        return DataError(f"{self.url} cannot be read: {cure} ({reason})")

    def _bucket_is_missing(self) -> bool:
        # The answer to HEAD has no body that tells, and a key may not be allowed to list the bucket.
        try:
            obstore.get(self._bucket, self._key)
        except (obstore_errors.BaseError, OSError) as error:
            return "NoSuchBucket" in str(error)
        return False


def inspect_object(url: str, first: int) -> tuple[ObjectVersion, bytes]:
    """Look an object up: its version, and its ``first`` bytes, or fewer if it is shorter."""
    there = _Object(url)
    version = there.version()
    if not version.size:  # no range of it can be asked for
        return version, b""
    start, found = there.get(0, min(first, version.size))
    _check(url, version, found)
    return version, bytes(start)


def _check(url: str, expected: ObjectVersion, found: ObjectVersion) -> None:
    if found != expected:
        raise WrongReaderState(
            f"{url} has {found.size} bytes and version {found.tag}, expected {expected.size} and"
            f" {expected.tag} as when this reader was made: make a new reader after the object has changed"
        )


class ObjectFile:
    """An object, opened for reading; a thread gets one range ahead.

    Raises:
        WrongReaderState: the object has changed since it had the version ``expected``; reading
            raises it as well, so that no bytes of two versions are mixed.
        DataError: it cannot be read.
    """

    def __init__(self, url: str, expected: ObjectVersion) -> None:
        self._object = _Object(url)
        self._expected = expected
        _check(url, expected, self._object.version())
        self._at = 0
        self._start, self._range = 0, memoryview(b"")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="object-file")
        self._ahead: tuple[int, Future[memoryview]] | None = None

    def _get(self, start: int) -> memoryview:
        end = min(start + RANGE_BYTES, self._expected.size)
        try:
            view, version = self._object.get(start, end)
        except DataError:
            # Of an object that has become shorter there is no such range.
            _check(self._object.url, self._expected, self._object.version())
            raise
        _check(self._object.url, self._expected, version)
        if len(view) != end - start:
            raise DataError(
                f"{self._object.url} gave {len(view)} bytes from byte {start}, expected {end - start}:"
                " try again"
            )
        return view

    def _have_range(self) -> None:
        """Have the range that holds the current position, and get the one after it."""
        if self._start <= self._at < self._start + len(self._range):
            return
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == self._at:
            found = ahead[1].result()
        else:
            if ahead is not None:
                ahead[1].cancel()
            found = self._get(self._at)
        self._start, self._range = self._at, found
        if (following := self._start + len(found)) < self._expected.size:
            self._ahead = following, self._thread.submit(self._get, following)

    def readinto(self, view: memoryview) -> int:
        """Fill the front of a view, up to the end of a range; how many bytes, and 0 only at the end."""
        if self._at >= self._expected.size or not len(view):
            return 0
        self._have_range()
        found = self._range[self._at - self._start :][: len(view)]
        view[: len(found)] = found
        self._at += len(found)
        return len(found)

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes, and none only at the end."""
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: self.readinto(memoryview(buffer))])

    def seek(self, position: int) -> int:
        """Go on at this byte."""
        self._at = position
        return position

    def tell(self) -> int:
        """Where the next byte is."""
        return self._at

    def close(self) -> None:
        """End the thread, when it has what it is getting."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
