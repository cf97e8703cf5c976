"""Threads that share work."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from holdfast.checkpoint.reading import stretches
from holdfast.checkpoint.reading.stretches import run_all


@pytest.mark.parametrize("count", [0, 1, 3, 200])
def test_everything_is_done_once(count: int) -> None:
    done: list[int] = []
    run_all(done.append, range(count))
    assert sorted(done) == list(range(count))


def test_one_thread_keeps_to_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "THREADS", 1)
    done: list[int] = []
    run_all(done.append, range(50))
    assert done == list(range(50))


def test_an_error_stops_the_others_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for the one that failed are told, and what they raise then is not the reason."""
    monkeypatch.setattr(stretches, "THREADS", 3)
    failed = threading.Event()
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 2:
            raise ValueError("two")
        assert failed.wait(60)
        raise CancelledError

    with pytest.raises(ValueError, match="two"):
        run_all(work, range(100), on_error=failed.set)
    assert sorted(begun) == [0, 1, 2]
    assert not [t for t in threading.enumerate() if t.name.startswith("holdfast-read")]
