"""A crash after any operation on the disk: what is listed is right, what was promised is listed (hole 27)."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import holdfast as hf
from holdfast.checkpoint import checkpointer as api
from holdfast.checkpoint.layout import rounds
from holdfast.checkpoint.saving import history
from holdfast.checkpoint.store.base import PARTIAL_PREFIX
from holdfast.checkpoint.store.local import LocalStore
from holdfast.testing.crash import CrashState, Journal, RecordingFiles, crash_states, materialise
from tests.checkpoint.lineage import (
    QUANTIZED,
    STRATEGIES,
    WITH_QUANTIZED,
    Lineage,
    QuickFiles,
    check_no_leftovers,
    check_store,
)

KEEP, KEEP_EVERY = 3, 5
STATES_IN_SUITE = 40


def retained(versions: list[int]) -> list[int]:
    """What the policy of these tests keeps, said in another way than the catalog does."""
    return [v for i, v in enumerate(versions) if i >= len(versions) - KEEP or v % KEEP_EVERY == 0]


def saved(journal: Journal, before: list[int], version: int) -> list[int]:
    """Note what was promised: the version is there, and those that retention took are not missed."""
    kept = retained([*before, version])
    journal.mark(f"saved {version}")
    return kept


def work(root: Path, policy: hf.Policy, journal: Journal) -> None:
    """Three processes: saves, rounds, a new baseline, versions that retention or the user deletes."""
    policy = replace(policy, keep=KEEP, keep_every=KEEP_EVERY)
    versions: list[int] = []
    for process in range(3):
        with LocalStore(root, create=True, files=RecordingFiles(journal)) as store, store.lock_writer():
            line = Lineage(store, policy)
            for _ in range(4 if process else 5):
                if line.step == 6:
                    line.writer.begin_anew()
                line.train()
                number = line.writer.catalog.next_version()
                for gone in set(versions) - set(retained([*versions, number])):
                    journal.mark(f"deleting {gone}")
                assert line.save() == number
                line.writer.wait()
                versions = saved(journal, versions, number)
            if process == 1:
                journal.mark(f"deleting {versions[0]}")
                line.writer.catalog.delete_versions(versions[:1])
                versions = versions[1:]
            if process == 0:  # what a writer leaves that dies before it publishes
                store.put("chunks/00000099-0000-increment-000000000000.safetensors", [b"orphan"])
            line.writer.close()
    assert len(versions) == KEEP + 1


def states(journal: Journal, every: bool, seed: int, in_suite: int = STATES_IN_SUITE) -> Iterator[CrashState]:
    """All of them, or some from everywhere."""
    found = crash_states(journal, mixed=3 if every else 1, seed=seed)
    if every:
        yield from found
        return
    listed = list(found)
    chosen = sorted(random.Random(seed).sample(range(len(listed) - 1), in_suite))
    yield from (listed[i] for i in (*chosen, -1))


def promised(marks: tuple[str, ...]) -> set[int]:
    saved = {int(m.split()[1]) for m in marks if m.startswith("saved ")}
    return saved - {int(m.split()[1]) for m in marks if m.startswith("deleting ")}


def check(state: CrashState, folder: Path, cache: Path, policy: hf.Policy) -> None:
    materialise(state, folder, cache)
    on_grids = policy.quantize is not None
    with LocalStore(folder, create=True, files=QuickFiles()) as store:
        listed = {v.version for v in check_store(store, on_grids=on_grids).versions}
        missing = promised(state.marks) - listed
        assert not missing, f"after {state.prefix} operations ({state.kind}), versions {missing} are gone"
        with store.lock_writer():
            line = Lineage(store, policy)
            line.writer.catalog.take_over()
            check_no_leftovers(line)
            for _ in range(2):
                line.train()
                number = line.save()
                assert number not in listed
                listed.add(number)
                line.writer.wait()
            assert {v.version for v in check_store(store, on_grids=on_grids).versions} == listed
            check_no_leftovers(line)
            line.writer.close()
    assert not list(folder.rglob(f"{PARTIAL_PREFIX}*"))


def run(
    tmp_path: Path, policy: hf.Policy, every: bool, seed: int, in_suite: int = STATES_IN_SUITE
) -> Journal:
    journal = Journal()
    work(tmp_path / "store", policy, journal)
    kinds: Counter[str] = Counter()
    for number, state in enumerate(states(journal, every, seed, in_suite)):
        folder = tmp_path / str(number)
        check(state, folder, tmp_path / "cache", policy)
        shutil.rmtree(folder)
        kinds[state.kind] += 1
    assert set(kinds) >= {"lost", "kept", "mixed"}, "crashes of all kinds were tried"
    assert state.prefix == len(journal.operations)
    return journal


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_crash_at_some_operations(tmp_path: Path, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    run(tmp_path, hf.Policy(strategy=strategy), every=False, seed=STRATEGIES.index(strategy))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_crash_with_segments(tmp_path: Path, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the copies of a segment, before and after the manifest that names it, while it is merged."""
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    monkeypatch.setattr(history, "RECENT_BYTES", 1000)
    monkeypatch.setattr(history, "FANOUT", 2)
    journal = run(tmp_path, hf.Policy(strategy=strategy), every=False, seed=20 + STRATEGIES.index(strategy))
    kinds = {o.kind for o in journal.operations if "segments/" in o.path + o.target}
    assert {"link", "unlink"} <= kinds, "segments were written and deleted"


