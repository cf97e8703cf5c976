"""How a bucket is reached and what is read of it, without a server."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import obstore
import obstore.exceptions
import pytest

from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.store.base import ReadRequest
from holdfast.checkpoint.store.s3 import S3Options, _explain, _split_reads
from holdfast.errors import AlreadyExists, ConfigError, ObjectMissing, StoreError, StoreUnreachable
from holdfast.redaction import Secrets

MIB = 1024 * 1024
GAP = 256 * 1024
LARGEST = 8 * MIB


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)


class TestOptions:
    def test_defaults(self) -> None:
        settings = S3Options().bucket_settings()
        assert set(settings) == {"client_options", "retry_config"}
        assert settings["client_options"] == {
            "allow_http": False,
            "timeout": timedelta(seconds=60),
            "connect_timeout": timedelta(seconds=5),
        }
        assert settings["retry_config"] == {
            "max_retries": 8,
            "retry_timeout": timedelta(seconds=60),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=5),
                "base": 2,
            },
        }
        assert S3Options().lease_seconds == 60.0

    def test_what_is_given_is_passed_on(self) -> None:
        options = S3Options.from_mapping(
            {"endpoint": "https://s3", "access_key_id": "me", "region": "", "request_seconds": 3.0}
        )
        settings = options.bucket_settings()
        assert (settings["endpoint"], settings["access_key_id"], settings["region"]) == (
            "https://s3",
            "me",
            "",
        )
        assert "session_token" not in settings
        assert settings["client_options"]["connect_timeout"] == timedelta(seconds=3)

    @pytest.mark.parametrize(
        ("endpoint", "allowed"), [("http://s3", True), ("https://s3", False), (None, False)]
    )
    def test_plain_http_is_allowed_where_it_is_asked_for(self, endpoint: str | None, allowed: bool) -> None:
        assert S3Options(endpoint=endpoint).bucket_settings()["client_options"]["allow_http"] is allowed

    def test_the_endpoint_of_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://env")
        settings = S3Options().bucket_settings()
        assert settings["endpoint"] == "http://env"
        assert settings["client_options"]["allow_http"] is True
        assert S3Options(endpoint="https://mine").bucket_settings()["endpoint"] == "https://mine"

    def test_what_must_not_be_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert S3Options(access_key_id="me").secrets() == {}
        for name in ("SECRET_ACCESS_KEY", "SESSION_TOKEN", "ENDPOINT_URL"):
            monkeypatch.setenv(f"AWS_{name}", f"env {name}")
        assert S3Options().secrets() == {
            "secret_access_key": "env SECRET_ACCESS_KEY",
            "session_token": "env SESSION_TOKEN",
            "endpoint": "env ENDPOINT_URL",
        }
        given = {"secret_access_key": "a", "session_token": "b", "endpoint": "c"}
        assert S3Options(**given).secrets() == given  # type: ignore[arg-type]

    def test_an_option_that_is_none(self) -> None:
        with pytest.raises(ConfigError, match=r"s3:// has no option 'bucket': it takes access_key_id, "):
            S3Options.from_mapping({"bucket": "x", "region": "y"})


def test_keys_do_not_belong_into_a_url() -> None:
    with pytest.raises(ConfigError, match="has keys in it"):
        open_store("s3://key:word@bucket/x", create=True)


class Requests:
    """A server that notes what it is asked for and has nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.puts: list[dict[str, Any]] = []
        self.deletes: list[list[str]] = []
        self.lists: list[dict[str, Any]] = []
        self.gets: list[tuple[int, int]] = []
        self.readers: set[int] = set()
        self.fails: Exception | None = None
        for name in ("put", "delete", "list", "head", "get", "get_range"):
            monkeypatch.setattr(obstore, name, getattr(self, name))

    def put(self, bucket: object, name: str, content: Any, **how: Any) -> dict[str, str]:
        self.puts.append({"name": name, **how})
        if self.fails is not None:
            raise self.fails
        return {"e_tag": "tag"}

    def delete(self, bucket: object, names: list[str]) -> None:
        self.deletes.append(names)

    def list(self, bucket: object, **how: Any) -> list[object]:
        self.lists.append(how)
        return []

    def head(self, bucket: object, name: str) -> dict[str, int]:
        if name == "there":
            return {"size": 3 * LARGEST}
        raise FileNotFoundError(name)

    def get(self, bucket: object, name: str) -> object:
        raise FileNotFoundError(name)

    def get_range(self, bucket: object, name: str, *, start: int, end: int) -> bytes:
        self.gets.append((start, end))
        self.readers.add(threading.get_ident())
        return bytes(end - start)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


