"""Small frozen option values, checked once where they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, Literal, get_args

from msgspec import Struct
from msgspec.structs import force_setattr

from holdfast.errors import ConfigError


def _at_least(name: str, value: Any, least: float) -> None:
    """ConfigError unless it is None or a number that is not less."""
    if value is None:
        return
    if not isinstance(value, Real) or not math.isfinite(value):  # infinite times are as good as none: say so
        raise ConfigError(f"{name} is {value!r}: expected a finite number, at least {least:g}")
    if value < least:
        raise ConfigError(f"{name} is {value}: expected at least {least:g}")


class Full(Struct, frozen=True, tag_field="kind", tag="full", forbid_unknown_fields=True):
    """Everything in every version: simple, and large."""


class Differential(Struct, frozen=True, tag_field="kind", tag="differential", forbid_unknown_fields=True):
    """All rows changed since the last full version (Check-N-Run).

    Args:
        baseline: "one-shot" keeps the first full version for good; "intermittent" writes a new one when
            the rows changed since the last are expected to cost more than that.
        extra_writes: where ``keep`` deletes old versions, a new full one ("intermittent") comes earlier, so
            that less lies in the store, if that is expected to add at most this share to what is written.
            0 is Check-N-Run's own rule.
    """

    baseline: Literal["one-shot", "intermittent"] = "intermittent"
    extra_writes: float = 0.2

    def __post_init__(self) -> None:
        _at_least("extra_writes", self.extra_writes, 0)
        if self.baseline not in ("one-shot", "intermittent"):
            raise ConfigError(f"baseline is {self.baseline!r}: expected 'one-shot' or 'intermittent'")


class Incremental(Struct, frozen=True, tag_field="kind", tag="incremental", forbid_unknown_fields=True):
    """Only the rows changed since the version before: least to write, most to read."""


class Chunked(Struct, frozen=True, tag_field="kind", tag="chunked", forbid_unknown_fields=True):
    """As ``Incremental``, and in the background replaced rows are moved out of the way of later restores.

    Two layouts do that. "rounds" waits until enough of a file has been replaced: it rewrites about as much as
    was saved, makes few files, and a restore reads little that was replaced. "2d" is IncrCP's
    two-dimensional list: after each version it compares the new rows with all that is current. With
    ``threshold=0`` a restore reads each row once, for several times the rewriting and many small pieces;
    each step of the threshold trades the one for the other. A restore from "2d" holds all rows that changed
    since the full version in memory, one from "rounds" a few megabytes. Changing the layout of a store
    begins with a new full version.

    Args:
        layout: "rounds" sorts rows out every ``round_versions``, in files of which more than
            ``dead_fraction`` has been replaced; "2d" takes them out of older chunks after each version.
        round_versions: versions between two rounds ("rounds").
        dead_fraction: how much of a file must have been replaced before it is rewritten ("rounds").
        threshold: IncrCP's R: chunks are compared further only if more than this share of the newer one's
            rows is in the older one ("2d").
        reset: "auto" writes a new full version when that is expected to save more time at a restore than
            it costs to write (IncrCP's rule); "never" keeps the first for good.
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
            raise ConfigError("dead_fraction and threshold are shares: expected 0 to 1")


Strategy = Full | Differential | Incremental | Chunked
_BY_NAME = {
    "full": Full(),
    "differential": Differential(),
    "incremental": Incremental(),
    "chunked": Chunked(),
}


RESTORES_THAT_BITS_BEAR = ((1, 2), (3, 3), (10, 4), (100, 8))
"""(restores, bits) at which the accuracy that is lost stays below 0.01 %: those of Check-N-Run, section
5.2.1, but for 4 bits, with which it has up to 20. ``bench quantize-accuracy`` could not show that of 20."""


@dataclass(frozen=True, slots=True)
class BitsChoice:
    """How many bits were chosen, and why."""

    bits: int
    reason: str


class AutoBits(Struct, frozen=True):
    """Bits of quantized rows by how often the run is expected to be restored.

    Each restore from quantized rows costs a little accuracy. As measured (docs/quantization-results.md) it
    stays below 0.01 % with 2 bits for one restore, with 3 for up to 3, with 4 for up to 10, else with 8.
    Restores are counted, across restarts; when there are more than expected, 8 bits are used from then on.
    Without anything to go by it is 8 bits from the start.

    Args:
        expected_restores: what you expect; or let it be estimated:
        training_hours: how long the whole run takes,
        nodes: on how many machines,
        failures_per_node_hour: and how often each of them fails.
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
        """How many are expected; None if that is not known."""
        if self.expected_restores is not None:
            return self.expected_restores
        if self.training_hours is None or self.failures_per_node_hour is None:
            return None
        return self.training_hours * self.nodes * self.failures_per_node_hour

    def choose(self, restores: int) -> BitsChoice:
        """Bits for a run that has been restored from quantized versions so often already."""
        expected = self.restores
        if expected is None:
            return BitsChoice(
                8, "nothing is known of how often it will be restored: tell AutoBits to use fewer"
            )
        said = f"{expected:g} restores are expected"
        if restores > max(1, math.ceil(expected)):
            return BitsChoice(8, f"{said}, and it has been restored {restores} times")
        bits = next((bits for most, bits in RESTORES_THAT_BITS_BEAR if math.ceil(expected) <= most), 8)
        return BitsChoice(bits, said)


Bits = Literal[2, 3, 4, 8, "auto"] | AutoBits | None
_WISHES = [(type(wish), wish) for wish in (None, 2, 3, 4, 8, "auto")]
"""With their types: 4.0 is equal to 4, but no number of bits."""
WhenBusy = Literal["wait", "skip", "cancel"]
PriorityName = Literal["mfu", "ssu", "scar"]
PRIORITIES: tuple[PriorityName, ...] = ("mfu", "ssu", "scar")
PRIORITIZED_FRACTION = 1 / 16
"""CPR saves an eighth at a time. Half of that twice as often are the same bytes, and what is saved of a row
that matters is half as old; ``bench partial`` has both."""

VERIFIED_SHARE = 0.0025
"""Of the training time. Hooks take about 0.6 % of it: with this, all of tracking stays below 1 %."""


class Policy(Struct, frozen=True):
    """When a ``Checkpointer`` saves, how, and what it keeps.

    Args:
        every_steps: save in ``step()`` when this many steps have passed since the last save.
        every_seconds: or this many seconds; with neither, only ``save()`` saves.
        strategy: a name, or an option value such as ``Chunked(round_versions=4)``.
        keep: keep the newest so many versions; None keeps all, or the newest alone if one of the next two is
            given.
        keep_every: keep every version whose number this divides, too.
        keep_seconds: keep every version younger than this, too.
        when_busy: what a save does while the one before is still being written: "wait" for it; "skip" (the
            rows stay marked and are in the next one); or "cancel" the one before, whose rows are then in this
            one. Of two saves in a row, at most one is cancelled: the other is waited for.
        save_last: when the ``with`` block of the ``Checkpointer`` ends without an exception, save the last
            step that ``step()`` was told, unless a version has it. A job does so when it ends.
        deletion_delay_seconds: how long files that no version needs any more are kept for restores that
            may still be reading them. On a local disk open files stay readable, so 0 is safe there.
        lock_wait_seconds: how long to wait at the start, at most, for the lease of a writer that may be dead,
            on stores other than a disk; None: until it has run out. A writer that is known to live is not
            waited for, and one that is known to be dead neither.
        quantize: store weights in 2, 3, 4 or 8 bits; "auto" or an ``AutoBits`` chooses; None stores them as
            they are. A mapping says it for each table by name or pattern ("model.user_*"), of which the
            first that fits counts; tables that none fits are stored as they are. Training itself stays in
            full precision: only a restore gives back rounded weights.
        quantize_state: store optimizer states that have an entry a row in 16 bits (bfloat16: off by 0.4 % at
            most) or 8 (in logarithmic steps: off by 4.4 %, momentum by 9 %). None stores them as they are.
        background_share: how much of a processor's time quantizing, and writing what was quantized, may take
            while training goes on.
        prioritize: save the rows first that matter most, for partial recovery (CPR): "mfu", those looked up
            most often since they were saved; "ssu", those seen in a sample of the batches; "scar", those
            that changed most. ``step()`` then saves a ``fraction`` of the rows of the largest tables after
            that fraction of the time. **Rows of such a version are of different ages**: each is as it was
            when it was last saved. A version that ``save()`` makes is whole.
        fraction: of the rows that are saved at a time by ``prioritize``. The smaller, the younger what is
            saved of the rows that matter, for the same bytes; the other tables are saved whole each time.
        verify: share of the training time that is spent on comparing rows with their digests, to find rows
            that changed unseen: a rotating slice in every ``step()`` and ``save()``. "all" compares every row
            at each save instead, so that no version misses a change: for debugging. 0 keeps no digests (8
            bytes a row) and saves tables whole of which any row may have changed.
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
    background_share: float = 1.0
    prioritize: PriorityName | None = None
    fraction: float = PRIORITIZED_FRACTION
    verify: float | Literal["all"] = VERIFIED_SHARE

    def __post_init__(self) -> None:
        if isinstance(self.strategy, str) and self.strategy in _BY_NAME:
            force_setattr(self, "strategy", _BY_NAME[self.strategy])
        kinds: dict[str, tuple[Any, str]] = {
            "strategy": (Strategy, f"one of {', '.join(_BY_NAME)}, or a value such as Chunked()"),
            "every_steps": (int | None, "a whole number or None"),
            "keep": (int | None, "a whole number or None"),
            "keep_every": (int | None, "a whole number or None"),
            "save_last": (bool, "True or False"),
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
        _at_least("keep_seconds", self.keep_seconds, 0)
        _at_least("deletion_delay_seconds", self.deletion_delay_seconds, 0)
        _at_least("lock_wait_seconds", self.lock_wait_seconds, 0)
        wishes = self.quantize.values() if isinstance(self.quantize, Mapping) else [self.quantize]
        for wish in wishes:
            if not (isinstance(wish, AutoBits) or (type(wish), wish) in _WISHES):
                raise ConfigError(f"quantize is {wish!r}: expected 2, 3, 4, 8, 'auto', an AutoBits or None")
        if (type(self.quantize_state), self.quantize_state) not in ((type(None), None), (int, 8), (int, 16)):
            raise ConfigError(f"quantize_state is {self.quantize_state!r}: expected 8, 16 or None")
        if not 0 < self.background_share <= 1:
            raise ConfigError(f"background_share is {self.background_share!r}: expected above 0, at most 1")
        if self.prioritize not in (None, *PRIORITIES):
            raise ConfigError(f"prioritize is {self.prioritize!r}: expected {', '.join(PRIORITIES)} or None")
        if self.prioritize is not None and isinstance(self.strategy, Full):
            raise ConfigError("prioritize saves some of the rows, strategy 'full' all: use another strategy")
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction is {self.fraction!r}: expected above 0, at most 1")
        share: Any = self.verify
        if share != "all" and not (isinstance(share, int | float) and 0 <= share <= 1):
            raise ConfigError(f"verify is {self.verify!r}: expected a share from 0 to 1, or 'all'")

    @property
    def keeps_few(self) -> bool:
        """Whether versions are deleted as new ones come, so that what the newest needs is what is stored."""
        return self.keep is not None and self.keep_every is None and self.keep_seconds is None

    def bits_of(self, table: str) -> int | AutoBits | None:
        """What ``quantize`` says of a table."""
        if isinstance(self.quantize, Mapping):
            wish = next((bits for name, bits in self.quantize.items() if fnmatchcase(table, name)), None)
        else:
            wish = self.quantize
        return AutoBits() if wish == "auto" else wish


class ErasureCode(Struct, frozen=True, tag_field="kind", tag="erasure-code", forbid_unknown_fields=True):
    """Servers keep parities of each other's rows in memory: any ``r`` of them may die at once.

    Every ``k`` rows, which lie on different servers, have ``r`` parities, on yet others. ECRec is
    ``atomic=True, dense="replicate"``, ECRM is ``atomic=False, dense="workers"``.

    Args:
        k: rows that share parities: memory grows by r / k. A job needs k + r servers or more.
        r: parities: how many servers may die before what they held is recovered. 1 to 3.
        atomic: whether a batch counts at all servers or at none, at the price of a second message.
        dense: the network's parameters: "replicate" keeps r more copies of them; "workers" takes lost ones
            from a worker, and begins their optimizer state anew; "none" keeps no copy: the loss of any server
            ends the job.
        rings: whether servers form rings of k + r that share nothing, so that failures of more than r
            servers are survived unless they fall into one ring.
        chunk_rows: rows that are recovered at a time behind the training's back; None: 1 MB of them.
        recovery_share: how much of the time that may take: 1 is as fast as it can. None: that, if servers
            have processors of their own; 0.2 where recovery takes from workers what it uses.
        scrub_seconds: how long it is to take to check all parities while training runs, over and over; 0:
            they are not checked.
        beyond: what goes back to the last checkpoint if more than r servers die: the whole "job", or only
            the "rows" that are lost, while all others go on (partial recovery).
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
    """Every row lies on ``copies`` servers: all but one of them may die at once, for as much memory again.

    The arguments are those of ``ErasureCode``.
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
        """The same as a code: one row, and parities that are copies of it."""
        return ErasureCode(
            1, self.copies - 1, self.atomic, "replicate", self.rings, self.chunk_rows, self.recovery_share,
            self.scrub_seconds, self.beyond,
        )  # fmt: skip


class NoProtection(Struct, frozen=True, tag_field="kind", tag="none", forbid_unknown_fields=True):
    """Rows lie on one server each: if it dies, the job ends.

    Args:
        atomic: whether a batch counts at all servers or at none, at the price of a second message.
    """

    atomic: bool = False


class PartialRecovery(Struct, frozen=True, tag_field="kind", tag="partial", forbid_unknown_fields=True):
    """If a server dies, its rows go back to what was last saved of them, and everyone else goes on (CPR).

    What those rows had learned since is lost: a portion of lost samples (PLS) of the samples since, times the
    server's share of the rows. It costs no memory and nothing while nothing fails, but needs a checkpoint.
    The network's parameters are taken from a worker. Two servers or more.

    Args:
        target_pls: the PLS that the whole training may end up with. With ``mtbf_hours`` it says how often to
            save, unless the checkpoint does.
        prioritize: which rows are saved first: "mfu" (most used), "ssu" (used lately) or "scar" (changed
            most); None: all that have changed.
        fraction: of the rows that are then saved at a time, that much more often.
        mtbf_hours: how long the job runs between two failures, on average. If it is given, and going back
            altogether would take less time by CPR's arithmetic, the job does that instead and says so.
        save_seconds: how long training is held up by a save, …
        load_seconds: … by reading one, …
        reschedule_seconds: … and by getting a process in place of the dead one: for that arithmetic.
        atomic: whether a batch counts at all servers or at none, at the price of a second message.
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
    """Read one that is written "2+1" (k + r), "replicate", "partial" or "none"; ConfigError if it is none."""
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
        bind: where processes listen: "ipc", Unix sockets in a folder that only this user can enter; or a TCP
            address without a port, such as "tcp://127.0.0.1", on which every connection is encrypted.
    """

    server_processors: Sequence[int] = ()
    bind: str = "ipc"


@dataclass(frozen=True, slots=True)
class Kill:
    """A process of a job that is killed (SIGKILL) when the job has done so many steps.

    Args:
        role: which kind of process.
        slot: which one of them, from 0.
        step: when; the job looks a few times a second, so it is some steps later.
    """

    role: Literal["server", "worker"]
    slot: int
    step: int

    @classmethod
    def parse(cls, text: str) -> Kill:
        """Read one that is written ``server:2@step:300``; ConfigError if it is none."""
        who, _, when = text.partition("@")
        role, _, slot = who.partition(":")
        what, _, step = when.partition(":")
        if role not in ("server", "worker") or what != "step" or not (slot.isdecimal() and step.isdecimal()):
            raise ConfigError(f"kill {text!r}: expected ROLE:SLOT@step:N, such as server:2@step:300")
        return cls("server" if role == "server" else "worker", int(slot), int(step))

    def __str__(self) -> str:
        return f"{self.role}:{self.slot}@step:{self.step}"

    def check(self, servers: int, workers: int) -> None:
        """ConfigError unless a job of so many servers and workers has such a process."""
        count = servers if self.role == "server" else workers
        if self.slot >= count:
            raise ConfigError(
                f"kill {self}: the job has {count} {self.role}s, expected one of 0 to {count - 1}"
            )
