"""A reader of Criteo's click logs: the Kaggle and Terabyte TSV files, plain or gzip.

Batches are numbered by raw lines: batch *i* is lines [i·B, (i+1)·B) of the stream, whichever process
parses them and whichever lines are bad. A reader skips other workers' lines by counting newlines, and parses
only its own.
"""

from __future__ import annotations

import copy
import inspect
import math
import operator
import os
import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Self, cast

import numpy as np

from holdfast.data.criteo_files import (
    DataFile,
    LineWindow,
    inspect_file,
    open_bytes,
    uncompressed_size,
)
from holdfast.data.criteo_kernel import FIELDS, explain_bad_line, parse_lines, pass_lines
from holdfast.data.criteo_shape import CATEGORICAL_FEATURES as TABLES
from holdfast.data.criteo_shape import DENSE_FEATURES
from holdfast.data.reader import Batch, ReadCount
from holdfast.errors import BadLine, ConfigError, DataError, WrongReaderState
from holdfast.recipe import described

_DEFLATE_LARGEST_RATIO = 1032
_SHORTEST_SAMPLE_BYTES = FIELDS  # a label and the tabs, when the file's last newline is missing
_KEPT_MESSAGES = 5
_STATE_KIND = "criteo"
_STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class _Part:
    """The lines of a file that start at ``begin`` or after it and before ``stop``."""

    file: int
    begin: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class _Position:
    """A place between two batches, and what was met before it."""

    next_batch: int = 0
    """0: the stream's start, wherever that is, and the other numbers say nothing."""
    file: int = 0
    offset: int = 0
    """Where the next line starts, uncompressed."""
    line: int = 0
    """How many lines of the file's part are before it."""
    disk_offset: int = 0
    bad_lines: int = 0
    first_bad: tuple[str, ...] = ()


class _Stream:
    """The lines of several files' parts as one sequence, from a position on."""

    def __init__(self, files: Sequence[DataFile], parts: Sequence[_Part], start: _Position) -> None:
        self._files = files
        self._parts = parts
        self._start = start
        self._window: LineWindow | None = None
        self._number = 0
        if start.next_batch:
            numbers = [number for number, part in enumerate(parts) if part.file == start.file]
            if not numbers:
                raise WrongReaderState(f"the reader's state is in file {start.file}, outside of its part")
            self._number = numbers[0]
        self._opened_at = (0, 0)  # the offset, and the part's lines before it
        self._lines_before_part: int | None = None
        self.bad_lines = start.bad_lines
        self.first_bad = list(start.first_bad)

    def window(self, *, cut_long_line: bool) -> LineWindow | None:
        """A window with at least one line in it; None at the stream's end."""
        if not self._parts:
            return None
        if self._window is None:
            self._open()
        while not (window := cast(LineWindow, self._window)).more(cut_long_line=cut_long_line):
            if window.offset == 0:
                raise DataError(f"{self.file.path} has no lines: download it again or leave it out")
            if self._number + 1 == len(self._parts):
                return None
            self.close()
            self._number += 1
            self._open()
        return window

    @property
    def file(self) -> DataFile:
        return self._files[self._parts[self._number].file]

    def _open(self) -> None:
        part = self._parts[self._number]
        resumed = bool(self._start.next_batch) and self._start.file == part.file
        source = open_bytes(self.file)
        begin, line = (self._start.offset, self._start.line) if resumed else (part.begin, 0)
        try:
            self._window = LineWindow(source, begin=begin, stop=part.stop, line=line)
        except BaseException:
            source.close()
            raise
        self._opened_at = self._window.offset, line
        if resumed and self._window.began_inside_a_line and self._window.offset != begin:
            raise WrongReaderState(
                f"{self.file.path} has no line that starts at byte {begin}, where the reader's state"
                " stopped: the file has changed since"
            )

    def skip(self, lines: int) -> int:
        """Pass ``lines`` lines, or as many as there are; how many there were."""
        skipped = 0
        while skipped < lines and (window := self.window(cut_long_line=False)):
            window.at, passed = pass_lines(window.buffer, window.at, window.complete, lines - skipped)
            window.line += passed
            skipped += passed
        return skipped

    def take_bad_line(self, *, skip: bool) -> None:
        """Pass the next line, which is bad; raise BadLine unless ``skip``."""
        window = cast(LineWindow, self._window)
        end, _ = pass_lines(window.buffer, window.at, window.complete, 1)
        reason = explain_bad_line(window.buffer[window.at : end - 1].tobytes(), window.longest_line)
        error = BadLine(self.file.path, self._lines_before() + window.line + 1, reason)
        if not skip:
            raise error
        self.bad_lines += 1
        self.first_bad.append(str(error))
        window.at = end
        window.line += 1

    def _lines_before(self) -> int:
        """How many of the file's lines are before its part."""
        part = self._parts[self._number]
        if part.begin == 0:
            return 0
        if self._lines_before_part is None:
            # Only now, as it takes a pass over the file that good data never need.
            offset, lines_since = self._opened_at
            whole = _Stream(self._files, [_Part(part.file, stop=offset)], _Position())
            try:
                self._lines_before_part = whole.skip(2**62) - lines_since
            finally:
                whole.close()
        return self._lines_before_part

    def position(self, next_batch: int) -> _Position:
        if self._window is None:
            return replace(self._start, next_batch=next_batch)
        return _Position(
            next_batch,
            self._parts[self._number].file,
            self._window.offset,
            self._window.line,
            self._window.disk_offset,
            self.bad_lines,
            tuple(self.first_bad),
        )

    def close(self) -> None:
        if self._window is not None:
            self._window.source.close()


