"""All protections, each with its expected cost in a situation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from holdfast.errors import ConfigError
from holdfast.policy.erasure import CodeModel, difference_bytes
from holdfast.policy.increments import (
    IncrementSizes,
    Strategy,
    fewest_bits,
    quantized_auc_loss,
    sizes,
)
from holdfast.policy.interval import optimal_interval
from holdfast.policy.machines import OnMachines, losses_per_hour, on_machines
from holdfast.policy.mechanisms import (
    Mechanism,
    Parities,
    PartialRollback,
    Rollback,
    Saves,
    StartAnew,
    Term,
)
from holdfast.policy.pls import AUC_LOSS_PER_PLS, decide_recovery, interval_for_pls
from holdfast.policy.situation import Situation
from holdfast.policy.units import show_bytes, show_hours, show_percent

Kind = Literal[
    "none", "full-stop", "full", "differential", "chunked", "partial", "ecrm", "ecrec", "replication"
]
KINDS: Mapping[Kind, str] = {
    "none": "nothing: begin anew",
    "full-stop": "full checkpoints, training stopped (torch.save)",
    "full": "full checkpoints in the background",
    "differential": "what changed since the last full one (Check-N-Run)",
    "chunked": "what changed since the last one, kept in order (IncrCP)",
    "partial": "only the failed part goes back (CPR)",
    "ecrm": "erasure code, network from the workers (ECRM)",
    "ecrec": "erasure code, all or nothing, network copied (ECRec)",
    "replication": "every row on two servers",
}
HIGHEST_PLS = 0.1
"""What CPR's section 4.2 calls a rough, conservative choice; a larger one must be asked for."""
PRIORITIZE: Literal["mfu"] = "mfu"
_COUNTER_BYTES = 4.0
_USUAL_K = 4
_SHORTEST_HOURS = 1 / 60
_SECOND_LINE_HOURS = 24.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The user's constraints.

    Args:
        k: data records of a stripe; None is 4, or more where servers' memory wants it.
        r: parity records of a stripe; None offers one and two.
        target_pls: of partial recovery; None is what the tolerated loss of AUC allows, 0.1 at most.
        auc_loss_per_pls: measured for this model (``bench partial``); None is CPR's.
    """

    k: int | None = None
    r: int | None = None
    target_pls: float | None = None
    auc_loss_per_pls: float | None = None

    def __post_init__(self) -> None:
        for name in ("k", "r", "target_pls", "auc_loss_per_pls"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value:g}: expected above 0")
        if self.target_pls is not None and self.target_pls > 1:
            raise ConfigError(f"the target PLS is {self.target_pls:g}: it is a portion, expected at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A protection with its expected cost in a situation."""

    kind: Kind
    name: str
    step_terms: tuple[Term, ...] = ()
    mechanism: Mechanism
    terms: tuple[Term, ...]
    """All of them; they add up to ``overhead``."""
    memory_share: float = 0.0
    """Permanent memory in addition to the tables."""
    save_memory_share: float = 0.0
    """Additional memory while a save is written."""
    stored_bytes: float = 0.0
    """Maximum size of the newest version in the store."""
    storage_rate: float = 0.0
    """Bytes a second to the store, on average."""
    traffic_rate: float = 0.0
    """Bytes a second between servers, of all of them together."""
    redone_hours: float = 0.0
    """Expected repeated work in the whole training."""
    pls: float = 0.0
    auc_loss: float = 0.0
    loss_chance: float = 0.0
    """That something of the training is lost that the protection is there to keep."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a configuration, ``job.protection`` and ``checkpoint`` without its path."""
    objection: str | None = None
    """Why it is not feasible in this situation; None if it is."""
    machines: OnMachines | None = None
    """Of a code in a plan, or where machines are given: what it needs, and what the loss of one costs."""

    @property
    def overhead(self) -> float:
        """The share that it adds to the training time."""
        return sum(term.share for term in self.terms)

    @property
    def interval_hours(self) -> float | None:
        """Between saves."""
        match self.mechanism:
            case (
                Rollback(saves=saves) | PartialRollback(saves=saves) | Parities(behind=Rollback(saves=saves))
            ):
                return saves.interval_hours
        return None

    @property
    def step_share(self) -> float:
        """The share that it adds to each step."""
        return sum(term.share for term in self.step_terms)


