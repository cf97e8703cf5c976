"""Everything of a version that is not rows: a tree of plain values as the bytes of one safetensors file.

Trees are made of None, bool, int, float, str, bytes, ``Array``, ``TablePlace``, and dicts, lists, tuples and
sets of them. They come back equal and of the same types (an ``OrderedDict`` or ``defaultdict`` as a plain
dict), floats to the bit. Nothing else can be written, so reading never has to run code that a file names.

    8 bytes   length of the JSON, little-endian
    JSON      names, types, shapes and offsets of all arrays; the tree under __metadata__, as text
    arrays    the largest elements first, so that all of them are aligned

In the tree's text, JSON's values stand for themselves; an object with one key that starts with "$" is a value
that JSON lacks: ``{"$tuple": [1, 2]}``, ``{"$tensor": "objects.model.bias"}``.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.format.chunk import FORMAT, LARGEST_HEADER, checksum
from holdfast.checkpoint.format.header import describe, encode_header, json_bytes
from holdfast.checkpoint.format.records import ELEMENT_BYTES
from holdfast.errors import CorruptCheckpoint, UnsupportedState

DENSE_ELEMENT_BYTES = ELEMENT_BYTES | {"C64": 8, "F8_E4M3": 1, "F8_E5M2": 1}
"""Bytes of one element: arrays have a few types more than rows."""
DEEPEST = 100
"""How many containers may be nested. Python's own limit is close to ten times that."""

_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8", "BOOL": "|b1",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1",
}  # fmt: skip
_NAMES = {text: name for name, text in _DTYPES.items()}
_ATOMS = (type(None), bool, int, float, str, bytes)
_DICTS = (dict, OrderedDict, defaultdict)
_BAD_BYTES = (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error)
_KINDS = ("tensor", "ndarray", "scalar")


@dataclass(frozen=True, slots=True, eq=False)
class Array:
    """An array's bits, and what to make of them when they are read.

    Attributes:
        dtype: safetensors' name of its type, a key of ``DENSE_ELEMENT_BYTES``.
        shape: as NumPy and PyTorch have it; () for a single number.
        data: all bytes in C order, one-dimensional.
        kind: a PyTorch tensor, a NumPy array or a NumPy scalar.
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    kind: Literal["tensor", "ndarray", "scalar"] = "ndarray"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array):
            return NotImplemented
        same = (self.dtype, self.shape, self.kind) == (other.dtype, other.shape, other.kind)
        return same and np.array_equal(self.data, other.data)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, value: NDArray[Any] | np.generic) -> Array | None:
        """A copy of a NumPy array or scalar; None if elements of its type cannot be stored."""
        array = np.asarray(value)
        name = _NAMES.get(array.dtype.newbyteorder("<").str)
        if name is None:
            return None
        flat = np.array(array, dtype=_DTYPES[name], order="C", copy=True).reshape(-1).view(np.uint8)
        return cls(name, array.shape, flat, "scalar" if isinstance(value, np.generic) else "ndarray")

    def to_numpy(self) -> Any:
        """A copy as NumPy's array or scalar. Only for types that NumPy has."""
        array = self.data.copy().view(_DTYPES[self.dtype]).reshape(self.shape)
        return array[()] if self.kind == "scalar" else array


@dataclass(frozen=True, slots=True)
class TablePlace:
    """Stands in a tree for a tensor that is stored as a field of a table's rows."""

    table: str
    field: str
    shape: tuple[int, ...]
    """The tensor's own: a field knows only how many elements a row has."""


def unsupported(value: object, path: str) -> NoReturn:
    """Raise UnsupportedState for a value that no checkpoint can hold."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise UnsupportedState(
        f"{path or 'the state'} is a {kind}: a checkpoint holds None, numbers, text, tensors, NumPy arrays, "
        "and dicts, lists, tuples and sets of them; turn it into these in state_dict()"
    )


def map_tree(value: Any, leaf: Callable[[Any, str], Any], path: str = "", depth: int = 0) -> Any:
    """A tree with fresh containers in which ``leaf(value, path)`` replaces each leaf that is not an atom.

    Atoms are None and the built-in numbers and strings themselves: not their subclasses, which would
    come back as something else.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    _check_depth(path, depth)
    if kind in _DICTS:
        return {_key(k, path): map_tree(v, leaf, _join(path, k), depth + 1) for k, v in value.items()}
    if kind in (list, tuple):
        return kind(map_tree(v, leaf, _join(path, i), depth + 1) for i, v in enumerate(value))
    if kind in (set, frozenset):
        return kind(_key(v, path) for v in value)
    if kind is Counter:
        return Counter(
            {_key(k, path): map_tree(v, leaf, _join(path, k), depth + 1) for k, v in value.items()}
        )
    return leaf(value, path)


