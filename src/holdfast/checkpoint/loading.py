"""``load`` and ``saved_shapes``: versions for evaluation, serving and fine-tuning.

    model = make_model()
    loaded = hf.load("run1", {"model": model})       # the newest intact version, without its optimizer
    print(loaded.version, loaded.step)

Nothing is written and no lock is taken, so a trainer may save to the store, and delete versions, meanwhile.
Which part of a version the objects need is found out by ``torch/chosen.py``; ``reading/version.py`` reads the
rows, as it does for ``Checkpointer.restore``, and drops the others.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.checkpoint.format.dense import Array, TablePlace, decode_tree, map_tree
from holdfast.checkpoint.format.manifest import Manifest, Version, raise_if_unreachable, read_newest
from holdfast.checkpoint.format.records import WEIGHT, Group
from holdfast.checkpoint.progress_bar import byte_progress
from holdfast.checkpoint.reading.coverage import check_places
from holdfast.checkpoint.reading.loader import RowLoader
from holdfast.checkpoint.reading.version import (
    VersionReader,
    by_preference,
    find_version,
    open_version,
    read_shapes,
    where_dense,
)
from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.torch.chosen import choose
from holdfast.checkpoint.torch.fit import say_grown, taken_for_damage
from holdfast.checkpoint.torch.names import bare_names
from holdfast.checkpoint.torch.state import TrainingObjects
from holdfast.checkpoint.torch.values import TORCH_DTYPES
from holdfast.errors import (
    ConfigError,
    CorruptCheckpoint,
    NoSuchVersion,
    ObjectMissing,
    StoreError,
    UnsupportedState,
    threads_explained,
)

log = logging.getLogger("holdfast.checkpoint")

_TRIES = 100  # a writer that deletes what is being read a hundred times in a row keeps no version


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """The version that ``load`` has loaded.

    Attributes:
        version: its number.
        step: the last step that it contains. A run that goes on from it begins with the next one.
        metadata: what was saved with it.
        unverified: why it may lack changes of rows; normally empty.
        grown: tables that have more rows in the model than in the version: the number of rows there and here.
            The new rows are as the model has initialized them.
        bytes_read: from the store, without manifests and headers.
    """

    version: int
    step: int
    metadata: Mapping[str, Any]
    unverified: str
    grown: Mapping[str, tuple[int, int]]
    bytes_read: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """The shape and type of a tensor in a version."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SavedShapes:
    """What ``saved_shapes`` has found.

    Attributes:
        version: its number.
        step: the last step that it contains.
        tables: the weights of the tables, by name: that of the object, a dot, and the key in its
            ``state_dict`` ("model.users.weight"). Tied weights are listed under each of their keys.
        tensors: all other tensors, those of optimizers included, by names of the same form.
    """

    version: int
    step: int
    tables: Mapping[str, SavedTensor]
    tensors: Mapping[str, SavedTensor]


def load(
    path: str | os.PathLike[str],
    objects: Mapping[str, Any],
    version: int | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    show_progress: bool | None = None,
) -> LoadedVersion:
    """Load a saved version into some of the objects of a run, for evaluation, serving or fine-tuning.

    Takes no lock and writes nothing: a trainer may be saving to the store. Random states are left alone.

    Args:
        path: the store: a folder or a URL.
        objects: those to load, by the names that they were saved under; a model without its optimizer, for
            example. Give an optimizer together with its model.
        version: which one. Defaults to the newest that can be read completely; the log names every newer one
            that cannot, and versions that a trainer deletes meanwhile are replaced by the newest.
        options: store options, such as S3's endpoint and keys.
        show_progress: show a progress bar for long operations; by default on a terminal.

    Load before you make a Checkpointer of the same objects: an open one would not notice at once.

    Names of wrappers do not matter: what was saved from a model in ``DistributedDataParallel`` or
    ``torch.compile`` is loaded into the bare model, and the other way round. A table may have more rows in
    the model than in the version: the new rows stay as they are.

    Raises:
        ModelMismatch: the version is of other objects. Nothing has been changed.
        UnsupportedState: the objects are sharded over ranks. Nothing has been changed.
        NoSuchVersion: there is no such version, or a trainer has deleted it.
        CorruptCheckpoint: the version is damaged, or no version can be read.
        StoreError: there is no store, or it does not answer.

    After an error while rows are being read, the objects hold a part of them: load another version.
    """
    if not objects:
        raise ConfigError('there is nothing to load: name the objects, as in {"model": model}')
    with threads_explained(), open_store(path, create=False, options=options or {}) as store:
        loading = _Loading(store, objects, show_progress)
        return loading.newest() if version is None else loading.one(version)


def saved_shapes(
    path: str | os.PathLike[str], version: int | None = None, *, options: Mapping[str, Any] | None = None
) -> SavedShapes:
    """The names, shapes and types of a version's tables and other tensors; the newest version by default.

    Reads only manifests and one header, and takes no lock: use it to build a model of the right size before
    you ``load`` it. Names are those of the bare model, without the names of wrappers such as
    ``DistributedDataParallel``.

    Raises:
        NoSuchVersion: there is no such version.
        CorruptCheckpoint: the version is damaged.
        StoreError: there is no store, or it does not answer.
    """
    with open_store(path, create=False, options=options or {}) as store:
        found, groups, tree = read_shapes(store, version)
        where = where_dense(store, found)
        with taken_for_damage(where):
            check_places(tree, groups, where)
            return _shapes(found, groups, tree)


