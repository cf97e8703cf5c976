"""A store in a bucket of S3 or of anything that speaks its protocol."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.buckets import Bucket, BucketOptions, failure_of, obstore, obstore_errors
from holdfast.checkpoint.store.base import (
    LEASE_OBJECT,
    ObjectInfo,
    ObjectReader,
    ReadRequest,
    Store,
    WriterLock,
    byte_views,
    check_name,
    check_prefix,
    is_name,
)
from holdfast.checkpoint.store.lease import Lease, LeaseChanged
from holdfast.errors import AlreadyExists, ConfigError, ObjectMissing, StoreError, StoreUnreachable
from holdfast.redaction import Secrets, redact

if TYPE_CHECKING:
    from obstore import PutMode
    from typing_extensions import Buffer

_MIB = 1024 * 1024
_ONE_REQUEST_BYTES = 16 * _MIB  # above it an upload goes in parts, below it in one conditional request
_MOST_PARTS = 9_000  # S3 allows 10,000
_UPLOADS_AT_ONCE = 8
_READS_AT_ONCE = 10
_LARGEST_READ_BYTES = 8 * _MIB
_GAP_WORTH_READING_BYTES = 256 * 1024  # reading it costs less than one more request
_WRITER_MARK = "holdfast-writer"


@dataclass(frozen=True, slots=True, repr=False)
class S3Options(BucketOptions):
    """Connection options of a bucket, see `BucketOptions`, and what a store in it needs.

    Attributes:
        lease_seconds: duration of a lease: how long a dead writer locks out others.
    """

    lease_seconds: float = 60.0


def _explain(error: Exception, doing: str, what: str, secrets: Secrets) -> StoreError:
    reason = secrets.scrub(str(error)).split("\n", 1)[0][:300]
    if isinstance(error, FileNotFoundError):
        return ObjectMissing(f"there is no object {what}: it was deleted or never written")
    failure = failure_of(error, reason)
    if failure == "refused":
        return StoreError(
            f"no permission to {doing} {what}: check the access key and the bucket's policy ({reason})"
        )
    if failure == "no bucket":
        return StoreError(f"could not {doing} {what}: there is no such bucket, make it first ({reason})")
    if failure == "lost":
        return StoreUnreachable(
            f"lost the connection while trying to {doing} {what}, also after retries: "
            f"check the endpoint and the network, then try again ({reason})"
        )
    return StoreError(f"could not {doing} {what}: the server failed or refused, try again ({reason})")


@contextmanager
def _explained(doing: str, what: str, secrets: Secrets) -> Iterator[None]:
    try:
        yield
    except (obstore_errors.BaseError, OSError) as error:
        # What is shown of an error shows its cause as well.
        raise _explain(error, doing, what, secrets) from (None if secrets.are_in(error) else error)


def _split_reads(requests: Sequence[ReadRequest]) -> Iterator[list[ReadRequest]]:
    """Group requests so that each group is one ranged get of a fair size."""
    group: list[ReadRequest] = []
    for request in requests:
        for start in range(0, request.into.nbytes, _LARGEST_READ_BYTES):
            piece = ReadRequest(request.offset + start, request.into[start : start + _LARGEST_READ_BYTES])
            joins = group and (
                0 <= piece.offset - group[-1].end <= _GAP_WORTH_READING_BYTES
                and piece.end - group[0].offset <= _LARGEST_READ_BYTES
            )
            if group and not joins:
                yield group
                group = []
            group.append(piece)
    if group:
        yield group


class S3Reader(ObjectReader):
    """An object in a bucket, read by ranged gets, several at once."""

    def __init__(
        self, bucket: Bucket, pool: ThreadPoolExecutor, name: str, url: str, size: int, secrets: Secrets
    ) -> None:
        self._bucket = bucket
        self._secrets = secrets
        self._pool = pool
        self._what = f"{name!r} in {url}"
        self.name = name
        self.size = size

    def _fill(self, requests: list[ReadRequest]) -> None:
        groups = list(_split_reads(requests))
        if len(groups) == 1:
            self._get(groups[0])
            return
        for _ in self._pool.map(self._get, groups):
            pass

    def _get(self, group: list[ReadRequest]) -> None:
        start, end = group[0].offset, group[-1].end
        with _explained("read", self._what, self._secrets):
            found = memoryview(obstore.get_range(self._bucket, self.name, start=start, end=end)).cast("B")
        if found.nbytes != end - start:
            raise self._too_short(end, start + found.nbytes)
        for request in group:
            request.into[:] = found[request.offset - start : request.end - start]

    def close(self) -> None:
        """Nothing is held open."""


class S3Store(Store):
    """Objects in a bucket, under a prefix; see `Store` for the contract.

    An object of up to 16 MiB is created by one conditional request. A larger one goes up in parts, and
    its name is only checked beforehand, so two writers must not put large objects under the same name;
    `publish` is conditional whatever its size. An upload that dies leaves parts that nobody sees: let the
    bucket's lifecycle rules abort incomplete uploads.
    """

    def __init__(self, url: str, *, create: bool, options: S3Options) -> None:
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        if not bucket:
            raise ConfigError(f"{url!r} names no bucket: write s3://bucket/prefix")
        if "@" in bucket:
            raise ConfigError(
                f"{url!r} has keys in it, which s3:// URLs do not take: give access_key_id and "
                "secret_access_key as options, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        self.url = redact(url.rstrip("/"))
        self._secrets = Secrets.of(url, options.secrets())
        self._lease_seconds = options.lease_seconds
        with _explained("open", f"the store {self.url}", self._secrets):
            try:
                self._bucket = Bucket(bucket, prefix=prefix or None, **options.bucket_settings())
            except ValueError as error:
                reason = self._secrets.scrub(str(error))
                raise ConfigError(f"{self.url!r} cannot be a store's URL: {reason}") from None
            # Asked in any case, so that a wrong key or bucket shows here and not hours later.
            page = next(iter(obstore.list(self._bucket, chunk_size=1)), [])
        if not page and not create:
            raise StoreError(f"no store at {self.url}: check the URL, or save a checkpoint there first")
        self._pool = ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="holdfast-s3")

    def put(self, name: str, parts: Sequence[Buffer]) -> int:
        """Upload a new object, large ones in parts; see `Store.put`."""
        check_name(name)
        views = byte_views(parts)
        size = sum(view.nbytes for view in views)
        if size <= _ONE_REQUEST_BYTES:
            self._create(name, b"".join(views))
            return size
        what = f"{name!r} in {self.url}"
        with _explained("write", what, self._secrets):
            try:
                obstore.head(self._bucket, name)
            except FileNotFoundError:
                pass
            else:
                raise self._taken(name)
            part_size = max(_ONE_REQUEST_BYTES, math.ceil(size / _MOST_PARTS))
            obstore.put(
                self._bucket,
                name,
                iter(views),
                use_multipart=True,
                chunk_size=part_size,
                max_concurrency=_UPLOADS_AT_ONCE,
            )
        return size

    def publish(self, name: str, data: bytes) -> None:
        """Create an object by one conditional request; see `Store.publish`.

        Uploads are durable when they return, so nothing is left to sync. When the connection is lost for
        good, nobody can tell whether the server carried the last request out: the object may appear after
        the `StoreError`, whole.
        """
        self._create(check_name(name), data)

    def open(self, name: str) -> ObjectReader:
        """Look an object up; see `Store.open`."""
        check_name(name)
        with _explained("open", f"{name!r} in {self.url}", self._secrets):
            size = obstore.head(self._bucket, name)["size"]
        return S3Reader(self._bucket, self._pool, name, self.url, size, self._secrets)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """List objects by prefix; see `Store.list`."""
        # obstore matches whole parts of a path, so the last, partial one is matched here.
        folder = check_prefix(prefix).rpartition("/")[0]
        with _explained("list", f"the store {self.url}", self._secrets):
            found = [
                ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())
                for page in obstore.list(self._bucket, prefix=folder or None, chunk_size=1000)
                for meta in page
            ]
        wanted = (info for info in found if info.name.startswith(prefix) and is_name(info.name))
        return sorted(wanted, key=lambda info: info.name)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; see `Store.delete`."""
        doomed = [check_name(name) for name in names]
        with _explained("delete from", f"the store {self.url}", self._secrets):
            for start in range(0, len(doomed), 1000):
                obstore.delete(self._bucket, doomed[start : start + 1000])

    def lock_writer(self, wait_seconds: float | None = 0.0) -> WriterLock:
        """Take a lease, renewed in the background; see `Store.lock_writer` and `lease`."""
        lease = _S3Lease(self._bucket, self.url, self._secrets)
        return Lease(lease, self.url, self._lease_seconds, wait_seconds)

    def close(self) -> None:
        """End the threads that read."""
        self._pool.shutdown()

    def _create(self, name: str, content: bytes) -> None:
        mark = secrets.token_hex(16)
        with _explained("write", f"{name!r} in {self.url}", self._secrets):
            try:
                obstore.put(
                    self._bucket,
                    name,
                    content,
                    mode="create",
                    attributes={_WRITER_MARK: mark},
                    use_multipart=False,
                )
            # A request whose answer was lost was carried out all the same. Repeated, it finds what it wrote
            # itself, or it gives up; either way the mark tells whose the object is.
            except obstore_errors.AlreadyExistsError:
                if not self._bears(name, mark):
                    raise self._taken(name) from None
            except obstore_errors.GenericError:
                if not self._bears(name, mark):
                    raise

    def _bears(self, name: str, mark: str) -> bool:
        try:
            return obstore.get(self._bucket, name).attributes.get(_WRITER_MARK) == mark
        except (obstore_errors.BaseError, OSError):
            return False

    def _taken(self, name: str) -> AlreadyExists:
        return AlreadyExists(
            f"{self.url} has an object {name!r} already: another writer may be at work, stop one of them"
        )


class _S3Lease:
    """The lease as an object whose entity tag is compared by the server."""

    def __init__(self, bucket: Bucket, url: str, secrets: Secrets) -> None:
        self._bucket = bucket
        self._secrets = secrets
        self._what = f"the lease of {url}"

    def read(self) -> tuple[bytes, str] | None:
        with _explained("read", self._what, self._secrets):
            try:
                found = obstore.get(self._bucket, LEASE_OBJECT)
            except FileNotFoundError:
                return None
            return bytes(found.bytes()), found.meta["e_tag"] or ""

    def create(self, content: bytes) -> str:
        return self._put(content, "create")

    def replace(self, content: bytes, tag: str) -> str:
        return self._put(content, {"e_tag": tag})

    def _put(self, content: bytes, mode: PutMode) -> str:
        changed = (obstore_errors.AlreadyExistsError, obstore_errors.PreconditionError, FileNotFoundError)
        with _explained("write", self._what, self._secrets):
            try:
                return (
                    obstore.put(self._bucket, LEASE_OBJECT, content, mode=mode, use_multipart=False)["e_tag"]
                    or ""
                )
            except changed:
                raise LeaseChanged from None