@pytest.fixture
def store(requests: Requests) -> Iterator[Store]:
    with open_store("s3://bucket/x", create=True) as store:
        requests.lists.clear()
        yield store


class TestRequests:
    def test_a_small_object_is_one_conditional_request(self, store: Store, requests: Requests) -> None:
        part = bytes(MIB)
        assert store.put("chunk", [part] * 16) == 16 * MIB
        store.publish("manifest", part * 17)
        for put in requests.puts:
            assert (put["mode"], put["use_multipart"]) == ("create", False)
            assert len(put["attributes"]["holdfast-writer"]) == 32

    def test_a_large_one_goes_up_in_parts(self, store: Store, requests: Requests) -> None:
        part = bytes(MIB)
        assert store.put("chunk", [*[part] * 16, b"x"]) == 16 * MIB + 1
        assert requests.puts[-1]["use_multipart"] is True
        assert requests.puts[-1]["chunk_size"] == 16 * MIB
        with pytest.raises(AlreadyExists):
            store.put("there", [part] * 17)
        assert len(requests.puts) == 1

    def test_there_are_fewer_parts_than_s3_allows(self, store: Store, requests: Requests) -> None:
        part = bytes(64 * MIB)
        size = store.put("chunk", [part] * 3000)
        assert size == 3000 * 64 * MIB
        assert requests.puts[-1]["chunk_size"] == math.ceil(size / 9000)

    def test_a_thousand_are_deleted_at_a_time(self, store: Store, requests: Requests) -> None:
        names = [f"chunk-{number}" for number in range(2001)]
        store.delete(names)
        assert [len(deleted) for deleted in requests.deletes] == [1000, 1000, 1]
        assert list(itertools.chain(*requests.deletes)) == names

    @pytest.mark.parametrize(("prefix", "asked"), [("", None), ("chu", None), ("a/b", "a"), ("a/b/", "a/b")])
    def test_a_listing_asks_for_whole_parts(
        self, store: Store, requests: Requests, prefix: str, asked: str | None
    ) -> None:
        store.list(prefix)
        assert requests.lists == [{"prefix": asked, "chunk_size": 1000}]

    def test_a_read_of_a_few_ranges_is_one_request(self, store: Store, requests: Requests) -> None:
        out = memoryview(bytearray(30))
        with store.open("there") as reader:
            reader.read_into([(100, 10), (200, 20)], out)
            assert requests.gets == [(100, 220)]
            assert requests.readers == {threading.get_ident()}, "no other thread is woken for it"
            requests.gets.clear()
            reader.read()
        assert sorted(requests.gets) == [(0, LARGEST), (LARGEST, 2 * LARGEST), (2 * LARGEST, 3 * LARGEST)]

    def test_an_object_of_another_writer_is_not_ours(self, store: Store, requests: Requests) -> None:
        requests.fails = obstore.exceptions.AlreadyExistsError("x")
        with pytest.raises(AlreadyExists, match="has an object 'chunk' already"):
            store.put("chunk", [b"x"])
        requests.fails = obstore.exceptions.GenericError("HTTP error: x")
        with pytest.raises(StoreUnreachable):
            store.put("chunk", [b"x"])


