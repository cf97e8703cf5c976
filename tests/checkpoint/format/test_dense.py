"""The file of everything that is not rows."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from holdfast.checkpoint.format.chunk import checksum
from holdfast.checkpoint.format.dense import (
    DEEPEST,
    Array,
    TablePlace,
    decode_shapes,
    decode_tree,
    encode_tree,
    header_bytes,
    map_tree,
)
from holdfast.errors import CorruptCheckpoint, UnsupportedState


def encoded(tree: Any) -> bytes:
    return b"".join(bytes(part) for part in encode_tree(tree))


def same(a: Any, b: Any) -> bool:
    """Equal in type, order and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(p, q) for p, q in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


numbers = st.none() | st.booleans() | st.integers() | st.floats()
texts = st.text(st.characters(exclude_categories=())) | st.sampled_from(["$tuple", "$", "__metadata__"])
keys = st.recursive(numbers | texts | st.binary(), lambda k: st.lists(k, max_size=3).map(tuple), max_leaves=4)
members = st.integers() | texts | st.binary() | st.booleans()
dtypes = hnp.scalar_dtypes().filter(lambda d: d.kind in "fiub" and d.itemsize <= 8)
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)).map(Array.of)
scalars = dtypes.flatmap(hnp.from_dtype).map(Array.of)
leaves = (
    numbers
    | texts
    | st.binary()
    | arrays
    | scalars
    | st.builds(TablePlace, texts, texts, st.lists(st.integers(0, 9)).map(tuple))
)
trees = st.recursive(
    leaves,
    lambda t: (
        st.lists(t, max_size=4)
        | st.lists(t, max_size=4).map(tuple)
        | st.dictionaries(texts, t, max_size=4)
        | st.dictionaries(keys, t, max_size=4)
        | st.sets(members, max_size=4)
        | st.frozensets(members, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(trees)
def test_a_tree_comes_back_to_the_bit(tree: Any) -> None:
    assert same(decode_tree(encoded(tree), "f"), tree)


@settings(max_examples=100, deadline=None)
@given(trees)
def test_mapping_a_tree_gives_an_equal_one(tree: Any) -> None:
    assert same(map_tree(tree, lambda leaf, path: leaf), tree)


@pytest.mark.parametrize(
    "number",
    [
        0.1,
        -0.0,
        5e-324,
        1.7976931348623157e308,
        math.inf,
        -math.inf,
        math.nan,
        2**53 + 1,
        10**5000,
        -(10**5000),
    ],
    ids=lambda n: hex(n)[:9] if isinstance(n, int) else str(n),
)
def test_numbers_are_exact(number: float) -> None:
    assert same(decode_tree(encoded({"n": number, (number,): {number}}), "f")["n"], number)


def test_a_nan_keeps_its_payload() -> None:
    (nan,) = struct.unpack("<d", bytes.fromhex("efbeadde0000f87f"))
    assert same(decode_tree(encoded(nan), "f"), nan)


def test_special_dicts() -> None:
    tree = {"o": OrderedDict(b=1, a=2), "d": defaultdict(int, {3: 4}), "c": Counter("aab")}
    found = decode_tree(encoded(tree), "f")
    assert same(found, {"o": {"b": 1, "a": 2}, "d": {3: 4}, "c": Counter("aab")})


def test_numpy_comes_back_as_it_was() -> None:
    for value in (np.float32(1.5), np.int64(-1), np.bool_(True), np.arange(6).reshape(2, 3).T, np.zeros(())):
        stored = Array.of(value)
        assert stored is not None
        back = decode_tree(encoded(stored), "f").to_numpy()
        assert type(back) is type(value)
        assert back.dtype == value.dtype
        assert np.array_equal(back, value)
    assert Array.of(np.array([None])) is None
    assert Array.of(np.arange(3, dtype=">i4")) == Array.of(np.arange(3, dtype="<i4"))


class Thing:
    pass


Pair = namedtuple("Pair", "a b")


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"optim": {"state": {3: {"buffer": Thing()}}}}, r"optim\.state\.3\.buffer is a .*Thing:"),
        ([1, Pair(1, 2)], r"1 is a .*Pair"),
        ({"a": {Thing: 1}}, "a key or member in a is a type"),
        ({"a": {(1, frozenset()): 1}}, "a key or member in a is a frozenset"),
        ({"a": np.zeros(3)}, "a is a numpy.ndarray"),
        (Text("x"), "the state is a .*Text"),
        ({"f": lambda: 1}, "f is a function"),
        ({"r": range(3)}, "r is a range"),
    ],
)
def test_what_cannot_be_stored_is_named(value: Any, path: str) -> None:
    with pytest.raises(UnsupportedState, match=path):
        encode_tree(value)


def test_too_deep_and_circular_trees() -> None:
    deep: list[Any] = []
    for _ in range(DEEPEST):
        deep = [deep]
    assert same(decode_tree(encoded(deep), "f"), deep)
    circle: list[Any] = []
    circle.append(circle)
    for tree in ([deep], circle):
        with pytest.raises(UnsupportedState, match="nested"):
            encode_tree(tree)
        with pytest.raises(UnsupportedState, match="nested"):
            map_tree(tree, lambda leaf, path: leaf)


def test_arrays_are_not_copied() -> None:
    array = Array("F32", (1024,), np.zeros(4096, np.uint8), "tensor")
    parts = encode_tree({"a": array})
    assert parts[1] is array.data
    whole = b"".join(map(bytes, parts))
    assert np.shares_memory(decode_tree(whole, "f")["a"].data, np.frombuffer(whole, np.uint8))


