"""Reading ahead: every batch once and in order, and a state that speaks of what was handed out or trained."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast as hf
from holdfast.data import prefetch
from tests.data.test_criteo import text_of, write
from tests.data.test_criteo_parsing import ROWS

SECONDS = 30.0
BATCHES = 7
Make = Callable[[], Any]


class Ids(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return BATCHES * 4 - 1

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Own:
    """A loader of a user's, whose state is the very object that it goes on to change."""

    def __init__(self, batches: int = BATCHES) -> None:
        self.position: dict[str, Any] = {"next": 0, "seen": []}
        self.batches = batches

    def __iter__(self) -> Iterator[int]:
        while self.position["next"] < self.batches:
            self.position["next"] += 1
            self.position["seen"].append(self.position["next"])
            yield self.position["next"] - 1
        self.position["next"] = 0

    def __len__(self) -> int:
        return self.batches

    def state_dict(self) -> dict[str, Any]:
        return self.position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = copy.deepcopy(state)


def synthetic() -> hf.Synthetic:
    return hf.Synthetic(samples=4 * BATCHES - 1, batch_size=4, table_rows=(10, 20))


def stateful(workers: int) -> StatefulDataLoader:
    torch.manual_seed(5)
    return StatefulDataLoader(Ids(), batch_size=4, shuffle=True, num_workers=workers)