def estimates(situation: Situation, wishes: Wishes | None = None) -> list[Estimate]:
    """All protections that are possible in this situation."""
    wishes = wishes or Wishes()
    found: list[Estimate] = [
        unprotected(situation),
        full_stopped(situation),
        checkpoints(situation, "full"),
        *with_and_without_bits(situation, "differential"),
        *with_and_without_bits(situation, "chunked"),
        partial(situation, wishes),
    ]
    for code in _codes(situation, wishes):
        if code.r == (wishes.r or 1):
            found.append(erasure_code(situation, code, "ecrm"))
        found.append(erasure_code(situation, code, "ecrec"))
    if situation.servers >= 2:
        found.append(erasure_code(situation, CodeModel(situation.servers, 1, 1), "replication"))
    return [_checked(situation, one) for one in found]


def unprotected(situation: Situation) -> Estimate:
    """No protection."""
    mechanism = StartAnew(total_hours=situation.hours, reschedule_hours=situation.reschedule_hours)
    terms = mechanism.terms(situation.mtbf_hours)
    return Estimate(
        kind="none",
        name="none",
        mechanism=mechanism,
        terms=terms,
        redone_hours=terms[0].share * situation.hours,
        loss_chance=-math.expm1(-situation.failures),
        settings={"protection": {"kind": "none"}},
    )


def full_stopped(situation: Situation) -> Estimate:
    """The papers' baseline: training stops until everything is written."""
    stopping = replace(situation, stop_to_write=True)
    return replace(checkpoints(stopping, "full"), kind="full-stop", name="full, stopped")


def with_and_without_bits(situation: Situation, strategy: Strategy) -> Iterable[Estimate]:
    """Unquantized rows, and rows in as few bits as the tolerated loss allows."""
    yield checkpoints(situation, strategy)
    bits = fewest_bits(situation.failures, situation.tolerated_auc_loss)
    if bits is not None:
        yield checkpoints(situation, strategy, bits)


def checkpoints(situation: Situation, strategy: Strategy, bits: int | None = None) -> Estimate:
    """Checkpoints with full recovery."""

    def rollback(interval: float) -> Rollback:
        amounts = sizes(strategy, situation.touches, interval, situation.row, bits)
        return Rollback(
            saves=_saves(situation, amounts, interval),
            load_hours=amounts.read * situation.table_bytes / situation.read_rate / 3600,
            reschedule_hours=situation.reschedule_hours,
        )

    interval = _interval(situation, rollback)
    mechanism = rollback(interval)
    amounts = sizes(strategy, situation.touches, interval, situation.row, bits)
    steps = () if strategy == "full" else (_tracking(situation.costs.tracking),)
    settings: dict[str, Any] = {"strategy": strategy, "every_seconds": _seconds(interval), "keep": 2}
    if bits is not None:
        settings["quantize"] = bits
    return Estimate(
        kind=strategy,
        name=strategy if bits is None else f"{strategy}, {bits} bits",
        step_terms=steps,
        mechanism=mechanism,
        terms=_together(steps, mechanism.terms(situation.mtbf_hours)),
        save_memory_share=0.0 if situation.stop_to_write else 1.0,
        stored_bytes=amounts.stored * situation.table_bytes,
        storage_rate=amounts.written * situation.table_bytes / (interval * 3600),
        redone_hours=mechanism.saves.lost_hours * situation.failures,
        auc_loss=quantized_auc_loss(bits, situation.failures),
        settings={"checkpoint": settings},
        objection=_too_slow(situation, mechanism.saves),
    )