@described
class Criteo:
    """The batches of Criteo TSV files, for training or for testing.

    A line is ``label \\t 13 integers \\t 26 hex ids``; any integer or id may be missing. An integer *x*
    becomes log(1 + x), and 0 if it is negative or missing. An id *v* of table *t* (from 0) becomes row
    1 + mix(v + (t + 1) · 0x9E3779B97F4A7C15) mod (rows - 1), where mix is SplitMix64's finalizer; row 0
    is for a missing id, and the only one of a table with one row.

    Args:
        paths: one or several files in chronological order, as paths or ``s3://bucket/key`` URLs, which need
            the extra ``s3``; gzip is recognized by its content.
        batch_size: lines per batch. The last batch, and batches with bad lines, may have fewer samples.
        table_rows: number of rows of each of the 26 tables.
        part: ``train`` is the stream before the split, ``test`` the stream after it, ``all`` is both.
        test_fraction: the split is at the first line that starts in the last ``test_fraction`` of all
            files' uncompressed bytes; gzip files are decompressed once to find their size.
        test_files: if not 0, the last ``test_files`` files are the test part instead.
        on_bad_line: ``raise`` BadLine, or ``skip`` the line and count it in ``bad_lines``.
        drop_last: drop the last batch if it is not full.

    A batch that contains only bad lines is not handed out, but its index is used. The test part of a
    very small file may be empty.
    """

    dense_features = DENSE_FEATURES

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        batch_size: int,
        table_rows: Sequence[int],
        part: Literal["train", "test", "all"] = "train",
        test_fraction: float = 1 / 7,
        test_files: int = 0,
        on_bad_line: Literal["raise", "skip"] = "raise",
        drop_last: bool = False,
    ) -> None:
        names = [paths] if isinstance(paths, str | os.PathLike) else paths
        if not isinstance(names, Sequence) or not all(isinstance(n, str | os.PathLike) for n in names):
            raise ConfigError(f"paths is {paths!r}, expected a path or a list of paths")
        if not names:
            raise ConfigError("paths is empty, expected at least one file")
        self.batch_size = _whole_number("batch_size", batch_size, least=1)
        if not isinstance(table_rows, Sequence) or len(table_rows) != TABLES:
            raise ConfigError(f"table_rows is {table_rows!r}, expected {TABLES} numbers")
        self.table_rows: Sequence[int] = [
            _whole_number("each of table_rows", rows, least=1, most=2**63 - 1) for rows in table_rows
        ]
        _check_choice("part", part, ("train", "test", "all"))
        _check_choice("on_bad_line", on_bad_line, ("raise", "skip"))
        _check_choice("drop_last", drop_last, (False, True))
        test_files = _whole_number("test_files", test_files, least=0)
        if test_files >= len(names) and test_files:
            raise ConfigError(f"test_files is {test_files}, expected fewer than the {len(names)} files")
        if not isinstance(test_fraction, int | float) or not 0 <= test_fraction < 1:
            raise ConfigError(f"test_fraction is {test_fraction}, expected at least 0 and less than 1")
        if part == "test" and not test_files and test_fraction == 0:
            raise ConfigError("part is 'test' but test_fraction is 0: nothing is left to test on")
        self._part = part
        self._test_fraction = float(test_fraction)
        self._test_files = test_files
        self._skip_bad = on_bad_line == "skip"
        self._drop_last = drop_last
        self._files = [inspect_file(os.fspath(name)) for name in names]
        # Of gzip files only once they have been decompressed; shared with the readers that split() makes.
        self._sizes = {n: file.size for n, file in enumerate(self._files) if not file.is_gzip}
        self._worker, self._workers = 0, 1
        self._start_at(_Position())
        self.read_count = ReadCount()
        self._iterations = 0
        self._iteration: weakref.ref[Generator[Batch, None, None]] | None = None

    def _start_at(self, position: _Position) -> None:
        self._position = position
        self._exhausted = False
        self._first_wanted = 0

    @property
    def bad_lines(self) -> int:
        """The number of bad lines that were skipped in this pass over the stream."""
        return self._position.bad_lines

    @property
    def first_bad(self) -> list[str]:
        """The first 5 bad lines, with file, line number and reason."""
        return list(self._position.first_bad)

    def split(self, worker: int, workers: int) -> Self:
        """A new reader at the start of the stream, of the batches with ``index % workers == worker``."""
        workers = _whole_number("workers", workers, least=1)
        worker = _whole_number("worker", worker, least=0)
        if worker >= workers:
            raise ConfigError(f"worker is {worker}, expected less than the number of workers, {workers}")
        if self._workers > 1:
            raise ConfigError("this reader is one worker's already: split the reader that it came from")
        self._parts()  # so that a reader that is sent to another process does not measure the files again
        child = copy.copy(self)
        child._worker, child._workers = worker, workers
        child._start_at(_Position())
        child.read_count = ReadCount()
        return child

    def __getstate__(self) -> dict[str, Any]:
        # For another process: an iteration stays where it is.
        return {**self.__dict__, "_iteration": None}

    def _parts(self) -> list[_Part]:
        """The pieces of files that the part is made of."""
        whole = [_Part(number) for number in range(len(self._files))]
        if self._part == "all":
            return whole
        if self._test_files:
            return whole[: -self._test_files] if self._part == "train" else whole[-self._test_files :]
        for number, file in enumerate(self._files):
            if number not in self._sizes:
                self._sizes[number] = uncompressed_size(file)
        cut = math.ceil((1 - self._test_fraction) * sum(self._sizes.values()))
        parts = []
        for part in whole:
            size = self._sizes[part.file]
            if self._part == "train" and cut > 0:
                parts.append(part if cut >= size else replace(part, stop=cut))
            elif self._part == "test" and cut < size:
                parts.append(replace(part, begin=max(cut, 0)))
            cut -= size
        return parts

    def __iter__(self) -> Iterator[Batch]:
        """The batches from the current position to the end of the stream."""
        if self._exhausted:
            self._start_at(_Position())
        self._iterations += 1
        iteration = self._batches(self._iterations)
        self._iteration = weakref.ref(iteration)
        return iteration

    def _batches(self, iteration: int) -> Generator[Batch, None, None]:
        self._check_newest(iteration)
        self.read_count.begin()
        index = self._position.next_batch
        stream = _Stream(self._files, self._parts(), self._position)
        capacity = min(self.batch_size, self._most_samples() + 1)
        try:
            while True:
                wanted = max(index, self._first_wanted)
                wanted += (self._worker - wanted) % self._workers
                stream.skip((wanted - index) * self.batch_size)
                index = wanted
                batch, lines = self._read_batch(stream, index, capacity)
                if lines == 0 or (self._drop_last and lines < self.batch_size):
                    break
                index += 1
                if batch is not None:
                    self._position = stream.position(index)
                    self.read_count.count()
                    yield batch
                    self._check_newest(iteration)
            self._position = stream.position(index)
            self._exhausted = True
        finally:
            stream.close()

    def _check_newest(self, iteration: int) -> None:
        if iteration != self._iterations:
            raise WrongReaderState("a newer iterator of this reader has advanced: use that one")

    def _most_samples(self) -> int:
        """No pass has more, whatever the files hold: so a huge batch_size costs no memory."""
        most = 0
        for number, file in enumerate(self._files):
            size = self._sizes.get(number, file.size * _DEFLATE_LARGEST_RATIO)
            most += size // _SHORTEST_SAMPLE_BYTES + 1
        return most

    def _read_batch(self, stream: _Stream, index: int, capacity: int) -> tuple[Batch | None, int]:
        """Parse the next batch's lines; None if none of them is good. And how many lines there were."""
        labels = np.empty(capacity, np.float32)
        dense = np.empty((capacity, DENSE_FEATURES), np.float32)
        ids = np.empty((TABLES, capacity), np.int64)
        table_rows = np.array(self.table_rows, np.int64)
        lines = samples = 0
        while lines < self.batch_size and (window := stream.window(cut_long_line=not self._skip_bad)):
            wanted = min(self.batch_size - lines, capacity - samples)
            if wanted == 0:  # going on would write behind the arrays
                raise DataError(f"{stream.file.path} has grown since it was opened: it was replaced")
            stop_at_bad = not self._skip_bad or len(stream.first_bad) < _KEPT_MESSAGES
            window.at, passed, good, bad = parse_lines(
                window.buffer, window.at, window.complete, wanted, window.longest_line, stop_at_bad,
                table_rows, labels, dense, ids, samples,
            )  # fmt: skip
            window.line += passed
            lines += passed
            samples += good
            stream.bad_lines += bad
            if passed < wanted and window.at < window.complete:
                stream.take_bad_line(skip=self._skip_bad)
                lines += 1
        if samples == 0:
            return None, lines
        if samples < capacity:
            labels, dense, ids = labels[:samples].copy(), dense[:samples].copy(), ids[:, :samples].copy()
        return Batch(index, dense, list(ids), None, labels), lines

    def progress(self) -> float:
        """The share of the stream that has been handed out, from 0 to 1, by bytes."""
        if self._exhausted or self._position.next_batch == 0:
            return float(self._exhausted)
        parts = self._parts()
        at = self._position
        # Bytes on disk tell when there was no need to measure what a gzip file holds.
        measured = all(part.file in self._sizes for part in parts)
        done = total = 0
        for part in parts:
            end = self._sizes[part.file] if measured else self._files[part.file].size
            length = (part.stop or end) - part.begin
            total += length
            if part.file < at.file:
                done += length
            elif part.file == at.file:
                done += min(length, (at.offset if measured else at.disk_offset) - part.begin)
        return done / total

    def _options(self) -> dict[str, Any]:
        """What two readers must have in common for one to go on where the other stopped."""
        cut_by_bytes = self._part != "all" and not self._test_files
        return {
            "files": [_identity(file) for file in self._files],
            "batch_size": self.batch_size,
            "table_rows": list(self.table_rows),
            "part": self._part,
            "test_fraction": self._test_fraction if cut_by_bytes else None,
            "test_files": self._test_files if self._part != "all" else None,
            "drop_last": self._drop_last,
            "worker": self._worker,
            "workers": self._workers,
        }

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was handed out, as plain values that JSON can represent.

        After the end of the stream it is the start of the next pass.
        """
        position = asdict(_Position() if self._exhausted else self._position)
        position["first_bad"] = list(position["first_bad"])
        return {"kind": _STATE_KIND, "version": _STATE_VERSION, **position, "options": self._options()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position from ``state_dict`` of an equal reader, else raise WrongReaderState.

        Readers are equal if all options are equal, except ``on_bad_line``, the files' folders or buckets, and
        options that have no effect in combination with the others.
        """
        self._check_not_iterating("load the state")
        self._start_at(_position_from(state, self._options()))

    def skip_to(self, index: int) -> None:
        """Skip the batches before ``index``: their lines are counted, not parsed."""
        self._check_not_iterating("skip")
        if self._exhausted:
            self._start_at(_Position())
        self._first_wanted = index

    def _check_not_iterating(self, what: str) -> None:
        iteration = self._iteration() if self._iteration else None
        if iteration is not None and inspect.getgeneratorstate(iteration) != inspect.GEN_CLOSED:
            raise WrongReaderState(f"an iteration is in progress: {what} before iter()")


