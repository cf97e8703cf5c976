"""How a bucket of S3, or of anything that speaks its protocol, is reached, and why a request failed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, Self

from holdfast.errors import ConfigError
from holdfast.redaction import redacted

try:
    import obstore
    from obstore import exceptions as obstore_errors
    from obstore.store import S3Store as Bucket
except ImportError as error:
    raise ConfigError("s3:// needs the package obstore: pip install 'holdfast[s3]'") from error

__all__ = ["Bucket", "BucketOptions", "failure_of", "obstore", "obstore_errors"]

Failure = Literal["refused", "no bucket", "lost", "other"]


@dataclass(frozen=True, slots=True, repr=False)
class BucketOptions:
    """Connection options of a bucket. None: from the environment, else obstore's default.

    Attributes:
        endpoint: URL of the server if it is not Amazon's; may be ``http://`` (``AWS_ENDPOINT_URL``).
        access_key_id: the key id (``AWS_ACCESS_KEY_ID``).
        secret_access_key: the secret key (``AWS_SECRET_ACCESS_KEY``).
        session_token: the token of a temporary key (``AWS_SESSION_TOKEN``).
        region: the bucket's region (``AWS_REGION``).
        max_retries: retries of a request after a lost connection or a server error.
        retry_seconds: maximum total time of retries of a request.
        request_seconds: timeout of one request.
    """

    endpoint: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None
    region: str | None = None
    max_retries: int = 8
    retry_seconds: float = 60.0
    request_seconds: float = 60.0

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Self:
        """Create options from a mapping; raises `ConfigError` for an unknown name."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(options) - known):
            raise ConfigError(f"s3:// has no option {unknown[0]!r}: it takes {', '.join(sorted(known))}")
        return cls(**options)

    def __repr__(self) -> str:
        shown = redacted({field.name: getattr(self, field.name) for field in fields(self)})
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def secrets(self) -> dict[str, str]:
        """The secrets by name, including those from the environment."""
        given = {
            "secret_access_key": self.secret_access_key or os.environ.get("AWS_SECRET_ACCESS_KEY"),
            "session_token": self.session_token or os.environ.get("AWS_SESSION_TOKEN"),
            "endpoint": self.endpoint or os.environ.get("AWS_ENDPOINT_URL"),
        }
        return {name: value for name, value in given.items() if value}

    def bucket_settings(self) -> dict[str, Any]:
        """Return the keyword arguments for obstore."""
        endpoint = self.endpoint or os.environ.get("AWS_ENDPOINT_URL")
        given = {
            "endpoint": endpoint,
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
            "session_token": self.session_token,
            "region": self.region,
        }
        return {
            **{name: value for name, value in given.items() if value is not None},
            "client_options": {
                "allow_http": bool(endpoint and endpoint.startswith("http://")),
                "timeout": timedelta(seconds=self.request_seconds),
                "connect_timeout": timedelta(seconds=min(5.0, self.request_seconds)),
            },
            "retry_config": {
                "max_retries": self.max_retries,
                "retry_timeout": timedelta(seconds=self.retry_seconds),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=5),
                    "base": 2,
                },
            },
        }


def failure_of(error: Exception, reason: str) -> Failure:
    """Why a request failed that did not just miss its object; ``reason`` is the error's text."""
    refused = (obstore_errors.PermissionDeniedError, obstore_errors.UnauthenticatedError)
    if isinstance(error, refused) or "403 Forbidden" in reason or "401 Unauthorized" in reason:
        return "refused"
    if "404 Not Found" in reason:
        return "no bucket"
    return "lost" if "HTTP error" in reason else "other"
