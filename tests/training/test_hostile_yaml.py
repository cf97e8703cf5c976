"""Configurations that nobody means: one sentence each, in little time and memory."""

from __future__ import annotations

import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.cli.app import main
from holdfast.recipe import plain
from holdfast.training.config import load

MOST_BYTES = 64 << 20


def laughs(levels: int, merge: bool = False) -> str:
    """Each level holds the one before it nine times."""
    lines = ["a0: &a0 {x: 1}" if merge else "a0: &a0 [1]"]
    for n in range(1, levels):
        inner = ", ".join([f"*a{n - 1}"] * 9)
        lines.append(f"a{n}: &a{n} {{<<: [{inner}]}}" if merge else f"a{n}: &a{n} [{inner}]")
    return "\n".join(lines) + "\n"


FILES: dict[str, tuple[str, str]] = {
    "deep list": ("model: " + "[" * 100_000, r"nested more than \d+ deep"),
    "deep mapping": ("model: " + "{a: " * 100_000, r"nested more than \d+ deep"),
    "deep block": ("\n".join(" " * n + "a:" for n in range(1000)), r"nested more than \d+ deep"),
    "itself in a list": ("model: &a [*a]", "contains itself"),
    "itself in a mapping": ("model: &a {arguments: *a}", "contains itself"),
    "itself merged": ("model: &a {<<: *a}", "contains itself"),
    "itself at the top": ("&a {model: *a}", "contains itself"),
    "laughs": (laughs(30) + "model: *a29", "aliases"),
    "laughs merged": (laughs(30, merge=True) + "model: *a29", "aliases"),
    "many values": ("model: [" + "1, " * 30_000 + "]", "values"),
    "a long file": ("# " + "x" * (5 << 20), "bytes"),
    "huge integer": ("seed: 1" + "0" * 5000, "seed|integer"),
    "huge hexadecimal": ("seed: 0x" + "f" * 5000, "integer"),
    "huge in base 60": ("seed: 1" + ":59" * 2_000, "integer"),
    "beyond 64 bits": (f"seed: {2**64}", "integer|seed"),
    "beyond 64 bits inside": (f"model: {{build: 'x:y', arguments: {{a: [{10**30}]}}}}", "integer"),
    "far below": (f"model: {{build: 'x:y', arguments: {{a: {-(10**30)}}}}}", "integer"),
    "huge float": ("optimizer: {lr: 1e999}", "optimizer.lr"),
    "no month": ("run: 2024-13-45", "run|month"),
    "twice": ("seed: 1\nseed: 2", r"seed.*twice"),
    "twice inside": ("optimizer:\n  lr: 0.1\n  lr: 0.2", r"lr.*twice"),
    "twice in a list": ("model: {build: 'x:y', arguments: {a: [{b: 1, b: 2}]}}", r"b.*twice"),
    "a tag": ("model: !!python/object/apply:os.system ['true']", "not YAML"),
    "a list as a key": ("? [a, b]\n: 1", "not YAML"),
    "an anchor that is not there": ("model: *nobody", "not YAML"),
    "zero bytes": ("seed: \0", "not YAML"),
    "two documents": ("seed: 1\n---\nseed: 2", "not YAML"),
}


@pytest.mark.parametrize("name", FILES)
def test_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = FILES[name]
    (tmp_path / "bad.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["holdfast", "train", "bad.yaml"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    if name.startswith(("laughs", "a long")):  # what would take gigabytes
        tracemalloc.start()
    try:
        with pytest.raises(SystemExit) as ended:
            main()
        assert not tracemalloc.is_tracing() or tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert len(said) < 1000
    assert re.search(message, said)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "text",
    [
        "model=" + "[" * 10_000,
        "seed=1" + "0" * 5000,
        "run=&a [*a]",
        "seed={a: 1, a: 2}",
        "run=2024-13-45",
        "seed=]",
    ],
    ids=lambda text: text[:20],
)
def test_values_on_the_command_line(text: str) -> None:
    with pytest.raises(hf.ConfigError) as caught:
        load(None, [text])
    assert len(str(caught.value)) < 1000


def test_a_device_in_place_of_a_file() -> None:
    with pytest.raises(hf.ConfigError, match="bytes"):
        load(Path("/dev/zero"))


def test_anchors_that_make_sense(tmp_path: Path) -> None:
    """Values used twice, and keys taken from another mapping and overridden."""
    (tmp_path / "good.yaml").write_text(
        "model: {build: 'x:y', arguments: {sizes: &s [8, 1], a: &base {x: 1, y: 2}, "
        f"b: {{<<: *base, y: 3}}, c: *s}}}}\nseed: {2**63 - 1}\n"
    )
    config = load(tmp_path / "good.yaml")
    assert config.seed == 2**63 - 1
    arguments: dict[str, Any] = config.model.arguments  # type: ignore[union-attr]
    assert arguments == {"sizes": [8, 1], "a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": [8, 1]}


def test_arguments_that_no_message_can_hold() -> None:
    itself: list[Any] = []
    itself.append(itself)
    for value, message in ((itself, "nested"), (2**64, "64 bits"), (-(2**63) - 1, "64 bits")):
        with pytest.raises(hf.ConfigError, match=message):
            plain({"a": value}, "data")
    assert plain(2**64 - 1, "data") == 2**64 - 1
    with pytest.raises(hf.ConfigError, match="64 bits"):
        hf.Job(("x:y", {"rows": 10**30}), ("x:z", {}))
