"""The bytes of Criteo's files, plain or gzip, and the window of whole lines that the parser sees."""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigError, DataError, WrongReaderState

if TYPE_CHECKING:
    from holdfast.data.object_file import ObjectFile

BLOCK_BYTES = 1 << 20
"""How much is read at a time: enough to make the calls cheap, little enough to stay in the cache."""
LONGEST_LINE_BYTES = 1 << 20
"""A longer line is bad, and is never held in memory as a whole."""

_COMPRESSED_BLOCK_BYTES = 128 << 10
_NEWLINE = ord("\n")
_OBJECT = "s3://"
_OTHER_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|s3:/")  # a Path has lost a slash
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW_BITS = 31  # a gzip header is expected, and its checksum checked


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file as it was when the reader was made."""

    path: str
    """Or an ``s3://`` URL."""
    size: int
    """On disk."""
    is_gzip: bool
    tag: str | None = None
    """The version of an object in a bucket; None of a local file."""


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def inspect_file(path: str) -> DataFile:
    """What the file at ``path`` is; DataError when nothing can be read from it."""
    if path.startswith(_OBJECT):
        return _inspect_object(path)
    if _OTHER_URL.match(path) and not os.path.exists(path):
        raise ConfigError(
            f"{path} is neither a path nor an s3:// URL: give a local path, or s3://bucket/key as a string"
        )
    with _reading(path), open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a regular file, expected a TSV file, plain or gzip")
        if status.st_size == 0:
            raise DataError(f"{path} is empty: download it again or leave it out")
        return DataFile(path, status.st_size, file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC)


def _inspect_object(url: str) -> DataFile:
    from holdfast.data.object_file import inspect_object  # noqa: PLC0415 - needs the extra s3

    version, start = inspect_object(url, len(_GZIP_MAGIC))
    if version.size == 0:
        raise DataError(f"{url} is empty: upload it again or leave it out")
    return DataFile(url, version.size, start == _GZIP_MAGIC, version.tag)


def _open(file: DataFile) -> FileIO | ObjectFile:
    if file.tag is not None:
        from holdfast.data.object_file import ObjectFile, ObjectVersion  # noqa: PLC0415 - needs the extra s3

        return ObjectFile(file.path, ObjectVersion(file.size, file.tag))
    with _reading(file.path):
        opened = FileIO(file.path)
    size = os.fstat(opened.fileno()).st_size
    if size != file.size:
        opened.close()
        raise WrongReaderState(
            f"{file.path} has {size} bytes, expected the {file.size} it had when this reader was made:"
            " make a new reader after the file has changed"
        )
    return opened


class _PlainBytes:
    """A plain file's bytes, as many as it had when the reader was made."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._raw = _open(file)
        self.disk_offset = 0

    def skip(self, count: int) -> bool:
        if self.disk_offset + count > self._file.size:
            return False
        self.disk_offset = self._raw.seek(self.disk_offset + count)
        return True

    def readinto(self, view: memoryview) -> int:
        # What is appended while we read is no part of the stream: another worker would not see it.
        wanted = min(len(view), self._file.size - self.disk_offset)
        with _reading(self._file.path):
            got = self._raw.readinto(view[:wanted])
        if wanted and not got:
            raise DataError(
                f"{self._file.path} ended after {self.disk_offset} bytes, expected {self._file.size}:"
                " it was truncated while it was read"
            )
        self.disk_offset += got
        return got

    def close(self) -> None:
        self._raw.close()


def _inflate(file: DataFile, raw: FileIO | ObjectFile) -> Iterator[tuple[bytes, int]]:
    """The uncompressed chunks of all gzip members, each with the place in the file that it ends at."""
    inflater = None
    packed = b""
    inflated = 0
    try:
        while packed or (packed := raw.read(_COMPRESSED_BLOCK_BYTES)):
            if inflater is None:
                packed = packed.lstrip(b"\0")  # tape-style padding after a member
                if not packed:
                    continue
                inflater = zlib.decompressobj(_GZIP_WINDOW_BITS)
            chunk = inflater.decompress(packed)
            packed = inflater.unused_data
            if inflater.eof:
                inflater = None
            inflated += len(chunk)
            if chunk:
                yield chunk, raw.tell() - len(packed)
    except (zlib.error, OSError) as error:
        raise DataError(
            f"{file.path} cannot be read after {inflated} uncompressed bytes ({error}): download it again"
        ) from error
    if inflater is not None:
        raise DataError(f"{file.path} is truncated after {inflated} uncompressed bytes: download it again")


class _GzipBytes:
    """A gzip file's uncompressed bytes; a thread decompresses one chunk ahead."""

    def __init__(self, file: DataFile) -> None:
        self._raw = _open(file)
        self._chunks = _inflate(file, self._raw)
        self._chunk = memoryview(b"")
        self.disk_offset = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="criteo-gzip")
        self._ahead = self._decompress_ahead()

    def _decompress_ahead(self) -> Future[tuple[bytes, int] | None]:
        return self._thread.submit(next, self._chunks, None)

    def _have_chunk(self) -> bool:
        if not self._chunk:
            following = self._ahead.result()
            if following is None:
                return False
            self._ahead = self._decompress_ahead()
            self._chunk, self.disk_offset = memoryview(following[0]), following[1]
        return True

    def skip(self, count: int) -> bool:
        while count and self._have_chunk():
            passed = min(count, len(self._chunk))
            self._chunk = self._chunk[passed:]
            count -= passed
        return count == 0

    def readinto(self, view: memoryview) -> int:
        if not self._have_chunk():
            return 0
        got = min(len(view), len(self._chunk))
        view[:got] = self._chunk[:got]
        self._chunk = self._chunk[got:]
        return got

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._raw.close()


