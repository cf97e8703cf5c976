"""The examples of the guides, run."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import holdfast
from holdfast.cli.app import app
from holdfast.training.config import JobConfig
from tests.blocks import DOCS, ROOT, Follower, blocks_of, prose_of

SOURCES = ROOT / "src" / "holdfast"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def test_the_complete_example_of_checkpointing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = re.findall(r"```python\n(.*?)```", (DOCS / "checkpointing.md").read_text(), re.DOTALL)
    code, *others = (example for example in examples if example.startswith("import"))
    monkeypatch.chdir(tmp_path)
    for other in others:
        exec(compile(other, "checkpointing.md", "exec"), {"__name__": "example"})  # noqa: S102
    smaller = code.replace("100_000", "20_480").replace("200_000", "2_000").replace("50_000", "500")
    for _ in range(2):  # the second start finds that all is done
        exec(compile(smaller, "checkpointing.md", "exec"), {"__name__": "example"})  # noqa: S102
        assert len(list((tmp_path / "run1" / "dense").iterdir())) == 2
    loads = next(example for example in examples if "hf.load(" in example)
    names: dict[str, Any] = {"__name__": "example", "hf": holdfast}
    exec(compile(loads, "checkpointing.md", "exec"), names)  # noqa: S102
    assert names["table_rows"] == [2_000, 500, 1_000]
    assert names["loaded"].step == 39


def test_the_examples_of_data() -> None:
    examples = re.findall(r"```python\n(.*?)```", (DOCS / "data.md").read_text(), re.DOTALL)
    complete = [example for example in examples if example.startswith("import")]
    assert len(complete) == 2
    for example in complete:
        names: dict[str, object] = {"__name__": "example"}
        exec(compile(example.replace("1_000_000", "9_000"), "data.md", "exec"), names)  # noqa: S102
        assert names["state"]


def test_the_first_example_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = re.findall(r"```python\n(.*?)```", (DOCS / "jobs.md").read_text(), re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    smaller = example.replace("1_000_000", "30_000").replace("=2048", "=100")
    assert smaller.count("30_000") == smaller.count("=100,") == 1
    exec(compile(smaller, "jobs.md", "exec"), {"__name__": "example"})  # noqa: S102
    *shown, last = capsys.readouterr().out.splitlines()
    assert "stopping 300 100%" in shown
    assert last.endswith(" 300 1")


def test_the_own_model_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(DOCS / "examples" / "own_model.py", tmp_path)
    Follower(tmp_path).run("python own_model.py clicks.npz")
    example = next(block.code for block in blocks_of(DOCS / "jobs.md") if "own_model:build" in block.code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    exec(compile(example.replace("batch_size=256", "batch_size=256, max_steps=20"), "jobs.md", "exec"), {})  # noqa: S102
    assert 0 < float(capsys.readouterr().out) < 1


def test_the_own_model_of_training(tmp_path: Path) -> None:
    shutil.copy(DOCS / "examples" / "own_model.py", tmp_path)
    example = next(block.code for block in blocks_of(DOCS / "training.md") if "own_model:build" in block.code)
    made, trained = example.splitlines()
    missing = Follower(tmp_path).run(f"! {trained} 2>&1")
    assert missing.splitlines() == [
        "error: clicks.npz does not exist: make it with `python own_model.py clicks.npz`"
    ]
    assert "test AUC" in Follower(tmp_path).run(f"{made}\n{trained} --set threads=1")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_are_python(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            ast.parse(block.code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    """Of every line that a reader can copy, whether a test runs it or not."""
    root = get_command(app)
    for block in blocks_of(page):
        if block.language != "sh":
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if not words or Path(words[0]).name != "holdfast":
                continue
            command: Any = root
            for word in words[1:]:
                command = getattr(command, "commands", {}).get(word, command)
            known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
            used = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
            assert command is not root, line
            assert used <= known | {"--help"}, line


def test_every_key_of_a_job_is_documented() -> None:
    keys = {f"job.{name}" for name in JobConfig.__struct_fields__}
    assert keys <= set(re.findall(r"`(job\.\w+)`", (DOCS / "jobs.md").read_text()))
    assert keys <= set(re.findall(r"`(job\.\w+)`", (DOCS / "training.md").read_text()))


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", prose_of(page)):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_event_is_documented() -> None:
    """By its name, on some page: where it is logged is where it is named in the code."""
    pages = "".join(page.read_text() for page in DOCS.glob("*.md"))
    found = {name for path in SOURCES.rglob("*.py") for name in events_of(path)}
    assert {"run_finished", "progress", "server_lost", "redundancy_restored", "checkpoint_saved"} <= found
    assert found <= set(re.findall(r"`(\w+)`", pages))


def events_of(path: Path) -> set[str]:
    """Names of events that a file logs itself, or hands on to whoever does."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        name = node.args[0]
        if node.func.attr == "append" and isinstance(name, ast.Tuple) and "events" in ast.dump(node.func):
            name = name.elts[0]
        elif node.func.attr not in ("emit", "event", "say", "_say"):
            continue
        if isinstance(name, ast.Constant):
            found.add(str(name.value))
        elif isinstance(name, ast.JoinedStr):  # of servers and workers alike
            found |= {ast.unparse(name)[2:-1].replace("{member.role}", role) for role in ("server", "worker")}
    return found
