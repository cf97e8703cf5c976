"""Messages between the ranks of a job, over the key-value store that ``torch.distributed`` has anyway.

Why not collectives: those of the trainer's group would mix with the trainer's own, and those of a group of
our own break for good at the first rank that is late or dead. A message in a store is read when it is wanted,
by whichever thread, and a rank that has died leaves nobody hanging: every rank says twice a second that it is
alive, and whoever waits for one that has fallen silent gets RankLost.

No call here waits inside of PyTorch. Waiting is asking again, in ever longer intervals.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.errors import RankLost

BEAT_SECONDS = 0.5
_SHORTEST_SLEEP_SECONDS = 0.0001
_URGENT_SLEEP_SECONDS = 0.0005
_LONGEST_SLEEP_SECONDS = 0.02
_LOOK_SECONDS = 0.25
"""How often a rank that is waited for is looked at."""
_PIECE_BYTES = 1 << 20  # PyTorch's store takes 8 MB at most
_LAST_WORDS = "bye"


class Link:
    """The connection of one rank to the others. Any thread may use it.

    Every message has a key, is posted once, and is there for all until it is forgotten.

    Args:
        store: of the process group; a copy of the connection is made.
        rank: of this process.
        world_size: how many ranks there are.
        silent_seconds: a rank that has not been heard of for so long is lost. In the beginning, all links
            wait for each other, for ten times as long.
        members: what the ranks are called in the default process group.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, silent_seconds: float, members: Sequence[int] = ()
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.members = members or range(world_size)
        self._silent_seconds = silent_seconds
        self._store = store.clone()  # whoever waits in the other one keeps it for himself
        self._lock = threading.Lock()
        self._prefix = "holdfast"
        self._prefix = f"holdfast/{self._agree_on_keys()}"
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._pieces: dict[str, int] = {}
        self._ended = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._keep_beating, name="holdfast-beat", daemon=True)
        self._thread.start()

    @property
    def others(self) -> range:
        """The ranks besides the first one."""
        return range(1, self.world_size)

    def post(self, key: str, message: bytes) -> None:
        """Leave a message under this key."""
        pieces = [message[i : i + _PIECE_BYTES] for i in range(0, len(message), _PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self._set(f"{key}/{number}", piece)
        self._pieces[key] = len(pieces)
        self._set(key, str(len(pieces)).encode())  # last: whoever sees it finds the pieces

    def hear(self, key: str, sender: int, *, is_urgent: bool = False) -> bytes:
        """The message under a key, when it is there. ``is_urgent``: training waits for it.

        Raises:
            RankLost: its sender has ended, or has been silent for too long.
        """
        pause, looked = _SHORTEST_SLEEP_SECONDS, time.monotonic()
        longest = _URGENT_SLEEP_SECONDS if is_urgent else _LONGEST_SLEEP_SECONDS
        while not self._has(key):
            if time.monotonic() - looked >= _LOOK_SECONDS:
                looked = time.monotonic()
                self._look_at(sender, key)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        count = int(self._get(key))
        self._pieces[key] = count
        return b"".join(self._get(f"{key}/{number}") for number in range(count))

    def has(self, key: str) -> bool:
        """Whether there is a message under a key."""
        return self._has(key)

    def forget(self, keys: Iterable[str]) -> None:
        """Delete messages that everybody has read."""
        for key in keys:
            for number in range(self._pieces.pop(key, 0)):
                self._delete(f"{key}/{number}")
            self._delete(key)

    def close(self, last_words: bytes = b"") -> None:
        """Say that this rank takes part no more. You may call it twice."""
        if self._ended.is_set():
            return
        with contextlib.suppress(RankLost):
            self.post(f"{_LAST_WORDS}/{self.rank}", last_words)
        self._ended.set()
        self._thread.join()

    def last_words(self, rank: int) -> bytes:
        """What a rank has said in the end; waits for it."""
        return self.hear(f"{_LAST_WORDS}/{rank}", rank)

    # Inside

    def _agree_on_keys(self) -> str:
        """A word that only these links of these ranks know; waits for all of them.

        The store may have keys of links that ended, of processes even that ``torchrun`` has started again.
        So each rank knocks with a word of its own, rank 0 lists all words, whoever finds its own in the list
        comes in, and rank 0 closes the door behind all of them. It lists them again when words change.
        """
        mine, began, pause = secrets.token_hex(8), time.monotonic(), _SHORTEST_SLEEP_SECONDS
        if self.rank:
            self._set(f"knock/{self.rank}", mine.encode())
        listed, missing = "", [0]
        while missing:
            if self.rank:
                words = self._get("list").decode() if self._has("list") else ""
                word = _word_of(words)
                if words != listed and mine in words.split():
                    listed = words
                    self._set(f"in/{word}/{self.rank}", b"")
                missing = [] if listed and self._has(f"closed/{word}") else [0]
            else:
                knocks = {rank: f"knock/{rank}" for rank in self.others}
                missing = [rank for rank, key in knocks.items() if not self._has(key)]
                if not missing:
                    words = " ".join([mine, *(self._get(key).decode() for key in knocks.values())])
                    if words != listed:
                        listed = words
                        self._set("list", words.encode())
                    missing = [r for r in self.others if not self._has(f"in/{_word_of(listed)}/{r}")]
            waited = time.monotonic() - began
            if missing and waited > 10 * self._silent_seconds:
                raise RankLost(
                    f"rank {missing[0]} has made no Checkpointer, and rank {self.rank} has waited "
                    f"{waited:.0f} s for it: make one on every rank of the process group, with the same "
                    "arguments"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP_SECONDS)
        if not self.rank:
            self._set(f"closed/{_word_of(listed)}", b"")
        return _word_of(listed)

    def _look_at(self, rank: int, key: str) -> None:
        """Raise RankLost if a rank will not say what is waited for."""
        if self._has(f"{_LAST_WORDS}/{rank}"):
            if self._has(key):  # it came before the end
                return
            raise RankLost(
                f"rank {rank} has closed its Checkpointer while others wait for it: call step(), save(), "
                "restore() and close() on every rank"
            )
        beat, now = self._get(f"beat/{rank}") if self._has(f"beat/{rank}") else b"", time.monotonic()
        known, since = self._beats.get(rank, (b"", now))
        if known != beat or rank not in self._beats:
            self._beats[rank] = beat, now
        elif now - since > self._silent_seconds:
            raise RankLost(
                f"rank {rank} has not been heard of for {now - since:.0f} s: its process has ended or hangs; "
                "restart all ranks"
            )

    def _keep_beating(self) -> None:
        number = 0
        while not self._ended.wait(BEAT_SECONDS):
            number += 1
            try:
                self._beat(number)
            except RankLost:
                return  # whoever waits for something finds out, too

    def _beat(self, number: int) -> None:
        self._set(f"beat/{self.rank}", str(number).encode())

    def _set(self, key: str, value: bytes) -> None:
        with self._lock, _lost_if_it_fails():
            self._store.set(f"{self._prefix}/{key}", value)

    def _get(self, key: str) -> bytes:
        with self._lock, _lost_if_it_fails():
            value: bytes = self._store.get(f"{self._prefix}/{key}")
            return value

    def _has(self, key: str) -> bool:
        with self._lock, _lost_if_it_fails():
            return bool(self._store.check([f"{self._prefix}/{key}"]))

    def _delete(self, key: str) -> None:
        with self._lock, _lost_if_it_fails():
            self._store.delete_key(f"{self._prefix}/{key}")


def _word_of(listed: str) -> str:
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


@contextlib.contextmanager
def _lost_if_it_fails() -> Any:
    try:
        yield
    except RuntimeError as error:  # torch.distributed.DistError is one
        first = str(error).partition("\n")[0]
        raise RankLost(
            f"the store of the process group does not answer ({first}): the process that has it, rank 0 as a "
            "rule, has ended; restart all ranks"
        ) from error
