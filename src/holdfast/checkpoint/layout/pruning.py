"""Remove records of deleted versions from files that other versions still need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.checkpoint.format.chunk import NewPiece, check_piece, decode_piece
from holdfast.checkpoint.format.manifest import FileChange, FileEntry
from holdfast.checkpoint.format.records import Group, Rows
from holdfast.checkpoint.layout import rounds
from holdfast.checkpoint.layout.bundles import FileWriter, ShardChange, read_indexes
from holdfast.checkpoint.reading.stretches import open_file
from holdfast.checkpoint.store import Store


def is_prunable(
    store: Store,
    entry: FileEntry,
    groups: Sequence[Group],
    kept_versions: Sequence[int],
    dead_fraction: float,
) -> bool:
    """Whether this is a history file of which more than a fraction of the records is of no kept version."""
    if entry.kind != "history":
        return False
    kept = np.asarray(kept_versions, np.int32)
    empty = Rows(np.empty(0, np.int64), ())
    needed = 0
    for _, index in read_indexes(store, entry, groups):
        born, died = (v.each(len(index.ids)) for v in (index.born, index.died))
        needed += int(rounds.belongs_to_any(rounds.Lives(empty, born, died), kept).sum())
    return entry.rows - needed > dead_fraction * entry.rows


def prune(
    store: Store, entry: FileEntry, groups: Sequence[Group], kept_versions: Sequence[int]
) -> FileChange:
    """Rewrite a history file without the records that no kept version needs.

    Each of its records says when it died, so nothing else has to be read.
    """
    kept = np.asarray(kept_versions, np.int32)
    pieces: list[NewPiece] = []
    opened = open_file(store, entry, groups)
    with opened.reader:
        for piece in opened.pieces:
            data = np.empty(piece.length, np.uint8)
            opened.read([piece], data)
            check_piece(piece, data, opened.where)
            found = decode_piece(piece, data, groups[piece.group].fields, opened.where)
            born, died = (v.each(piece.rows) for v in (found.born, found.died))
            lives = rounds.Lives(found.rows, born, died)
            lives = lives.take(rounds.belongs_to_any(lives, kept))
            if len(lives.rows):
                pieces.append(NewPiece(piece.group, piece.rank, lives.rows, lives.born, lives.died))
    version = int(kept[-1])
    written = FileWriter(entry.shard, groups).write(store, version, "history", pieces)
    return ShardChange(version, "round", written, (entry.name,)).for_manifest()
