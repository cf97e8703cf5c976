"""The configuration of a training run: a YAML file with ``--set`` overrides, validated before training.

Each section is a small frozen value. A key that does not exist or a value of the wrong type is refused
with its full name and, for a key, the nearest one that does exist.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta, Struct

from holdfast.data.criteo_shape import Cardinalities
from holdfast.errors import ConfigError
from holdfast.models.presets import PRESETS, Architecture, Sizes
from holdfast.options import (
    ErasureCode,
    Kill,
    NoProtection,
    PartialRecovery,
    Protection,
    Ray,
    Replication,
    parse_protection,
)
from holdfast.recipe import Recipe, plain
from holdfast.redaction import redacted
from holdfast.training import yaml_text
from holdfast.training.saving import CheckpointConfig
from holdfast.training.yaml_text import YamlError

_MOST = 2**63 - 1
_LONGEST_SHOWN = 100
Positive = Annotated[int, Meta(ge=1, le=_MOST)]
NotNegative = Annotated[int, Meta(ge=0, le=_MOST)]
Layers = Annotated[tuple[Positive, ...], Meta(min_length=1)]
Preset = Literal["criteo-kaggle", "criteo-terabyte"]

DEFAULT_RATES = {"sgd": 0.2, "momentum": 0.05, "adagrad": 0.01, "rowwise-adagrad": 0.02, "adam": 0.001}


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class OwnConfig(_Section, frozen=True, kw_only=True):
    """A function of the user, by import path, with its arguments."""

    build: str
    """The import path of a function or class, "package.module:name"."""
    arguments: dict[str, Any] = {}

    @property
    def recipe(self) -> Recipe:
        """The function and its arguments."""
        return Recipe(self.build, self.arguments)


class OwnModelConfig(OwnConfig, frozen=True, kw_only=True, tag_field="kind", tag="own"):
    """A model of the user's: ``build(reader, **arguments)`` (see ``holdfast.training.networks``)."""


class OwnDataConfig(OwnConfig, frozen=True, kw_only=True, tag_field="source", tag="own"):
    """A reader of the user's: ``build(part, batch_size, **arguments)`` for the parts "train" and "test".

    ``arguments`` may give ``part`` and ``batch_size``, too: then those count.
    """

    test: OwnConfig | None = None
    """The function that creates the test reader, if it is a different one."""


class ModelConfig(_Section, frozen=True, kw_only=True, tag_field="kind", tag="preset"):
    """The model. ``dim``, ``bottom`` and ``top`` override the preset's."""

    architecture: Architecture = "dlrm"
    preset: Preset = "criteo-kaggle"
    dim: Positive | None = None
    bottom: Layers | None = None
    top: Layers | None = None

    def sizes(self) -> Sizes:
        """The preset's sizes with this configuration's overrides."""
        preset = PRESETS[self.preset]
        sizes = Sizes(self.dim or preset.dim, self.bottom or preset.bottom, self.top or preset.top)
        if self.architecture == "dlrm" and sizes.bottom[-1] != sizes.dim:
            raise ConfigError(
                f"model.bottom ends in {sizes.bottom[-1]} but model.dim is {sizes.dim}: "
                "in DLRM they must be equal"
            )
        if sizes.top[-1] != 1:
            raise ConfigError(f"model.top ends in {sizes.top[-1]}: expected 1, the logit")
        return sizes


class SyntheticConfig(_Section, frozen=True, kw_only=True, tag_field="source", tag="synthetic"):
    """Synthetic click data (see ``holdfast.data.synthetic``)."""

    samples: Positive = 1_000_000
    test_samples: Positive = 100_000
    cardinalities: Cardinalities = "kaggle"
    max_rows: Positive = 100_000
    zipf_exponent: Annotated[float, Meta(ge=0)] = 1.05
    noise: Annotated[float, Meta(gt=0)] = 1.0
    ids_per_sample: Positive | tuple[Positive, ...] = 1


class CriteoConfig(_Section, frozen=True, kw_only=True, tag_field="source", tag="criteo"):
    """Criteo's TSV files, local or in a bucket (see ``holdfast.data.criteo``)."""

    paths: Annotated[tuple[str, ...], Meta(min_length=1)]
    cardinalities: Cardinalities = "kaggle"
    max_rows: Positive = 10_000_000
    test_fraction: Annotated[float, Meta(gt=0, lt=1)] = 1 / 7
    test_files: NotNegative = 0
    on_bad_line: Literal["raise", "skip"] = "raise"


