"""Lines that are no samples: refused with file, line number and reason, or skipped and counted."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.data import criteo_files
from holdfast.data.criteo import Criteo
from holdfast.errors import BadLine
from tests.data.test_criteo import compressed, criteo, lines_of, read, text_of, twin_batches, write
from tests.data.test_criteo_parsing import line_of

__all__ = ["compressed"]

NUMBERS, IDS = ["3"] * 13, ["0a"] * 26

BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty, expected 40 fields"),
    "only a carriage return": (b"\r", "is empty, expected 40 fields"),
    "one field": (b"1", "has 1 field, expected 40: a label, 13 integers and 26 ids"),
    "too few fields": (line_of(ids=IDS[1:]), "has 39 fields, expected 40: a label, 13 integers and 26 ids"),
    "too many fields": (line_of() + b"\t", "has 41 fields, expected 40: a label, 13 integers and 26 ids"),
    "no number": (
        line_of(integers=[*NUMBERS[:3], "x1", *NUMBERS[4:]]),
        "field 5 (integer 4) is 'x1', expected an integer or nothing",
    ),
    "a lone minus": (
        line_of(integers=[*NUMBERS[:12], "-"]),
        "field 14 (integer 13) is '-', expected an integer or nothing",
    ),
    "a fraction": (
        line_of(integers=["1.5", *NUMBERS[1:]]),
        "field 2 (integer 1) is '1.5', expected an integer or nothing",
    ),
    "overflow": (
        line_of(integers=["9223372036854775808", *NUMBERS[1:]]),
        "field 2 (integer 1) is '9223372036854775808', expected an integer of 64 bits",
    ),
    "negative overflow": (
        line_of(integers=["-9223372036854775809", *NUMBERS[1:]]),
        "field 2 (integer 1) is '-9223372036854775809', expected an integer of 64 bits",
    ),
    "too many digits to show": (
        line_of(integers=["1" * 4000, *NUMBERS[1:]]),
        f"field 2 (integer 1) is '{'1' * 40}'…, expected an integer of 64 bits",
    ),
    "no hex id": (
        line_of(ids=["0g", *IDS[1:]]),
        "field 15 (id 1) is '0g', expected up to 8 hex digits or nothing",
    ),
    "nine digits": (
        line_of(ids=[*IDS[:25], "123456789"]),
        "field 40 (id 26) is '123456789', expected up to 8 hex digits or nothing",
    ),
    "label 2": (line_of(label="2"), "field 1 (label) is '2', expected 0 or 1"),
    "label 01": (line_of(label="01"), "field 1 (label) is '01', expected 0 or 1"),
    "no label": (line_of(label=""), "field 1 (label) is '', expected 0 or 1"),
    "a NUL byte": (line_of(ids=[*IDS[:5], "a\0", *IDS[6:]]), "field 20 has a NUL byte: the file is damaged"),
    "not text": (
        line_of().replace(b"\t3\t", b"\t\xff\t", 1),
        "field 2 (integer 1) is '\\xff', expected an integer or nothing",
    ),
    "too long": (b"1" * 6001, "is longer than 6000 bytes, expected 40 fields and a newline"),
    "too long by zeros": (
        line_of(integers=["0" * 6000, *NUMBERS[1:]]),
        "is longer than 6000 bytes, expected 40 fields and a newline",
    ),
}


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo_files, "BLOCK_BYTES", 50)
    monkeypatch.setattr(criteo_files, "LONGEST_LINE_BYTES", 6000)


def text_with(bad: bytes, place: int, lines: int = 7, *, last_newline: bool = True) -> bytes:
    whole = lines_of(text_of(lines))
    whole[place] = bad
    return b"\n".join(whole) + (b"\n" if last_newline else b"")


def failure(reader: Criteo) -> BadLine:
    with pytest.raises(BadLine) as caught:
        read(reader)
    return caught.value


@pytest.mark.parametrize("kind", BAD)
def test_each_kind_is_refused_with_its_place_and_reason(
    tmp_path: Path, compressed: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, reason = BAD[kind]
    for place, block_bytes in itertools.product((0, 3, 6), (50, 1 << 20)):
        monkeypatch.setattr(criteo_files, "BLOCK_BYTES", block_bytes)
        paths = write(tmp_path, [text_of(5), text_with(line, place)], compressed=compressed)
        error = failure(criteo(paths))
        assert (error.path, error.line) == (str(paths[1]), place + 1)
        assert error.reason.startswith(reason)
        assert failure(criteo(paths[1])).line == place + 1


@pytest.mark.parametrize("kind", [kind for kind in BAD if BAD[kind][0]])
def test_a_bad_last_line_without_newline(tmp_path: Path, compressed: bool, kind: str) -> None:
    text = text_with(BAD[kind][0], 6, last_newline=False)
    error = failure(criteo(write(tmp_path, [text], compressed=compressed)))
    assert error.line == 7
    assert error.reason.startswith(BAD[kind][1])


@pytest.mark.parametrize("kind", BAD)
def test_each_kind_is_skipped_and_counted(tmp_path: Path, compressed: bool, kind: str) -> None:
    texts = [text_with(BAD[kind][0], place) for place in (0, 3, 6)]
    paths = write(tmp_path, texts, compressed=compressed)
    reader = criteo(paths, on_bad_line="skip")
    lines = [line for text in texts for line in text.split(b"\n")[:-1]]
    assert read(reader) == twin_batches([line if len(line) <= 6000 else b"" for line in lines], 4)
    assert reader.bad_lines == 3
    places = [re.sub(": .*", "", message) for message in reader.first_bad]
    assert places == [f"{paths[0]}, line 1", f"{paths[1]}, line 4", f"{paths[2]}, line 7"]


@pytest.mark.parametrize("kind", ["empty", "too long", "no number"])
def test_line_numbers_are_the_files_own_in_the_test_part(tmp_path: Path, compressed: bool, kind: str) -> None:
    texts = [text_of(10), text_with(BAD[kind][0], 8, 10), text_with(BAD[kind][0], 2, 10)]
    paths = write(tmp_path, texts, compressed=compressed)
    inside_line_6 = len(texts[0]) + len(b"\n".join(lines_of(texts[1])[:5])) + 10
    fraction = 1 - inside_line_6 / sum(map(len, texts))
    options: dict[str, Any] = {"part": "test", "test_fraction": fraction, "batch_size": 1}
    error = failure(criteo(paths, **options))
    assert (error.path, error.line) == (str(paths[1]), 9)
    reader = criteo(paths, on_bad_line="skip", **options)
    states = [reader.state_dict() for _ in reader]
    assert [message.split(":")[0] for message in reader.first_bad] == [
        f"{paths[1]}, line 9",
        f"{paths[2]}, line 3",
    ]
    assert states[1]["bad_lines"] == 0
    resumed = criteo(paths, **options)
    resumed.load_state_dict(states[1])
    assert failure(resumed).line == 9


def test_a_worker_counts_the_lines_it_passes(tmp_path: Path, compressed: bool) -> None:
    paths = write(tmp_path, [text_of(6), text_with(b"no", 8, 20)], compressed=compressed)
    assert failure(criteo(paths, 3).split(4, 5)).line == 9
    assert failure(criteo(paths, 2).split(0, 7)).line == 9


@pytest.mark.parametrize("ending", [b"", b"\n", b"\n" + line_of()])
def test_the_longest_line_is_good_and_one_byte_more_is_bad(tmp_path: Path, ending: bytes) -> None:
    for excess in (0, 1, 2, 50):
        integers = ["0" * (6000 + excess - len(line_of()) + 1), *NUMBERS[1:]]
        line = line_of(integers=integers)
        assert len(line) == 6000 + excess
        reader = criteo(write(tmp_path, [line + ending]), on_bad_line="skip")
        assert sum(map(len, reader)) == (excess == 0) + (len(ending) > 1)
        assert reader.bad_lines == (excess > 0)


def test_the_first_five_are_kept_and_all_are_counted(tmp_path: Path) -> None:
    good = lines_of(text_of(30))
    text = b"\n".join(line for pair in zip(good, [b"no"] * 30, strict=True) for line in pair)
    [path] = write(tmp_path, [text])
    reader = criteo(path, 6, on_bad_line="skip")
    assert [len(batch) for batch in reader] == [3] * 10
    assert reader.bad_lines == 30
    assert [message.split(":")[0] for message in reader.first_bad] == [
        f"{path}, line {number}" for number in (2, 4, 6, 8, 10)
    ]


def test_a_second_pass_counts_anew(tmp_path: Path) -> None:
    reader = criteo(write(tmp_path, [text_with(b"no", 5)]), on_bad_line="skip")
    for _ in range(2):
        read(reader)
        assert reader.bad_lines == len(reader.first_bad) == 1


def test_a_batch_of_bad_lines_uses_up_its_index(tmp_path: Path) -> None:
    good = lines_of(text_of(6))
    lines = [*good[:2], b"", b"no", *good[2:], b"no"]
    reader = criteo(write(tmp_path, [b"\n".join(lines) + b"\n"]), 2, on_bad_line="skip")
    assert [(batch.index, len(batch)) for batch in reader] == [(0, 2), (2, 2), (3, 2)]
    assert reader.bad_lines == 3
    assert reader.progress() == 1


def test_only_bad_lines(tmp_path: Path) -> None:
    reader = criteo(write(tmp_path, [b"no\n" * 100]), 7, on_bad_line="skip")
    assert read(reader) == []
    assert reader.bad_lines == 100


def test_more_lines_than_samples_could_be(tmp_path: Path) -> None:
    # The arrays of a huge batch are cut to what the bytes can hold: bad lines must not overrun them.
    smallest = b"1" + b"\t" * 39 + b"\n"
    [path] = write(tmp_path, [(smallest + b"1\t2\n" * 40) * 30 + smallest * 50])
    [batch] = criteo(path, 2**31 - 1, on_bad_line="skip")
    assert len(batch) == 80


def test_others_bad_lines_are_not_this_workers(tmp_path: Path, compressed: bool) -> None:
    bad = {kind: line for kind, (line, _) in BAD.items()}
    texts = [text_with(line, 3, 8) for line in bad.values()]
    reader = criteo(write(tmp_path, texts, compressed=compressed), 4, on_bad_line="raise")
    assert [batch.index for batch in reader.split(1, 2)] == list(range(1, 2 * len(bad), 2))
    failure(reader.split(0, 2))
    workers = [criteo(reader_paths(reader), 4, on_bad_line="skip").split(n, 2) for n in range(2)]
    assert [(len(read(worker)), worker.bad_lines) for worker in workers] == [
        (len(bad), len(bad)),
        (len(bad), 0),
    ]


def reader_paths(reader: Criteo) -> list[str]:
    return [file.path for file in reader._files]


def test_after_a_bad_line_the_position_is_behind_the_last_batch(tmp_path: Path) -> None:
    [path] = write(tmp_path, [text_with(b"no", 5, 12)])
    reader = criteo(path)
    assert failure(reader).line == 6
    assert failure(reader).line == 6
    # The cure for a bad line: go on from there with another on_bad_line.
    tolerant = criteo(path, on_bad_line="skip")
    tolerant.load_state_dict(reader.state_dict())
    assert [(batch.index, len(batch)) for batch in tolerant] == [(1, 3), (2, 4)]


def test_a_line_without_end_is_refused_early(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    with path.open("wb") as file:
        file.write(text_of(1))
        file.truncate(1 << 34)
    error = failure(criteo(path, 1))
    assert error.line == 2
    assert "longer than 6000 bytes" in error.reason


def test_it_comes_out_of_another_process() -> None:
    error = BadLine("day_0", 17, "has 3 fields")
    again = copy.copy(error)  # by the way that processes send it
    assert (str(again), again.line) == (str(error), 17)
