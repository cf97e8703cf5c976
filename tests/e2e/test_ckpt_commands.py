"""``holdfast ckpt`` as a user runs it: in a process of its own, on stores that others write."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

import holdfast as hf
from holdfast.checkpoint.format.manifest import encode, name_of, read_newest
from holdfast.checkpoint.store.local import LocalStore
from holdfast.cli.app import main
from holdfast.testing.s3 import ACCESS_KEY, SECRET_KEY, S3Server
from tests.checkpoint.test_checkpointer import Run
from tests.e2e.commands import PATIENCE_SECONDS, holdfast


def ckpt(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return holdfast("ckpt", *arguments, cwd=cwd)


Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The same in this process, where a start takes no second: for what only differs in its arguments."""

    def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["holdfast", "ckpt", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, captured.out, captured.err)

    return run


def train(path: str | Path, *, options: dict[str, object] | None = None, versions: int = 6) -> Run:
    run = Run()
    policy = hf.Policy(strategy=hf.Chunked(round_versions=2, reset="never"))
    with hf.Checkpointer(path, run.objects, policy, options=options) as writer:
        for step in range(versions):
            run.train(2)
            writer.save(step, {"auc": 0.75})
    return run


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "store"
    train(path)
    return path


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    """A folder with a store named "store" in it."""
    shutil.copytree(template, tmp_path / "store")
    return tmp_path


def listing(path: Path) -> dict[str, tuple[int, int, bytes]]:
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_mode, p.read_bytes()) for p in files}


def folders(path: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in [path, *path.rglob("*")] if p.is_dir()}


