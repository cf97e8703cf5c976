"""Signals while a command runs."""

from __future__ import annotations

import os
import signal

from holdfast.stopping import Notice


def test_a_notice_ends_though_whoever_listened_before_has_closed_its_file() -> None:
    """As an event loop does that ends without a word."""
    read, write = os.pipe2(os.O_NONBLOCK)
    before = signal.set_wakeup_fd(write)
    try:
        with Notice():
            os.close(write)
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        os.close(read)
        signal.set_wakeup_fd(before)
