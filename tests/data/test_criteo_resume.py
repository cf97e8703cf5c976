"""A state taken anywhere gives exactly the rest, here or in another process; and only its own reader's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.data import criteo_files
from holdfast.data.criteo import Criteo
from holdfast.errors import DataError, WrongReaderState
from tests.data.test_criteo import Batches, compressed, criteo, lines_of, plain, read, text_of, write
from tests.data.test_criteo_parsing import ROWS

__all__ = ["compressed"]

PARTS: list[dict[str, Any]] = [
    {"part": "all"},
    {"part": "train", "test_fraction": 0.3},
    {"part": "test", "test_fraction": 0.8},
    {"part": "test", "test_files": 2},
]


def with_states(reader: Criteo) -> tuple[list[str], Batches]:
    """Each position's state, the start's first, and the batches between them."""
    states, batches = [json.dumps(reader.state_dict())], []
    for batch in reader:
        batches.append(plain(batch))
        states.append(json.dumps(reader.state_dict()))
    return states, batches


@pytest.mark.parametrize("options", PARTS, ids=str)
@pytest.mark.parametrize("last_newline", [True, False])
def test_every_position_gives_the_rest(
    tmp_path: Path,
    compressed: bool,
    options: dict[str, Any],
    last_newline: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(criteo_files, "BLOCK_BYTES", 250)
    texts = [text_of(n, n, last_newline=last_newline) for n in (4, 3, 5)]
    paths = write(tmp_path, texts, compressed=compressed)
    for workers in (1, 2, 3):
        for worker in range(workers):
            states, batches = with_states(criteo(paths, 2, **options).split(worker, workers))
            for number, state in enumerate(states):
                reader = criteo(paths, 2, **options).split(worker, workers)
                reader.load_state_dict(json.loads(state))
                assert json.dumps(reader.state_dict()) == state
                assert read(reader) == batches[number:]
                assert read(reader) == batches, "the next pass does not start over"


def test_after_the_end_the_state_is_the_next_passs_start(tmp_path: Path) -> None:
    paths = write(tmp_path, [text_of(9)])
    reader = criteo(paths)
    start, batches = reader.state_dict(), read(reader)
    assert reader.state_dict() == start
    resumed = criteo(paths)
    resumed.load_state_dict(reader.state_dict())
    assert read(resumed) == read(reader) == batches


def test_bad_lines_before_the_position_are_remembered(tmp_path: Path, compressed: bool) -> None:
    lines = lines_of(text_of(20))
    lines[1::3] = [b"no"] * 7
    paths = write(tmp_path, [b"\n".join(lines)], compressed=compressed)
    whole = criteo(paths, 2, on_bad_line="skip")
    states, batches = with_states(whole)
    for number, state in enumerate(states):
        reader = criteo(paths, 2, on_bad_line="skip")
        reader.load_state_dict(json.loads(state))
        assert reader.bad_lines == json.loads(state)["bad_lines"]
        assert read(reader) == batches[number:]
        assert (reader.bad_lines, reader.first_bad) == (7, whole.first_bad)


def test_another_process_goes_on(tmp_path: Path, compressed: bool) -> None:
    paths = write(tmp_path, [text_of(9), text_of(9, 1)], compressed=compressed)
    states, batches = with_states(criteo(paths, 2).split(1, 2))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in paths:
        path.rename(moved / path.name)
    program = """