def partial(situation: Situation, wishes: Wishes) -> Estimate:
    """Partial recovery (CPR) with prioritized saves."""
    per_pls = wishes.auc_loss_per_pls or AUC_LOSS_PER_PLS[PRIORITIZE]
    bearable = min(HIGHEST_PLS, situation.tolerated_auc_loss / per_pls)
    target = wishes.target_pls or bearable
    if not target:
        target = HIGHEST_PLS  # to show what it would cost: the tolerance says no
    wanted = interval_for_pls(target_pls=target, mtbf_hours=situation.mtbf_hours, servers=situation.parts)
    strategy: Strategy = "full" if situation.stop_to_write else "chunked"  # the paper's saves hold everything

    def saves_every(hours: float) -> tuple[IncrementSizes, Saves]:
        amounts = sizes(strategy, situation.touches, hours, situation.row)
        return amounts, _saves(situation, amounts, hours)

    interval = min(situation.save_every_hours or wanted, situation.hours)
    amounts, saves = saves_every(interval)
    for _ in range(20):
        # What is still being written is lost, too, so saves come earlier by that.
        if situation.save_every_hours is not None or 2 * saves.lost_hours <= wanted:
            break
        interval = max(wanted - 2.001 * saves.write_hours, wanted / 2)
        amounts, saves = saves_every(interval)
    load = situation.table_bytes / situation.parts / situation.read_rate / 3600
    mechanism = PartialRollback(
        saves=saves, load_hours=load, reschedule_hours=situation.reschedule_hours, parts=situation.parts
    )
    decision = decide_recovery(
        target_pls=target,
        servers=situation.parts,
        mtbf_hours=situation.mtbf_hours,
        save_hours=saves.stall_hours,
        load_hours=situation.table_bytes / situation.read_rate / 3600,
        partial_load_hours=load,
        reschedule_hours=situation.reschedule_hours,
    )
    steps = (
        () if situation.stop_to_write else (_tracking(situation.costs.tracking + situation.costs.counting),)
    )
    pls = mechanism.pls(situation.mtbf_hours)
    return Estimate(
        kind="partial",
        name=f"partial, PLS {target:.2g}",
        step_terms=steps,
        mechanism=mechanism,
        terms=_together(steps, mechanism.terms(situation.mtbf_hours)),
        memory_share=_COUNTER_BYTES / situation.row.raw,
        save_memory_share=0.0 if situation.stop_to_write else 1.0,
        stored_bytes=amounts.stored * situation.table_bytes,
        storage_rate=amounts.written * situation.table_bytes / (interval * 3600),
        pls=pls,
        auc_loss=pls * per_pls,
        settings={
            "protection": {"kind": "partial", "target_pls": round(target, 4), "prioritize": PRIORITIZE},
            "checkpoint": {"strategy": "chunked", "every_seconds": _seconds(interval), "keep": 2},
        },
        objection=("of one server nothing would be left" if situation.parts < 2 else None)
        or _too_slow(situation, saves)
        or (None if decision.partial else f"does not pay: {decision.reason}"),
    )


