"""From Criteo's files to arrays: the compiled scan of lines, the words for a line that it refuses, and
the window through which it sees a plain or gzip file.

A line is 40 fields with tabs between them: the label, 13 integers, 26 ids of up to 8 hex digits. Any
field but the label may be empty. A carriage return before the newline does not count.

The compiled functions only say whether a line is a sample. Why it is not one is for
``explain_bad_line``, which is slow and runs on refused lines only.
"""

from __future__ import annotations

import math
import os
import re
import stat
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO

import numpy as np
from numba import njit
from numpy.typing import NDArray

from holdfast.errors import DataError, WrongReaderState

DENSE_FEATURES = 13
TABLES = 26
FIELDS = 1 + DENSE_FEATURES + TABLES
ID_DIGITS = 8

BLOCK_BYTES = 1 << 20
"""How much is read at a time: enough to make the calls cheap, little enough to stay in the cache."""
LONGEST_LINE_BYTES = 1 << 20
"""A longer line is bad, and is never held in memory as a whole."""

_COMPRESSED_BLOCK_BYTES = 128 << 10
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW_BITS = 31  # a gzip header is expected, and its checksum checked
_TAB, _NEWLINE, _RETURN, _MINUS, _ZERO = b"\t\n\r-0"
_NOT_HEX = 255
_SHOWN_BYTES = 40

