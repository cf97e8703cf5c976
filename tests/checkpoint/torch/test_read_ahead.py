"""Loaders that are read ahead of training: saved right through ``Prefetch``, noticed without it."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast as hf
from holdfast.checkpoint.torch.read_ahead import WATCHED_STEPS, ReadAhead
from holdfast.data.reader import ReadCount
from holdfast.events import EventLog, read_events
from tests.data.test_criteo import text_of, write
from tests.data.test_criteo_parsing import ROWS

ROW_COUNT = 60


class Ids(torch.utils.data.Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index % ROW_COUNT)


def synthetic(batches: int = 40) -> hf.Synthetic:
    return hf.Synthetic(samples=batches, batch_size=1, table_rows=(ROW_COUNT,))


def stateful(batches: int = 40, workers: int = 0) -> StatefulDataLoader:
    return StatefulDataLoader(Ids(batches), batch_size=1, shuffle=True, num_workers=workers)


def ids_of(batch: Any) -> Tensor:
    return torch.from_numpy(batch.ids[0]) if isinstance(batch, hf.Batch) else batch


class Model:
    """A table, and dropout, which draws random numbers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(ROW_COUNT, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adagrad(self.net.parameters(), lr=0.1)
        self.trained: list[list[int]] = []

    def train(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.net(ids_of(batch)).sum().backward()
        self.optimizer.step()
        self.trained.append(ids_of(batch).tolist())

    def objects(self, loader: Any) -> dict[str, Any]:
        return {"model": self.net, "optim": self.optimizer, "loader": loader}


class Crash(Exception):
    pass


# Runs that are saved through a Prefetch


@pytest.mark.parametrize(
    ("make", "count", "passes"),
    [
        (synthetic, "yielded", 2),
        (synthetic, "trained", 2),
        (stateful, "yielded", 2),
        # In its second pass, a random number for it would be drawn before all of the first is trained.
        (stateful, "trained", 1),
    ],
)
def test_a_run_that_crashes_again_and_again_is_as_one_that_never_did(
    tmp_path: Path, make: Callable[[], Any], count: Any, passes: int
) -> None:
    """Bit for bit, with dropout: also as one without a Prefetch."""
    alone, loader = Model(), make()
    for batch in (batch for _ in range(passes) for batch in loader):
        alone.train(batch)

    chance, crashes = random.Random(3), 0
    trained: list[list[int]] = []
    while True:
        model = Model()
        prefetch = hf.Prefetch(make(), 4, count=count)
        policy = hf.Policy(every_steps=4, strategy="incremental")
        try:
            with hf.Checkpointer(tmp_path / "store", model.objects(prefetch), policy) as ckpt:
                start = ckpt.restore()
                del trained[start:]
                stream = (batch for _ in range(passes - start // 40) for batch in prefetch)
                for step, batch in enumerate(on_the_way(stream, 3 if count == "trained" else 0), start):
                    model.train(batch)
                    trained.append(model.trained[-1])
                    if count == "trained":
                        prefetch.trained()
                    ckpt.step(step)
                    if chance.random() < 0.1:
                        raise Crash
        except Crash:
            crashes += 1
            continue
        break
    assert crashes > 2
    assert trained == alone.trained
    for name, value in alone.net.state_dict().items():
        assert torch.equal(value, model.net.state_dict()[name])


def on_the_way(batches: Iterable[Any], most: int) -> Iterator[Any]:
    """Batches, of which so many more have been taken, to be copied somewhere."""
    waiting: deque[Any] = deque()
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > most:
            yield waiting.popleft()
    yield from waiting


def test_a_restore_in_the_midst_of_a_loop_is_refused_before_anything_is_overwritten(tmp_path: Path) -> None:
    model, prefetch = Model(), hf.Prefetch(synthetic())
    with hf.Checkpointer(tmp_path, model.objects(prefetch)) as ckpt:
        for step, batch in enumerate(prefetch):
            model.train(batch)
            if step == 0:
                ckpt.save(0)
            if step == 3:
                weights = {name: value.clone() for name, value in model.net.state_dict().items()}
                with pytest.raises(hf.CheckpointError, match=r"before iter\(loader\)"):
                    ckpt.restore()
                break
        assert all(torch.equal(value, weights[name]) for name, value in model.net.state_dict().items())
        assert ckpt.restore() == 1
        assert next(iter(prefetch)).index == 1


# Noticing those that are read ahead without one


class Watch:
    """A run whose loaders are watched; what was said of them."""

    def __init__(self, path: Path, caplog: pytest.LogCaptureFixture, loaders: dict[str, Any]) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._log = caplog
        caplog.clear()
        self.open(**loaders)

    def open(self, **loaders: Any) -> None:
        """Begin, or go on in another process, as it were."""
        self.model = Model()
        self.events = EventLog(self.path)
        objects = {"model": self.model.net, "optim": self.model.optimizer, **loaders}
        self.ckpt = hf.Checkpointer(self.path / "store", objects, events=self.events)

    def said(self) -> list[str]:
        """The loaders that were complained about."""
        self.ckpt.close()
        self.events.close()
        events = [e for e in read_events(self.path) if e["event"] == "loader_read_ahead"]
        logged = [r.getMessage() for r in self._log.records if "hf.Prefetch" in r.getMessage()]
        for event, message in zip(events, logged, strict=True):
            assert message.startswith(f"{event['name']} is read ahead")
            assert event["batches"] > event["steps"]
        return [event["name"] for event in events]


@pytest.fixture
def watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., Watch]:
    numbers = itertools.count()
    return lambda **loaders: Watch(tmp_path / str(next(numbers)), caplog, loaders)


@pytest.fixture(params=["synthetic", "criteo", "stateful", "prefetch"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Any]:
    def criteo(batches: int) -> hf.Criteo:
        (tmp_path / str(batches)).mkdir(exist_ok=True)
        paths = write(tmp_path / str(batches), [text_of(batches, 1)], compressed=False)
        return hf.Criteo(paths, batch_size=1, table_rows=ROWS, part="all")

    made: dict[str, Callable[[int], Any]] = {
        "synthetic": synthetic,
        "criteo": criteo,
        "stateful": stateful,
        "prefetch": lambda batches: hf.Prefetch(synthetic(batches), 2),
    }
    return made[request.param]


def fed(loader: Any, most: int) -> Iterator[Any]:
    """Batches through a queue of the user's own, filled by a thread of his."""
    waiting: queue.Queue[Any] = queue.Queue(most + 1)
    room = threading.Semaphore(most)

    def feed() -> None:
        stream = iter(loader)
        batch: Any = 0
        while batch is not None:
            room.acquire()
            batch = next(stream, None)
            waiting.put(batch)

    thread = threading.Thread(target=feed)
    thread.start()
    while True:
        # As it is where reading is quicker than training: the queue is full when a step is told.
        room.release()
        while thread.is_alive() and not waiting.full():
            time.sleep(0.0002)
        batch = waiting.get()
        if batch is None:
            thread.join()
            return
        yield batch


@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("through", ["a queue of 4", "a list of 2"])
def test_reading_ahead_is_noticed(
    make: Callable[[int], Any], watch: Callable[..., Watch], through: str, first: int, per_step: int
) -> None:
    run = watch(loader=(loader := make(60)))
    batches = fed(loader, 4) if through == "a queue of 4" else on_the_way(loader, 2)
    for step in itertools.count(first):
        if len(list(itertools.islice(batches, per_step))) < per_step:
            break
        run.ckpt.step(step)
    assert run.said() == ["loader"]


@pytest.mark.parametrize("first", [7, 1000])
def test_another_thread_is_noticed_however_steps_are_counted(
    watch: Callable[..., Watch], first: int, tmp_path: Path
) -> None:
    for loader in (synthetic(), hf.Prefetch(synthetic(), 2)):
        for every in (1, 3):
            run = watch(loader=loader)
            for step, _ in enumerate(fed(loader, 4), first):
                if step % every == 0:
                    run.ckpt.step(step)
            assert run.said() == ["loader"]


def test_the_loader_inside_a_prefetch_is_noticed(watch: Callable[..., Watch]) -> None:
    """It is the Prefetch that knows what was trained."""
    for loader in (synthetic(), stateful()):
        run = watch(loader=loader)
        prefetch = hf.Prefetch(loader, 3)
        for step, _ in enumerate(prefetch):
            while prefetch._ahead._source is not None and prefetch._ahead._read - prefetch._ahead.taken < 3:
                time.sleep(0.0002)
            run.ckpt.step(step)
        assert run.said() == ["loader"]


def test_reading_ahead_is_noticed_after_a_restore(
    make: Callable[[int], Any], watch: Callable[..., Watch]
) -> None:
    run = watch(loader=(loader := make(60)))
    for step, _ in enumerate(itertools.islice(loader, 9)):
        run.ckpt.step(step)
    run.ckpt.save()
    assert run.said() == []
    run.open(loader=(loader := make(60)))
    start = run.ckpt.restore()
    assert start == 9
    for step, _ in enumerate(on_the_way(loader, 2), start):
        run.ckpt.step(step)
    assert run.said() == ["loader"]


# And nothing else is complained about


@pytest.mark.parametrize("per_step", [1, 2, 4])
@pytest.mark.parametrize("first", [0, 1, 7, 1000])
def test_no_alarm_for_any_count_of_steps(
    make: Callable[[int], Any], watch: Callable[..., Watch], per_step: int, first: int
) -> None:
    """Gradients that are accumulated, steps that begin anywhere, and passes that end within a step."""
    run = watch(loader=(loader := make(19)))
    step = first
    for _ in range(4):
        for count, _ in enumerate(loader, 1):
            if count % per_step == 0:
                run.ckpt.step(step)
                step += 1
    assert run.said() == []


@pytest.mark.parametrize("every", [2, 5, 8])
@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("first", [0, 1])
def test_no_alarm_where_only_some_steps_are_told(
    make: Callable[[int], Any], watch: Callable[..., Watch], every: int, offset: int, first: int
) -> None:
    run = watch(loader=(loader := make(60)))
    for step, _ in enumerate(loader, first):
        if step % every == offset % every and step > offset:
            run.ckpt.step(step)
    assert run.said() == []


def test_no_alarm_where_steps_are_told_late(make: Callable[[int], Any], watch: Callable[..., Watch]) -> None:
    """After a warm-up, with numbers that count it."""
    run = watch(loader=(loader := make(60)))
    for step, _ in enumerate(loader):
        if step >= 11:
            run.ckpt.step(step)
    assert run.said() == []


@pytest.mark.parametrize("skipped", [{0}, {1}, {0, 1, 5}, {3, 4, 9}])
def test_no_alarm_where_batches_are_left_out(
    make: Callable[[int], Any], watch: Callable[..., Watch], skipped: set[int]
) -> None:
    """Of which the numbers of steps tell; and without that, where they come irregularly."""
    run = watch(loader=(loader := make(60)))
    for step, _ in enumerate(loader):
        if step not in skipped:
            run.ckpt.step(step)
    assert run.said() == []
    if skipped == {3, 4, 9}:
        run = watch(loader=(loader := make(60)))
        told = itertools.count()
        for step, _ in enumerate(loader):
            if step not in skipped:
                run.ckpt.step(next(told))
        assert run.said() == []


def test_no_alarm_for_loaders_that_do_not_train(
    make: Callable[[int], Any], watch: Callable[..., Watch]
) -> None:
    """Those that are evaluated with, now and then, in each step or before the first; two that take turns."""
    loader, other = make(60), make(60)
    run = watch(loader=loader, test=(test := make(5)), other=other, unused=make(5))
    list(test)
    others = iter(other)
    for step, _ in enumerate(loader):
        if step % 3 == 1:
            next(others)
        if step % 4 == 0 or 20 < step < 30:
            list(test)
        run.ckpt.step(step)
    assert run.said() == []


def test_no_alarm_for_a_look_at_the_first_batch(
    make: Callable[[int], Any], watch: Callable[..., Watch]
) -> None:
    for before in (True, False):
        loader = make(60)
        if before:
            next(iter(loader))
        run = watch(loader=loader)
        if not before:
            next(iter(loader))
        for step, _ in enumerate(loader):
            run.ckpt.step(step)
        assert run.said() == []


@pytest.mark.parametrize("stop", [1, 3, 12, 19, 20])
def test_no_alarm_after_restores(make: Callable[[int], Any], watch: Callable[..., Watch], stop: int) -> None:
    """Of runs that go on from any position, the end of a pass included."""
    run = watch(loader=(loader := make(20)))
    for step, _ in enumerate(itertools.islice(loader, stop)):
        run.ckpt.step(step)
    run.ckpt.save()
    for length in (3, 17, 6):
        assert run.said() == []
        run.open(loader=(loader := make(20)))
        start = run.ckpt.restore()
        assert start > 0
        for step, _ in enumerate(itertools.islice(loader, length), start):
            run.ckpt.step(step)
            if step % 5 == 0:
                run.ckpt.save()
    assert run.said() == []


def test_no_alarm_after_going_back(watch: Callable[..., Watch]) -> None:
    for make in (synthetic, lambda: hf.Prefetch(synthetic(), 3)):
        run = watch(loader=(loader := make()))
        for _ in range(4):
            start = run.ckpt.restore()
            for step, _ in enumerate(itertools.islice(loader, 8), start):
                run.ckpt.step(step)
                if step == start + 2:
                    run.ckpt.save()
        assert run.said() == []


def test_no_alarm_for_saves_in_the_midst_of_a_step(
    make: Callable[[int], Any], watch: Callable[..., Watch]
) -> None:
    run = watch(loader=(loader := make(60)))
    stream = iter(loader)
    for step in range(14):
        for part in range(4):
            next(stream)
            if step % 3 == part:
                run.ckpt.save()
        run.ckpt.step(step)
    assert run.said() == []


def test_no_alarm_for_batches_that_count_when_they_are_trained(watch: Callable[..., Watch]) -> None:
    run = watch(loader=(loader := hf.Prefetch(synthetic(), 2, count="trained")))
    for step, _ in enumerate(fed(loader, 4)):
        loader.trained()
        run.ckpt.step(step)
    assert run.said() == []


def test_no_alarm_for_another_thread_that_reads_in_step(watch: Callable[..., Watch]) -> None:
    """Each batch when it is asked for, and not before."""
    run = watch(loader=(loader := synthetic()))
    stream, wanted, given = iter(loader), queue.SimpleQueue[int](), queue.SimpleQueue[Any]()

    def read() -> None:
        while wanted.get():
            given.put(next(stream))

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(30):
        wanted.put(1)
        given.get()
        run.ckpt.step(step)
    wanted.put(0)
    thread.join()
    assert run.said() == []


def test_loaders_with_workers(watch: Callable[..., Watch]) -> None:
    """Workers read ahead, too, but what counts is what they hand out."""
    run = watch(loader=(loader := stateful(20, 1)))
    for step, _ in enumerate(loader):
        run.ckpt.step(step)
    assert run.said() == []
    run = watch(loader=(loader := stateful(20, 1)))
    for step, _ in enumerate(on_the_way(loader, 2)):
        run.ckpt.step(step)
    assert run.said() == ["loader"]


def test_watching_ends(watch: Callable[..., Watch]) -> None:
    """It costs nothing after the first steps, whatever it has found."""
    run = watch(loader=(loader := synthetic(200)), test=synthetic(), other=hf.Prefetch(synthetic()))
    for step, _ in enumerate(itertools.islice(loader, WATCHED_STEPS + 1)):
        run.ckpt.step(step)
    assert not run.ckpt._read_ahead._watched
    assert run.said() == []


class AnyLoop:
    """A training loop of some kind, over a loader that only counts; what is said of it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.loader = Counts(self.rng.randint(3, 150))
        self.watch = Says({"loader": self.loader}, EventLog(None))
        self.per_step = self.rng.choice([1, 1, 2, 3, 8])
        self.start = self.rng.choice([0, 0, 1, 9, 40])  # what restore() has said
        if self.start:
            next(iter(self.loader), None)
            self.watch.begin(self.start)

    def run(self, first: int, ahead: int, tells: Callable[[int], bool]) -> list[str]:
        step = first
        for _ in range(3):
            stream = on_the_way(self.loader, ahead)
            while len(list(itertools.islice(stream, self.per_step))) == self.per_step:
                if tells(step):
                    self.watch.told(step)
                step += 1
        return self.watch.said


class Counts:
    """A loader of numbers."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.read_count = ReadCount()

    def __iter__(self) -> Iterator[int]:
        self.read_count.begin()
        for batch in range(self.batches):
            self.read_count.count()
            yield batch


class Says(ReadAhead):
    """Keeps what it would say."""

    def __init__(self, objects: dict[str, Any], events: EventLog) -> None:
        self.said: list[str] = []
        super().__init__(objects, events)

    def _say(self, name: str, steps: int, batches: int) -> None:
        self.said.append(name)
        super()._say(name, steps, batches)


@pytest.mark.parametrize(
    "seeds", [range(1000), pytest.param(range(1000, 40000), marks=pytest.mark.soak)], ids=len
)
def test_no_alarm_for_any_loop(seeds: range) -> None:
    """Whatever steps are numbered from, and whichever of them are told."""
    for seed in seeds:
        loop = AnyLoop(seed)
        rng = loop.rng
        first = rng.choice([loop.start, loop.start + 1, 0, 1, 7, 1000])
        every, late, left_out = rng.choice([1, 1, 2, 5, 10]), rng.choice([0, 0, 3, 30]), rng.choice([0, 0.2])
        told = {n for n in range(first + late, first + 1000) if n % every == 0 and rng.random() >= left_out}
        if min(told) > first and first - loop.start not in (0, 1) and min(told) - loop.start in (0, 1):
            continue  # a later step that has the number of a first one, by chance
        assert loop.run(first, 0, told.__contains__) == [], seed


@pytest.mark.parametrize(
    "seeds", [range(500), pytest.param(range(500, 20000), marks=pytest.mark.soak)], ids=len
)
def test_an_alarm_where_every_step_is_told(seeds: range) -> None:
    checked = 0
    for seed in seeds:
        loop = AnyLoop(seed)
        ahead = loop.rng.choice([2, 4, 5, 7])
        first = loop.start + loop.rng.choice([0, 1])
        if (loop.loader.batches - ahead) // loop.per_step < 6:
            continue  # the pass is over too soon
        if first > loop.start and ahead == loop.per_step:
            continue  # as if the first step had not been told
        checked += 1
        assert loop.run(first, ahead, lambda step: True) == ["loader"], seed
    assert checked > len(seeds) / 2


class TestRules:
    """The two rules on a loader that says what a test wants it to say."""

    class Loader:
        def __init__(self) -> None:
            self.read_count = SimpleNamespace(batches=0, passes=0, thread=None)

    class Case:
        def __init__(self, start: int = 0, read: int = 0) -> None:
            self.loader = TestRules.Loader()
            self.loader.read_count.batches = read
            self.watch = Says({"loader": self.loader}, EventLog(None))
            self.watch.begin(start)

        def tell(self, step: int, batches: int, thread: int | None = None, passes: int = 0) -> bool | None:
            """Whether it is said to be read ahead; None: that is not known yet."""
            self.loader.read_count = SimpleNamespace(batches=batches, passes=passes, thread=thread)
            self.watch.told(step)
            if self.watch.said:
                return True
            return None if "loader" in self.watch._watched else False

    ELSEWHERE = threading.get_ident() + 1

    def test_batches_that_were_read_before_are_found_after_some_even_steps(self) -> None:
        case = self.Case()
        assert [case.tell(step, step + 3) for step in range(5)] == [None] * 4 + [True]

    def test_even_steps_are_needed_first(self) -> None:
        case = self.Case()
        reads = [9, 10, 11, 13, 14, 15, 16, 17]  # batches are left out here and there
        assert [case.tell(step, read) for step, read in enumerate(reads)] == [None] * 7 + [False]
        case = self.Case()
        reads = [9, 13, 14, 15, 16, 17]
        assert [case.tell(step, read) for step, read in enumerate(reads)] == [None] * 5 + [True]

    @pytest.mark.parametrize(("first", "ahead"), [(0, False), (1, False), (2, False)])
    def test_one_batch_for_each_step_is_not_ahead(self, first: int, ahead: bool) -> None:
        case = self.Case()
        assert case.tell(first, 1) in (None, False)
        found = [case.tell(first + step, 1 + step) for step in range(1, 5)]
        assert found[-1] is ahead

    def test_the_first_step_may_have_been_told_as_the_second(self) -> None:
        case = self.Case()
        assert [case.tell(1 + step, 2 + step) for step in range(5)][-1] is False
        case = self.Case()
        assert [case.tell(step, 2 + step) for step in range(5)][-1] is True

    def test_what_was_read_before_the_start_does_not_count(self) -> None:
        case = self.Case(start=7, read=30)
        assert [case.tell(7 + step, 31 + step) for step in range(5)][-1] is False

    @pytest.mark.parametrize("steps", [[0, 1, 1], [0, 1, 3], [2, 3], [0, 1, 0]])
    def test_steps_that_are_not_told_one_by_one(self, steps: list[int]) -> None:
        case = self.Case()
        assert [case.tell(step, 50 + number) for number, step in enumerate(steps)][-1] is False

    def test_a_loop_that_reads_nothing(self) -> None:
        case = self.Case()
        assert [case.tell(step, 4) for step in range(5)] == [None] * 4 + [False]

    def test_another_pass_is_another_matter(self) -> None:
        case = self.Case()
        assert case.tell(0, 3, passes=1) is None
        assert case.tell(1, 4, passes=2) is False
        case = self.Case()
        assert case.tell(0, 3, passes=2) is False

    @pytest.mark.parametrize(
        ("step", "batches", "ahead"),
        [
            (0, 1, None),
            (0, 2, True),
            (9, 10, False),
            (9, 9, False),
            (9, 11, True),
            (9, 8, True),
            (9, 1, False),
        ],
    )
    def test_another_thread_that_has_got_more_than_there_were_steps(
        self, step: int, batches: int, ahead: bool | None
    ) -> None:
        """Unless steps were told late, by their numbers."""
        found = self.Case().tell(step, batches, self.ELSEWHERE)
        assert bool(found) is bool(ahead)

    def test_the_thread_that_trains_is_none_other(self) -> None:
        assert not self.Case().tell(0, 2, threading.get_ident())

    def test_after_a_while_nothing_is_looked_at_any_more(self) -> None:
        case = self.Case()
        reads = itertools.accumulate(1 + step % 2 for step in range(WATCHED_STEPS))
        found = [case.tell(step, read) for step, read in enumerate(reads)]
        assert found == [None] * (WATCHED_STEPS - 1) + [False]
        assert WATCHED_STEPS == 64

    def test_it_is_said_once_for_each_loader(self) -> None:
        case = self.Case()
        assert case.tell(0, 2, self.ELSEWHERE)
        case.watch.begin(0)
        case.tell(0, 2, self.ELSEWHERE)
        assert case.watch.said == ["loader"]

    def test_a_step_that_is_no_number_is_for_others_to_complain_about(self) -> None:
        case = self.Case()
        assert case.tell(0, 1) is None
        assert case.tell("one", 2) is False  # type: ignore[arg-type]
