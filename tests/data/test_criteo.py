"""The stream of a Criteo reader: files, splits, workers, blocks. Against batches cut the obvious way."""

from __future__ import annotations

import gc
import gzip
import math
import os
import pickle  # noqa: TID251 - what multiprocessing does to a reader
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.data import criteo_files
from holdfast.data.criteo import Criteo
from holdfast.data.reader import Batch, Reader
from holdfast.errors import ConfigError, DataError, WrongReaderState
from tests.data.test_criteo_parsing import ROWS, Row, random_line, rows_of, twin_row

Batches = list[tuple[int, list[Row]]]


def text_of(lines: int, seed: int = 0, *, newline: bytes = b"\n", last_newline: bool = True) -> bytes:
    rng = random.Random(seed)
    text = newline.join(random_line(rng) for _ in range(lines))
    return text + newline if last_newline else text


def lines_of(text: bytes) -> list[bytes]:
    return text.removesuffix(b"\n").split(b"\n")


def write(folder: Path, texts: Sequence[bytes], *, compressed: bool = False) -> list[Path]:
    paths = [folder / f"day_{n}" for n in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(gzip.compress(text, 1) if compressed else text)
    return paths


def twin_batches(lines: Sequence[bytes], batch_size: int) -> Batches:
    batches = []
    for begin in range(0, len(lines), batch_size):
        rows = [row for line in lines[begin : begin + batch_size] if (row := twin_row(line))]
        if rows:
            batches.append((begin // batch_size, rows))
    return batches


def plain(batch: Batch) -> tuple[int, list[Row]]:
    return batch.index, rows_of(batch.labels, batch.dense, batch.ids)


def read(reader: Criteo) -> Batches:
    return [plain(batch) for batch in reader]


def criteo(paths: Any, batch_size: int = 4, **options: Any) -> Criteo:
    return Criteo(paths, **{"batch_size": batch_size, "table_rows": ROWS, "part": "all", **options})


@pytest.fixture(params=[False, True], ids=["plain", "gzip"])
def compressed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[1, 64, None], ids=lambda size: f"blocks of {size or 'usual size'}")
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(criteo_files, "BLOCK_BYTES", request.param)
        monkeypatch.setattr(criteo_files, "_COMPRESSED_BLOCK_BYTES", max(request.param, 20))


def test_conforms_to_the_protocol(tmp_path: Path) -> None:
    reader = criteo(write(tmp_path, [text_of(3)]))
    assert isinstance(reader, Reader)
    assert reader.dense_features == 13
    assert list(reader.table_rows) == ROWS


def test_types_and_layout(tmp_path: Path) -> None:
    for batch in criteo(write(tmp_path, [text_of(7)])):
        assert batch.offsets is None
        assert batch.labels.dtype == batch.dense.dtype == np.float32
        assert batch.dense.shape == (len(batch), 13)
        assert len(batch.ids) == 26
        for ids in batch.ids:
            assert ids.shape == (len(batch),)
            assert ids.dtype == np.int64
            assert ids.flags.c_contiguous
            assert ids.base is batch.ids[0].base


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last_newline", [True, False])
def test_batches_run_across_files_and_blocks(
    tmp_path: Path, compressed: bool, block: None, newline: bytes, last_newline: bool
) -> None:
    texts = [text_of(n, n, newline=newline, last_newline=last_newline) for n in (5, 1, 6)]
    lines = [line for text in texts for line in lines_of(text)]
    reader = criteo(write(tmp_path, texts, compressed=compressed))
    assert read(reader) == twin_batches(lines, 4)
    assert read(reader) == twin_batches(lines, 4), "the second pass differs"


@pytest.mark.parametrize("batch_size", [1, 2, 11, 12, 13, 2**31 - 1])
def test_batch_sizes(tmp_path: Path, compressed: bool, batch_size: int) -> None:
    paths = write(tmp_path, [text_of(12)], compressed=compressed)
    assert read(criteo(paths, batch_size)) == twin_batches(lines_of(text_of(12)), batch_size)
    dropped = read(criteo(paths, batch_size, drop_last=True))
    assert dropped == twin_batches(lines_of(text_of(12)), batch_size)[: 12 // batch_size]


def test_one_path_alone(tmp_path: Path) -> None:
    [path] = write(tmp_path, [text_of(2)])
    assert read(criteo(path)) == read(criteo(str(path))) == read(criteo([path]))


def test_gzip_members_one_after_the_other_and_padding(tmp_path: Path, block: None) -> None:
    text = text_of(9)
    members = [gzip.compress(text[n : n + 500]) for n in range(0, len(text), 500)]
    path = tmp_path / "no suffix"
    path.write_bytes(b"".join(members) + bytes(600))
    assert read(criteo(path)) == twin_batches(lines_of(text), 4)


# Splits


@pytest.mark.parametrize("last_newline", [True, False])
@pytest.mark.parametrize("block_bytes", [10, 1 << 20])
def test_train_and_test_are_all_lines_cut_at_the_byte(
    tmp_path: Path, compressed: bool, last_newline: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_files, "BLOCK_BYTES", block_bytes)
    texts = [text_of(n, n, last_newline=last_newline) for n in (3, 1, 2)]
    paths = write(tmp_path, texts, compressed=compressed)
    total = sum(map(len, texts))
    lines, starts, offset = [], [], 0
    for text in texts:
        for line in lines_of(text):
            lines.append(line)
            starts.append(offset)
            offset += len(line) + 1
        offset -= not last_newline
    near = [1 - (start + shift) / total for start in starts for shift in (-1, -0.5, 0, 0.5, 1)]
    fractions = [f for f in [*near, 1 / 7, 0.5, 0.9, 1e-6, 1 - 1e-6] if 0 < f < 1]
    for fraction in fractions:
        cut = math.ceil((1 - fraction) * total)
        before = [line for line, start in zip(lines, starts, strict=True) if start < cut]
        after = [line for line, start in zip(lines, starts, strict=True) if start >= cut]
        options: dict[str, Any] = {"batch_size": 2, "test_fraction": fraction}
        assert read(criteo(paths, part="train", **options)) == twin_batches(before, 2)
        assert read(criteo(paths, part="test", **options)) == twin_batches(after, 2)


def test_without_a_fraction_all_is_for_training(tmp_path: Path) -> None:
    paths = write(tmp_path, [text_of(5)])
    assert read(criteo(paths, part="train", test_fraction=0)) == read(criteo(paths))


def test_split_by_files(tmp_path: Path, compressed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text_of(n, n) for n in (3, 4, 5)]
    paths = write(tmp_path, texts, compressed=compressed)
    monkeypatch.setattr("holdfast.data.criteo.uncompressed_size", None)  # no need to measure
    train = criteo(paths, part="train", test_files=1, test_fraction=0.9)
    assert read(train) == twin_batches(lines_of(texts[0]) + lines_of(texts[1]), 4)
    assert read(criteo(paths, part="test", test_files=1)) == twin_batches(lines_of(texts[2]), 4)


def test_gzip_files_are_measured_once_for_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write(tmp_path, [text_of(20), text_of(20)], compressed=True)
    reader = criteo(paths, part="test", test_fraction=0.6)
    workers = [reader.split(n, 2) for n in range(2)]
    sent = [pickle.loads(pickle.dumps(worker)) for worker in workers]  # noqa: S301
    monkeypatch.setattr("holdfast.data.criteo.uncompressed_size", None)
    expected = read(reader)
    assert sorted(read(workers[0]) + read(sent[1])) == expected


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("part", ["train", "all"])
def test_workers_give_each_batch_once(
    tmp_path: Path, compressed: bool, workers: int, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_files, "BLOCK_BYTES", 300)
    paths = write(tmp_path, [text_of(17), text_of(14, 1)], compressed=compressed)
    reader = criteo(paths, 2, part=part)
    parts = [read(reader.split(worker, workers)) for worker in range(workers)]
    for worker, mine in enumerate(parts):
        assert all(index % workers == worker for index, _ in mine)
    assert sorted(batch for mine in parts for batch in mine) == read(reader)


def test_progress_rises_to_one(tmp_path: Path, compressed: bool) -> None:
    texts = [text_of(40, 1), text_of(40, 2)]
    paths = write(tmp_path, texts, compressed=compressed)
    for options in ({"part": "all"}, {"part": "train", "test_fraction": 0.4}, {"part": "test"}):
        reader = criteo(paths, 1, **options)
        assert reader.progress() == 0
        seen = [reader.progress() for _ in reader]
        assert seen == sorted(set(seen))
        assert seen[-1] == reader.progress() == 1
        count = len(seen)
        for number, progress in enumerate(seen, 1):
            assert progress == pytest.approx(number / count, abs=0.1)


# What cannot be read


def test_missing_empty_and_odd_files(tmp_path: Path) -> None:
    [good] = write(tmp_path, [text_of(2)])
    empty = tmp_path / "empty"
    empty.touch()
    for path, words in (
        (tmp_path / "nowhere", "nowhere cannot be read: No such file"),
        (tmp_path, "Is a directory"),
        (Path(os.devnull), "not a regular file"),
        (empty, "empty is empty"),
    ):
        for paths in ([path], [good, path]):
            with pytest.raises(DataError, match=words):
                criteo(paths)


def test_gzip_of_nothing(tmp_path: Path) -> None:
    paths = write(tmp_path, [text_of(2), b""], compressed=True)
    with pytest.raises(DataError, match="day_1 has no lines"):
        read(criteo(paths))


@pytest.mark.parametrize("kind", ["cut", "cut in the header", "garbage inside", "checksum", "garbage after"])
def test_damaged_gzip_gives_the_batches_before_and_then_names_the_file(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_files, "_COMPRESSED_BLOCK_BYTES", 64)
    paths = write(tmp_path, [text_of(50), text_of(50, 1)], compressed=True)
    whole = paths[1].read_bytes()
    damaged = {
        "cut": whole[: len(whole) // 2],
        "cut in the header": whole[:5],
        "garbage inside": whole[:2000] + b"\xff" * 50 + whole[2050:],
        "checksum": whole[:-8] + b"1234" + whole[-4:],
        "garbage after": whole + b"more",
    }[kind]
    paths[1].write_bytes(damaged)
    expected = twin_batches(lines_of(text_of(50)) + lines_of(text_of(50, 1)), 4)
    got: Batches = []
    with pytest.raises(DataError, match=r"day_1 (is truncated|cannot be read) after \d+ uncompressed bytes"):
        got.extend(plain(batch) for batch in criteo(paths))
    assert got == expected[: len(got)]
    assert len(got) >= 12
    with pytest.raises(DataError, match="day_1"):
        read(criteo(paths, part="train"))


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo_files, "BLOCK_BYTES", 100)
    [path] = write(tmp_path, [text_of(50)])
    size = path.stat().st_size
    batches = iter(criteo(path))
    next(batches)
    os.truncate(path, size // 2)
    with pytest.raises(DataError, match=f"ended after {size // 2} bytes, expected {size}"):
        list(batches)


def test_a_file_that_grows_while_it_is_read_is_read_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_files, "BLOCK_BYTES", 100)
    [path] = write(tmp_path, [text_of(10)])
    batches = iter(criteo(path))
    got = [plain(next(batches))]
    with path.open("ab") as file:
        file.write(text_of(10))
    got += [plain(batch) for batch in batches]
    assert got == twin_batches(lines_of(text_of(10)), 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"paths": []}, "paths is empty"),
        ({"paths": 5}, "paths is 5"),
        ({"paths": b"day_0"}, "paths is b'day_0'"),
        ({"batch_size": 0}, "batch_size is 0, expected a whole number from 1"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"table_rows": [5] * 25}, "26 numbers"),
        ({"table_rows": 5}, "table_rows is 5"),
        ({"table_rows": [5] * 25 + [0]}, "each of table_rows is 0"),
        ({"part": "valid"}, "part is 'valid', expected one of 'train', 'test', 'all'"),
        ({"test_fraction": 1}, "test_fraction is 1"),
        ({"test_fraction": -0.1}, "test_fraction"),
        ({"test_fraction": math.nan}, "test_fraction"),
        ({"test_fraction": "half"}, "test_fraction"),
        ({"test_fraction": 0, "part": "test"}, "nothing is left"),
        ({"test_files": 1}, "test_files is 1, expected fewer than the 1 files"),
        ({"test_files": -1}, "test_files"),
        ({"on_bad_line": "ignore"}, "on_bad_line is 'ignore'"),
        ({"drop_last": "no"}, "drop_last is 'no'"),
    ],
)
def test_options_that_cannot_be_meant(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    paths = write(tmp_path, [text_of(1)])
    with pytest.raises(ConfigError, match=words):
        criteo(**{"paths": paths, **options})


@pytest.mark.parametrize(("worker", "workers"), [(2, 2), (-1, 2), (0, 0), (0.5, 2)])
def test_workers_that_cannot_be_meant(tmp_path: Path, worker: Any, workers: Any) -> None:
    with pytest.raises(ConfigError, match="worker"):
        criteo(write(tmp_path, [text_of(1)])).split(worker, workers)


def test_a_worker_is_not_split_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already"):
        criteo(write(tmp_path, [text_of(1)])).split(0, 2).split(0, 2)


# Iterations and what they hold open


def held(folder: Path) -> int:
    """Open files in ``folder``, and threads that decompress."""
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    files = sum(os.readlink(link).startswith(str(folder)) for link in links if os.path.islink(link))
    return files + sum(thread.name.startswith("criteo") for thread in threading.enumerate())


@pytest.mark.parametrize("how", ["to the end", "closed", "dropped", "bad line", "bad file"])
def test_nothing_stays_open(
    tmp_path: Path, compressed: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteo_files, "BLOCK_BYTES", 100)
    texts = [text_of(6), text_of(6) + (b"oh\n" if how == "bad line" else b"")]
    paths = write(tmp_path, texts, compressed=compressed)
    batches = iter(criteo(paths, 1))
    next(batches)
    assert held(tmp_path) == 1 + compressed
    if how == "to the end":
        list(batches)
    elif how == "closed":
        batches.close()  # type: ignore[attr-defined]
    elif how == "dropped":
        del batches
        gc.collect()
    else:
        if how == "bad file":
            paths[1].unlink()
        with pytest.raises(DataError):
            list(batches)
    assert held(tmp_path) == 0


def test_a_second_iteration_goes_on_and_the_first_says_so(tmp_path: Path) -> None:
    reader = criteo(write(tmp_path, [text_of(12)]))
    first, unused = iter(reader), iter(reader)
    with pytest.raises(WrongReaderState, match="newer iterator"):
        next(first)
    next(unused)
    assert [batch.index for batch in reader] == [1, 2]
    with pytest.raises(WrongReaderState, match="newer iterator"):
        next(unused)
    assert [batch.index for batch in reader] == [0, 1, 2]
