"""From Criteo's lines to arrays: the compiled scan, and the words for a line that it refuses.

A line is 40 fields with tabs between them: the label, 13 integers, 26 ids of up to 8 hex digits. Any
field but the label may be empty. A carriage return before the newline does not count.

The compiled functions only say whether a line is a sample. Why it is not one is for
``explain_bad_line``, which is slow and runs on refused lines only.
"""

from __future__ import annotations

import math
import re

import numpy as np
from numba import njit
from numpy.typing import NDArray

from holdfast.data.criteo_shape import CATEGORICAL_FEATURES as TABLES
from holdfast.data.criteo_shape import DENSE_FEATURES

FIELDS = 1 + DENSE_FEATURES + TABLES
ID_DIGITS = 8

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
def _parse_integer(buffer, at):
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
def _row_of_id(value, table, rows):
    """The table row, from 1, of a present id: SplitMix64's finalizer, salted by the table."""
    if rows == 1:
        return np.int64(0)
    mixed = value + np.uint64(table + 1) * _GOLDEN
    mixed = (mixed ^ (mixed >> _SHIFT_1)) * _MIX_1
    mixed = (mixed ^ (mixed >> _SHIFT_2)) * _MIX_2
    mixed = mixed ^ (mixed >> _SHIFT_3)
    return np.int64(mixed % np.uint64(rows - 1)) + 1


@njit(nogil=True, cache=True, error_model="numpy")
def _parse_line(buffer, at, table_rows, labels, dense, ids, row):
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
def parse_lines(
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
def _count_newlines(stride):
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
