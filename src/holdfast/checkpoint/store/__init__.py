"""Where checkpoints are written: a local folder, an S3-compatible object store, or any fsspec URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from holdfast.checkpoint.store.base import ObjectInfo, ObjectReader, Store, WriterLock, check_name
from holdfast.errors import ConfigError
from holdfast.redaction import HIDDEN

__all__ = ["ObjectInfo", "ObjectReader", "Store", "WriterLock", "check_name", "open_store"]


def open_store(
    url: str | os.PathLike[str], *, create: bool, options: Mapping[str, object] | None = None
) -> Store:
    """Open the store at ``url``.

    Args:
        url: a folder or ``file://`` URL; ``s3://bucket/prefix``; any other URL that fsspec knows.
        create: make the store if it is missing. Without it, opening writes nothing and a missing
            store is an error.
        options: for S3, see `holdfast.checkpoint.store.s3.S3Options`; for other URLs, what the
            fsspec file system takes; a folder has none.

    Raises:
        StoreError: there is no store at ``url``, or it cannot be reached.
        ConfigError: an invalid option or URL.
    """
    text = os.fspath(url)
    scheme, separator, _ = text.partition("://")
    if not separator and scheme.startswith("file:"):
        raise ConfigError(f"{text!r} is neither a path nor a URL: write file:///path, or ./{text}")
    if not separator:
        return _open_local(text, create, options)
    if f":{HIDDEN}@" in text or f"={HIDDEN}" in text or f"//{HIDDEN}@" in text:
        raise ConfigError(
            f"{text} has {HIDDEN} in place of a password, which Holdfast writes nowhere: put the password in"
        )
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(
                f"{text!r} names the host {parts.netloc!r}: write file:///path for a folder here"
            )
        if parts.query or parts.fragment or text.endswith(("?", "#")):
            raise ConfigError(
                f"{text!r} has a '?' or '#', which end the path in a URL: write %3F or %23, or the bare path"
            )
        return _open_local(unquote(parts.path), create, options)
    # The other stores need packages that not every user has, so they are imported when asked for.
    if scheme == "s3":
        from holdfast.checkpoint.store.s3 import S3Options, S3Store  # noqa: PLC0415

        return S3Store(text, create=create, options=S3Options.from_mapping(options or {}))
    from holdfast.checkpoint.store.other import FsspecStore  # noqa: PLC0415

    return FsspecStore(text, create=create, options=dict(options or {}))


def _open_local(path: str, create: bool, options: Mapping[str, object] | None) -> Store:
    from holdfast.checkpoint.store.local import LocalStore  # noqa: PLC0415

    if not path:
        raise ConfigError("the path of the store is empty: name a folder, '.' for this one")
    if options:
        raise ConfigError(
            f"the store {path!r} is a folder, which takes no options, but got {sorted(options)}"
        )
    return LocalStore(path, create=create)
