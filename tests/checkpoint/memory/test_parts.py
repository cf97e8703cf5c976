"""Parts of groups: what is written is what a slow twin picks out of the whole groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.codecs.quantize import UniformCodec
from holdfast.checkpoint.format.records import Bytes2D, Field, Group, Rows, make_groups
from holdfast.checkpoint.memory.live import LiveTables
from holdfast.checkpoint.memory.parts import GroupPart, LiveParts
from holdfast.errors import CorruptCheckpoint

FIELDS = (Field("weight", "F32", 3), Field("optim.sum", "F32", 1), Field("optim.step", "U8", 1))
SIZES = {"a": 5, "b": 1, "empty": 0, "c": 7, "d": 4}
(GROUP,) = make_groups([(name, rows, FIELDS) for name, rows in SIZES.items()])
chosen_tables = st.sets(st.sampled_from(sorted(SIZES)))
chosen_fields = st.sets(st.sampled_from([field.name for field in FIELDS]), min_size=1)


def memory(group: Group) -> dict[str, list[Bytes2D]]:
    return {t.name: [np.zeros((t.rows, f.live_bytes), np.uint8) for f in group.fields] for t in group.tables}


def check(part: GroupPart, found: dict[str, list[Bytes2D]], whole: dict[str, list[Bytes2D]]) -> None:
    """The memory of the part has what that of the whole group has, and there is nothing else."""
    assert list(found) == [table.name for table in part.group.tables]
    for name, fields in found.items():
        for number, field in zip(part.fields, fields, strict=True):
            assert np.array_equal(field, whole[name][number]), name


@given(tables=chosen_tables, fields=chosen_fields, seed=st.integers(0, 1 << 30))
def test_rows_of_a_part(tables: set[str], fields: set[str], seed: int) -> None:
    random = np.random.default_rng(seed)
    part = GroupPart.of(GROUP, tables, fields)
    assert {table.name for table in part.group.tables} == tables
    assert {field.name for field in part.group.fields} == fields
    found, whole = memory(part.group), memory(GROUP)
    parts, twin = LiveParts([part], found.__getitem__), LiveTables([GROUP], whole.__getitem__)
    for _ in range(6):
        ids = np.sort(random.choice(GROUP.rows, random.integers(1, GROUP.rows), replace=False))
        values = tuple(random.integers(0, 256, (len(ids), f.bytes), np.uint8) for f in FIELDS)
        rows = Rows(ids, values)
        positions = None
        if random.random() < 0.5:
            positions = np.flatnonzero(random.random(len(ids)) < 0.5)
        parts.scatter(0, rows, positions)
        twin.scatter(0, rows, positions)
        first = int(random.integers(0, GROUP.rows - 3))
        run = [random.integers(0, 256, (3, f.bytes), np.uint8) for f in FIELDS]
        parts.fill(0, first, run)
        twin.fill(0, first, run)
        check(part, found, whole)


@given(tables=chosen_tables, fields=chosen_fields, seed=st.integers(0, 1 << 30))
def test_coded_rows_of_a_part(tables: set[str], fields: set[str], seed: int) -> None:
    random = np.random.default_rng(seed)
    codec = UniformCodec(8)
    part = GroupPart.of(GROUP, tables, fields)
    found, whole = memory(part.group), memory(GROUP)
    ids = np.sort(random.choice(GROUP.rows, 9, replace=False))
    weights = np.empty((9, codec.stored_bytes(3)), np.uint8)
    codec.encode(random.normal(size=(9, 3)).astype(np.float32), weights)
    others = [random.integers(0, 256, (9, f.bytes), np.uint8) for f in FIELDS[1:]]
    rows = Rows(ids, (weights, *others))
    positions = np.flatnonzero(random.random(9) < 0.7)
    for live in (LiveParts([part], found.__getitem__), LiveTables([GROUP], whole.__getitem__)):
        live.scatter(0, rows, positions, [codec, None, None])
    check(part, found, whole)


@given(tables=chosen_tables, first=st.integers(0, 16), length=st.integers(1, 17))
def test_which_rows_are_in_a_part(tables: set[str], first: int, length: int) -> None:
    last = min(first + length, GROUP.rows) - 1
    part = GroupPart.of(GROUP, tables, {"weight"})
    twin = {t.first + row for t in GROUP.tables if t.name in tables for row in range(t.rows)}
    assert part.overlaps(first, last) == bool(twin & set(range(first, last + 1)))


def test_rows_that_a_group_cannot_have() -> None:
    part = GroupPart.of(GROUP, SIZES, {"weight"})
    found = memory(part.group)
    live = LiveParts([part], found.__getitem__)
    values = tuple(np.ones((2, f.bytes), np.uint8) for f in FIELDS)
    live.scatter(0, Rows(np.array([-1, 3]), values))
    live.scatter(0, Rows(np.array([4, GROUP.rows]), values))
    assert [int(row) for row in np.flatnonzero(found["a"][0].any(1))] == [3, 4]
    assert not any(found[name][0].any() for name in ("b", "c", "d"))
    with pytest.raises(CorruptCheckpoint, match="is not"):
        LiveParts([part], {**found, "a": [found["a"][0][:4]]}.__getitem__)