def places_of(state: Any) -> dict[str, TablePlace]:
    """Where in a state rows of tables belong, by path."""
    found: dict[str, TablePlace] = {}

    def leaf(value: Any, path: str) -> Any:
        if isinstance(value, TablePlace):
            found[path] = value
        return None

    map_tree(state, leaf)
    return found


def encode_tree(tree: Any) -> list[Any]:
    """The file of a tree as buffers to be written one after the other; arrays are not copied.

    Raises UnsupportedState, with the path to it, for a value that cannot be written.
    """
    encoder = _Encoder()
    text = json.dumps(encoder.value(tree, "", 0), separators=(",", ":"), allow_nan=False)
    ordered = sorted(encoder.arrays.items(), key=lambda item: -DENSE_ELEMENT_BYTES[item[1].dtype])
    described: dict[str, Any] = {}
    at = 0
    for name, array in ordered:
        end = at + array.data.nbytes
        described[name] = describe(array.dtype, array.shape, at, end)
        at = end
    metadata = {"holdfast": FORMAT, "checksum": _header_checksum(described, text), "tree": text}
    header = encode_header(described, metadata)
    if len(header) > LARGEST_HEADER:
        raise UnsupportedState(
            f"the state has {len(header)} bytes outside of arrays, expected at most {LARGEST_HEADER}: "
            "keep long lists of numbers in NumPy arrays or tensors"
        )
    return [header, *(a.data for _, a in ordered if a.data.nbytes)]


def decode_tree(data: bytes | memoryview, where: str) -> Any:
    """The tree in a file. Its arrays are views of ``data``.

    Raises CorruptCheckpoint, which names ``where``, for bytes that ``encode_tree`` cannot have written.
    Bits of arrays are not checked here: that takes the checksum of the whole file.
    """
    view = memoryview(data).cast("B")
    return _decode(view, len(view), lambda begin: np.frombuffer(view[begin:], np.uint8), where)


def decode_shapes(header: bytes | memoryview, size: int, where: str) -> Any:
    """The tree in a file of this size, of which only the header was read: its arrays are zeros.

    ``header_bytes`` says how long that is. The header has a checksum of its own, which is checked here.
    Raises what ``decode_tree`` raises.
    """
    view = memoryview(header).cast("B")
    return _decode(view, size, lambda begin: np.broadcast_to(np.uint8(0), size - begin), where)


def header_bytes(start: bytes) -> int:
    """How long the header of a file is that starts with these 8 bytes."""
    return 8 + min(json_bytes(start), LARGEST_HEADER)


def _decode(
    view: memoryview, file_bytes: int, data_from: Callable[[int], NDArray[np.uint8]], where: str
) -> Any:
    try:
        size = json_bytes(view)
        if len(view) < 8 or size > min(len(view) - 8, LARGEST_HEADER):
            raise ValueError(f"a header of {size} bytes in a file of {file_bytes}")
        described = json.loads(bytes(view[8 : 8 + size]))
        if not isinstance(described, dict):
            raise TypeError("the header is not an object")
        metadata = described.pop("__metadata__")
        if metadata["holdfast"] != FORMAT:
            raise ValueError(f"format {metadata['holdfast']!r}, expected {FORMAT!r}")
        if metadata["checksum"] != _header_checksum(described, metadata["tree"]):
            raise ValueError("checksum mismatch in the header")
        arrays = _decode_arrays(described, data_from(8 + size))
        return _Decoder(arrays).value(json.loads(metadata["tree"]), 0)
    except (UnsupportedState, *_BAD_BYTES) as error:
        detail = f"{type(error).__name__}: {error}"[:200]
        raise CorruptCheckpoint(f"{where} is not a file of dense state of Holdfast ({detail})") from None


def _header_checksum(described: dict[str, Any], tree: str) -> str:
    return checksum(json.dumps(described, separators=(",", ":")).encode(), tree.encode())


def _decode_arrays(described: dict[str, Any], data: NDArray[np.uint8]) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    at = 0
    for name, entry in described.items():
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if len(shape) > 64 or any(type(n) is not int or not 0 <= n < 1 << 63 for n in (*shape, begin, end)):
            raise ValueError(f"array {name!r} has an invalid shape")
        if begin != at or end - begin != DENSE_ELEMENT_BYTES[dtype] * math.prod(shape) or end > len(data):
            raise ValueError(f"array {name!r} is at an unexpected offset")
        arrays[name] = Array(dtype, shape, data[begin:end])
        at = end
    if at != len(data):
        raise ValueError(f"{at} bytes of arrays expected, {len(data)} found")
    return arrays


