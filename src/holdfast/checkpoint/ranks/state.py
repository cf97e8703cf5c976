"""What each rank has of its own, beside what all ranks have: in a version, and when it is restored.

The dense state of a version is that of rank 0, as if it had saved alone: any reader takes it for such. Under
"ranks" it says in addition how many ranks there were, which rows each of them saved, and what the others had
of their own: random states, loaders, and whatever is neither a module nor an optimizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.format.dense import map_tree
from holdfast.checkpoint.memory.shares import Share
from holdfast.checkpoint.torch.sharded import ArrayPart
from holdfast.errors import CheckpointError, CorruptCheckpoint

RANKS = "ranks"


def own_part(tree: Mapping[str, Any], apart: Sequence[str], shares: Mapping[str, Share]) -> dict[str, Any]:
    """Of a rank's dense state, what is not that of all ranks."""
    parts = _parts_of(tree["objects"])
    return {
        "rng": tree["rng"],
        "objects": {name: tree["objects"][name] for name in apart},
        "shares": _plain(shares),
        "parts": [[list(part.shape), list(part.offset), part.array] for _, part in parts],
    }


def whole_tree(
    tree: Mapping[str, Any], shares: Mapping[str, Share], others: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The dense state of a version: rank 0's, and the own parts of the others."""
    theirs = [
        [ArrayPart(array, tuple(shape), tuple(offset)) for shape, offset, array in other["parts"]]
        for other in others
    ]
    counts = {len(parts) for parts in theirs} | {len(_parts_of(tree["objects"]))}
    if len(counts) > 1:
        raise CheckpointError("ranks have parts of different parameters: train the same model on every rank")
    numbers = itertools.count()

    def leaf(value: Any, path: str) -> Any:
        if not isinstance(value, ArrayPart):
            return value
        number = next(numbers)
        return value.joined([parts[number] for parts in theirs], path)

    own = [{"shares": _plain(shares)}, *({k: v for k, v in o.items() if k != "parts"} for o in others)]
    joined = {**tree, "objects": map_tree(tree["objects"], leaf)}
    return {**joined, RANKS: {"world_size": len(own), "own": own}}


def _parts_of(tree: Any) -> list[tuple[str, ArrayPart]]:
    found: list[tuple[str, ArrayPart]] = []

    def leaf(value: Any, path: str) -> Any:
        if isinstance(value, ArrayPart):
            found.append((path, value))

    map_tree(tree, leaf)
    return found


@dataclass(frozen=True, slots=True)
class StateOfRank:
    """The dense state of a version as one rank takes it."""

    tree: dict[str, Any]
    world_size: int
    """How many ranks saved it."""
    is_mine: bool
    """Whether as many ranks saved it as restore it now."""
    shares: Mapping[str, Share]
    """The rows that the rank with this number saved, if it ``is_mine``."""
    had_one_rng: bool = False
    """Whether the random states of all ranks that saved it were the same."""


def for_rank(tree: Any, rank: int, world_size: int, where: str) -> StateOfRank:
    """What rank ``rank`` of ``world_size`` takes of a version, whichever ranks saved it."""
    saved = tree.get(RANKS) if isinstance(tree, dict) else None
    if saved is None:
        return StateOfRank(tree, 1, world_size == 1, {})
    try:
        count, own = int(saved["world_size"]), list(saved["own"])
        if count != len(own):
            raise ValueError(f"{count} ranks, and the parts of {len(own)}")
        rest = {key: value for key, value in tree.items() if key != RANKS}
        if count != world_size:
            same = all(other["rng"] == rest["rng"] for other in own[1:])
            return StateOfRank(rest, count, False, {}, had_one_rng=same)
        mine = own[rank]
        if rank:
            rest["rng"] = mine["rng"]
            rest["objects"] = {**rest["objects"], **mine["objects"]}
        shares = {str(name): Share(*map(int, share)) for name, share in mine["shares"].items()}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{where} has no valid state of ranks: {error!r}") from error
    return StateOfRank(rest, count, True, shares)


def _plain(shares: Mapping[str, Share]) -> dict[str, list[int]]:
    return {name: list(share) for name, share in shares.items()}