SMALL = {
    "a": Array.of(np.arange(3, dtype=np.float32)), "b": [1, 2.5, True, None, "text", b"bytes"], 7: (1, {2}),
    "n": math.nan, "big": 1 << 80, "t": TablePlace("m.weight", "optim.sum", (3,)), "s": Array.of(np.int8(3)),
}  # fmt: skip


def test_other_tools_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "dense.safetensors"
    odd = Array("BF16", (2,), np.zeros(4, np.uint8), "tensor")
    path.write_bytes(encoded({**SMALL, "odd": odd, "a.b": odd, "a": {"b": odd}, "\ud800": odd, "": b""}))
    with safetensors.safe_open(path, framework="pt") as file:
        assert {"odd", "a.b", "a.b#1", "s"} <= set(file.keys())
        assert file.get_tensor("s").item() == 3
        assert all(file.get_tensor(key) is not None for key in set(file.keys()))


def test_flipped_bytes_are_noticed() -> None:
    good = encoded(SMALL)
    arrays = 8 + int.from_bytes(good[:8], "little")
    for at in range(len(good)):
        for flip in (1, 0x80, 0xFF, good[at]):
            bad = bytearray(good)
            bad[at] ^= flip
            try:
                found = decode_tree(bytes(bad), "some/file")
            except CorruptCheckpoint:
                continue
            assert at >= arrays or same(found, SMALL), f"byte {at} ^ {flip}"


def test_truncated_and_longer_files_are_noticed() -> None:
    good = encoded(SMALL)
    for bad in (*(good[:end] for end in range(len(good))), good + b"\0", good[1:], good * 2):
        with pytest.raises(CorruptCheckpoint, match="some/file"):
            decode_tree(bad, "some/file")


def file_of(header: Any, tree: Any, data: bytes = b"") -> bytes:
    """A file whose checksum is right but which no encoder writes."""
    text = tree if isinstance(tree, str) else json.dumps(tree)
    described = json.dumps(header, separators=(",", ":")).encode()
    metadata = {"holdfast": "1", "checksum": checksum(described, text.encode()), "tree": text}
    whole = json.dumps({"__metadata__": metadata, **header}).encode()
    return len(whole).to_bytes(8, "little") + whole + data


def entry(dtype: Any = "U8", shape: Any = (1,), offsets: Any = (0, 1)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "bad",
    [
        (1 << 63).to_bytes(8, "little"),
        *(len(h).to_bytes(8, "little") + h for h in (b"[]", b"1", b"{}", b'{"__metadata__":1}', b"[" * 9999)),
        file_of({}, "[" * 100_000 + "]" * 100_000),
        file_of({}, "[" * 200 + "]" * 200),
        file_of({}, {"$eval": "1"}),
        file_of({}, {"$int": 5}),
        file_of({}, {"$int": "x"}),
        file_of({}, {"$float": "00"}),
        file_of({}, {"$tuple": 3}),
        file_of({}, {"$set": [[]]}),
        file_of({}, {"$dict": [[[], 1]]}),
        file_of({}, {"$dict": [1]}),
        file_of({}, {"$place": ["a"]}),
        file_of({}, {"$place": ["a", "b", ["x"]]}),
        file_of({}, {"$tensor": []}),
        file_of({}, {"$tensor": "nowhere"}),
        file_of({}, {"$bytes": {}}),
        file_of({}, {"$tuple": [], "more": 1}),
        file_of({}, "9" * 10_000),
        file_of(entry(shape=[1 << 60], offsets=[0, 1 << 60]), None, b"1"),
        file_of(entry(shape=[1 << 40] * 64), None, b"1"),
        file_of(entry(shape=[2] * 100_000), None, b"1"),
        file_of(entry(shape=[-1, -1]), None, b"1"),
        file_of(entry(shape=[True]), None, b"1"),
        file_of(entry(shape=[1.0]), None, b"1"),
        file_of(entry(dtype="F128"), None, b"1"),
        file_of(entry(dtype=[]), None, b"1"),
        file_of(entry(offsets=[1, 2]), None, b"11"),
        file_of(entry(offsets=3), None, b"1"),
        file_of({"a": 3}, None),
    ],
    ids=lambda b: f"{len(b)} bytes",
)  # fmt: skip
def test_made_up_files_are_refused(bad: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match="some/file"):
        decode_tree(bad, "some/file")
    with pytest.raises(CorruptCheckpoint, match="some/file"):
        decode_shapes(bad[: header_bytes(bad)], len(bad), "some/file")


@settings(max_examples=200, deadline=None)
@given(trees)
def test_a_header_is_enough_for_shapes(tree: Any) -> None:
    def shapes(value: Any, path: str) -> Any:
        return (value.dtype, value.shape, value.kind) if isinstance(value, Array) else value

    good = encoded(tree)
    assume(b"$bytes" not in good)  # as arrays: zeros of the same length
    header = good[: header_bytes(good[:8])]
    found = decode_shapes(header, len(good), "some/file")
    assert same(map_tree(found, shapes), map_tree(tree, shapes))
    for wrong in (len(good) - 1, len(good) + 1, 0):
        with pytest.raises(CorruptCheckpoint, match="some/file"):
            decode_shapes(header, wrong, "some/file")
    with pytest.raises(CorruptCheckpoint, match="some/file"):
        decode_shapes(header[:-1], len(good), "some/file")


def test_random_bytes_raise_nothing_but_that_they_are_corrupt() -> None:
    refused = 0
    rng = random.Random(1)
    good = encoded(SMALL)
    for _ in range(2000):
        start = rng.randrange(len(good))
        noise = rng.randbytes(rng.randrange(1, 20))
        bad = good[:start] + noise + good[start + rng.randrange(20) :]
        try:
            decode_tree(bad, "f")
        except CorruptCheckpoint:
            refused += 1
    assert refused > 1000, "what is left are changes to the arrays, whose checksums stand elsewhere"