def test_looking_leaves_no_trace(folder: Path, quick: Command) -> None:
    store = folder / "store"
    (store / "writer.lock").unlink(missing_ok=True)  # nor is it made again
    for path in [store, *store.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = listing(store), folders(store)
    try:
        shown = {
            "ls": ckpt("ls", "store", cwd=folder),
            "show": quick("show", "store", "3", cwd=folder),
            "verify": ckpt("verify", "store", cwd=folder),
            "restore": quick("restore", "store", "--out", "all.safetensors", cwd=folder),
            "export": ckpt("export", "store", "--out", "model.safetensors", cwd=folder),
            "gc": quick("gc", "store", "--keep", "1", "--dry-run", cwd=folder),
        }
        after = listing(store), folders(store)
    finally:
        for path in [store, *store.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
    for name, done in shown.items():
        assert done.returncode == 0, (name, done.stderr)
    assert after == before
    assert "6 versions, " in shown["ls"].stdout
    assert '{"auc": 0.75}' in shown["ls"].stdout
    assert "model.tables.1.weight" in shown["show"].stdout
    assert "intact: versions 1 to 6" in shown["verify"].stdout
    assert "would delete versions 1 to 5" in shown["gc"].stdout


def test_json(folder: Path, quick: Command) -> None:
    found = json.loads(quick("ls", "store", "--json", cwd=folder).stdout)
    assert [v["version"] for v in found["versions"]] == [1, 2, 3, 4, 5, 6]
    shown = json.loads(quick("show", "store", "2", "--json", cwd=folder).stdout)
    assert shown["tables"][1]["rows"] == 400
    checked = json.loads(quick("verify", "store", "2", "3", "--json", cwd=folder).stdout)
    assert checked["whole"] == [2, 3]


def test_a_damaged_chunk(folder: Path, quick: Command) -> None:
    (chunk,) = (folder / "store").glob("chunks/00000006-*increment*")
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    done = ckpt("verify", "store", cwd=folder)
    assert done.returncode == 1
    assert f"damaged chunks/{chunk.name}, needed by version 6: " in done.stdout
    assert "intact: versions 1 to 5" in done.stdout
    assert "Traceback" not in done.stderr
    assert quick("verify", "store", "5", cwd=folder).returncode == 0
    refused = quick("restore", "store", "--out", "x.safetensors", cwd=folder)
    assert refused.returncode == 1
    assert chunk.name in refused.stderr
    assert not (folder / "x.safetensors").exists()


def test_a_manifest_that_leaves_rows_out(folder: Path, quick: Command) -> None:
    """Named: the version, how many rows of which table, and where they are."""
    with LocalStore(folder / "store", create=False) as store:
        manifest = read_newest(store)
    eras = [
        msgspec.structs.replace(era, files=[f for f in era.files if f.kind != "baseline"])
        for era in manifest.eras
    ]
    forged = encode(msgspec.structs.replace(manifest, eras=eras))
    (folder / "store" / name_of(manifest.number)).write_bytes(forged)
    done = quick("verify", "store", cwd=folder)
    assert done.returncode == 1
    assert re.search(
        r"damaged version 1 is incomplete: 453 rows are missing: 50 of the 50 rows of table "
        r"model.tables.0.weight \(between rows 0 and 49\), 400 of",
        done.stdout,
    )
    assert "damaged: versions 1 to 6" in done.stdout
    refused = quick("restore", "store", "--out", "x.safetensors", cwd=folder)
    assert refused.returncode == 1
    assert "rows are missing" in refused.stderr
    assert not (folder / "x.safetensors").exists()


def test_leftovers_are_named_and_freed(folder: Path, quick: Command) -> None:
    left = folder / "store" / "chunks" / "00000099-0000-increment-0123456789ab.safetensors"
    left.write_bytes(b"x" * 5000)
    done = quick("verify", "store", cwd=folder)
    assert done.returncode == 0
    assert left.name in done.stdout
    freed = quick("gc", "store", "--keep", "2", cwd=folder)
    assert freed.returncode == 0, freed.stderr
    assert "deleted versions 1 to 4" in freed.stdout
    assert f"deleted chunks/{left.name} (left over)" in freed.stdout
    assert not left.exists()
    assert "intact: versions 5 to 6" in quick("verify", "store", cwd=folder).stdout


def test_exports(folder: Path, quick: Command) -> None:
    done = ckpt(
        "export", "store", "6", "--since", "5", "--format", "delta", "--out", "d.safetensors", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert "rows/tables.0.weight" in load_file(folder / "d.safetensors")
    done = quick("export", "store", "--format", "dcp", "--out", "dcp", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert (folder / "dcp" / ".metadata").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["ls", "nowhere"], 1, "no store at nowhere"),
        (["show", "store", "77"], 1, "has no version 77: it has 1 to 6"),
        (["verify", "store", "77"], 1, "has no version 77"),
        (["verify", "."], 1, "has no version"),
        (["gc", "."], 1, "nothing to clean up"),
        (["gc", "store", "--keep", "0"], 1, "keep is 0: expected at least 1"),
        (["export", "store", "--out", "store"], 1, "store is a folder: name a file"),
        (["export", "store", "--format", "delta", "--out", "d"], 1, "--since"),
        (["export", "store", "--object", "none", "--out", "d"], 1, "no object 'none': it has model, loader"),
        (["export", "store", "--format", "zip", "--out", "d"], 2, "Invalid value"),
        (["restore", "store"], 2, "Missing option"),
        (["show", "store", "newest"], 2, "Invalid value"),
    ],
)
def test_mistakes(folder: Path, arguments: list[str], code: int, message: str, quick: Command) -> None:
    done = quick(*arguments, cwd=folder)
    assert done.returncode == code
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_every_command_has_an_example(tmp_path: Path, quick: Command) -> None:
    for command in ("ls", "show", "verify", "restore", "export", "gc"):
        done = quick(command, "--help", cwd=tmp_path)
        assert done.returncode == 0
        assert "Example" in done.stdout
        assert f"holdfast ckpt {command}" in done.stdout


def test_ls_starts_without_torch(folder: Path) -> None:
    code = (
        "import sys; sys.argv = ['holdfast', 'ckpt', 'ls', 'store']\n"
        "from holdfast.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, timeout=PATIENCE_SECONDS
    )


def test_on_s3(s3_server: S3Server, tmp_path: Path, quick: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://{s3_server.bucket}/commands"
    run = train(url, options=s3_server.options())
    env = {
        "AWS_ENDPOINT_URL": s3_server.endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    shown = ckpt("ls", url, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "6 versions, " in shown.stdout
    checked = ckpt("verify", url, cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "intact: versions 1 to 6" in checked.stdout
    done = quick("export", url, "--out", "m.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    weight = load_file(tmp_path / "m.safetensors")["tables.1.weight"]
    assert torch.equal(weight, run.model.state_dict()["tables.1.weight"])
    freed = quick("gc", url, "--keep", "1", cwd=tmp_path)
    assert freed.returncode == 0, freed.stderr
    assert "1 version stays" in freed.stdout


WRITER = """
import sys
import holdfast as hf
from tests.checkpoint.test_checkpointer import Run
run = Run()
policy = hf.Policy(strategy=hf.Chunked(round_versions=1, dead_fraction=0.0, reset="never"), keep=4)
with hf.Checkpointer("store", run.objects, policy) as writer:
    for step in range(10**6):
        if step < 150:  # what the loader has is soon trained
            run.train()
        writer.mark("model.tables.1.weight", [step % 400])
        writer.save(step)
        if step == 5:
            print("ready", flush=True)
"""


def test_a_store_that_is_being_written_to(tmp_path: Path, quick: Command) -> None:
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        first = json.loads(quick("ls", "store", "--json", cwd=tmp_path).stdout)["versions"][-1]["version"]
        done = ckpt("verify", "store", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        for command in (["verify"], ["show"], ["export", "--out", "x.safetensors"], ["ls"]):
            done = quick(command[0], "store", *command[1:], cwd=tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr
        locked = quick("gc", "store", "--keep", "1", cwd=tmp_path)
        assert locked.returncode == 1
        assert f"process {writer.pid}" in locked.stderr
        last = json.loads(quick("ls", "store", "--json", cwd=tmp_path).stdout)["versions"][-1]["version"]
        assert last > first
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.communicate()
    assert quick("gc", "store", "--keep", "1", cwd=tmp_path).returncode == 0
    assert quick("verify", "store", cwd=tmp_path).returncode == 0
