"""A reader of objects in a bucket gives what it gives of local files, against a real S3 server."""

from __future__ import annotations

import datetime
import gzip
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import obstore
import pytest
from obstore.store import S3Store as Bucket

from holdfast.buckets import BucketOptions
from holdfast.data import object_file
from holdfast.data.criteo import Criteo
from holdfast.data.object_file import ObjectFile, ObjectVersion, inspect_object
from holdfast.data.reader import Batch
from holdfast.errors import ConfigError, DataError, WrongReaderState
from holdfast.recipe import recipe_of
from holdfast.testing.proxy import breaking_proxy
from holdfast.testing.s3 import ACCESS_KEY, SECRET_KEY, S3Server
from holdfast.training import config as configurations
from holdfast.training.readers import build_readers
from tests.data.test_criteo import compressed, criteo, text_of, write

__all__ = ["compressed"]

LINES = (40, 31, 57)
_places = itertools.count()


class Place:
    """A folder of a bucket, and what tests do there."""

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self._prefix = f"data/{next(_places)}"
        self._bucket = Bucket(server.bucket, **BucketOptions.from_mapping(server.options()).bucket_settings())

    def url(self, name: str) -> str:
        return f"s3://{self.server.bucket}/{self._prefix}/{name}"

    def put(self, name: str, content: bytes) -> str:
        obstore.put(self._bucket, f"{self._prefix}/{name}", content)
        return self.url(name)

    def delete(self, name: str) -> None:
        obstore.delete(self._bucket, f"{self._prefix}/{name}")

    def upload(self, paths: Sequence[Path]) -> list[str]:
        return [self.put(path.name, path.read_bytes()) for path in paths]


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_file, "RANGE_BYTES", 1000)


