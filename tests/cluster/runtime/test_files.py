"""A run's log outlives its machine: whoever goes on from the copies has all that anybody has read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from holdfast.cluster.runtime.files import FileNews, Journal, JournalCopy, write_part, written

LOG = "events.jsonl"


def test_readers_get_what_a_majority_keeps(tmp_path: Path) -> None:
    (tmp_path / LOG).write_bytes(b"0123456789")
    journal = Journal(tmp_path / LOG)
    assert journal.kept() > 10, "nobody keeps a copy yet, or any more"
    for keeper, length in enumerate((7, 3, 0)):
        journal.note(keeper, length)
    assert journal.kept() == 3
    assert written(tmp_path, {LOG: 1}, ends={LOG: journal.kept()}) == [FileNews(LOG, 1, b"12")]
    assert written(tmp_path, {LOG: 3}, ends={LOG: journal.kept()}) == []
    journal.forget(2)
    assert journal.kept() == 3, "of two, both"
    journal.forget(1)
    assert journal.kept() == 7


def test_a_copy_takes_each_part_once_and_in_order(tmp_path: Path) -> None:
    copy = JournalCopy(tmp_path / "journal")
    assert (copy.length, copy.read(0)) == (0, b"")
    for offset, data in ((0, b"abc"), (0, b"abc"), (5, b"xyz"), (3, b"de"), (3, b"de"), (5, b"")):
        copy.take(offset, data)
    assert copy.read(0) == b"abcde"
    assert copy.read(4) == b"e"


@pytest.mark.parametrize("seed", range(20))
def test_nobody_has_read_what_a_successor_does_not_have(tmp_path: Path, seed: int) -> None:
    """A log of which five keep copies is read while it grows; then its machine is lost, and those of two."""
    chance = random.Random(seed)
    log, read = tmp_path / LOG, tmp_path / "reader"
    log.touch()
    read.mkdir()
    journal = Journal(log)
    copies = {keeper: JournalCopy(tmp_path / f"copy-{keeper}") for keeper in range(5)}
    for keeper in copies:
        journal.note(keeper, 0)
    for _ in range(chance.randrange(5, 60)):
        with log.open("ab") as file:
            file.write(chance.randbytes(chance.randrange(40)))
        keeper = chance.randrange(5)
        part = journal.missing(keeper)
        if chance.random() < 0.8:  # else it does not arrive
            copies[keeper].take(*part)
        if chance.random() < 0.8:  # else the answer does not
            journal.note(keeper, copies[keeper].length)
        size = (read / LOG).stat().st_size if (read / LOG).exists() else 0
        for news in written(tmp_path, {LOG: size}, ends={LOG: journal.kept()}):
            write_part(read, news)
    for _ in range(2):
        del copies[chance.choice(sorted(copies))]
    longest = max(copies.values(), key=lambda copy: copy.length)
    kept = longest.read(0)
    known = (read / LOG).read_bytes() if (read / LOG).exists() else b""
    assert kept.startswith(known)
    assert log.read_bytes().startswith(kept)
