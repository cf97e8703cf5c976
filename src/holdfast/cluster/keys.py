"""The CURVE keys of a job that leaves the machine: who may talk to its nodes, and how they prove it.

A folder holds four small text files: ``secret.key`` (mode 0600) and ``public.key`` are this holder's pair,
``server.key`` is the public key of every node that listens, ``allowed.keys`` are the public keys that such
a node lets in, one to a line. ``make_keys`` makes one pair that all nodes share: copy the folder to every
machine. Whoever has the secret key is a member of the job.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from holdfast.errors import ConfigError

_LETTERS = 40  # a CURVE key in Z85


@dataclass(frozen=True, slots=True)
class Keys:
    """One holder's keys, each 40 letters of Z85."""

    public: str
    secret: str = field(repr=False)
    server: str
    """Of whoever listens; a node that listens itself holds this pair."""
    allowed: frozenset[str]
    """Whom a node that listens lets in."""

    def __post_init__(self) -> None:
        for name, key in (("public", self.public), ("secret", self.secret), ("server", self.server)):
            _check(name, key)
        for key in self.allowed:
            _check("allowed", key)
        if _public_of(self.secret) != self.public:
            raise ConfigError(
                f"keys: the public key {self.public} does not belong to the secret one; make a new pair"
            )


def make_keys(folder: Path | str) -> Keys:
    """Make a job's pair of keys in a new or empty folder; keys that are there are never overwritten."""
    folder = Path(folder)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text, mode in (
        ("secret.key", secret, 0o600),
        ("public.key", public, 0o644),
        ("server.key", public, 0o644),
        ("allowed.keys", public, 0o644),
    ):
        path = folder / name
        try:
            # The mode is given at creation: at no moment can others open the secret.
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            raise ConfigError(
                f"{path} exists: expected a folder without keys; load it, or name another"
            ) from None
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(text + "\n")
    return load_keys(folder)


def load_keys(folder: Path | str) -> Keys:
    """Read a folder of keys.

    Raises ConfigError, as ssh does, for a secret that others can read, and for files or folders above them
    that others can write: they could add their own key.
    """
    folder = Path(folder)
    _check_folders(folder)
    secret = _lines(folder / "secret.key", private=True)
    public = _lines(folder / "public.key")
    server = _lines(folder / "server.key")
    allowed = _lines(folder / "allowed.keys")
    for name, lines in (("secret.key", secret), ("public.key", public), ("server.key", server)):
        if len(lines) != 1:
            raise ConfigError(f"{folder / name} holds {len(lines)} keys: expected one; make the keys again")
    return Keys(public[0], secret[0], server[0], frozenset(allowed))


def _lines(path: Path, private: bool = False) -> list[str]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            mode = status.st_mode & 0o777
            data = file.read(1 << 20)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): expected the keys of a job; "
            "make them with holdfast.cluster.keys.make_keys"
        ) from None
    if private and mode & 0o077:
        raise ConfigError(
            f"{path} has mode {mode:04o}: expected a secret that only its owner can read; chmod 600 it, "
            "and make new keys if somebody else may have read it"
        )
    _check_writers(path, status)
    lines = data.decode("ascii", "replace").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("# ")]


def _check_folders(folder: Path) -> None:
    """Who can rename a folder can put another in its place."""
    try:
        real = folder.resolve(strict=True)
        statuses = [(path, path.stat()) for path in (real, *real.parents)]
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be read ({error.strerror}): expected the keys of a job; "
            "make them with holdfast.cluster.keys.make_keys"
        ) from None
    for path, status in statuses:
        # In a folder such as /tmp nobody can rename or remove what belongs to somebody else.
        if path == real or not status.st_mode & stat.S_ISVTX:
            _check_writers(path, status)


def _check_writers(path: Path, status: os.stat_result) -> None:
    mode = status.st_mode & 0o777
    if mode & 0o022:
        raise ConfigError(
            f"{path} has mode {mode:04o}, so others can write their own keys there: expected a file or "
            f"folder that only its owner can write; chmod go-w {path}, and check the keys"
        )
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}, who can put other keys there: expected user "
            f"{os.geteuid()} or root; chown it, or copy the keys to a folder of your own"
        )


def _check(name: str, key: str) -> None:
    try:
        if len(key) == _LETTERS and key.isascii():
            _public_of(key)
            return
    except (ValueError, zmq.ZMQError):
        pass
    what = f"of {len(key)} letters" if name == "secret" else repr(key)
    raise ConfigError(
        f"keys: the {name} key is {what}: expected {_LETTERS} letters of Z85; make the keys again"
    )


def _public_of(secret: str) -> str:
    if not zmq.has("curve"):
        raise ConfigError("this build of ZeroMQ has no CURVE: install pyzmq from its wheels to use keys")
    return zmq.curve_public(secret.encode("ascii")).decode("ascii")
