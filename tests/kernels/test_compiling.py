from __future__ import annotations

import threading

from holdfast.kernels.compiling import in_turn


def test_one_at_a_time() -> None:
    """Threads stand for processes: each opens the lock for itself."""
    inside, done = threading.Event(), threading.Event()
    order: list[str] = []

    def second() -> None:
        inside.wait()
        with in_turn():
            order.append("second")
        done.set()

    thread = threading.Thread(target=second)
    thread.start()
    with in_turn():
        inside.set()
        assert not done.wait(0.3), "it did not wait"
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert done.is_set()
