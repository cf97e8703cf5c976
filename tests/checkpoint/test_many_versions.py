"""Manifests with thousands of versions and files: what is done for each is not done for each pair of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import holdfast as hf
from holdfast.checkpoint.format.chunk import OPEN, checksum
from holdfast.checkpoint.format.manifest import (
    DenseEntry,
    Era,
    FileChange,
    FileEntry,
    Manifest,
    Version,
    encode,
    name_of,
    read_newest,
)
from holdfast.checkpoint.saving import history
from holdfast.checkpoint.saving.catalog import Catalog
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.tools.inspect import collect_garbage, list_versions
from holdfast.checkpoint.tools.verify import bytes_to_verify, verify_versions
from tests.checkpoint.lineage import QuickFiles

SMALL, LARGE = 200, 1200
GROUPS = [{"fields": [["weight", "F32", 4]], "tables": [[f"t{n}", 10] for n in range(8)]}]


def entry(number: int, kind: Any = "increment") -> FileEntry:
    name = f"chunks/{number:08}-0000-{kind}-{number:012x}.safetensors"
    return FileEntry(name, 200, 100, "0" * 32, kind, 0, number, number, OPEN, 3)


def version(number: int, era: int) -> Version:
    dense = DenseEntry(f"dense/{number:08}-{number:012x}.safetensors", 1, checksum(b"x"))
    return Version(number, era, number, 0.0, number == era, 3, 200, dense)


def one_era(count: int) -> Manifest:
    """Every version needs all files before it."""
    files = [entry(1, "baseline"), *map(entry, range(2, count + 1))]
    versions = [version(number, 1) for number in range(1, count + 1)]
    return Manifest(1, 2, 0.0, [Era(1, "Incremental", GROUPS, files)], versions, last_version=count)


def many_eras(count: int) -> Manifest:
    """Every version has an era of its own, and every file was moved since."""
    numbers = range(1, count + 1)
    eras = [Era(number, "Full", GROUPS, [entry(number, "baseline")]) for number in numbers]
    retired = [(f"chunks/{n:08}-0000-live-{n:012x}.safetensors", 0.0) for n in range(count + 1, 2 * count)]
    versions = [version(number, number) for number in numbers]
    return Manifest(1, 2, 0.0, eras, versions, retired, last_version=count)


def lines_run(work: Callable[[], object]) -> int:
    """How many lines of this package run, rounds of loops included: the same each time."""
    count = 0
    package = str(Path(hf.__file__).parent)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "call" and not frame.f_code.co_filename.startswith(package):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def delete_half(store: Store) -> object:
    catalog = Catalog(store, hf.Policy())
    catalog.delete_versions([v.version for v in catalog.manifest.versions[::2]])
    return catalog.manifest


LOOKS: dict[str, Callable[[Store], object]] = {
    "ls": list_versions,
    "bytes to verify": bytes_to_verify,
    "verify": verify_versions,
    "gc": lambda store: collect_garbage(store, hf.Policy(keep=3), dry_run=True),
    "publish": delete_half,
}


@pytest.fixture(params=[one_era, many_eras])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[LocalStore]]:
    found = []
    for count in (SMALL, LARGE):
        store = LocalStore(tmp_path / str(count), create=True, files=QuickFiles())
        manifest = request.param(count)
        store.put(name_of(manifest.number), [encode(manifest)])
        found.append(store)
    yield found
    for store in found:
        store.close()


@pytest.mark.parametrize("look", LOOKS)
def test_the_work_grows_as_the_manifest_does(stores: list[LocalStore], look: str) -> None:
    for store in stores if look == "gc" else ():
        for name in read_newest(store).file_names():
            (Path(store.url) / name).parent.mkdir(exist_ok=True)
            (Path(store.url) / name).touch()
    small, large = (lines_run(lambda: LOOKS[look](store)) for store in stores)  # noqa: B023
    assert small > SMALL  # it was counted
    # With pairs of them it would be the square of that.
    assert large < 1.3 * (LARGE / SMALL) * small


@pytest.mark.parametrize("look", ["commit", "flag"])
def test_the_work_of_a_publication_does_not_grow(
    stores: list[LocalStore], look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted where Holdfast's lines run: lists are copied, but not gone through."""
    monkeypatch.setattr(history, "RECENT_BYTES", 1 << 20)  # the cost of merging is measured by the bench
    counts = []
    for store in stores:
        catalog = Catalog(store, hf.Policy())
        catalog.take_over()
        with monkeypatch.context() as once:
            once.setattr(history, "RECENT_BYTES", 100)
            publish(catalog, "commit")
        assert len(catalog.manifest.segments) == 1
        counts.append(lines_run(lambda: publish(catalog, look)))  # noqa: B023
    small, large = counts
    assert small > 50  # it was counted
    assert large < 1.2 * small


def publish(catalog: Catalog, what: str) -> None:
    newest = catalog.newest
    assert newest is not None
    if what == "flag":
        catalog.flag_versions({newest.version: "why"})
    else:
        number = catalog.next_version()
        change = FileChange((entry(number),))
        catalog.commit_version(version(number, newest.era), [], "x", [change])
