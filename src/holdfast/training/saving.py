"""The ``checkpoint`` section of a configuration. Nothing here loads torch: servers read it too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from holdfast.errors import ConfigError
from holdfast.options import VERIFIED_SHARE, Policy
from holdfast.redaction import redact

_Bits = Literal[2, 3, 4, 8, "auto"] | None


class CheckpointConfig(Policy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a job is saved and restored from, and when: all options of ``holdfast.Policy``, and a path.

    A version is also saved when the job ends (``save_last``); with neither ``every_steps`` nor
    ``every_seconds``, only then. ``verify`` is for a ``Checkpointer`` alone.
    """

    path: Annotated[str, Meta(min_length=1)]
    """A folder or a URL, as ``holdfast.Checkpointer`` takes it. A job goes on from its newest version."""
    quantize: _Bits | Mapping[str, _Bits] = None

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ConfigError as error:
            raise ConfigError(f"checkpoint.{error}") from None
        if self.verify != VERIFIED_SHARE:
            raise ConfigError(
                "checkpoint.verify is set, but a job's servers see every change of a row: leave it out"
            )

    def __repr__(self) -> str:
        return redact(super().__repr__())

    @property
    def policy(self) -> Policy:
        """The same as the value that writers take."""
        return Policy(**{name: getattr(self, name) for name in Policy.__struct_fields__})