class OptimizerConfig(_Section, frozen=True, kw_only=True):
    """One optimizer for tables and network alike; ``momentum`` is read by "momentum" alone.

    ``lr`` unset is a rate that suits the optimizer on click data: see ``DEFAULT_RATES``.
    """

    name: Literal["sgd", "momentum", "adagrad", "rowwise-adagrad", "adam"] = "adagrad"
    lr: Annotated[float, Meta(gt=0, le=1e37)] | None = None
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    eps: Annotated[float, Meta(ge=1e-37, le=1e37)] = 1e-8
    """Of both, what 32 bits hold."""

    @property
    def rate(self) -> float:
        """The learning rate: ``lr``, or the optimizer's default."""
        return self.lr if self.lr is not None else DEFAULT_RATES[self.name]


class JobConfig(_Section, frozen=True, kw_only=True):
    """Training in many processes (see ``holdfast.Job``); without servers, in this one."""

    servers: Annotated[int, Meta(ge=0, le=1024)] = 0
    workers: Annotated[int, Meta(ge=1, le=1024)] = 2
    protection: Protection = NoProtection()
    """What keeps a job going when servers die: "erasure-code", "replication", "partial" or "none", with the
    arguments of ``holdfast.ErasureCode``, ``Replication``, ``PartialRecovery`` and ``NoProtection``; or in
    short "2+1", "replicate", "partial", "none"."""
    staleness: NotNegative = 1
    """How many of a worker's own updates may be missing from the rows that it reads."""
    engine: Literal["local"] | Ray = "local"
    """Where processes run: on this machine, or on those of a Ray cluster ("ray", or a section with ``kind:
    ray`` and the arguments of ``holdfast.Ray``)."""
    bind: str = "ipc"
    """Where processes listen: Unix sockets in a folder that only this user can enter, or a TCP address
    without a port (each takes one that is free), on which every connection is encrypted."""
    kill: tuple[str, ...] = ()
    """Processes to kill, for demonstrations: "server:2@step:300"."""
    silent_seconds: Annotated[float, Meta(ge=0.5)] = 10.0
    """Heartbeat timeout: a process that is silent for this long is considered dead. On a Ray cluster,
    ``engine.silent_seconds`` counts instead."""
    server_processors: tuple[NotNegative, ...] = ()
    """Processors of this machine that servers have for themselves; workers have the others. None: all share
    all."""
    server_threads: Annotated[int, Meta(ge=1, le=64)] = 1
    """How many threads of a server read and update rows."""
    compare_recovered: bool = False
    """Whether rows that were recovered are compared with what the dead server's memory held: servers keep
    their rows in files of the run's folder then, as long as the job runs."""

    @property
    def kills(self) -> tuple[Kill, ...]:
        """The parsed ``kill`` entries."""
        return tuple(Kill.parse(text) for text in self.kill)

    def check(self) -> None:
        """Raise ConfigError for an invalid combination of keys of a job."""
        if self.engine != "local":
            for key in ("server_processors", "compare_recovered"):
                if getattr(self, key):
                    raise ConfigError(
                        f"job.{key} works on one machine only: leave it out with job.engine ray"
                    )
            if self.bind != "ipc":
                raise ConfigError(
                    "job.bind is for one machine: with job.engine ray, each listens on its own address"
                )
        for kill in self.kills:
            kill.check(self.servers, self.workers)
        code = self.code
        if isinstance(self.protection, PartialRecovery) and self.servers == 1:
            raise ConfigError(
                "job.protection is partial, but of one server nothing would be left: set job.servers to 2 or "
                "more"
            )
        if code is not None and self.servers < code.k + code.r:
            raise ConfigError(
                f"job.servers is {self.servers}, but a code of {code.k} + {code.r} needs {code.k + code.r} "
                "servers or more: add servers, or choose a smaller k or r in job.protection"
            )

    @property
    def code(self) -> ErasureCode | None:
        """The protection as an erasure code; None if it is not one."""
        protection = self.protection
        if isinstance(protection, NoProtection | PartialRecovery):
            return None
        return protection.as_code() if isinstance(protection, Replication) else protection


