"""How much of a processor the background takes, if it is told to take less."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from holdfast.checkpoint.background import Throttle


class Clocks:
    """Time that passes only by work and by sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worked = self.now = self._worked_before = 0.0
        self.slept: list[float] = []
        for name in ("thread_time", "monotonic", "sleep"):
            monkeypatch.setattr(f"holdfast.checkpoint.background.time.{name}", getattr(self, name))

    def work(self, seconds: float, waiting: float = 0.0) -> None:
        self.worked += seconds
        self.now += seconds + waiting

    def thread_time(self) -> float:
        return self.worked

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if self.slept and self.worked == self._worked_before:
            self.slept[-1] += seconds  # a rest is made of many short ones
        else:
            self.slept.append(seconds)
        self._worked_before = self.worked
        self.now += seconds


def test_a_share_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a quarter of the time, a thread rests three times as long as it works."""
    clocks = Clocks(monkeypatch)
    throttle = Throttle(0.25)

    def values() -> Iterator[int]:
        for i in range(3):
            clocks.work(1.0)
            yield i

    for _ in throttle.after_each(values()):
        clocks.work(2.0, waiting=100.0)  # what a disk takes is no work, and no credit either
    assert clocks.slept == pytest.approx([3.0, 9.0, 9.0])
    assert Throttle(1.0)._rest_per_second == 0


def test_a_rest_ends_when_the_work_is_not_needed_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    throttle = Throttle(0.001, lambda: clocks.now > 3)
    throttle.begin()
    clocks.work(1.0)
    throttle.pause()
    assert clocks.slept == pytest.approx([2.0], abs=0.1)


def test_a_rest_can_be_shorter_than_the_share_requires(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    lengths = iter([1.0, 0.5, 0.0, 0.25])
    throttle = Throttle(0.2, length=lambda: next(lengths))
    for _ in range(4):
        throttle.begin()
        clocks.work(1.0)
        throttle.pause()
    assert clocks.slept == pytest.approx([4.0, 2.0, 1.0])


def test_threads_share_a_throttle() -> None:
    """Two that work all the time together get what one would."""
    throttle = Throttle(0.25)
    spent: list[float] = []
    started = time.monotonic()

    def work() -> None:
        begun = time.thread_time()
        throttle.begin()
        while time.monotonic() < started + 0.5:
            until = time.thread_time() + 0.01
            while time.thread_time() < until:
                pass
            throttle.pause()
        spent.append(time.thread_time() - begun)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < sum(spent) < 0.35 * (time.monotonic() - started)