@pytest.fixture(params=["synthetic", "split", "criteo", "own", "stateful", "stateful with a worker"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    paths = write(tmp_path, [text_of(9, 1), text_of(4 * BATCHES - 10, 2)], compressed=False)
    return {
        "synthetic": synthetic,
        "split": lambda: hf.Synthetic(samples=8 * BATCHES, batch_size=4, table_rows=(10, 20)).split(1, 2),
        "criteo": lambda: hf.Criteo(paths, batch_size=4, table_rows=ROWS, part="all"),
        "own": Own,
        "stateful": lambda: stateful(0),
        "stateful with a worker": lambda: stateful(1),
    }[request.param]


def plain(batch: Any) -> Any:
    """What tells batches apart."""
    if isinstance(batch, hf.Batch):
        return batch.index, [ids.tolist() for ids in batch.ids], batch.labels.tolist()
    return batch.tolist() if isinstance(batch, Tensor) else batch


def epochs(loader: Any, count: int) -> list[Any]:
    return [plain(batch) for _ in range(count) for batch in loader]


def is_full(loader: hf.Prefetch) -> None:
    """Wait until it has read as far ahead as it may, or to the end."""
    ahead = loader._ahead
    deadline = time.monotonic() + SECONDS
    while ahead._source is not None and ahead._read - ahead.taken < ahead._depth:
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "holdfast-prefetch"]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    if readers():
        gc.collect()
    for thread in readers():
        thread.join(SECONDS)
    assert not readers()


# What is handed out, and what the state says of it


@pytest.mark.parametrize("depth", [1, 2, 5, 100])
def test_the_same_batches_in_the_same_order(make: Make, depth: int) -> None:
    assert epochs(hf.Prefetch(make(), depth), 2) == epochs(make(), 2)


@pytest.mark.parametrize("depth", [1, 4])
def test_a_resume_trains_exactly_what_was_not_trained(make: Make, depth: int) -> None:
    """From any position, the end and the next pass included, however far ahead the loader has been read."""
    expected = epochs(make(), 3)
    for stop in (0, 1, BATCHES - 1, BATCHES, BATCHES + 2):
        loader = hf.Prefetch(make(), depth)
        done: list[Any] = []
        state = loader.state_dict()
        stream = (batch for _ in range(2) for batch in loader)
        for batch in itertools.islice(stream, stop):
            done.append(plain(batch))
            is_full(loader)
            state = loader.state_dict()
        loader.close()
        other = hf.Prefetch(make(), depth)
        other.load_state_dict(state)
        assert done == expected[:stop]
        rest = epochs(other, 3)[: 3 * BATCHES - stop]
        assert rest == expected[stop:], stop


def test_states_are_those_of_the_loader(make: Make) -> None:
    """So a Prefetch can be put round a loader between two runs, or taken away."""
    found = []
    for alone in (True, False):
        ahead = make() if alone else hf.Prefetch(make(), 3)
        states = []
        for _ in ahead:
            if isinstance(ahead, hf.Prefetch):
                is_full(ahead)
            states.append(repr(ahead.state_dict()))
        found.append([*states, repr(ahead.state_dict())])
    assert found[0] == found[1]
    bare = make()
    bare.load_state_dict(ahead.state_dict())
    assert epochs(bare, 1) == epochs(make(), 2)[BATCHES:]


def test_without_it_batches_are_lost() -> None:
    """What a queue of 4 before training does to a reader's own state."""
    reader, waiting = synthetic(), deque[Any]()
    stream = iter(reader)
    for _ in range(4):
        waiting.append(next(stream))
    trained = [waiting.popleft().index]
    again = synthetic()
    again.load_state_dict(reader.state_dict())
    assert trained + [batch.index for batch in again] == [0, 4, 5, 6]


def test_no_more_is_read_than_depth_says() -> None:
    class Counted(Own):
        def __iter__(self) -> Iterator[int]:
            for batch in super().__iter__():
                beyond.append(loader._ahead._read + 1 - loader._ahead.taken)  # with this one
                yield batch

    for depth in (1, 3):
        beyond: list[int] = []
        loader = hf.Prefetch(Counted(30), depth)
        for _ in loader:
            is_full(loader)
        assert max(beyond) == depth
        assert len(beyond) == 30


def test_after_a_break_it_goes_on(make: Make) -> None:
    expected = epochs(make(), 3)
    loader = hf.Prefetch(make(), 3)
    found: list[Any] = []
    for stop in (1, 2, 3, 100, 2, 100, 100):
        for batch in itertools.islice(loader, stop):
            found.append(plain(batch))
            is_full(loader)
        assert not [t for t in readers() if t.is_alive()]
    assert found == expected


def test_states_after_a_break(make: Make) -> None:
    loader = hf.Prefetch(make(), 4)
    for batch in loader:
        first = plain(batch)
        is_full(loader)
        break
    other = hf.Prefetch(make(), 4)
    other.load_state_dict(loader.state_dict())
    assert [first, *epochs(other, 1)] == epochs(make(), 1)
    loader.load_state_dict(loader.state_dict())  # which drops what was read ahead
    assert [first, *epochs(loader, 1)] == epochs(make(), 1)


def test_a_state_that_is_refused_changes_nothing() -> None:
    loader = hf.Prefetch(synthetic(), 4)
    for _ in loader:
        is_full(loader)
        break
    with pytest.raises(hf.WrongReaderState, match="seed"):
        loader.load_state_dict({**loader.state_dict(), "seed": 99})
    assert [batch.index for batch in loader] == list(range(1, BATCHES))
    fresh = hf.Prefetch(synthetic())
    with pytest.raises(hf.WrongReaderState):
        fresh.load_state_dict({})
    assert len(list(fresh)) == BATCHES


def test_a_state_comes_too_late(make: Make) -> None:
    loader = hf.Prefetch(make())
    state = loader.state_dict()
    stream = iter(loader)
    next(stream)
    with pytest.raises(hf.WrongReaderState, match=r"after iter\(\)"):
        loader.load_state_dict(state)
    list(stream)
    loader.load_state_dict(state)
    assert epochs(loader, 1) == epochs(make(), 1)


def test_a_newer_iteration_takes_over() -> None:
    loader = hf.Prefetch(Own(), 2)
    old = iter(loader)
    assert next(old) == 0
    new = iter(loader)
    assert next(new) == 1
    with pytest.raises(hf.WrongReaderState, match="this iteration is over"):
        next(old)
    del old
    gc.collect()
    assert list(new) == [2, 3, 4, 5, 6]


def test_lengths() -> None:
    assert len(hf.Prefetch(Own())) == BATCHES
    assert len(hf.Prefetch(stateful(0))) == BATCHES
    with pytest.raises(TypeError):
        len(hf.Prefetch(synthetic()))
    assert len(list(hf.Prefetch(synthetic()))) == BATCHES


def test_what_cannot_be_prefetched() -> None:
    with pytest.raises(hf.ConfigError, match=r"a list has no state_dict, load_state_dict: .*Stateful"):
        hf.Prefetch([1, 2])
    for depth in (0, -1, 2.0, True):
        with pytest.raises(hf.ConfigError, match="depth"):
            hf.Prefetch(Own(), depth)  # type: ignore[arg-type]
    with pytest.raises(hf.ConfigError, match="expected 'yielded' or 'trained'"):
        hf.Prefetch(Own(), count="read")  # type: ignore[arg-type]


# Counting what is trained


def test_batches_count_when_they_are_trained(make: Make) -> None:
    """A loop that keeps three batches on their way to a device."""
    expected = epochs(make(), 2)
    for stop in (1, 2, BATCHES - 3, BATCHES, BATCHES + 1, 2 * BATCHES - 1):
        loader = hf.Prefetch(make(), 2, count="trained")
        on_the_way: deque[Any] = deque()
        done: list[Any] = []
        stream = (batch for _ in range(2) for batch in loader)
        for batch in stream:
            on_the_way.append(batch)
            if len(on_the_way) > 3 and len(done) < stop:
                done.append(plain(on_the_way.popleft()))
                loader.trained()
            if len(done) == stop:
                break
        while len(done) < stop:
            done.append(plain(on_the_way.popleft()))
            loader.trained()
        state = loader.state_dict()
        loader.close()
        other = hf.Prefetch(make(), 2)
        other.load_state_dict(state)
        assert done + epochs(other, 2)[: 2 * BATCHES - stop] == expected, stop


def test_counting_in_another_thread_than_reading() -> None:
    """A feeder of the user's own, as in the run that loses batches without this."""
    loader = hf.Prefetch(synthetic(), 1, count="trained")
    waiting: Any = queue.Queue(4)

    def feed() -> None:
        for batch in loader:
            waiting.put(batch)
        waiting.put(None)

    feeder = threading.Thread(target=feed)
    feeder.start()
    states = [loader.state_dict()]
    while (batch := waiting.get()) is not None:
        loader.trained()
        states.append(loader.state_dict())
        assert states[-1]["next_index"] == batch.index + 1 or batch.index == BATCHES - 1
    feeder.join()
    assert [s["next_index"] for s in states][:BATCHES] == list(range(BATCHES))
    assert loader.state_dict()["next_index"] == 0  # of the next pass


def test_counting_too_much_or_never(caplog: pytest.LogCaptureFixture) -> None:
    loader = hf.Prefetch(Own(), count="trained")
    with pytest.raises(hf.WrongReaderState, match="1 more batches are said to be trained than were handed"):
        loader.trained()
    stream = iter(loader)
    next(stream), next(stream)
    with pytest.raises(hf.WrongReaderState):
        loader.trained(3)
    assert loader.state_dict()["next"] == 0
    loader.trained(2)
    assert loader.state_dict()["next"] == 2
    with pytest.raises(hf.ConfigError, match="expected at least 1"):
        loader.trained(0)
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(hf.ConfigError, match="count='trained'"):
        hf.Prefetch(Own()).trained()
    assert not caplog.records
    forgot = hf.Prefetch(Own(), count="trained")
    for _ in forgot:
        forgot.state_dict()
    assert "none was counted: call trained()" in caplog.text


# Errors


class Broken(Exception):
    pass


class Breaks(Own):
    """Fails at a batch, or when its state is asked for after it."""

    def __init__(self, at: int, place: str) -> None:
        super().__init__()
        self.at, self.place = at, place

    def fail(self, place: str) -> None:
        if self.place == place and self.position["next"] == self.at:
            raise Broken(place)

    def __iter__(self) -> Iterator[int]:
        self.fail("iter")
        return self.batches_of()

    def batches_of(self) -> Iterator[int]:
        for batch in super().__iter__():
            if self.place == "next" and batch == self.at:
                self.position["next"] -= 1
                raise Broken("next")
            yield batch

    def state_dict(self) -> dict[str, Any]:
        self.fail("state_dict")
        return super().state_dict()


@pytest.mark.parametrize("depth", [1, 3, 20])
@pytest.mark.parametrize("place", ["next", "state_dict"])
@pytest.mark.parametrize("count", ["yielded", "trained"])
def test_an_error_comes_where_it_belongs(depth: int, place: str, count: Any) -> None:
    """After all batches before it, each of which counts."""
    loader = hf.Prefetch(source := Breaks(4, place), depth, count=count)
    found: list[int] = []

    def train() -> None:
        for batch in loader:
            found.append(batch)
            if count == "trained":
                loader.trained()

    with pytest.raises(Broken, match=place):
        train()
    good = 4 if place == "next" else 3
    assert found == list(range(good))
    source.place = "nowhere"
    assert loader.state_dict()["next"] == good
    assert list(loader) == [4, 5, 6], "it is asked again, as it would be alone"


def test_an_error_of_iter_and_of_strange_kinds() -> None:
    with pytest.raises(Broken):
        next(iter(hf.Prefetch(Breaks(0, "iter"))))

    class Exits(Own):
        def __iter__(self) -> Iterator[int]:
            yield 1
            sys.exit(3)

    with pytest.raises(SystemExit):
        list(hf.Prefetch(Exits()))


# The thread's life


def test_threads_end_with_the_loop_or_the_object() -> None:
    for end in ("break", "close", "forget", "forget the loader", "exception"):
        loader: Any = hf.Prefetch(Own(1000), 3)
        stream = iter(loader)
        next(stream)
        is_full(loader)
        assert len(readers()) == 1
        assert readers()[0].daemon
        if end == "break":
            stream.close()
        elif end == "close":
            loader.close()
            with pytest.raises(hf.WrongReaderState):
                next(stream)
        elif end == "forget":
            del stream, loader
        elif end == "forget the loader":
            del loader
            assert next(stream) == 1
            del stream
        else:
            with contextlib.suppress(Broken):
                for _ in loader:
                    raise Broken
        gc.collect()
        assert not readers(), end


def test_after_close() -> None:
    loader = hf.Prefetch(synthetic(), 3)
    for _ in loader:
        is_full(loader)
        break
    loader.close()
    loader.close()
    assert loader.state_dict()["next_index"] == 1
    with pytest.raises(hf.WrongReaderState, match="is closed: make a new one"):
        list(loader)


def test_a_loader_that_waits_for_data_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of a stream does that is still being written. What it reads in the end is not lost."""
    monkeypatch.setattr(prefetch, "_PATIENCE_SECONDS", 0.05)
    gate = threading.Event()

    class Waits(Own):
        def __iter__(self) -> Iterator[int]:
            for batch in super().__iter__():
                assert batch < 2 or gate.wait(SECONDS)
                yield batch

    loader = hf.Prefetch(Waits(), 4)
    assert list(itertools.islice(loader, 2)) == [0, 1]
    assert loader.is_iterating
    with pytest.raises(hf.WrongReaderState):
        loader.load_state_dict(Own().state_dict())
    assert loader.state_dict()["next"] == 2
    gate.set()
    assert list(loader) == [2, 3, 4, 5, 6]


def test_a_program_that_ends_in_the_midst_of_a_loop(tmp_path: Path) -> None:
    code = (
        "import holdfast as hf\n"
        "loader = hf.Prefetch(hf.Synthetic(samples=10**6, batch_size=10, table_rows=(10,)), 4)\n"
        "stream = iter(loader)\n"
        "print(next(stream).index)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert (ended.stdout, ended.stderr) == ("0\n", "")


def in_a_fork(work: Callable[[], bool]) -> bool:
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_that_was_forked_off() -> None:
    """It has no reading thread: it says so instead of waiting for it, and its parent notices nothing."""
    loader = hf.Prefetch(Own(20), 3)
    stream = iter(loader)
    found = [next(stream)]
    is_full(loader)

    def go_on_in_child() -> bool:
        assert loader.state_dict()["next"] == 1
        assert loader.is_iterating
        for again in (stream, loader):
            with pytest.raises(hf.WrongReaderState, match="forked"):
                list(again)
        loader.close()
        return True

    assert in_a_fork(go_on_in_child)
    assert found + list(stream) == list(range(20))
    # One that nobody iterates over can be used by either.
    for _ in loader:
        break
    assert in_a_fork(lambda: list(loader) == list(range(1, 20)))
    assert list(loader) == list(range(1, 20))


def test_interrupts_lose_no_batch_and_block_nothing() -> None:
    """As Ctrl-C, at many moments. One that comes while a batch is on its way to the loop takes that batch."""
    main = threading.get_ident()

    def strike(seconds: float) -> None:
        time.sleep(seconds)
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    loader = hf.Prefetch(Own(10**9), 2)
    found: list[int] = []
    interrupted = 0
    try:
        for i in range(250):
            thread = threading.Thread(target=strike, args=(4e-6 * i,))
            with contextlib.suppress(KeyboardInterrupt):
                thread.start()
                try:
                    for batch in loader:
                        found.append(batch)
                        if not thread.is_alive():
                            break
                except KeyboardInterrupt:
                    interrupted += 1
                thread.join()
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert interrupted > 50
    found += itertools.islice(loader, 3)
    gaps = [after - before - 1 for before, after in itertools.pairwise(found)]
    assert min(gaps) == 0, "a batch was handed out twice"
    assert max(gaps) <= 1
    assert sum(gaps) <= interrupted
    assert loader.state_dict()["next"] == found[-1] + 1


# Anything, in any order


class AnyUse:
    """What a seed makes of a Prefetch, beside a list of what must come."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.batches = self.rng.choice([1, 2, 5, 9])
        self.count: Any = self.rng.choice(["yielded", "trained"])
        self.loader = self.build()
        self.handed = self.trained = 0  # over all passes
        self.stream: Any = None

    def build(self) -> hf.Prefetch:
        source = hf.Synthetic(samples=self.batches, batch_size=1, table_rows=(5,))
        return hf.Prefetch(source, self.rng.randint(1, 4), count=self.count)

    @property
    def counted(self) -> int:
        return self.handed if self.count == "yielded" else self.trained

    def act(self) -> None:
        action = self.rng.choice(["next"] * 6 + ["train"] * 5 + ["leave", "resume", "go back", "wait"])
        getattr(self, f"do_{action.replace(' ', '_')}")()
        self.check()

    def do_next(self) -> None:
        self.stream = self.stream or iter(self.loader)
        batch = next(self.stream, None)
        if batch is None:
            assert self.handed % self.batches == 0
            self.stream = None
        else:
            assert batch.index == self.handed % self.batches
            self.handed += 1

    def do_train(self) -> None:
        most = self.handed - self.trained
        if self.count == "trained" and most:
            count = self.rng.randint(1, most)
            self.loader.trained(count)
            self.trained += count

    def do_leave(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def do_resume(self) -> None:
        """In another process, say."""
        state = self.loader.state_dict()
        self.do_leave()
        self.loader.close()
        self.loader = self.build()
        self.loader.load_state_dict(state)
        self.handed = self.trained = self.counted

    def do_go_back(self) -> None:
        self.do_leave()
        self.loader.load_state_dict(self.loader.state_dict())
        self.handed = self.trained = self.counted

    def do_wait(self) -> None:
        if self.stream is not None:
            is_full(self.loader)

    def check(self) -> None:
        position = self.loader.state_dict()["next_index"]
        assert position % self.batches == self.counted % self.batches


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 5000), marks=pytest.mark.soak)], ids=len)
def test_anything_in_any_order(seeds: range) -> None:
    for seed in seeds:
        use = AnyUse(seed)
        try:
            for _ in range(40):
                use.act()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        finally:
            use.do_leave()
            use.loader.close()
