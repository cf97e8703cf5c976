"""The header of a safetensors file: where each array is, and text that goes with it.

8 bytes   length of the JSON, little-endian
JSON      dtype, shape and offsets of each array; metadata under __metadata__; spaces at the end
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

ALIGNMENT = 64
"""The data behind a header begin at a multiple of it, and so do pieces of chunk files and their fields, like
the memory that they are read to.

The system copies what was read with one instruction, which on some processors (AMD's with "fast short rep
mov") takes several times as long if the target address is up to 31 bytes behind the source address within
their pages.
"""


def describe(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    """A header's entry for an array: ``begin`` and ``end`` count from the end of the header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def encode_header(arrays: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str]) -> bytes:
    """A whole header for arrays that ``describe`` has described."""
    text = json.dumps({"__metadata__": dict(metadata), **arrays}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def json_bytes(start: bytes | memoryview) -> int:
    """The length of the JSON, from the first bytes of a file; add 8 for that of the header."""
    return int.from_bytes(start[:8], "little")
