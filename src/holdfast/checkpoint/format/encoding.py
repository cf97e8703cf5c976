"""Choose codecs by the policy, and encode rows.

A group of tables of which some field has a codec is stored as two groups: one with all of its rows, coded,
and behind all groups one with the few rows that their codec cannot hold (NaN, infinity, values off its
grid), whole and raw. In the first a mark stands in their place. So every record of a group has the same
length, and whoever moves records about need not know what is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import numpy as np

from holdfast.checkpoint.background import Throttle, computed_ahead
from holdfast.checkpoint.codecs.quantize import (
    CODED_DTYPES,
    FloatCodec,
    LogCodec,
    RowCodec,
    UniformCodec,
    as_float32,
    choose_grid_bits,
    from_float32,
)
from holdfast.checkpoint.format.records import WEIGHT, Field, Group, Rows, RowSource, SampledRows, join_rows
from holdfast.options import AutoBits, Policy

BLOCK_BYTES = 4 << 20
"""Rows that are encoded at a time, as they are in memory."""
_SAMPLED_ROWS = 65_536
# Blocks that are encoded while a file is written: as many as fill the next one.
_BLOCKS_AHEAD = 16

GridBits = Callable[[int, Field, int], int]
"""Of a group by number, one of its fields and its bits: the bits of scale and zero point."""


class Encoder:
    """Encodes snapshots of live groups.

    Attributes:
        live: the groups as they are in memory.
        stored: the same, in the same order, with codecs; then the groups of raw rows.
    """

    def __init__(self, live: Sequence[Group], stored: Sequence[Group]) -> None:
        self.live = tuple(live)
        self.stored = tuple(stored)
        self._raw_group = {g.raw_rows_of: n for n, g in enumerate(stored) if g.raw_rows_of is not None}

    @classmethod
    def plan(
        cls, policy: Policy, restores: int, snapshot: Sequence[SampledRows], live: Sequence[Group]
    ) -> Encoder:
        """For an era that begins with this snapshot, of all rows."""

        def grid_bits(number: int, field: Field, bits: int) -> int:
            rows = snapshot[number]
            count = min(len(rows), _SAMPLED_ROWS)
            sampled = rows.take(np.arange(count) * len(rows) // max(count, 1))
            sample = sampled.fields[live[number].fields.index(field)]
            return choose_grid_bits(as_float32(sample, field.dtype), bits)

        return cls(live, _stored_groups(live, policy, restores, grid_bits))

    @classmethod
    def for_shards(cls, policy: Policy, restores: int, live: Sequence[Group]) -> Encoder:
        """For shards that have to agree without seeing each other's rows.

        Scale and zero point take 16 bits whatever the rows are, where one writer of all rows chooses by them.
        """
        return cls(live, _stored_groups(live, policy, restores, lambda number, field, bits: 16))

    @classmethod
    def of_era(
        cls, policy: Policy, restores: int, era: Sequence[Group], live: Sequence[Group]
    ) -> Encoder | None:
        """To go on with an era, if that is what the policy wants."""

        def grid_bits(number: int, field: Field, bits: int) -> int:
            codecs = (
                [f.codec for f in era[number].fields if f.name == field.name] if number < len(era) else []
            )
            return codecs[0].grid_bits if codecs and isinstance(codecs[0], UniformCodec) else 16

        wanted = _stored_groups(live, policy, restores, grid_bits)
        return cls(live, wanted) if wanted == tuple(era) else None

    @property
    def is_coded(self) -> bool:
        """Whether anything is stored otherwise than it is in memory."""
        return any(group.is_coded for group in self.stored)

    def blocks_ahead(
        self, rows: Sequence[RowSource], throttle: Throttle | None = None
    ) -> Generator[tuple[int, Rows], None, None]:
        """What ``blocks`` gives, encoded by a thread of its own if there is something to encode.

        ``throttle`` limits the thread that encodes and the one that takes blocks and writes them. Close it
        when you need no more of it: that ends the thread.
        """
        blocks = self.blocks(rows)
        if not self.is_coded:
            return blocks if throttle is None else throttle.after_each(blocks)
        if throttle is None:
            return computed_ahead(blocks, _BLOCKS_AHEAD)
        return throttle.after_each(computed_ahead(throttle.after_each(blocks), _BLOCKS_AHEAD))

    def blocks(self, snapshot: Sequence[RowSource]) -> Generator[tuple[int, Rows], None, None]:
        """(Number of the stored group, rows), block by block, of the rows of each live group."""
        for number, rows in enumerate(snapshot):
            group = self.stored[number]
            if not group.is_coded:
                for part in rows.parts():
                    yield number, part
                continue
            step = max(1, BLOCK_BYTES // self.live[number].record_bytes)
            raw: list[Rows] = []
            for part in rows.parts(step):
                coded, is_raw = _encode(group, part)
                if is_raw.any():
                    raw.append(part.take(np.flatnonzero(is_raw)))
                yield number, coded
            if raw:
                yield self._raw_group[number], join_rows(raw)


def decode_rows(group: Group, rows: Rows) -> Rows:
    """Rows of a stored group, none of them marked as raw, as they are in memory."""
    fields = []
    for field, values in zip(group.fields, rows.fields, strict=True):
        if field.codec is None:
            fields.append(values)
        else:
            decoded = np.zeros((len(rows), field.width), np.float32)
            field.codec.decode(np.ascontiguousarray(values), decoded)
            fields.append(from_float32(decoded, field.dtype))
    return Rows(rows.ids, tuple(fields))


def _encode(group: Group, rows: Rows) -> tuple[Rows, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """The rows as they are stored, and which of them have to be kept raw."""
    raw = np.zeros(len(rows), np.bool_)
    fields = []
    for field, values in zip(group.fields, rows.fields, strict=True):
        if field.codec is None:
            fields.append(values)
        else:
            stored = np.empty((len(rows), field.bytes), np.uint8)
            raw |= field.codec.encode(as_float32(np.ascontiguousarray(values), field.dtype), stored)
            fields.append(stored)
    return Rows(rows.ids, tuple(fields)), raw


def _stored_groups(
    live: Sequence[Group], policy: Policy, restores: int, grid_bits: GridBits
) -> tuple[Group, ...]:
    stored: list[Group] = []
    for number, group in enumerate(live):
        wish = policy.bits_of(group.tables[0].name) if group.tables else None
        bits = wish.choose(restores).bits if isinstance(wish, AutoBits) else wish
        fields = tuple(
            replace(f, codec=_codec(f, bits, policy.quantize_state, number, grid_bits)) for f in group.fields
        )
        stored.append(Group(fields, group.tables))
    raw = [Group(g.live().fields, g.tables, number) for number, g in enumerate(stored) if g.is_coded]
    return (*stored, *raw)


def _codec(
    field: Field, bits: int | None, state_bits: int | None, number: int, grid_bits: GridBits
) -> RowCodec | None:
    """The codec of a field, if it is to have one and that makes it smaller."""
    codec: RowCodec | None = None
    if field.dtype not in CODED_DTYPES:
        return None
    if field.name == WEIGHT and bits is not None:
        codec = UniformCodec(bits, 16)
        if codec.stored_bytes(field.width) < field.live_bytes:
            codec = UniformCodec(bits, grid_bits(number, field, bits))
    elif field.name != WEIGHT and state_bits is not None:
        codec = LogCodec() if state_bits == 8 and field.width >= 4 else FloatCodec()
    return codec if codec is not None and codec.stored_bytes(field.width) < field.live_bytes else None