class _Encoder:
    """Turns a tree into JSON's values and collects its arrays under names that tell where they stood."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}

    def value(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 64 else {"$int": hex(value)}
        if kind is float:
            # JSON has no NaN; and of NaNs there are many.
            return value if math.isfinite(value) else {"$float": struct.pack("<d", value).hex()}
        if kind in (bytes, Array, TablePlace):
            return self._own(value, path)
        _check_depth(path, depth)
        return self._container(value, path, depth)

    def _own(self, value: bytes | Array | TablePlace, path: str) -> Any:
        if isinstance(value, TablePlace):
            return {"$place": [value.table, value.field, list(value.shape)]}
        if isinstance(value, Array):
            return {f"${value.kind}": self._store(value, path)}
        return {"$bytes": self._store(Array("U8", (len(value),), np.frombuffer(value, np.uint8)), path)}

    def _container(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in _DICTS and all(type(k) is str and not k.startswith("$") for k in value):
            return {k: self.value(v, _join(path, k), depth + 1) for k, v in value.items()}
        if kind in (*_DICTS, Counter):
            pairs = [
                [self.value(_key(k, path), path, depth + 1), self.value(v, _join(path, k), depth + 1)]
                for k, v in value.items()
            ]
            return {"$counter" if kind is Counter else "$dict": pairs}
        if kind in (list, tuple):
            items = [self.value(v, _join(path, i), depth + 1) for i, v in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind in (set, frozenset):
            # The order of a set differs from run to run; the file's must not.
            items = [self.value(_key(v, path), path, depth + 1) for v in sorted(value, key=_label)]
            return {f"${kind.__name__}": items}
        unsupported(value, path)

    def _store(self, array: Array, path: str) -> str:
        if array.data.nbytes != DENSE_ELEMENT_BYTES[array.dtype] * math.prod(array.shape):
            raise ValueError(
                f"{path}: {array.data.nbytes} bytes for shape {array.shape} of type {array.dtype}"
            )
        # Other readers of safetensors refuse names that are not valid UTF-8.
        name = free = _short(path).encode(errors="replace").decode() or "value"
        number = 1
        while free in self.arrays or free == "__metadata__":
            free, number = f"{name}#{number}", number + 1
        self.arrays[free] = array
        return free


class _Decoder:
    """The way back. Raises ValueError, TypeError or KeyError for what no encoder writes."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        self.arrays = arrays

    def value(self, node: Any, depth: int) -> Any:
        if not isinstance(node, (list, dict)):
            return node
        if depth > DEEPEST + 1:
            raise ValueError(f"more than {DEEPEST} nested containers")
        if isinstance(node, list):
            return [self.value(item, depth + 1) for item in node]
        tag = next(iter(node), "")
        if not tag.startswith("$"):
            return {key: self.value(item, depth + 1) for key, item in node.items()}
        if len(node) != 1:
            raise ValueError(f"{tag} among other keys")
        return self._tagged(tag[1:], node[tag], depth)

    def _tagged(self, tag: str, node: Any, depth: int) -> Any:
        if tag in ("dict", "counter", "tuple", "set", "frozenset"):
            return self._container(tag, [self.value(item, depth + 1) for item in _list(node)])
        if tag in _KINDS:
            found = self.arrays[node]
            return Array(found.dtype, found.shape, found.data, tag)  # type: ignore[arg-type]
        if tag == "bytes":
            return self.arrays[node].data.tobytes()
        if tag == "place":
            table, field, shape = _list(node)
            return TablePlace(str(table), str(field), tuple(map(int, shape)))
        return self._number(tag, node)

    def _number(self, tag: str, node: Any) -> int | float:
        if tag == "int":
            return int(node, 16)
        if tag == "float":
            number: float = struct.unpack("<d", bytes.fromhex(node))[0]
            return number
        raise ValueError(f"an unknown tag ${tag}")

    def _container(self, tag: str, items: list[Any]) -> Any:
        if tag in ("dict", "counter"):
            pairs = {_key(key, "a dict"): value for key, value in items}
            return pairs if tag == "dict" else Counter(pairs)
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](items)


def _list(node: Any) -> list[Any]:
    if not isinstance(node, list):
        raise TypeError("a tag without a list")
    return node


def _check_depth(path: str, depth: int) -> None:
    # Also what ends the walk of a list that contains itself.
    if depth > DEEPEST:
        raise UnsupportedState(f"{_short(path)} is nested in more than {DEEPEST} containers: make it flatter")


def _key(key: Any, path: str, depth: int = 0) -> Any:
    """A dict's key or a set's member, if it is an atom or a tuple of atoms."""
    if type(key) is tuple and depth <= DEEPEST:
        for part in key:
            _key(part, path, depth + 1)
    elif type(key) not in _ATOMS:
        unsupported(key, f"a key or member in {path or 'the state'}")
    return key


def _join(path: str, key: object) -> str:
    return f"{path}.{_label(key)}" if path else _label(key)


def _label(key: object) -> str:
    try:
        return str(key)
    except ValueError:  # an integer of more digits than Python is willing to print
        return "…"


def _short(path: str) -> str:
    return path if len(path) <= 300 else f"{path[:300]}…"