@pytest.mark.parametrize("strategy", WITH_QUANTIZED, ids=str)
def test_a_crash_with_quantized_rows(tmp_path: Path, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    policy = hf.Policy(strategy=strategy, **QUANTIZED)
    run(tmp_path, policy, every=False, seed=10 + STRATEGIES.index(strategy), in_suite=12)


@pytest.mark.soak
@pytest.mark.parametrize("quantized", [{}, QUANTIZED], ids=["raw", "quantized"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_crash_at_every_operation(
    tmp_path: Path, strategy: Any, seed: int, quantized: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "SMALLEST_PIECE_BYTES", 30)
    if seed:
        monkeypatch.setattr(history, "RECENT_BYTES", 1000 * seed)
        monkeypatch.setattr(history, "FANOUT", 2)
    run(tmp_path, hf.Policy(strategy=strategy, **quantized), every=True, seed=seed)


def make() -> tuple[nn.Embedding, dict[str, Any]]:
    torch.manual_seed(0)
    table = nn.Embedding(30, 2, sparse=True)
    return table, {"m": table, "o": torch.optim.SGD(table.parameters(), lr=0.5)}


def train(table: nn.Embedding, objects: dict[str, Any], step: int) -> None:
    objects["o"].zero_grad()
    table(torch.tensor([step % 3, step % 7, 10 + step])).square().sum().backward()
    objects["o"].step()


def test_a_crash_of_a_checkpointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a model, an optimizer and the public names."""
    journal, truth = Journal(), {}
    policy = hf.Policy(strategy=hf.Chunked(round_versions=2, dead_fraction=0.0, reset="never"), keep=3)
    with monkeypatch.context() as patch:
        patch.setattr(
            api, "open_store", lambda path, **_: LocalStore(path, create=True, files=RecordingFiles(journal))
        )
        for _ in range(2):
            table, objects = make()
            with hf.Checkpointer(tmp_path / "store", objects, policy) as ckpt:
                start = ckpt.restore()
                for step in range(start, start + 4):
                    train(table, objects, step)
                    version = ckpt.save(step)
                    ckpt.wait()
                    truth[step] = table.weight.tolist()
                    journal.mark(f"saved {version}")
    checked: set[int] = set()
    for number, state in enumerate(states(journal, every=False, seed=1)):
        materialise(state, tmp_path / str(number), tmp_path / "cache")
        table, objects = make()
        with hf.Checkpointer(tmp_path / str(number), objects, policy) as ckpt:
            start = ckpt.restore()
            newest = max((int(m.split()[1]) for m in state.marks), default=0)
            assert start >= newest  # version n is of step n - 1
            if start:
                assert table.weight.tolist() == truth[start - 1]
                checked.add(start)
            if start < 8:
                train(table, objects, start)
                ckpt.save(start)
                ckpt.wait()
                assert table.weight.tolist() == truth[start]
        shutil.rmtree(tmp_path / str(number))
    assert len(checked) == 8, "crashes at every version were tried"