def erasure_code(
    situation: Situation, code: CodeModel, kind: Literal["ecrm", "ecrec", "replication"]
) -> Estimate:
    """Redundancy in the servers' memory, with checkpoints behind it for more failures than it bears."""
    costs, row = situation.costs, situation.row
    copies = kind == "replication"
    # A copy is kept in step by gradients, a parity by differences of whole records.
    record = 4 * row.dim if copies else row.raw
    batch_bytes = difference_bytes(rows=situation.rows_per_batch, record_bytes=record, r=code.r)
    dense_bytes = 0.0 if kind == "ecrm" else situation.dense_bytes * (code.r if copies else 1)
    exposed = costs.differences * (costs.atomic if kind == "ecrec" else 1.0)
    steps = [
        _transfer(situation, "copying updates" if copies else "updating parities", batch_bytes, exposed),
        _tracking(costs.tracking),
    ]
    if dense_bytes:
        steps.append(_transfer(situation, "copying the network's updates", dense_bytes, costs.dense))
    rebuild = code.rebuild_hours(situation.server_bytes, costs.rebuild_share * situation.network_rate)
    by_machine = situation.machine_mtbf_hours is not None
    uncovered = losses_per_hour(situation, code, rebuild) if by_machine else None
    machines = on_machines(situation, code) if situation.machines is not None else None

    def mechanism(interval: float) -> Parities:
        amounts = sizes("chunked", situation.touches, interval, row)
        return Parities(
            code=code,
            pause_hours=costs.pause_hours,
            rebuild_hours=rebuild,
            rebuild_drop=costs.rebuild_drop,
            behind=Rollback(
                saves=_saves(situation, amounts, interval),
                load_hours=amounts.read * situation.table_bytes / situation.read_rate / 3600,
                reschedule_hours=situation.reschedule_hours,
            ),
            uncovered_per_hour=uncovered,
        )

    interval = min(_SECOND_LINE_HOURS, _cheapest(situation, lambda t: _cost(mechanism(t), situation)))
    chosen = mechanism(interval)
    amounts = sizes("chunked", situation.touches, interval, row)
    losses = chosen.losses_per_hour(situation.mtbf_hours, situation.servers_per_failure)
    protection: dict[str, Any] = {"kind": "erasure-code", "k": code.k, "r": code.r}
    if copies:
        name = f"{code.r + 1} copies"
        protection = {"kind": "replication", "copies": code.r + 1}
    else:
        atomic = kind == "ecrec"
        name = f"code {code.k}+{code.r}{', atomic' * atomic}"
        protection |= {"atomic": atomic, "dense": "replicate" if atomic else "workers"}
    if code.groups > 1:
        protection["rings"] = True  # as the chances of a loss assume
    return Estimate(
        kind=kind,
        name=name,
        step_terms=tuple(steps),
        mechanism=chosen,
        terms=_together(tuple(steps), chosen.terms(situation.mtbf_hours, situation.servers_per_failure)),
        memory_share=code.memory_share,
        save_memory_share=1.0,
        stored_bytes=amounts.stored * situation.table_bytes,
        storage_rate=amounts.written * situation.table_bytes / (interval * 3600),
        traffic_rate=(batch_bytes + dense_bytes) * situation.steps_per_hour / 3600,
        redone_hours=losses * chosen.behind.saves.lost_hours * situation.hours,
        loss_chance=-math.expm1(-losses * situation.hours),
        settings={
            "protection": protection,
            "checkpoint": {"strategy": "chunked", "every_seconds": _seconds(interval), "keep": 2},
        },
        objection=(machines.objection if machines is not None else None)
        or _too_slow(situation, chosen.behind.saves),
        machines=machines,
    )


def _codes(situation: Situation, wishes: Wishes) -> Iterable[CodeModel]:
    """The code that is wished for, refused if it cannot be; else usual ones, as far as there are servers."""
    servers = situation.servers
    if wishes.r is not None:
        yield CodeModel(servers, wishes.k or max(1, _usual_k(situation, wishes.r)), wishes.r)
        return
    if wishes.k is not None:
        yield CodeModel(servers, wishes.k, 1)
    elif servers >= 2:
        yield CodeModel(servers, _usual_k(situation, 1), 1)
    k = wishes.k or _usual_k(situation, 2)
    if 1 <= k <= servers - 2:
        yield CodeModel(servers, k, 2)


def _usual_k(situation: Situation, r: int) -> int:
    """4, or more if memory has no room for so many parities; below 1 if there are too few servers."""
    largest = situation.servers - r
    k = min(_USUAL_K, largest)
    memory = situation.server_memory_bytes
    while memory is not None and k < largest and situation.server_bytes * (2 + r / k) > memory:
        k += 1
    return k


