"""Rank the protections: the feasible ones first, by cost."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.errors import ConfigError
from holdfast.policy.machines import on_machines
from holdfast.policy.mechanisms import Parities
from holdfast.policy.protections import KINDS, Estimate, Wishes, estimates
from holdfast.policy.situation import Situation


@dataclass(frozen=True, slots=True)
class Plan:
    """The ranked protections for a situation."""

    situation: Situation
    ranked: tuple[Estimate, ...]
    """Those that fit, by what they add to the training time; then those that do not."""

    @property
    def best(self) -> Estimate:
        """The recommended protection."""
        if self.ranked[0].objection is not None:
            raise ConfigError(f"nothing fits: {self.ranked[0].name} {self.ranked[0].objection}")
        return self.ranked[0]


def plan(situation: Situation, wishes: Wishes | None = None, among: Collection[str] = ()) -> Plan:
    """Rank the protections, of some kinds only if ``among`` names them.

    Of those that cost about the same, the one that needs less memory comes first.
    """
    unknown = sorted(set(among) - set(KINDS))
    if unknown:
        raise ConfigError(f"there is no protection {unknown[0]!r}: there are {', '.join(KINDS)}")
    found = [
        _with_machines(situation, one)
        for one in estimates(situation, wishes)
        if not among or one.kind in among
    ]
    if not found:
        raise ConfigError(
            f"{', '.join(among)} need more than {situation.servers} servers: use more, or another protection"
        )
    return Plan(situation, tuple(sorted(found, key=_rank)))


def _with_machines(situation: Situation, estimate: Estimate) -> Estimate:
    if not isinstance(estimate.mechanism, Parities):
        return estimate
    return replace(estimate, machines=on_machines(situation, estimate.mechanism.code))


def _rank(estimate: Estimate) -> tuple[bool, float, float]:
    return estimate.objection is not None, round(estimate.overhead, 5), estimate.memory_share


_PLANNED = {
    "strategy", "every_steps", "every_seconds", "keep", "keep_every", "keep_seconds", "quantize",
    "quantize_state", "prioritize", "fraction",
}  # fmt: skip
"""What a plan says of checkpoints: nothing of it may stay as it was."""


def configuration(
    estimate: Estimate, *, servers: int, workers: int, path: str, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The keys of a configuration for ``holdfast train`` that has this protection; others as in ``base``."""
    values = dict(base or {})
    job = {**(values.get("job") or {}), "servers": servers, "workers": workers}
    job.pop("protection", None)
    if estimate.settings.get("protection") is not None:
        job["protection"] = dict(estimate.settings["protection"])
    values["job"] = job
    before = values.pop("checkpoint", None) or {}
    checkpoint = estimate.settings.get("checkpoint")
    if checkpoint is not None:
        others = {key: value for key, value in before.items() if key not in _PLANNED}
        values["checkpoint"] = {**others, "path": path, **checkpoint}
    return values
