"""One rank's part in saving and restoring together: ``checkpointer.py`` asks it where ranks must agree."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from holdfast.checkpoint.format.dense import decode_tree
from holdfast.checkpoint.memory.shares import Share, even_share
from holdfast.checkpoint.ranks.agreement import Agreement, Hello
from holdfast.checkpoint.ranks.group import link_of
from holdfast.checkpoint.ranks.link import Link
from holdfast.checkpoint.ranks.publisher import Follower, FollowingCatalog, Leader
from holdfast.checkpoint.ranks.state import own_part, whole_tree
from holdfast.checkpoint.saving.catalog import Catalog
from holdfast.checkpoint.saving.schedule import SaveSchedule
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.torch.sharded import is_sharded, ranks_of
from holdfast.checkpoint.torch.state import TrainingObjects
from holdfast.errors import HoldfastError, RankLost, UnsupportedState, message_of
from holdfast.options import Policy

log = logging.getLogger("holdfast.checkpoint")


class Together:
    """A rank of several.

    The calls: ``share_of`` while the objects are looked at, ``check_tables``; ``ready``; ``publisher``; then
    what ``agreement`` has. ``finish`` at the end, or ``close`` after an error.

    Args:
        link: to the other ranks.
        policy: the same on all ranks.
        schedule: when saves are due.
    """

    def __init__(self, link: Link, policy: Policy, schedule: SaveSchedule) -> None:
        self.link = link
        self._policy, self._schedule = policy, schedule
        self.publisher: Leader | Follower
        self.agreement: Agreement
        self._greeted = False

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which has the store's lock and decides."""
        return self.link.rank == 0

    def share_of(self, rows: int) -> Share:
        """The rows that this rank saves of a table that all ranks have."""
        return even_share(rows, self.link.rank, self.link.world_size)

    @contextlib.contextmanager
    def roll_call(self, path: str, objects: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
        """Call what this gives when this rank is ready, and the others will be, too. If this rank fails
        before, they hear why."""
        hello = Hello(path, repr(self._policy), list(objects))

        def ready() -> None:
            self._greeted = True
            Agreement.greet(self.link, hello)

        try:
            yield ready
        except BaseException as error:
            if not self._greeted:
                hello.error = message_of(error) or type(error).__name__
                with contextlib.suppress(HoldfastError):
                    ready()
            raise

    def check_tables(self, objects: TrainingObjects) -> None:
        """Raise UnsupportedState for tables that several ranks cannot train alike."""
        everyone = sorted(self.link.members)
        for name, table in objects.tables.items():
            found = sorted(ranks_of(table.parameter)) if is_sharded(table.parameter) else everyone
            if found != everyone:
                raise UnsupportedState(
                    f"{name} has its rows on ranks {found}, expected all that save together, {everyone}: "
                    "distribute it over these"
                )
            if any(module.max_norm is not None for module in table.modules):
                raise UnsupportedState(
                    f"{name} has max_norm: its lookups change rows on the rank alone that makes them, so the "
                    "ranks' tables drift apart; renormalize rows in a step of your own, on every rank"
                )

    def open(self, store: Store) -> Leader | Follower:
        """The publisher of this rank. Rank 0 has locked the store."""
        if self.leads:
            self.publisher = Leader(Catalog(store, self._policy), self.link)
        else:
            self.publisher = Follower(FollowingCatalog(store, self._policy), self.link)
        self.agreement = Agreement(self.link, self.publisher, self._policy, self._schedule)
        return self.publisher

    def note_witness(self, objects: TrainingObjects, rows_of: Callable[[str], list[int]]) -> None:
        """Sample what all ranks should have alike, as a version has it."""
        self.publisher.witness = objects.sample(rows_of)

    def part_of(self, objects: TrainingObjects) -> Callable[[dict[str, Any]], Any]:
        """What a save makes of this rank's dense state: the version's, or this rank's own part of it."""

        def finish(tree: dict[str, Any]) -> Any:
            shares = objects.live_tables().share_of
            if not isinstance(self.publisher, Leader):
                return own_part(tree, objects.apart, shares)
            reports = self.publisher.reports(self.publisher.version)
            others = [decode_tree(r.own, f"rank {n}'s state") for n, r in enumerate(reports, 1)]
            return whole_tree(tree, shares, others)

        return finish

    def finish(self) -> None:
        """Say goodbye; rank 0 waits for the others, which may need the store of the process group until then,
        and flags versions for them."""
        if not self.leads:
            assert isinstance(self.publisher, Follower)
            self.link.close(msgspec.json.encode(self.publisher.catalog.flags))
            return
        flags: dict[int, str] = {}
        try:
            for rank in self.link.others:
                words = self.link.last_words(rank)
                flags.update(msgspec.json.decode(words, type=dict[int, str]) if words else {})
            if flags:
                self.publisher.catalog.flag_versions(flags)
        except RankLost as error:
            log.warning("%s", error)

    def close(self) -> None:
        """Take part no more."""
        self.link.close()


def join(
    process_group: Any, silent_seconds: float, policy: Policy, schedule: SaveSchedule
) -> Together | None:
    """Join the other ranks of a process group; None if this process saves alone."""
    link = link_of(process_group, silent_seconds)
    return None if link is None else Together(link, policy, schedule)