class Config(_Section, frozen=True, kw_only=True):
    """The configuration of a run."""

    model: ModelConfig | OwnModelConfig = ModelConfig()
    data: SyntheticConfig | CriteoConfig | OwnDataConfig = SyntheticConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    job: JobConfig = JobConfig()
    checkpoint: CheckpointConfig | None = None
    """Checkpoints of a job."""
    batch_size: Positive = 2048
    epochs: Positive = 1
    max_steps: Positive | None = None
    test_every: NotNegative = 0
    """Steps between tests, rounded up to a report; 0: at the end only."""
    report_every: Positive = 20
    """Steps between progress events."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads that PyTorch computes with; 0: as many as it finds cores, and one in each worker of a job."""
    seed: NotNegative = 0
    run: str | None = None
    """The run's folder; by default a new one under ``runs/``."""
    tensorboard: bool = False
    plot: bool = False
    """Whether a picture of the throughput over time is drawn at the end, ``throughput.png``."""


def load(
    path: Path | None = None,
    overrides: Iterable[str] = (),
    *,
    lacks_servers: bool = False,
    **top_level: Any,
) -> Config:
    """Read a configuration file and put ``key=value`` overrides, then top-level values, on top.

    Values of overrides are read as YAML: ``optimizer.lr=0.1``, ``model.top=[64, 1]``, ``run=null``.
    Top-level values that are None are left as they were. Without ``job.servers``, other keys of ``job`` are
    refused, unless ``lacks_servers`` says that their number is still to be decided.
    """
    values = {} if path is None else _read(path)
    named: set[str] = set()
    for override in overrides:
        named |= _override(values, override)
    values.update({key: value for key, value in top_level.items() if value is not None})
    for section, (tag_field, default) in _TAGS.items():
        if section in values:
            values[section] = inner = _as_section(section, values[section])
            if isinstance(inner, dict):
                inner.setdefault(tag_field, "own" if "build" in inner else default)
    job = values.get("job")
    if isinstance(job, dict):
        for key in ("protection", "engine"):
            if isinstance(job.get(key), str):
                job[key] = _as_section(key, job[key])
    _check_keys(Config, values, "")
    try:
        config = msgspec.convert(values, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {_readable(str(error))}") from None
    if isinstance(config.model, ModelConfig):
        config.model.sizes()
    if config.job.servers:
        config.job.check()
    elif not lacks_servers:
        _check_alone(config.job, job or {}, named)
    protection, checkpoint = config.job.protection, config.checkpoint
    if checkpoint is not None and isinstance(protection, PartialRecovery) and protection.prioritize:
        # Made to see that they go together; the job makes it again when it is planned.
        msgspec.structs.replace(checkpoint, prioritize=protection.prioritize)
    return config


_FLAGS = {"workers": "--workers", "protection": "--protect", "kill": "--kill"}


def _check_alone(job: JobConfig, written: dict[str, Any], named: set[str]) -> None:
    """Refuse what nothing would use: keys of jobs in a run of one process.

    A run's own ``config.yaml`` says that there are 0 servers, and has all other keys with their defaults.
    """
    usual = JobConfig()
    given = named if "servers" in written else named | written.keys()
    useless = [
        key
        for key in job.__struct_fields__
        if key != "servers" and (key in given or getattr(job, key) != getattr(usual, key))
    ]
    if not useless:
        return
    names = [f"job.{key} ({_FLAGS[key]})" if key in _FLAGS else f"job.{key}" for key in useless]
    are, them = ("is", "it") if len(useless) == 1 else ("are", "them")
    raise ConfigError(
        f"{' and '.join(names)} {are} set but job.servers is 0: training in one process does not use {them}; "
        f"set job.servers (--servers) to train in several, or leave {them} out"
    )


# Sections of several kinds: the key that says which, and what it is if nothing says it.
_TAGS = {"model": ("kind", "preset"), "data": ("source", "synthetic")}


def _as_section(name: str, value: Any) -> Any:
    """The value; an import path or "2+1" in place of a section stands for one that has nothing else."""
    if name == "protection" and isinstance(value, str):
        return msgspec.to_builtins(parse_protection(value))
    if name == "engine" and value == "ray":
        return msgspec.to_builtins(Ray())
    return {"build": value} if name in _TAGS and isinstance(value, str) else value


def to_yaml(config: Config) -> str:
    """The whole configuration, defaults included, as ``load`` reads it; without passwords."""
    return yaml.safe_dump(redacted(msgspec.to_builtins(config)), sort_keys=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml_text.read(path)
    except OSError as error:
        raise ConfigError(f"configuration {path} cannot be read: {error.strerror}") from None
    except (YamlError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path} is not YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"configuration {path} holds a {type(values).__name__}: expected keys and values")
    return values


def _override(values: dict[str, Any], override: str) -> set[str]:
    """Put it on top; the keys of the section ``job`` that it names."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override}: expected key=value, such as optimizer.lr=0.1")
    try:
        value = yaml_text.parse(text)
    except YamlError as error:
        shown = override if len(override) <= _LONGEST_SHOWN else f"{override[:_LONGEST_SHOWN]}…"
        raise ConfigError(f"--set {shown}: this is not a YAML value: {error}") from None
    *sections, last = key.split(".")
    for section in sections:
        inner = values[section] = _as_section(section, values.get(section, {}))
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: {section} is {inner!r}, not a section with keys")
        values = inner
    if (key, value) == ("job.engine", "ray") and isinstance(values.get(last), dict):
        return {"engine"}  # the file has its keys
    values[last] = value
    if key == "job":
        return set(value) if isinstance(value, dict) else set()
    return {key.split(".")[1]} if key.startswith("job.") else set()


def _check_keys(section: type[Struct], values: dict[str, Any], prefix: str) -> None:
    hints = get_type_hints(section)
    for key, value in values.items():
        if key == section.__struct_config__.tag_field:
            continue
        if key not in section.__struct_fields__:
            raise ConfigError(f"configuration: there is no key {prefix}{key}{_nearest(key, section, prefix)}")
        if isinstance(value, float) and not math.isfinite(value):  # the types let them through
            raise ConfigError(f"configuration: {prefix}{key} is {value}: expected a finite number")
        inner = _section_of(hints[key], value, f"{prefix}{key}")
        if key == "arguments":
            plain(value, f"configuration: {prefix}{key}")
        if inner is not None:
            _check_keys(inner, value, f"{prefix}{key}.")


def _section_of(hint: Any, value: Any, name: str) -> type[Struct] | None:
    """The section type that this value is for; None if the key holds no section."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    sections = [k for k in kinds if isinstance(k, type) and issubclass(k, Struct)]
    if not sections or not isinstance(value, dict):
        return None
    for kind in sections:
        tag_field = kind.__struct_config__.tag_field
        if tag_field is None or value.get(tag_field) == kind.__struct_config__.tag:
            return kind
    tags = " or ".join(repr(k.__struct_config__.tag) for k in sections)
    raise ConfigError(f"configuration: {name}.{tag_field} is {value.get(tag_field)!r}: expected {tags}")


def _nearest(key: str, section: type[Struct], prefix: str) -> str:
    # A key of this name in another kind of this section would be no help.
    everywhere = {name.rsplit(".", 1)[-1]: name for name in _all_keys() if name != f"{prefix}{key}"}
    if key in everywhere and not prefix:
        return f"; did you mean {everywhere[key]}?"
    here = difflib.get_close_matches(str(key), section.__struct_fields__, n=1, cutoff=0.5)
    if here:
        return f"; did you mean {prefix}{here[0]}?"
    elsewhere = difflib.get_close_matches(str(key), everywhere, n=1, cutoff=0.7)
    if elsewhere:
        return f"; did you mean {everywhere[elsewhere[0]]}?"
    return f"; {prefix.rstrip('.') or 'the top level'} has {', '.join(section.__struct_fields__)}"


def _all_keys() -> Iterable[str]:
    sections = {
        OwnModelConfig: "model", ModelConfig: "model", CriteoConfig: "data", SyntheticConfig: "data",
        OptimizerConfig: "optimizer", JobConfig: "job", CheckpointConfig: "checkpoint",
    }  # fmt: skip
    for section, prefix in sections.items():
        yield from (f"{prefix}.{key}" for key in section.__struct_fields__)
    yield from Config.__struct_fields__


def _readable(message: str) -> str:
    """msgspec's message with the key's name in front: "optimizer.lr: Expected `float`, got `str`"."""
    text, at, where = message.rpartition(" - at `$.")
    if not at:
        return message
    return f"{where.rstrip('`').replace('[...]', '')}: {text[0].lower()}{text[1:]}"
