"""Small frozen option values, validated in their constructors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import force_setattr

from holdfast.errors import ConfigError


def _at_least(name: str, value: Any, least: float) -> None:
    """Raise ConfigError unless the value is None or a finite number that is at least ``least``."""
    if value is None:
        return
    if not isinstance(value, Real) or not math.isfinite(value):  # use None instead of infinity
        raise ConfigError(f"{name} is {value!r}: expected a finite number, at least {least:g}")
    if value < least:
        raise ConfigError(f"{name} is {value}: expected at least {least:g}")


class Full(Struct, frozen=True, tag_field="kind", tag="full", forbid_unknown_fields=True):
    """Write everything in every version."""


class Differential(Struct, frozen=True, tag_field="kind", tag="differential", forbid_unknown_fields=True):
    """Write all rows that changed since the last full version (Check-N-Run).

    Args:
        baseline: "one-shot" keeps the first full version forever; "intermittent" writes a new one when
            that is expected to cost fewer bytes than further increments.
        extra_writes: where ``keep`` deletes old versions, write a new full version ("intermittent") earlier,
            so that the store takes less space, if that adds at most this share to the bytes written. 0 is
            Check-N-Run's own rule.
    """

    baseline: Literal["one-shot", "intermittent"] = "intermittent"
    extra_writes: float = 0.2

    def __post_init__(self) -> None:
        _at_least("extra_writes", self.extra_writes, 0)
        if self.baseline not in ("one-shot", "intermittent"):
            raise ConfigError(f"baseline is {self.baseline!r}: expected 'one-shot' or 'intermittent'")


class Incremental(Struct, frozen=True, tag_field="kind", tag="incremental", forbid_unknown_fields=True):
    """Write only the rows that changed since the previous version: fewest bytes to write, most to read."""


class Chunked(Struct, frozen=True, tag_field="kind", tag="chunked", forbid_unknown_fields=True):
    """As ``Incremental``, but rearrange files in the background so that restores skip replaced rows.

    There are two layouts. "rounds" waits until enough rows of a file have been replaced: it rewrites about as
    many bytes as were saved, makes few files, and a restore reads few replaced rows. "2d" is IncrCP's
    two-dimensional list: after each version it compares the new rows with all current ones. With
    ``threshold=0`` a restore reads each row once, at the cost of several times the rewriting and many small
    pieces; a higher threshold rewrites less. A restore from "2d" keeps all rows that changed since the full
    version in memory, one from "rounds" a few megabytes. After a change of layout, the next version is a full
    one.

    Args:
        layout: "rounds" rewrites files in which more than ``dead_fraction`` of the rows have been replaced,
            every ``round_versions``; "2d" removes replaced rows from older chunks after each version.
        round_versions: versions between two rounds ("rounds").
        dead_fraction: share of replaced rows above which a file is rewritten ("rounds").
        threshold: IncrCP's R: chunks are compared further only if more than this share of the newer chunk's
            rows is in the older one ("2d").
        reset: "auto" writes a new full version when that is expected to save more time at a restore than
            it costs to write (IncrCP's rule); "never" keeps the first one forever.
        extra_writes: as in ``Differential`` ("rounds" with "auto").
    """

    layout: Literal["rounds", "2d"] = "rounds"
    round_versions: int = 4
    dead_fraction: float = 0.15
    threshold: float = 0.02
    reset: Literal["auto", "never"] = "auto"
    extra_writes: float = 0.2

    def __post_init__(self) -> None:
        if self.layout not in ("rounds", "2d"):
            raise ConfigError(f"layout is {self.layout!r}: expected 'rounds' or '2d'")
        if self.reset not in ("auto", "never"):
            raise ConfigError(f"reset is {self.reset!r}: expected 'auto' or 'never'")
        _at_least("round_versions", self.round_versions, 1)
        _at_least("extra_writes", self.extra_writes, 0)
        if not 0 <= self.dead_fraction < 1 or not 0 <= self.threshold < 1:
            raise ConfigError(
                f"dead_fraction is {self.dead_fraction} and threshold is {self.threshold}: "
                "expected both at least 0 and less than 1"
            )


Strategy = Full | Differential | Incremental | Chunked
_BY_NAME = {
    "full": Full(),
    "differential": Differential(),
    "incremental": Incremental(),
    "chunked": Chunked(),
}


RESTORES_THAT_BITS_BEAR = ((1, 2), (3, 3), (10, 4), (100, 8))
"""(restores, bits) for which the AUC loss stays below 0.01 %, as in Check-N-Run, section 5.2.1. The paper
uses 4 bits for up to 20 restores, which ``bench quantize-accuracy`` did not confirm."""


@dataclass(frozen=True, slots=True)
class BitsChoice:
    """The chosen number of bits, and why."""

    bits: int
    reason: str


class AutoBits(Struct, frozen=True):
    """Choose the bits of quantized rows by the expected number of restores.

    Each restore from quantized rows costs a little accuracy. As measured (docs/quantization-results.md) the
    loss stays below 0.01 % with 2 bits for one restore, 3 bits for up to 3, 4 bits for up to 10, else 8 bits.
    Restores are counted across restarts; when there are more than expected, 8 bits are used from then on.
    Without any estimate, 8 bits are used from the start.

    Args:
        expected_restores: the expected number of restores. If None, it is estimated from the others.
        training_hours: duration of the whole run.
        nodes: number of machines.
        failures_per_node_hour: failure rate of one machine.
    """

    expected_restores: float | None = None
    training_hours: float | None = None
    nodes: int = 1
    failures_per_node_hour: float | None = None

    def __post_init__(self) -> None:
        for name in ("expected_restores", "training_hours", "failures_per_node_hour"):
            _at_least(name, getattr(self, name), 0)
        _at_least("nodes", self.nodes, 1)
        if (self.training_hours is None) != (self.failures_per_node_hour is None):
            raise ConfigError("AutoBits: give training_hours and failures_per_node_hour together")

    @property
    def restores(self) -> float | None:
        """The expected number of restores; None if unknown."""
        if self.expected_restores is not None:
            return self.expected_restores
        if self.training_hours is None or self.failures_per_node_hour is None:
            return None
        return self.training_hours * self.nodes * self.failures_per_node_hour

    def choose(self, restores: int) -> BitsChoice:
        """Choose the bits for a run that has been restored from quantized versions ``restores`` times."""
        expected = self.restores
        if expected is None:
            return BitsChoice(
                8, "the expected number of restores is unknown: pass it to AutoBits to use fewer bits"
            )
        said = f"{expected:g} restores are expected"
        if restores > max(1, math.ceil(expected)):
            return BitsChoice(8, f"{said}, and it has been restored {restores} times")
        bits = next((bits for most, bits in RESTORES_THAT_BITS_BEAR if math.ceil(expected) <= most), 8)
        return BitsChoice(bits, said)


Bits = Literal[2, 3, 4, 8, "auto"] | AutoBits | None
_WISHES = [(type(wish), wish) for wish in (None, 2, 3, 4, 8, "auto")]
"""With their types, because 4.0 == 4 but 4.0 is not a valid number of bits."""
WhenBusy = Literal["wait", "skip", "cancel"]
PriorityName = Literal["mfu", "ssu", "scar"]
PRIORITIES: tuple[PriorityName, ...] = ("mfu", "ssu", "scar")
PRIORITIZED_FRACTION = 1 / 16
"""CPR saves an eighth at a time. Half of that twice as often is the same number of bytes, and saved rows are
half as old; ``bench partial`` measures both."""

VERIFIED_SHARE = 0.0025
"""Share of the training time. Hooks take about 0.6 %, so that all of tracking stays below 1 %."""


class Policy(Struct, frozen=True):
    """When a ``Checkpointer`` saves, how, and what it keeps.

    Args:
        every_steps: save in ``step()`` when this many steps have passed since the last save.
        every_seconds: save in ``step()`` when this many seconds have passed. With neither, only ``save()``
            saves.
        strategy: a name, or an option value such as ``Chunked(round_versions=4)``.
        keep: keep this many of the newest versions. None keeps all, or only the newest if ``keep_every`` or
            ``keep_seconds`` is given.
        keep_every: also keep versions whose number is a multiple of this.
        keep_seconds: also keep versions younger than this.
        when_busy: what a save does while the previous one is still being written: "wait" for it; "skip" this
            save (its rows stay marked and are in the next one); or "cancel" the previous one, whose rows are
            then in this one. Of two consecutive saves at most one is cancelled; the other is waited for.
        save_last: when the ``with`` block of the ``Checkpointer`` ends without an exception, save the last
            step passed to ``step()``, unless a version has it. A job does the same when it ends.
        deletion_delay_seconds: how long to keep files that no version needs any more for restores that
            may still be reading them. On a local disk open files stay readable, so 0 is safe there.
        lock_wait_seconds: maximum time to wait at the start for the lease of a writer that may be dead, on
            stores other than a disk. None: until the lease expires. There is no wait for a writer that is
            known to be alive or dead.
        quantize: store weights in 2, 3, 4 or 8 bits; "auto" or an ``AutoBits`` chooses; None stores them
            unchanged. A mapping from table names or patterns ("model.user_*") sets it per table: the
            first match wins, and tables without a match are stored unchanged. Training itself stays in
            full precision: only a restore loads rounded weights.
        quantize_state: store per-row optimizer state in 16 bits (bfloat16: error at most 0.4 %) or 8 bits
            (logarithmic steps: error at most 4.4 %, for momentum 9 %). None stores it unchanged.
        background_share: maximum share of one processor for quantizing, for writing quantized rows, and for
            writing baselines, during training. By default a baseline takes at most a fortieth of all
            processors, and other versions as much as they need. Does not apply if somebody waits for it.
        prioritize: save the most important rows first, for partial recovery (CPR): "mfu", those looked up
            most often since they were saved; "ssu", those seen in a sample of the batches; "scar", those
            that changed most. ``step()`` then saves a ``fraction`` of the rows of the largest tables after
            that fraction of the interval. **Rows of such a version have different ages**: each is in its last
            saved state. A version that ``save()`` writes has the current state of all rows.
        fraction: fraction of the rows per prioritized save, by default 1/16. With a smaller one, the saved
            state of important rows is newer, for the same bytes. Of the smaller tables all changed rows are
            saved each time.
        verify: share of the training time, by default 0.0025, to spend on comparing rows with their digests,
            to find unreported changes: a rotating slice in every ``step()`` and ``save()``. "all" compares
            every row at each save instead, so that no version misses a change; use it for debugging. 0 keeps
            no digests (8 bytes per row), and saves whole tables if any of their rows may have changed.
        max_memory: maximum number of bytes that a baseline may take beyond the tables while it is written,
            by default 5 % of the tables plus 256 MB. Rows that training changes before they are written are
            copied first. If these copies exceed the limit, training waits (``SaveReport.waited_seconds``).
    """

    every_steps: int | None = None
    every_seconds: float | None = None
    strategy: Strategy | Literal["full", "differential", "incremental", "chunked"] = "chunked"
    keep: int | None = None
    keep_every: int | None = None
    keep_seconds: float | None = None
    when_busy: WhenBusy = "wait"
    save_last: bool = True
    deletion_delay_seconds: float | None = None
    lock_wait_seconds: float | None = None
    quantize: Bits | Mapping[str, Bits] = None
    quantize_state: Literal[8, 16] | None = None
    background_share: float | None = None
    prioritize: PriorityName | None = None
    fraction: float = PRIORITIZED_FRACTION
    verify: float | Literal["all"] = VERIFIED_SHARE
    max_memory: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.strategy, str) and self.strategy in _BY_NAME:
            force_setattr(self, "strategy", _BY_NAME[self.strategy])
        kinds: dict[str, tuple[Any, str]] = {
            "strategy": (Strategy, f"one of {', '.join(_BY_NAME)}, or a value such as Chunked()"),
            "every_steps": (int | None, "a whole number or None"),
            "keep": (int | None, "a whole number or None"),
            "keep_every": (int | None, "a whole number or None"),
            "save_last": (bool, "True or False"),
            "max_memory": (int | None, "a number of bytes or None"),
        }
        for name, (kind, said) in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: expected {said}")
        if self.when_busy not in get_args(WhenBusy):
            raise ConfigError(f"when_busy is {self.when_busy!r}: expected 'wait', 'skip' or 'cancel'")
        _at_least("every_steps", self.every_steps, 1)
        _at_least("every_seconds", self.every_seconds, 0)
        _at_least("keep", self.keep, 1)
        _at_least("keep_every", self.keep_every, 1)
        _at_least("max_memory", self.max_memory, 1)
        _at_least("keep_seconds", self.keep_seconds, 0)
        _at_least("deletion_delay_seconds", self.deletion_delay_seconds, 0)
        _at_least("lock_wait_seconds", self.lock_wait_seconds, 0)
        wishes = self.quantize.values() if isinstance(self.quantize, Mapping) else [self.quantize]
        for wish in wishes:
            if not (isinstance(wish, AutoBits) or (type(wish), wish) in _WISHES):
                raise ConfigError(f"quantize is {wish!r}: expected 2, 3, 4, 8, 'auto', an AutoBits or None")
        if (type(self.quantize_state), self.quantize_state) not in ((type(None), None), (int, 8), (int, 16)):
            raise ConfigError(f"quantize_state is {self.quantize_state!r}: expected 8, 16 or None")
        if self.background_share is not None and not 0 < self.background_share <= 1:
            raise ConfigError(f"background_share is {self.background_share!r}: expected above 0, at most 1")
        if self.prioritize not in (None, *PRIORITIES):
            raise ConfigError(f"prioritize is {self.prioritize!r}: expected {', '.join(PRIORITIES)} or None")
        if self.prioritize is not None and isinstance(self.strategy, Full):
            raise ConfigError("prioritize cannot be combined with strategy 'full': use another strategy")
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction is {self.fraction!r}: expected above 0, at most 1")
        share: Any = self.verify
        if share != "all" and not (isinstance(share, int | float) and 0 <= share <= 1):
            raise ConfigError(f"verify is {self.verify!r}: expected a share from 0 to 1, or 'all'")

    @property
    def keeps_few(self) -> bool:
        """Whether old versions are deleted, so that the store holds little more than the newest ones."""
        return self.keep is not None and self.keep_every is None and self.keep_seconds is None

    def bits_of(self, table: str) -> int | AutoBits | None:
        """The ``quantize`` option of a table."""
        if isinstance(self.quantize, Mapping):
            wish = next((bits for name, bits in self.quantize.items() if fnmatchcase(table, name)), None)
        else:
            wish = self.quantize
        return AutoBits() if wish == "auto" else wish


class ErasureCode(Struct, frozen=True, tag_field="kind", tag="erasure-code", forbid_unknown_fields=True):
    """Servers keep parities of each other's rows in memory, so that any ``r`` of them may die at once.

    Every ``k`` rows, each on a different server, have ``r`` parities on ``r`` other servers. ECRec is
    ``atomic=True, dense="replicate"``, ECRM is ``atomic=False, dense="workers"``.

    Args:
        k: number of rows that share parities. Memory grows by r / k. A job needs at least k + r servers.
        r: number of parities, 1 to 3: how many servers may die before their rows are recovered.
        atomic: apply a batch on all servers or on none, at the cost of a second message.
        dense: how the network's parameters are protected: "replicate" keeps r more copies on servers;
            "workers" takes lost parameters from a worker and resets their optimizer state; "none" keeps no
            copy, so that the loss of any server ends the job.
        rings: form rings of k + r servers that share no stripe. More than r failures are then survived
            unless they fall into one ring.
        chunk_rows: rows per chunk of background recovery. None: 4 MB of rows.
        recovery_share: share of time for background recovery while workers are busy and processors are
            scarce, otherwise it takes all; 1: no throttling. None: 1 if servers have processors of their
            own, else 0.3.
        scrub_seconds: duration of one pass of scrubbing, which compares all parities with their rows during
            training; 0: never.
        beyond: what reverts to the last checkpoint if more than r servers die: the whole "job", or only
            the lost "rows" (partial recovery).
    """

    k: int
    r: int = 1
    atomic: bool = True
    dense: Literal["replicate", "workers", "none"] = "replicate"
    rings: bool = False
    chunk_rows: int | None = None
    recovery_share: float | None = None
    scrub_seconds: float = 0.0
    beyond: Literal["job", "rows"] = "job"

    def __post_init__(self) -> None:
        _at_least("k", self.k, 1)
        if not 1 <= self.r <= 3:
            raise ConfigError(f"r is {self.r}: expected 1 to 3 parities")
        if self.dense not in ("replicate", "workers", "none"):
            raise ConfigError(f"dense is {self.dense!r}: expected 'replicate', 'workers' or 'none'")
        _check_recovery(self)


class Replication(Struct, frozen=True, tag_field="kind", tag="replication", forbid_unknown_fields=True):
    """Keep every row on ``copies`` servers, of which all but one may die at once.

    Args:
        copies: number of copies, 2 to 4. Memory grows by copies - 1.
        atomic: as in ``ErasureCode``.
        rings: as in ``ErasureCode``, with rings of ``copies`` servers.
        chunk_rows: as in ``ErasureCode``.
        recovery_share: as in ``ErasureCode``.
        scrub_seconds: as in ``ErasureCode``.
        beyond: as in ``ErasureCode``.
    """

    copies: int = 2
    atomic: bool = True
    rings: bool = False
    chunk_rows: int | None = None
    recovery_share: float | None = None
    scrub_seconds: float = 0.0
    beyond: Literal["job", "rows"] = "job"

    def __post_init__(self) -> None:
        if not 2 <= self.copies <= 4:
            raise ConfigError(f"copies is {self.copies}: expected 2 to 4")
        _check_recovery(self)

    def as_code(self) -> ErasureCode:
        """The equivalent erasure code, whose parities are copies of one row."""
        return ErasureCode(
            1, self.copies - 1, self.atomic, "replicate", self.rings, self.chunk_rows, self.recovery_share,
            self.scrub_seconds, self.beyond,
        )  # fmt: skip


class NoProtection(Struct, frozen=True, tag_field="kind", tag="none", forbid_unknown_fields=True):
    """Keep every row on one server. If a server dies, the job ends.

    Args:
        atomic: apply a batch on all servers or on none, at the cost of a second message.
    """

    atomic: bool = False


class PartialRecovery(Struct, frozen=True, tag_field="kind", tag="partial", forbid_unknown_fields=True):
    """If a server dies, revert only its rows to their last saved state, and continue training (CPR).

    Updates of those rows since they were saved are lost. The portion of lost samples (PLS) is the share of
    samples since then, times the server's share of the rows. Partial recovery costs no memory, and no time
    without failures, but needs a checkpoint. The network's parameters are taken from a worker. A job needs at
    least two servers.

    Args:
        target_pls: the PLS that training may end with. Together with ``mtbf_hours`` it sets the save
            interval, unless the checkpoint options do.
        prioritize: which rows are saved first: "mfu" (most used), "ssu" (recently used) or "scar" (changed
            most). None: each save writes all changed rows.
        fraction: fraction of the rows per prioritized save, by default 1/16.
        mtbf_hours: mean time between failures of the job. If it is given, and full recovery takes less time
            by CPR's arithmetic, the job uses full recovery and reports it.
        save_seconds: time that a save stops training, for that arithmetic.
        load_seconds: time to load a checkpoint, for that arithmetic.
        reschedule_seconds: time to replace a dead process, for that arithmetic.
        atomic: apply a batch on all servers or on none, at the cost of a second message.
    """

    target_pls: float = 0.1
    prioritize: PriorityName | None = None
    fraction: float = PRIORITIZED_FRACTION
    mtbf_hours: float | None = None
    save_seconds: float = 1.0
    load_seconds: float = 10.0
    reschedule_seconds: float = 1.0
    atomic: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.target_pls <= 1:
            raise ConfigError(f"target_pls is {self.target_pls}: expected more than 0, up to 1")
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction is {self.fraction}: expected more than 0, up to 1")
        if self.prioritize not in (None, *PRIORITIES):
            raise ConfigError(f"prioritize is {self.prioritize!r}: expected {', '.join(PRIORITIES)} or None")
        if self.mtbf_hours is not None and not 0 < self.mtbf_hours < math.inf:
            raise ConfigError(f"mtbf_hours is {self.mtbf_hours}: expected more than 0")
        for name in ("save_seconds", "load_seconds", "reschedule_seconds"):
            _at_least(name, getattr(self, name), 0)


Protection = ErasureCode | Replication | PartialRecovery | NoProtection


def parse_protection(text: str) -> Protection:
    """Parse "2+1" (k + r), "replicate", "partial" or "none". Raises ConfigError for anything else."""
    if text == "none":
        return NoProtection()
    if text == "partial":
        return PartialRecovery()
    if text == "replicate":
        return Replication()
    k, plus, r = text.replace(" ", "").partition("+")
    if not (plus and k.isdecimal() and r.isdecimal()):
        raise ConfigError(
            f"protection {text!r}: expected K+R, such as 2+1 (two rows share one parity), replicate, "
            "partial, or none"
        )
    return ErasureCode(int(k), int(r))


def _check_recovery(options: ErasureCode | Replication) -> None:
    if options.chunk_rows is not None:
        _at_least("chunk_rows", options.chunk_rows, 1)
    _at_least("scrub_seconds", options.scrub_seconds, 0)
    if options.recovery_share is not None and not 0 < options.recovery_share <= 1:
        raise ConfigError(f"recovery_share is {options.recovery_share}: expected more than 0, up to 1")
    if options.beyond not in ("job", "rows"):
        raise ConfigError(f"beyond is {options.beyond!r}: expected 'job' or 'rows'")


class Training(Struct, frozen=True, kw_only=True):
    """How a ``Job`` trains.

    Args:
        optimizer: "sgd", "momentum", "adagrad", "rowwise-adagrad" or "adam", for tables and network alike.
        lr: the learning rate; None: one that suits the optimizer.
        batch_size: samples in a batch; None: 2048, or that of a reader which has its own.
        epochs: how often to go over all data.
        max_steps: end after so many batches, of all workers together.
        test_every: batches between tests, which one worker makes while the others train; 0: at the end only.
        seed: of the first values.
        staleness: how many of its own updates may be missing from the rows that a worker reads: 1 lets it
            pull rows while it computes, 0 is synchronous.
    """

    optimizer: str = "adagrad"
    lr: float | None = None
    batch_size: int | None = None
    epochs: int = 1
    max_steps: int | None = None
    test_every: int = 0
    seed: int = 0
    staleness: int = 1


class Local(Struct, frozen=True, kw_only=True):
    """The engine that runs all processes of a ``Job`` on this machine.

    Args:
        server_processors: numbers of processors that servers have for themselves, as if they were on other
            machines than workers: what they do, recovery included, takes no processor from workers. By
            default all processes share all processors.
        server_threads: how many threads of a server read and update rows, 1 to 64. More help where workers
            wait for servers and processors are free; results are the same to the bit.
        bind: where processes listen: "ipc", Unix sockets in a folder that only this user can enter; or a TCP
            address without a port, such as "tcp://127.0.0.1", on which every connection is encrypted.
    """

    server_processors: Sequence[int] = ()
    server_threads: int = 1
    bind: str = "ipc"


NODE_DOMAIN = "node"
"""The failure domain that is a machine."""
_LABEL = re.compile(r"([\w.-]+/)?[\w.-]+")


class Ray(Struct, frozen=True, kw_only=True, tag_field="kind", tag="ray", forbid_unknown_fields=True):
    """The engine that runs a ``Job`` on the machines of a Ray cluster: ``pip install 'holdfast[ray]'``.

    Servers are placed such that the loss of any one machine, or failure domain, is one that the code covers.

    Args:
        address: of the cluster, as for ``ray.init``: "auto" is the one to which this machine belongs.
        machines: how many machines to use. None: all that are there when the job starts.
        spares: further machines that take over when one is lost.
        spread: what to do where the loss of a machine would lose rows although servers have a code: "require"
            raises ConfigError, "prefer" continues.
        domain: what fails at once: "node", a machine, or the name of a label of Ray's nodes, such as "rack"
            (``ray start --labels rack=a``). Machines with the same value are one failure domain.
        server_cpus: processors to reserve for each server.
        worker_cpus: processors to reserve for each worker.
        server_memory: bytes of memory to reserve for each server; 0: none. Default: an estimate.
        worker_memory: the same for each worker.
        silent_seconds: a process that sends no heartbeat for this long is considered dead.
        runtime_env: what Ray prepares on all machines, such as ``{"working_dir": "."}``.
        shared_paths: whether local paths, such as ``checkpoint``, are one folder that all machines share.
        name: by which ``holdfast attach``, ``holdfast stop`` and ``holdfast jobs`` know the job. Default: a
            random one.
    """

    address: str = "auto"
    machines: int | None = None
    spares: int = 0
    spread: Literal["require", "prefer"] = "require"
    domain: str = NODE_DOMAIN
    server_cpus: float = 1.0
    worker_cpus: float = 1.0
    server_memory: int | None = None
    worker_memory: int | None = None
    silent_seconds: float = 3.0
    runtime_env: dict[str, Any] = {}
    shared_paths: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        if self.spread not in ("require", "prefer"):
            raise ConfigError(f"spread is {self.spread!r}: expected 'require' or 'prefer'")
        if not _LABEL.fullmatch(self.domain):
            raise ConfigError(
                f"domain is {self.domain!r}: expected {NODE_DOMAIN!r}, or the name of a label of Ray's nodes "
                "such as 'rack' or 'topology.kubernetes.io/zone'"
            )
        _at_least("machines", self.machines, 1)
        for name in ("spares", "server_cpus", "worker_cpus", "server_memory", "worker_memory"):
            _at_least(name, getattr(self, name), 0)
        _at_least("silent_seconds", self.silent_seconds, 0.5)


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a process of a job (SIGKILL) at a step.

    Args:
        role: "server" or "worker".
        slot: the process's number in its role, from 0.
        step: the step. The job checks a few times per second, so the kill happens some steps later.
    """

    role: Literal["server", "worker"]
    slot: int
    step: int

    @classmethod
    def parse(cls, text: str) -> Kill:
        """Parse ``server:2@step:300``. Raises ConfigError for anything else."""
        who, _, when = text.partition("@")
        role, _, slot = who.partition(":")
        what, _, step = when.partition(":")
        if role not in ("server", "worker") or what != "step" or not (slot.isdecimal() and step.isdecimal()):
            raise ConfigError(f"kill {text!r}: expected ROLE:SLOT@step:N, such as server:2@step:300")
        return cls("server" if role == "server" else "worker", int(slot), int(step))

    def __str__(self) -> str:
        return f"{self.role}:{self.slot}@step:{self.step}"

    def check(self, servers: int, workers: int) -> None:
        """Raise ConfigError unless a job with these numbers of servers and workers has the process."""
        count = servers if self.role == "server" else workers
        if self.slot >= count:
            raise ConfigError(
                f"kill {self}: the job has {count} {self.role}s, expected one of 0 to {count - 1}"
            )