# All arithmetic on 64-bit patterns stays unsigned: one signed operand would make Numba use floats.
_TEN = np.uint64(10)
_INT64_MAX_TENTH = np.uint64((2**63 - 1) // 10)
_INT64_MAX_LAST_DIGIT = (2**63 - 1) % 10
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_HEX_BITS = np.uint64(4)

_HEX_VALUES = np.full(256, _NOT_HEX, np.uint8)
for _value, _digits in enumerate(zip(b"0123456789abcdef", b"0123456789ABCDEF", strict=True)):
    _HEX_VALUES[list(_digits)] = _value

# Counts are mostly small, and a load costs a tenth of a logarithm.
_SMALL_LOGS = np.array([math.log1p(count) for count in range(4096)], np.float32)


@njit(nogil=True, cache=True, error_model="numpy")
def _parse_integer(buffer, at):  # type: ignore[no-untyped-def]
    """The integer at ``at``, negative ones as 0, and where it ends; -1 for an overflow or a lone minus."""
    negative = buffer[at] == _MINUS
    if negative:
        at += 1
    first = at
    magnitude = np.uint64(0)
    while True:
        digit = np.int64(buffer[at]) - _ZERO
        if digit < 0 or digit > 9:
            break
        if magnitude >= _INT64_MAX_TENTH and (
            magnitude > _INT64_MAX_TENTH or digit > _INT64_MAX_LAST_DIGIT + negative
        ):
            return np.uint64(0), np.int64(-1)
        magnitude = magnitude * _TEN + np.uint64(digit)
        at += 1
    if negative:
        return np.uint64(0), (at if at > first else np.int64(-1))
    return magnitude, at


@njit(nogil=True, cache=True, error_model="numpy")
def _row_of_id(value, table, rows):  # type: ignore[no-untyped-def]
    """The table row, from 1, of a present id: SplitMix64's finalizer, salted by the table."""
    if rows == 1:
        return np.int64(0)
    mixed = value + np.uint64(table + 1) * _GOLDEN
    mixed = (mixed ^ (mixed >> _SHIFT_1)) * _MIX_1
    mixed = (mixed ^ (mixed >> _SHIFT_2)) * _MIX_2
    mixed = mixed ^ (mixed >> _SHIFT_3)
    return np.int64(mixed % np.uint64(rows - 1)) + 1


@njit(nogil=True, cache=True, error_model="numpy")
def _parse_line(buffer, at, table_rows, labels, dense, ids, row):  # type: ignore[no-untyped-def] # noqa: PLR0917
    """Parse one line into ``row``; where its newline is, or -1 when it is no sample.

    Stays inside the line: no field takes a newline, so each scan stops at it at the latest.
    """
    label = np.int64(buffer[at]) - _ZERO
    if label < 0 or label > 1:
        return np.int64(-1)
    labels[row] = label
    at += 1
    for feature in range(DENSE_FEATURES):
        if buffer[at] != _TAB:
            return np.int64(-1)
        count, at = _parse_integer(buffer, at + 1)
        if at < 0:
            return np.int64(-1)
        if count < np.uint64(_SMALL_LOGS.size):
            dense[row, feature] = _SMALL_LOGS[count]
        else:
            dense[row, feature] = math.log1p(np.float64(count))
    for table in range(TABLES):
        if buffer[at] != _TAB:
            return np.int64(-1)
        at += 1
        first = at
        value = np.uint64(0)
        while at < first + ID_DIGITS:
            digit = _HEX_VALUES[buffer[at]]
            if digit == _NOT_HEX:
                break
            value = (value << _HEX_BITS) | np.uint64(digit)
            at += 1
        ids[table, row] = _row_of_id(value, table, table_rows[table]) if at > first else 0
    if buffer[at] == _RETURN:
        at += 1
    return at if buffer[at] == _NEWLINE else np.int64(-1)


@njit(nogil=True, cache=True, error_model="numpy")
def parse_lines(  # type: ignore[no-untyped-def] # noqa: PLR0917 - compiled calls are by position
    buffer, begin, end, most_lines, longest_line, stop_at_bad, table_rows, labels, dense, ids, row
):
    """Parse up to ``most_lines`` lines of ``buffer[begin:end]`` into the arrays from ``row`` on.

    ``buffer[end - 1]`` must be a newline, unless ``begin == end``. Returns where it stopped, the lines
    passed, the samples written and the bad lines among those passed. With ``stop_at_bad`` it stops
    in front of the first bad line: then fewer than ``most_lines`` are passed before ``end``.
    """
    at = begin
    lines = written = bad = 0
    while lines < most_lines and at < end:
        newline = _parse_line(buffer, at, table_rows, labels, dense, ids, row + written)
        if newline >= 0 and newline - at <= longest_line:
            written += 1
        else:
            if stop_at_bad:
                break
            bad += 1
            newline = at
            while buffer[newline] != _NEWLINE:
                newline += 1
        lines += 1
        at = newline + 1
    return at, lines, written, bad


_STRIDE = 4096


@njit(nogil=True, cache=True, error_model="numpy")
def _count_newlines(stride):  # type: ignore[no-untyped-def]
    # A slice from its start and 32 bits: so the compiler counts in many bytes at once.
    newlines = np.int32(0)
    for byte in stride:
        newlines = np.int32(newlines + np.int32(byte == _NEWLINE))
    return np.int64(newlines)


@njit(nogil=True, cache=True, error_model="numpy")
def pass_lines(buffer: NDArray[np.uint8], begin: int, end: int, most_lines: int) -> tuple[int, int]:
    """Where the first ``most_lines`` lines of ``buffer[begin:end]`` end, and how many there were."""
    at, lines = begin, 0
    # Whole strides are only counted, which is ten times as fast.
    while at + _STRIDE <= end:
        newlines = _count_newlines(buffer[at : at + _STRIDE])
        if lines + newlines > most_lines:
            break
        lines += newlines
        at += _STRIDE
    # `at` may now be inside a line, even with all lines found: go back to the last one's end.
    if lines == most_lines:
        while at > begin and buffer[at - 1] != _NEWLINE:
            at -= 1
        return at, lines
    while at < end and lines < most_lines:
        lines += buffer[at] == _NEWLINE
        at += 1
    return at, lines


_INTEGER = re.compile(rb"-?[0-9]+")
_ID = re.compile(rb"[0-9a-fA-F]{1,8}")


def explain_bad_line(line: bytes, longest_line: int) -> str:
    """Why ``parse_lines`` refuses ``line`` (without its newline): one clause that names the field."""
    if len(line) > longest_line:
        return f"is longer than {longest_line} bytes, expected {FIELDS} fields and a newline"
    line = line.removesuffix(b"\r")
    if not line:
        return f"is empty, expected {FIELDS} fields"
    fields = line.split(b"\t")
    if b"\0" in line:
        number = line[: line.index(b"\0")].count(b"\t") + 1
        return f"field {number} has a NUL byte: the file is damaged or not text"
    if len(fields) != FIELDS:
        plural = "" if len(fields) == 1 else "s"
        return f"has {len(fields)} field{plural}, expected {FIELDS}: a label, 13 integers and 26 ids"
    names = ["label", *(f"integer {n + 1}" for n in range(13)), *(f"id {n + 1}" for n in range(26))]
    for number, (name, field) in enumerate(zip(names, fields, strict=True), 1):
        expected = _what_a_field_lacks(number, field)
        if expected:
            return f"field {number} ({name}) is {_shown(field)}, expected {expected}"
    raise AssertionError(f"the parser refused a good line: {line!r}")


def _what_a_field_lacks(number: int, field: bytes) -> str | None:
    if number == 1:
        return None if field in (b"0", b"1") else "0 or 1"
    if number > 1 + DENSE_FEATURES:
        return None if not field or _ID.fullmatch(field) else "up to 8 hex digits or nothing"
    if field and not _INTEGER.fullmatch(field):
        return "an integer or nothing"
    # Python refuses to convert thousands of digits; the leading zeros are no part of the value.
    digits = field.lstrip(b"-").lstrip(b"0") or b"0"
    largest = 2**63 if field.startswith(b"-") else 2**63 - 1
    return "an integer of 64 bits" if len(digits) > 19 or int(digits) > largest else None


def _shown(field: bytes) -> str:
    """``field`` in quotes, cut to what fits a message."""
    return repr(field[:_SHOWN_BYTES])[1:] + ("…" if len(field) > _SHOWN_BYTES else "")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file as it was when the reader was made."""

    path: str
    size: int
    """On disk."""
    is_gzip: bool


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def inspect_file(path: str) -> DataFile:
    """What the file at ``path`` is; DataError when nothing can be read from it."""
    with _reading(path), open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a regular file, expected a TSV file, plain or gzip")
        if status.st_size == 0:
            raise DataError(f"{path} is empty: fetch it again or leave it out")
        return DataFile(path, status.st_size, file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC)


def _open(file: DataFile) -> FileIO:
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
                " it was cut while it was read"
            )
        self.disk_offset += got
        return got

    def close(self) -> None:
        self._raw.close()


def _inflate(file: DataFile, raw: FileIO) -> Iterator[tuple[bytes, int]]:
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
            f"{file.path} cannot be read after {inflated} uncompressed bytes ({error}): fetch it again"
        ) from error
    if inflater is not None:
        raise DataError(f"{file.path} is cut off after {inflated} uncompressed bytes: fetch it again")


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