@pytest.fixture
def place(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return Place(s3_server)


@pytest.fixture
def both(place: Place, tmp_path: Path, compressed: bool) -> tuple[list[Path], list[str]]:
    """The same three files on disk and in the bucket."""
    paths = write(tmp_path, [text_of(lines, lines) for lines in LINES], compressed=compressed)
    return paths, place.upload(paths)


def bits(batch: Batch) -> tuple[int, bytes, bytes, list[bytes]]:
    return batch.index, batch.labels.tobytes(), batch.dense.tobytes(), [ids.tobytes() for ids in batch.ids]


def read(reader: Criteo) -> list[tuple[int, bytes, bytes, list[bytes]]]:
    return [bits(batch) for batch in reader]


def rest_of(file: ObjectFile) -> bytes:
    rest = b""
    while chunk := file.read(1000):
        rest += chunk
    return rest


PARTS: list[dict[str, Any]] = [
    {"part": "all"},
    {"part": "train", "test_fraction": 0.3},
    {"part": "test", "test_fraction": 0.7},
    {"part": "train", "test_files": 1},
    {"part": "test", "test_files": 2},
]


@pytest.mark.parametrize("options", PARTS, ids=str)
def test_batches_are_those_of_the_local_files(
    both: tuple[list[Path], list[str]], options: dict[str, Any]
) -> None:
    paths, urls = both
    local, remote = criteo(paths, **options), criteo(urls, **options)
    expected = read(local)
    assert len(expected) > 5
    assert read(remote) == expected
    assert read(remote) == expected, "the second pass differs"


def test_one_url_alone(both: tuple[list[Path], list[str]]) -> None:
    paths, urls = both
    assert read(criteo(urls[0])) == read(criteo(paths[0]))


@pytest.mark.parametrize("options", PARTS[:3], ids=str)
def test_split_and_resumed_in_the_middle(both: tuple[list[Path], list[str]], options: dict[str, Any]) -> None:
    paths, urls = both
    for worker in range(3):
        expected = read(criteo(paths, **options).split(worker, 3))
        reader = criteo(urls, **options).split(worker, 3)
        states = [reader.state_dict()]
        for batch, wanted in zip(reader, expected, strict=True):
            assert bits(batch) == wanted
            states.append(reader.state_dict())
        for number in range(0, len(expected), 3):
            resumed = criteo(urls, **options).split(worker, 3)
            resumed.load_state_dict(json.loads(json.dumps(states[number])))
            assert read(resumed) == expected[number:]


def test_a_run_may_move_between_disk_and_bucket(both: tuple[list[Path], list[str]]) -> None:
    paths, urls = both
    expected = read(criteo(paths))
    for first, second in ((paths, urls), (urls, paths)):
        reader = criteo(first)
        for _ in itertools.islice(reader, 12):
            pass
        moved = criteo(second)
        moved.load_state_dict(reader.state_dict())
        assert read(moved) == expected[12:]


def test_a_process_that_is_told_the_urls(both: tuple[list[Path], list[str]]) -> None:
    paths, urls = both
    code = (
        "import json, sys; from holdfast.recipe import Recipe, make; import msgspec\n"
        "reader = make(msgspec.json.decode(sys.argv[1], type=Recipe)).split(1, 3)\n"
        "print(json.dumps([[b.index, b.labels.tolist(), [i.tolist() for i in b.ids]] for b in reader]))"
    )
    recipe = msgspec.json.encode(recipe_of(criteo(urls))).decode()
    ended = subprocess.run(
        [sys.executable, "-c", code, recipe], capture_output=True, text=True, check=True, timeout=120
    )
    expected = [[b.index, b.labels.tolist(), [i.tolist() for i in b.ids]] for b in criteo(paths).split(1, 3)]
    assert json.loads(ended.stdout) == expected


def test_a_configuration_takes_urls(both: tuple[list[Path], list[str]], tmp_path: Path) -> None:
    paths, urls = both

    def batches(names: Sequence[object]) -> list[Any]:
        config = configurations.load(
            None,
            ["data.source=criteo", f"data.paths=[{','.join(map(str, names))}]", "data.test_files=1",
             "batch_size=7", "data.max_rows=100"],
        )  # fmt: skip
        train, test = build_readers(config)
        return [[bits(batch) for batch in reader] for reader in (train, test)]

    assert batches(urls) == batches(paths)


# Changes


def test_a_changed_object_is_noticed_before_it_is_read(
    both: tuple[list[Path], list[str]], place: Place, compressed: bool
) -> None:
    paths, urls = both
    reader = criteo(urls)
    content = bytearray(paths[1].read_bytes())
    content[-1] ^= 1  # of the same size
    place.put(paths[1].name, bytes(content))
    with pytest.raises(WrongReaderState, match=rf"{urls[1]}.*make a new reader"):
        read(reader)


def test_a_changed_object_is_noticed_by_a_resumed_reader(
    both: tuple[list[Path], list[str]], place: Place
) -> None:
    paths, urls = both
    reader = criteo(urls)
    next(iter(reader))
    state = reader.state_dict()
    criteo(urls).load_state_dict(state)
    content = bytearray(paths[2].read_bytes())
    content[-1] ^= 1
    place.put(paths[2].name, bytes(content))
    with pytest.raises(WrongReaderState, match=rf"files.*{paths[2].name}"):
        criteo(urls).load_state_dict(state)


@pytest.mark.parametrize("size", [9000, 1500, 12000])
def test_an_object_that_changes_while_it_is_read(place: Place, size: int) -> None:
    url = place.put("x", bytes(9000))
    version, _ = inspect_object(url, 2)
    with ObjectFile(url, version) as file:
        assert file.read(500) == bytes(500)
        assert file._ahead is not None
        file._ahead[1].result()  # so that what comes next is asked for after the change
        place.put("x", b"\1" * size)
        with pytest.raises(WrongReaderState, match=rf"{url} has {size} bytes"):
            rest_of(file)


def test_a_changed_object_is_not_opened(place: Place) -> None:
    url = place.put("x", bytes(9000))
    version, _ = inspect_object(url, 2)
    place.put("x", b"\1" * 9000)
    with pytest.raises(WrongReaderState, match=f"{url} has 9000 bytes and version"):
        ObjectFile(url, version)


def test_an_object_that_is_deleted_while_it_is_read(place: Place) -> None:
    url = place.put("x", bytes(9000))
    with ObjectFile(url, inspect_object(url, 2)[0]) as file:
        assert file.read(500) == bytes(500)
        place.delete("x")
        with pytest.raises(DataError, match=f"{url} cannot be read: there is no such object"):
            rest_of(file)


def test_a_server_without_etags_is_told_by_the_time() -> None:
    def meta(second: int, tag: str | None) -> Any:
        modified = datetime.datetime(2026, 1, 1, 0, 0, second, tzinfo=datetime.UTC)
        return {"path": "x", "size": 5, "e_tag": tag, "last_modified": modified, "version": None}

    assert ObjectVersion.of(meta(1, None)) == ObjectVersion.of(meta(1, None))
    assert ObjectVersion.of(meta(1, None)) != ObjectVersion.of(meta(2, None))
    assert ObjectVersion.of(meta(1, "a")) == ObjectVersion.of(meta(2, "a"))
    assert ObjectVersion.of(meta(1, "a")) != ObjectVersion.of(meta(1, "b"))


# What cannot be read


def test_a_missing_object(place: Place) -> None:
    with pytest.raises(DataError, match=f"{place.url('none')} cannot be read: there is no such object"):
        criteo(place.url("none"))


def test_a_missing_bucket(place: Place) -> None:
    with pytest.raises(DataError, match=r"s3://no-such-bucket/x cannot be read: there is no such bucket"):
        criteo("s3://no-such-bucket/x")


def test_an_empty_object(place: Place) -> None:
    url = place.put("empty", b"")
    with pytest.raises(DataError, match=f"{url} is empty: upload it again"):
        criteo(url)


def test_a_truncated_gzip_object(place: Place) -> None:
    url = place.put("cut", gzip.compress(text_of(300))[:-9])
    with pytest.raises(DataError, match=f"{url} is truncated"):
        read(criteo(url))


def test_a_wrong_key(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    url = place.put("x", b"1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-secret")
    with pytest.raises(DataError, match=f"{url} cannot be read: no permission") as caught:
        criteo(url)
    assert "wrong-and-secret" not in str(caught.value)


def test_a_connection_that_is_lost(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    url = place.put("x", bytes(5000))
    impatient = BucketOptions(max_retries=0, retry_seconds=5.0, request_seconds=5.0)
    monkeypatch.setattr(object_file, "BucketOptions", lambda: impatient)
    with breaking_proxy(int(place.server.endpoint.rpartition(":")[2])) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        file = ObjectFile(url, inspect_object(url, 2)[0])
        assert file.read(10) == bytes(10)
    with file, pytest.raises(DataError, match=f"{url} cannot be read: lost the connection"):
        rest_of(file)


@pytest.mark.parametrize(
    "url", ["s3://", "s3://bucket", "s3://bucket/", "s3:///key", "s3://a b/key", "s3://me:pass@bucket/key",
            "s3://bucket/a//b", "s3://bucket/../b"],
)  # fmt: skip
def test_what_is_no_objects_url(place: Place, url: str) -> None:
    with pytest.raises(ConfigError, match="s3://"):
        criteo(url)


@pytest.mark.parametrize("path", ["gs://bucket/key", "https://host/day_0", Path("s3://bucket/key")])
def test_other_urls(path: str | Path) -> None:
    with pytest.raises(ConfigError, match="neither a path nor an s3:// URL"):
        criteo(path)


def test_without_the_extra(place: Place, tmp_path: Path) -> None:
    # None in sys.modules is how Python itself marks a module that cannot be imported.
    code = (
        "import sys; sys.modules['obstore'] = None\n"
        "import holdfast as hf\n"
        "try: hf.Criteo(sys.argv[1], batch_size=1, table_rows=[2] * 26)\n"
        "except hf.ConfigError as error: print(error)"
    )
    local = tmp_path / "day"
    local.write_bytes(text_of(2))
    for path, expected in ((place.url("x"), "holdfast[s3]"), (str(local), "")):
        ended = subprocess.run(
            [sys.executable, "-c", code, path], capture_output=True, text=True, check=True, timeout=120
        )
        assert (expected in ended.stdout) if expected else not ended.stdout


def test_a_forked_process_says_so_in_place_of_waiting_forever(place: Place) -> None:
    code = (
        "import os, signal, sys; import holdfast as hf\n"
        "def make(): return hf.Criteo(sys.argv[1], batch_size=4, table_rows=[9] * 26, part='all')\n"
        "reader = make()\n"
        "def child(what):\n"
        "    if (pid := os.fork()): return os.waitpid(pid, 0)\n"
        "    signal.alarm(60)\n"
        "    try: what()\n"
        "    except hf.ConfigError as error: print(error, flush=True)\n"
        "    os._exit(0)\n"
        "child(lambda: next(iter(reader)))\n"
        "child(make)\n"
        "print(len(list(reader)))"
    )
    url = place.put("x", text_of(8))
    ended = subprocess.run(
        [sys.executable, "-c", code, url], capture_output=True, text=True, check=True, timeout=180
    )
    *errors, batches = ended.stdout.splitlines()
    assert batches == "2"
    assert len(errors) == 2
    assert all(url in error and "spawn the process" in error for error in errors)


# The file itself


@pytest.fixture
def opened(place: Place) -> Iterator[tuple[ObjectFile, bytes]]:
    content = np.random.default_rng(1).bytes(10_500)
    url = place.put("random", content)
    version, start = inspect_object(url, 7)
    assert (version.size, start) == (len(content), content[:7])
    with ObjectFile(url, version) as file:
        yield file, content


def test_reads_and_seeks_as_a_local_file_does(opened: tuple[ObjectFile, bytes]) -> None:
    file, content = opened
    rng = random.Random(2)
    at = 0
    for _ in range(200):
        if rng.random() < 0.3:
            at = rng.randrange(len(content) + 10)
            assert file.seek(at) == at
        size = rng.choice([1, 10, 700, 1000, 3000])
        got = file.read(size)
        assert got == content[at : at + len(got)]
        assert bool(got) == (at < len(content))
        at += len(got)
        assert file.tell() == at


def test_a_thread_gets_the_next_range(opened: tuple[ObjectFile, bytes], place: Place) -> None:
    file, content = opened
    assert file.read(1) == content[:1]
    assert file._ahead is not None
    start, ahead = file._ahead
    assert (start, bytes(ahead.result())) == (1000, content[1000:2000])
    file.seek(1000)
    assert file.read(2000) == content[1000:2000]


def test_no_thread_is_left(both: tuple[list[Path], list[str]]) -> None:
    _, urls = both
    iteration = iter(criteo(urls))
    next(iteration)
    assert any(thread.name.startswith("object-file") for thread in threading.enumerate())
    del iteration
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("object-file") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, os.getpid()
        time.sleep(0.01)