def _saves(situation: Situation, amounts: IncrementSizes, interval: float) -> Saves:
    write = amounts.written * situation.table_bytes / situation.write_rate / 3600
    if situation.stop_to_write:
        return Saves(interval_hours=interval, stall_hours=write)
    copy = amounts.copied * situation.server_bytes / situation.copy_rate / 3600
    return Saves(interval_hours=interval, stall_hours=copy, write_hours=write)


def _interval(situation: Situation, mechanism: Callable[[float], Rollback]) -> float:
    """Where going back costs least, or what is settled."""
    if situation.save_every_hours is not None:
        return situation.save_every_hours
    if situation.stop_to_write:
        stall = mechanism(situation.hours).saves.stall_hours
        return min(optimal_interval(save_hours=stall, mtbf_hours=situation.mtbf_hours), situation.hours)
    return _cheapest(situation, lambda t: _cost(mechanism(t), situation))


def _cost(mechanism: Rollback | Parities, situation: Situation) -> float:
    """Its overhead; infinite if the store could not keep up."""
    saves = mechanism.saves if isinstance(mechanism, Rollback) else mechanism.behind.saves
    if saves.write_hours > saves.interval_hours:
        return math.inf
    return sum(term.share for term in mechanism.terms(situation.mtbf_hours))


def _cheapest(situation: Situation, cost: Callable[[float], float]) -> float:
    """The interval that costs least, of many between a minute and the whole training."""
    count = 100
    longest = max(situation.hours, 2 * _SHORTEST_HOURS)
    step = math.log(longest / _SHORTEST_HOURS) / count
    return min((_SHORTEST_HOURS * math.exp(step * i) for i in range(count + 1)), key=cost)


def _tracking(share: float) -> Term:
    return Term("marking what changes", share, f"{show_percent(share)} of a step, measured")


def _transfer(situation: Situation, what: str, batch_bytes: float, exposed: float) -> Term:
    """What a transfer between servers for each batch takes from a step."""
    of_server = batch_bytes * situation.workers / situation.servers
    seconds = of_server / situation.network_rate
    step_seconds = situation.step_hours * 3600
    share = max(exposed * seconds / step_seconds, seconds / step_seconds - 1)
    how = (
        f"{show_bytes(of_server)} from each server in a step of {show_hours(situation.step_hours)} take "
        f"{show_hours(seconds / 3600)}, of which {exposed:.2g} shows"
    )
    return Term(what, share, how)


def _together(steps: tuple[Term, ...], others: tuple[Term, ...]) -> tuple[Term, ...]:
    """All terms, and what it adds that each is paid while others are, too."""
    a, b = sum(term.share for term in steps), sum(term.share for term in others)
    if not steps:
        return others
    return (*steps, *others, Term("one on top of the other", a * b, "(1 + steps) (1 + failures) - the sum"))


def _seconds(interval_hours: float) -> int:
    return max(1, round(interval_hours * 3600))


def _too_slow(situation: Situation, saves: Saves) -> str | None:
    if saves.write_hours <= saves.interval_hours:
        return None
    return (
        f"the store cannot keep up: a save takes {show_hours(saves.write_hours)} to write, and comes every "
        f"{show_hours(saves.interval_hours)}"
    )


def _checked(situation: Situation, estimate: Estimate) -> Estimate:
    """The same with an objection if it does not fit the situation."""
    objection = estimate.objection
    memory = situation.server_memory_bytes
    needed = situation.server_bytes * (1 + estimate.memory_share + estimate.save_memory_share)
    if objection is None and estimate.auc_loss > situation.tolerated_auc_loss * (1 + 1e-9):
        objection = (
            f"is expected to cost {estimate.auc_loss:.2g} of AUC, more than the tolerated "
            f"{situation.tolerated_auc_loss:.2g}"
        )
    if objection is None and memory is not None and needed > memory:
        objection = f"needs {show_bytes(needed)} of memory on each server, which has {show_bytes(memory)}"
    return replace(estimate, objection=objection)