def _position_from(state: dict[str, Any], options: dict[str, Any]) -> _Position:
    """The position in ``state``, checked against the options of the reader that is to use it."""
    if not isinstance(state, dict):
        raise WrongReaderState(f"the reader's state is {type(state).__name__}, expected a dict")
    for key, own in (("kind", _STATE_KIND), ("version", _STATE_VERSION)):
        if state.get(key) != own:
            raise WrongReaderState(f"the reader's state has {key} {state.get(key)!r}, expected {own!r}")
    saved = state.get("options")
    for name, own in options.items():
        got = saved.get(name) if isinstance(saved, dict) else None
        if got == own or (name == "files" and _same_files(got, own)):
            continue
        expected = own
        if name == "files" and isinstance(got, list) and len(got) == len(own):
            # Of a month of days, the one that differs.
            got, expected = next(pair for pair in zip(got, own, strict=True) if not _same_file(*pair))
        raise WrongReaderState(
            f"the reader's state was saved with {name} {got!r}, expected {expected!r}: make the reader"
            " with the files and options of the one that saved it"
        )
    values = {field.name: state.get(field.name) for field in fields(_Position)}
    messages = values.pop("first_bad")
    for name, value in values.items():
        if type(value) is not int or not 0 <= value < 2**63:
            raise WrongReaderState(f"the reader's state has {name} {value!r}, expected a count")
    if not isinstance(messages, list) or not all(isinstance(message, str) for message in messages):
        raise WrongReaderState(f"the reader's state has first_bad {messages!r}, expected messages")
    position = _Position(**cast(dict[str, int], values), first_bad=tuple(messages))
    if position.next_batch and (position.next_batch - 1) % options["workers"] != options["worker"]:
        raise WrongReaderState(
            f"the reader's state has next_batch {position.next_batch}, expected one that follows a batch"
            f" of worker {options['worker']} of {options['workers']}"
        )
    return position


def _identity(file: DataFile) -> list[Any]:
    """What a state says of a file: its name and size, and of an object in a bucket its version."""
    return [os.path.basename(file.path), file.size, *([file.tag] if file.tag is not None else [])]


def _same_files(got: object, own: list[list[Any]]) -> bool:
    return isinstance(got, list) and len(got) == len(own) and all(map(_same_file, got, own))


def _same_file(got: object, own: list[Any]) -> bool:
    # A local file has no version to compare: between a bucket and a disk, name and size decide.
    return isinstance(got, list) and len(got) in (2, 3) and got[: len(own)] == own[: len(got)]


def _whole_number(name: str, value: int, *, least: int, most: int = 2**31 - 1) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        raise ConfigError(f"{name} is {value!r}, expected a whole number from {least} to {most}")
    return number


def _check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}")
