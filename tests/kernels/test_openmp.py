"""Loops on the threads that torch computes with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray  # type: ignore[attr-defined]

from holdfast.checkpoint.memory import live
from holdfast.checkpoint.memory.live import Gather, _GatherPart
from holdfast.kernels import openmp
from holdfast.kernels.machine import fetch_add

add: Any = fetch_add  # Numba passes its first argument


def count_calls(packed: Any) -> None:
    address = carray(packed, 1, np.int64)[0]
    add(address, 1)
    for _ in range(1 << 28):  # until another thread is here, too: one alone could make both calls
        if add(address, 0) >= 2:
            return


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("a thread of our own was woken up")

    monkeypatch.setattr(live, "_helper", refuse)
    monkeypatch.setattr(live, "_CORES", 2)


@pytest.mark.usefixtures("two_threads")
def test_all_threads_call_it() -> None:
    assert openmp.threads() == 2
    calls = np.zeros(1, np.int64)
    argument = np.array([calls.ctypes.data])
    openmp.run_on_all(count_calls, argument.ctypes.data)
    assert calls[0] == 2
    assert torch.get_num_threads() == 2


def test_as_many_as_torch_is_told() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert openmp.threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads", "no_helper")
def test_rows_are_copied_by_torchs_threads() -> None:
    random = np.random.default_rng(0)
    tables = [random.integers(0, 256, (rows, 64), np.uint8) for rows in (30_000, 10, 20_000)]
    firsts = np.array([0, 30_000, 30_010, 50_010])
    addresses = np.array([[table.ctypes.data for table in tables]], np.int64)
    ids = np.flatnonzero(random.random(50_010) < 0.7)
    copies = np.zeros((len(ids), 64), np.uint8)
    part = _GatherPart(addresses, firsts, ids, [copies])
    assert part.bytes > live._HELP_BYTES
    Gather([part]).finish()
    assert np.array_equal(copies, np.concatenate(tables)[ids])


def test_a_forked_process_has_no_threads_of_torchs() -> None:
    """Loops that were handed to them would never end."""
    code = """if True:
        import os, torch
        from holdfast.kernels import openmp
        torch.set_num_threads(2)
        torch.ones(300, 300) @ torch.ones(300, 300)
        assert openmp.threads() == 2
        child = os.fork()
        if child == 0:
            os._exit(openmp.threads())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env={**os.environ})


def test_without_a_runtime_there_is_one_thread() -> None:
    code = "from holdfast.kernels import openmp; assert openmp.threads() == 1"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_environment_can_turn_it_off() -> None:
    code = """if True:
        import torch
        from holdfast.kernels import openmp
        torch.set_num_threads(2)
        assert openmp.threads() == 1
    """
    environment = {**os.environ, "HOLDFAST_OPENMP": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("enabled", [True, False])
def test_both_ways_copy_the_same_rows(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "ENABLED", enabled)
    monkeypatch.setattr(live, "_CORES", 2)
    woken: list[bool] = []
    helper = live._helper

    def noted() -> object:
        woken.append(True)
        return helper()

    monkeypatch.setattr(live, "_helper", noted)
    table = np.random.default_rng(0).integers(0, 256, (40_000, 64), np.uint8)
    ids = np.arange(0, 40_000, 2)
    copies = np.zeros((len(ids), 64), np.uint8)
    part = _GatherPart(np.array([[table.ctypes.data]]), np.array([0, 40_000]), ids, [copies])
    Gather([part]).finish()
    assert np.array_equal(copies, table[ids])
    assert bool(woken) != enabled