import json, sys
from holdfast.data.criteo import Criteo
state, paths, rows = json.load(sys.stdin)
reader = Criteo(paths, batch_size=2, table_rows=rows, part="all").split(1, 2)
reader.load_state_dict(state)
lists = [[b.index, b.labels.tolist(), b.dense.tolist(), [t.tolist() for t in b.ids]] for b in reader]
print(json.dumps(lists))
"""
    given = json.dumps([json.loads(states[2]), [str(moved / path.name) for path in paths], ROWS])
    ran = subprocess.run(
        [sys.executable, "-c", program], input=given, capture_output=True, text=True, check=True
    )
    rest = [
        (index, [(labels[n], dense[n], [table[n] for table in ids]) for n in range(len(labels))])
        for index, labels, dense, ids in json.loads(ran.stdout)
    ]
    assert rest == batches[2:]


def test_progress_goes_on(tmp_path: Path, compressed: bool) -> None:
    paths = write(tmp_path, [text_of(50)], compressed=compressed)
    for options in PARTS[:3]:
        reader = criteo(paths, 5, **options)
        batches = iter(reader)
        next(batches)
        resumed = criteo(paths, 5, **options)
        resumed.load_state_dict(reader.state_dict())
        assert resumed.progress() == reader.progress() > 0


def test_a_broken_loop_goes_on_where_it_stopped(tmp_path: Path) -> None:
    reader = criteo(write(tmp_path, [text_of(12)]))
    for batch in reader:
        if batch.index == 1:
            break
    assert [batch.index for batch in reader] == [2]


def test_load_is_refused_between_iter_and_the_end(tmp_path: Path) -> None:
    reader = criteo(write(tmp_path, [text_of(12)]))
    start = reader.state_dict()
    batches = iter(reader)
    with pytest.raises(WrongReaderState, match="in progress"):
        reader.load_state_dict(start)
    next(batches)
    with pytest.raises(WrongReaderState, match="in progress"):
        reader.load_state_dict(start)
    assert len(list(batches)) == 2
    reader.load_state_dict(start)
    batches = iter(reader)
    next(batches)
    del batches
    reader.load_state_dict(start)
    assert len(read(reader)) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 3}, "batch_size 2, expected 3"),
        ({"table_rows": [7] * 26}, r"table_rows \[1, 2, .*, expected \[7, 7"),
        ({"part": "all"}, "part 'train', expected 'all'"),
        ({"test_fraction": 0.25}, "test_fraction 0.5, expected 0.25"),
        ({"test_files": 1}, "test_fraction 0.5, expected None"),
        ({"drop_last": True}, "drop_last False, expected True"),
    ],
)
def test_another_readers_state_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    paths = write(tmp_path, [text_of(9), text_of(9, 1)])
    options: dict[str, Any] = {"batch_size": 2, "part": "train", "test_fraction": 0.5}
    state = criteo(paths, **options).state_dict()
    with pytest.raises(WrongReaderState, match=words):
        criteo(paths, **{**options, **change}).load_state_dict(state)


def test_another_workers_state_is_refused(tmp_path: Path) -> None:
    reader = criteo(write(tmp_path, [text_of(9)]))
    with pytest.raises(WrongReaderState, match="worker 0, expected 1"):
        reader.split(1, 2).load_state_dict(reader.split(0, 2).state_dict())
    with pytest.raises(WrongReaderState, match="workers 1, expected 3"):
        reader.split(0, 3).load_state_dict(reader.state_dict())


def test_other_files_are_refused(tmp_path: Path) -> None:
    paths = write(tmp_path, [text_of(9), text_of(9, 1), text_of(9, 2)])
    state = criteo(paths[:2]).state_dict()
    with pytest.raises(WrongReaderState, match="files"):
        criteo(paths).load_state_dict(state)
    with pytest.raises(WrongReaderState, match=r"files \['day_1', \d+\], expected \['day_2', \d+\]"):
        criteo([paths[0], paths[2]]).load_state_dict(state)
    size = paths[1].stat().st_size
    with paths[1].open("ab") as file:
        file.write(b"\n")
    with pytest.raises(WrongReaderState, match=rf"\['day_1', {size}\], expected \['day_1', {size + 1}\]"):
        criteo(paths[:2]).load_state_dict(state)


def test_a_file_that_changes_after_the_load(tmp_path: Path, compressed: bool) -> None:
    [path] = write(tmp_path, [text_of(9)], compressed=compressed)
    states, _ = with_states(criteo(path))
    reader = criteo(path)
    reader.load_state_dict(json.loads(states[1]))
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(WrongReaderState, match=f"has {size - 1} bytes, expected the {size}"):
        read(reader)


def test_a_file_of_the_same_size_with_other_lines(tmp_path: Path) -> None:
    [path] = write(tmp_path, [text_of(9)])
    states, _ = with_states(criteo(path))
    path.write_bytes(b"1" + path.read_bytes()[:-1])
    reader = criteo(path)
    reader.load_state_dict(json.loads(states[1]))
    with pytest.raises(WrongReaderState, match="no line that starts at byte"):
        read(reader)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "synthetic"},
        {"version": 2},
        {"options": None},
        {"next_batch": -1},
        {"next_batch": "1"},
        {"next_batch": 2},
        {"offset": None},
        {"offset": 2**70},
        {"line": 1.5},
        {"bad_lines": True},
        {"first_bad": "all"},
        {"first_bad": [1]},
    ],
    ids=str,
)
def test_a_damaged_state_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    reader = criteo(write(tmp_path, [text_of(9)])).split(0, 2)
    iter(reader).__next__()
    with pytest.raises(WrongReaderState, match=next(iter(change)).replace("options", "files")):
        reader.load_state_dict({**reader.state_dict(), **change})
    with pytest.raises(WrongReaderState, match="dict"):
        reader.load_state_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"offset": 10**15}, {"offset": 5}, {"file": 1}, {"file": 7}], ids=str)
def test_a_state_that_points_nowhere_is_refused(
    tmp_path: Path, compressed: bool, change: dict[str, int]
) -> None:
    paths = write(tmp_path, [text_of(9), text_of(9, 1)], compressed=compressed)
    reader = criteo(paths, part="train", test_files=1)
    iter(reader).__next__()
    reader.load_state_dict({**reader.state_dict(), **change})
    with pytest.raises(DataError, match="state"):
        read(reader)