ByteSource = _PlainBytes | _GzipBytes


def open_bytes(file: DataFile) -> ByteSource:
    """The file's uncompressed bytes; the caller closes it."""
    return _GzipBytes(file) if file.is_gzip else _PlainBytes(file)


def uncompressed_size(file: DataFile) -> int:
    """How many bytes a gzip file holds: it is decompressed to know."""
    with _open(file) as raw:
        return sum(len(chunk) for chunk, _ in _inflate(file, raw))


class LineWindow:
    """A moving window on a file: ``buffer[at:complete]`` are whole lines, the next ones to take.

    The lines of a part of the file are those that start at ``begin`` or after it and before ``stop``,
    wherever in a line these two are.
    """

    def __init__(self, source: ByteSource, *, begin: int, stop: int | None, line: int) -> None:
        self.source = source
        self.line = line
        """How many of the part's lines have been taken."""
        self.began_inside_a_line = False
        self._stop = stop
        self.longest_line = LONGEST_LINE_BYTES
        self._block = BLOCK_BYTES
        # Between reads at most one byte more than the longest line stays; one is for a last newline.
        self._bytes = bytearray(self.longest_line + 1 + self._block + 1)
        self.buffer: NDArray[np.uint8] = np.frombuffer(self._bytes, np.uint8)
        self.at = self.complete = self._filled = 0
        self._base = begin  # the offset of buffer[0] in the file
        self._ended = stop is not None and begin >= stop
        self._end_offset: int | None = None
        self._disk_before = self._disk_after = 0
        if begin > 0 and not self._ended:
            self._go_to_line_start(begin)

    def _go_to_line_start(self, begin: int) -> None:
        """Take up the first line that starts at ``begin`` or after it."""
        # The byte before decides: if it is a newline, a line starts at `begin` itself.
        self._base = begin - 1
        if not self.source.skip(begin - 1):
            self._ended = self.began_inside_a_line = True
            return
        self._disk_before = self._disk_after = self.source.disk_offset
        while not self._ended:
            self._read_block()
            newline = self._bytes.find(b"\n", 0, self._filled)
            self.began_inside_a_line |= newline != 0
            if newline >= 0:
                self.at = newline + 1
                return
            self.at = self._filled

    @property
    def offset(self) -> int:
        """Where in the file the next line starts."""
        offset = self._base + self.at
        return offset if self._end_offset is None else min(offset, self._end_offset)

    @property
    def disk_offset(self) -> int:
        """About where on disk the next line starts: that is exact only at a block's ends."""
        used = self._disk_after - self._disk_before
        return self._disk_before + used * self.at // max(self._filled, 1)

    def more(self, *, cut_long_line: bool) -> bool:
        """Have at least one whole line in the window; False at the end of the part.

        ``cut_long_line``: do not look for the end of a line that is too long already. For a caller
        who will not go on after it.
        """
        while self.at == self.complete and not self._ended:
            self._read_block()
            if cut_long_line and not self.complete and self._filled > self.longest_line:
                self.buffer[self.longest_line + 1] = _NEWLINE
                self.complete = self.longest_line + 2
        return self.at < self.complete

    def _read_block(self) -> None:
        tail = self._filled - self.at
        # The middle of a line that is too long goes: what stays is too long as well, so it is still
        # refused, and as it has no newline, lines are still counted right.
        kept = min(tail, self.longest_line + 1)
        self._disk_before = self.disk_offset
        self._base += self._filled - kept
        self._bytes[:kept] = self._bytes[self.at : self.at + kept]
        self.at = self.complete = 0
        got = self.source.readinto(memoryview(self._bytes)[kept : kept + self._block])
        self._disk_after = self.source.disk_offset
        self._filled = kept + got
        if got:
            self._look_for_stop(kept)
            self.complete = self._bytes.rfind(b"\n", kept, self._filled) + 1
        else:
            self._ended = True
            self._end_offset = self._base + kept
            if kept:
                self.buffer[kept] = _NEWLINE
                self.complete = self._filled = kept + 1

    def _look_for_stop(self, fresh: int) -> None:
        """End the part behind the first newline at ``stop - 1`` or later, when it is in the window."""
        if self._stop is None or self._base + self._filled < self._stop:
            return
        newline = self._bytes.find(b"\n", max(fresh, self._stop - 1 - self._base), self._filled)
        if newline >= 0:
            self._filled = newline + 1
            self._ended = True
