"""The ``checkpoint`` section of a configuration. Nothing here loads torch: servers read it too."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import asdict

from holdfast.errors import ConfigError
from holdfast.options import PRIORITIZED_FRACTION, Policy, PriorityName, WhenBusy
from holdfast.redaction import redact

_Count = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(ge=0)]


class CheckpointConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a job is saved and restored from, and when; all but ``path`` as in ``holdfast.Policy``.

    A version is also saved when the job ends (``save_last``); with neither ``every_steps`` nor
    ``every_seconds``, only then.
    """

    path: Annotated[str, Meta(min_length=1)]
    """A folder or a URL, as ``holdfast.Checkpointer`` takes it. A job goes on from its newest version."""
    every_steps: _Count | None = None
    every_seconds: _Seconds | None = None
    strategy: Literal["full", "differential", "incremental", "chunked"] = "chunked"
    keep: _Count | None = None
    keep_every: _Count | None = None
    keep_seconds: _Seconds | None = None
    when_busy: WhenBusy = "wait"
    save_last: bool = True
    deletion_delay_seconds: _Seconds | None = None
    lock_wait_seconds: _Seconds | None = None
    quantize: Literal[2, 3, 4, 8, "auto"] | None = None
    quantize_state: Literal[8, 16] | None = None
    background_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    prioritize: PriorityName | None = None
    fraction: Annotated[float, Meta(gt=0, le=1)] = PRIORITIZED_FRACTION

    def __post_init__(self) -> None:
        try:
            _ = self.policy  # what goes together is checked there, and now, not by the process that saves
        except ConfigError as error:
            raise ConfigError(f"checkpoint: {error}") from None

    def __repr__(self) -> str:
        return redact(super().__repr__())

    @property
    def policy(self) -> Policy:
        """The same as the value that writers take."""
        options = asdict(self)
        del options["path"]
        return Policy(**options)