def test_opening_asks_in_any_case(requests: Requests) -> None:
    """A wrong key or bucket shows here and not hours later."""
    open_store("s3://bucket/x", create=True).close()
    with pytest.raises(StoreError, match="no store at s3://bucket/x"):
        open_store("s3://bucket/x/", create=False)
    assert requests.lists == [{"chunk_size": 1}] * 2


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (FileNotFoundError("x"), ObjectMissing, "there is no object x: it was deleted or never written"),
        (
            obstore.exceptions.PermissionDeniedError("x"),
            StoreError,
            "no permission to put x: check the access",
        ),
        (
            obstore.exceptions.UnauthenticatedError("x"),
            StoreError,
            "no permission to put x: check the access",
        ),
        (obstore.exceptions.GenericError("403 Forbidden"), StoreError, "no permission to put x"),
        (obstore.exceptions.GenericError("401 Unauthorized"), StoreError, "no permission to put x"),
        (
            obstore.exceptions.GenericError("404 Not Found"),
            StoreError,
            "could not put x: there is no such bucket",
        ),
        (
            obstore.exceptions.GenericError("HTTP error: x"),
            StoreUnreachable,
            "lost the connection while trying",
        ),
        (obstore.exceptions.GenericError("500"), StoreError, "could not put x: the server failed or refused"),
    ],
)
def test_an_error_says_what_to_do(error: Exception, kind: type[StoreError], message: str) -> None:
    explained = _explain(error, "put", "x", Secrets.of("s3://bucket", {}))
    assert type(explained) is kind
    assert str(explained).startswith(message)


def test_of_an_answer_only_the_beginning_is_shown() -> None:
    error = obstore.exceptions.GenericError("a" * 400 + "b\nsecond line")
    shown = str(_explain(error, "put", "x", Secrets.of("s3://bucket", {})))
    assert "a" * 300 + ")" in shown
    assert "a" * 301 not in shown
    assert "second" not in str(
        _explain(obstore.exceptions.GenericError("a\nsecond"), "put", "x", Secrets.of("", {}))
    )


def reads(*ranges: tuple[int, int]) -> list[list[tuple[int, int]]]:
    """The groups of requests for ranges from one offset up to another."""
    requests = [ReadRequest(start, memoryview(bytearray(end - start))) for start, end in ranges]
    return [[(r.offset, r.end) for r in group] for group in _split_reads(requests)]


class TestSplittingReads:
    def test_nothing(self) -> None:
        assert reads() == []

    def test_a_gap_that_costs_less_than_a_request_is_read(self) -> None:
        near = [(0, 10), (10 + GAP, 20 + GAP)]
        assert reads(*near) == [near]
        assert reads((0, 10), (11 + GAP, 20 + GAP)) == [[(0, 10)], [(11 + GAP, 20 + GAP)]]

    def test_ranges_that_touch_share_a_request(self) -> None:
        assert reads((0, 10), (10, 20)) == [[(0, 10), (10, 20)]]

    def test_ranges_that_go_back_do_not(self) -> None:
        assert reads((10, 20), (0, 10)) == [[(10, 20)], [(0, 10)]]
        assert reads((10, 20), (19, 30)) == [[(10, 20)], [(19, 30)]]

    def test_a_request_has_a_largest_size(self) -> None:
        assert reads((0, LARGEST)) == [[(0, LARGEST)]]
        assert reads((5, 5 + 2 * LARGEST + 1)) == [
            [(5, 5 + LARGEST)],
            [(5 + LARGEST, 5 + 2 * LARGEST)],
            [(5 + 2 * LARGEST, 6 + 2 * LARGEST)],
        ]
        assert reads((0, 10), (10, LARGEST)) == [[(0, 10), (10, LARGEST)]]
        assert reads((0, 10), (10, LARGEST + 1)) == [[(0, 10)], [(10, LARGEST + 1)]]