class _Loading:
    """Loads versions of a store into some objects, until one is whole."""

    def __init__(self, store: Store, objects: Mapping[str, Any], show_progress: bool | None) -> None:
        self._store = store
        self._given = tuple(objects)
        self._objects = objects
        self._show_progress = show_progress
        self._overwritten: dict[str, int] = {}

    def one(self, number: int) -> LoadedVersion:
        """Load this version."""
        for _ in range(_TRIES):
            manifest = read_newest(self._store)
            try:
                return self._load(find_version(manifest, number, self._store.url), manifest)
            except ObjectMissing as error:
                # Its files have been replaced by others, or it has been deleted: a new manifest tells.
                missing = error
                if read_newest(self._store).number == manifest.number:
                    break
        raise CorruptCheckpoint(f"version {number} of {self._store.url} cannot be read: {missing}")

    def newest(self) -> LoadedVersion:
        """Load the newest version that is whole."""
        problems: dict[int, str] = {}
        for _ in range(_TRIES):
            complaints: list[str] = []
            manifest = read_newest(self._store, complaints)
            for complaint in complaints:
                log.warning("%s: an older manifest is used: %s", self._store.url, complaint)
            if not manifest.versions:
                raise NoSuchVersion(f"{self._store.url} has no versions")
            loaded = self._first_of(manifest, problems)
            if loaded is not None:
                return loaded
            if all(version.version in problems for version in manifest.versions):
                break
        raise CorruptCheckpoint(
            f"no version of {self._store.url} can be loaded: "
            + "; ".join(f"version {number}: {problem}" for number, problem in problems.items())
        )

    def _first_of(self, manifest: Manifest, problems: dict[int, str]) -> LoadedVersion | None:
        """Load the newest version of a manifest that is whole; None if a writer has deleted one meanwhile."""
        for candidate in by_preference(manifest.versions):
            if candidate.version in problems:
                continue
            try:
                return self._load(candidate, manifest)
            except (CorruptCheckpoint, NoSuchVersion, StoreError) as error:
                raise_if_unreachable(self._store, error)
                gone = isinstance(error, NoSuchVersion | ObjectMissing)
                if gone and read_newest(self._store).number != manifest.number:
                    return None
                log.warning("version %d cannot be loaded: %s", candidate.version, error)
                problems[candidate.version] = str(error)
        return None

    def _load(self, version: Version, manifest: Manifest) -> LoadedVersion:
        objects = TrainingObjects(self._objects)
        objects.overwritten = self._overwritten
        if objects.is_sharded:
            raise UnsupportedState(
                "other ranks have parts of these objects: load into whole ones and shard them afterwards, or "
                "use Checkpointer.restore() on every rank"
            )
        with open_version(self._store, version.version, manifest) as reader:
            where = where_dense(self._store, version)
            tree = decode_tree(reader.dense(), where)
            # Validate before overwriting anything.
            with taken_for_damage(where):
                check_places(tree, reader.groups, where)
                chosen = choose(tree, reader.groups, objects, self._given)
                objects.check_dense(chosen.tree)
            reader.keep_parts(chosen.parts)
            reader.check_complete()
            objects.prepare(chosen.live_parts)
            loader = RowLoader.of_parts(chosen.parts, lambda table: objects.fields(chosen.tables[table]))
            text = f"loading version {version.version}"
            with byte_progress(text, reader.total_bytes(), self._show_progress) as on_progress:
                reader.read_rows(loader, on_progress=on_progress)
            with taken_for_damage(where):
                objects.load_dense(chosen.tree, random_states=False)
            return _loaded(version, objects, reader)


def _loaded(version: Version, objects: TrainingObjects, reader: VersionReader) -> LoadedVersion:
    if version.unverified:
        log.warning("version %d is unverified: %s", version.version, version.unverified)
    say_grown(objects.grown, version.version)
    log.info("loaded version %d (step %d)", version.version, version.step)
    return LoadedVersion(
        version=version.version,
        step=version.step,
        metadata=version.metadata,
        unverified=version.unverified,
        grown=objects.grown,
        bytes_read=reader.bytes_read,
    )


def _shapes(version: Version, groups: Sequence[Group], tree: Any) -> SavedShapes:
    types = {(t.name, f.name): TORCH_DTYPES[f.dtype] for g in groups for t in g.tables for f in g.fields}
    tables: dict[str, SavedTensor] = {}
    tensors: dict[str, SavedTensor] = {}
    for name, state in tree["objects"].items():
        bare = bare_names(state) if name in tree["metadata"] else {}

        def leaf(value: Any, path: str, name: str = name, bare: Mapping[str, str] = bare) -> None:
            full = f"{name}.{bare.get(path, path)}"
            if isinstance(value, TablePlace):
                found = tables if path in bare and value.field == WEIGHT else tensors
                found[full] = SavedTensor(value.shape, types[value.table, value.field])
            elif isinstance(value, Array) and value.kind == "tensor":
                tensors[full] = SavedTensor(value.shape, TORCH_DTYPES[value.dtype])

        map_tree(state, leaf)
    return SavedShapes(version.version, version.step, tables, tensors)
