"""Keep passwords out of messages, logs, events and the files of a run.

A URL may hold a password (``sftp://ann:hunter2@host/run``), its query a token, an option a key. The raw
values go to whoever opens the store and nowhere else. Everything for people goes through ``redact``: the
messages of all of Holdfast's errors, every event, ``Store.url``. Errors of other packages go through
``Secrets``, which knows the values of one store.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"]+")
# Up to the last "@": a password may hold one, or a slash.
_PASSWORD = re.compile(r"(://[^:/?#@]*):(.*)@")
# Where a user's name alone is a token. Elsewhere it may be the name of a container (abfs://), say.
_TOKEN = re.compile(r"((?:https?|github|gitlab)://)([^:/?#@]+)@")
_QUERY = re.compile(r"([?&][^=&#]+)=([^&#]+)")
_SECRET_NAME = re.compile(
    r"(.*_)?(password|passwd|passphrase|secret|token|credentials?|(secret|api|account|access|private|shared)_key|"
    r"secret_access_key|connection_string)",
    re.IGNORECASE,
)
_SHORTEST = 4  # letters of a secret that is looked for: others are in every other word


def redact(text: str) -> str:
    """The text with ``***`` in place of passwords and tokens in its URLs."""
    return _URL.sub(_redact_url, text) if "://" in text else text


def redacted(value: Any) -> Any:
    """A copy of plain data with all strings redacted, and hidden where their name says they are secret."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if isinstance(inner, str) and inner and is_secret_name(key) else redacted(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(inner) for inner in value]
    return value


def is_secret_name(name: object) -> bool:
    """Whether the name marks a value as secret."""
    return isinstance(name, str) and _SECRET_NAME.fullmatch(name) is not None


def _redact_url(found: re.Match[str]) -> str:
    url = _PASSWORD.sub(rf"\1:{HIDDEN}@", found[0])
    return _QUERY.sub(rf"\1={HIDDEN}", _TOKEN.sub(rf"\1{HIDDEN}@", url))


class Secrets:
    """The secret values of one store, to be taken out of what others say.

    Args:
        values: the secrets.
    """

    def __init__(self, values: Iterator[str]) -> None:
        known = {form for value in values for form in (value, unquote(value)) if len(form) >= _SHORTEST}
        self._known = sorted(known, key=len, reverse=True)  # one may be a part of another

    @classmethod
    def of(cls, url: str, options: Mapping[str, Any]) -> Secrets:
        """Those in a URL, and in options by name or in URLs among their values."""
        return cls(_secrets(url, options))

    def scrub(self, text: str) -> str:
        """Replace the secrets in a text."""
        for value in self._known:
            text = text.replace(value, HIDDEN)
        return redact(text)

    def are_in(self, error: BaseException) -> bool:
        """Whether an error, or one that led to it, says one of them."""
        seen: set[int] = set()
        waiting: list[BaseException | None] = [error]
        while waiting:
            one = waiting.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            text = f"{one} {one!r}"
            if self.scrub(text) != text:
                return True
            waiting += [one.__cause__, one.__context__]
        return False


def _secrets(url: str, options: Mapping[str, Any]) -> Iterator[str]:
    for found in _PASSWORD.finditer(url):
        yield found[2]
    for pattern in (_TOKEN, _QUERY):
        for found in pattern.finditer(url):
            yield found[2]
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets("", value)
        elif isinstance(value, str):
            if is_secret_name(name):
                yield value
            elif "://" in value:
                yield from _secrets(value, {})
