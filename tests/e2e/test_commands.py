"""The commands as a user runs them: in a process of their own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.events import read_events
from holdfast.training.config import load
from tests.e2e.commands import ENDLESS, SMALL, Pipe, Terminal, holdfast, wait_for_step


def test_train_prints_a_summary_and_keeps_its_figures(tmp_path: Path) -> None:
    more = ["--set=data.samples=10000", "--set=tensorboard=true", "--seed=5", "--run=here"]
    done = holdfast("train", *SMALL, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "finished after 79 steps, 10,000 samples" in done.stdout
    assert "test AUC 0." in done.stdout
    assert "samples/s" in done.stdout
    events = read_events(tmp_path / "here")
    assert events[0]["event"] == "config"
    assert events[-1]["event"] == "run_finished"
    assert load(tmp_path / "here" / "config.yaml").seed == 5
    assert list((tmp_path / "here" / "tensorboard").glob("events.out.*"))


def test_a_run_can_be_repeated_from_its_folder_bit_for_bit(tmp_path: Path) -> None:
    """And neither overwrites the other's folder, nor does a third that is told to."""
    assert holdfast("train", *SMALL, "--set=max_steps=40", "--seed=9", cwd=tmp_path).returncode == 0
    (first,) = (tmp_path / "runs").iterdir()
    again = holdfast("train", str(first / "config.yaml"), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    one, two = (read_events(run)[-1]["weights"] for run in (tmp_path / "runs").iterdir())
    assert one == two
    third = holdfast("train", *SMALL, "--set=max_steps=2", "--run", str(first), cwd=tmp_path)
    assert third.returncode == 1
    assert "holds an earlier run" in third.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_cleanly_with_a_summary(tmp_path: Path, number: int, code: int) -> None:
    with Pipe("train", *SMALL, ENDLESS, "--run", "r", cwd=tmp_path) as run:
        wait_for_step(tmp_path / "r")
        run.process.send_signal(number)
        run.until("stopping…")
        assert run.end() == code
    lines = run.lines()
    assert any(line.startswith("interrupted after") for line in lines)
    assert any(line.startswith("test AUC") for line in lines)
    assert lines[-1].startswith("nothing was saved")
    assert not any("100%" in line for line in lines)
    last = read_events(tmp_path / "r")[-1]
    assert (last["event"], last["interrupted"]) == ("run_finished", True)


def test_the_live_view_on_a_terminal(tmp_path: Path) -> None:
    data = ["--set", "data.samples=30000", "--set", "test_every=100"]
    with Terminal("train", *SMALL, *data, cwd=tmp_path, columns=120) as terminal:
        assert terminal.end() == 0
    for part in (b"loss ", b"test AUC ", b"samples/s", b" left", b"%", b"finished after"):
        assert part in terminal.shown, part


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "--set", "batchsize=3"], 1, "there is no key batchsize; did you mean batch_size?"),
        (["train", "nowhere.yaml"], 1, "nowhere.yaml cannot be read"),
        (["train", "--set", "data.source=criteo", "--set", "data.paths=[none.tsv]"], 1, "none.tsv"),
        (
            ["train", *SMALL, "--set=optimizer.name=sgd", "--set=optimizer.lr=1e30", "--set=max_steps=30"],
            1,
            "lower",
        ),
        (["train", "--run", "/sys"], 1, "the run's folder /sys cannot be written to"),
        (
            ["train", "--set", "model.top=[100000000000000, 1]"],
            1,
            "out of memory",
        ),
        (["bench", "train", "--json", "."], 1, ". is a folder: expected the name of a file"),
        (["bench", "nothing"], 1, "unknown bench 'nothing'"),
        (["trian"], 2, "No such command"),
        (["train", "--sed", "1"], 2, "No such option"),
    ],
)
def test_mistakes_get_a_sentence_and_a_code(
    tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    done = holdfast(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_help_has_an_example() -> None:
    for command in ("train", "bench"):
        done = holdfast(command, "--help", cwd=Path.cwd())
        assert done.returncode == 0
        assert "Example: holdfast" in done.stdout
    assert "holdfast 0." in holdfast("--version", cwd=Path.cwd()).stdout


def test_bench_without_a_name_lists_all() -> None:
    done = holdfast("bench", cwd=Path.cwd())
    assert done.returncode == 0
    assert "train" in done.stdout


def criteo_lines(count: int) -> list[str]:
    """Lines in which one id decides the label, so that a model can learn it."""
    lines = []
    for i in range(count):
        clicked = i * 7919 % 97 < 30
        ids = [f"{i * 31 % 1000:08x}"] * 25
        lines.append("\t".join([str(int(clicked)), *["3"] * 13, "aaaa0001" if clicked else "bbbb0002", *ids]))
    return lines


def criteo(*more: str) -> list[str]:
    pairs = ("data.source=criteo", "model.dim=8", "model.bottom=[16, 8]", "model.top=[16, 1]",
             "data.max_rows=500", "batch_size=64", "threads=1", "optimizer.lr=0.05", *more)  # fmt: skip
    return [f"--set={pair}" for pair in pairs]


def test_train_on_a_criteo_file(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("\n".join(criteo_lines(6000)) + "\n")
    done = holdfast("train", *criteo("data.paths=[train.txt]"), "--run", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    finished = read_events(tmp_path / "r")[-1]
    assert finished["samples"] + finished["test"]["samples"] == 6000
    assert finished["test"]["auc"] > 0.99


def test_bad_lines_of_both_parts_are_reported(tmp_path: Path) -> None:
    lines = criteo_lines(3000)
    lines[10] = "nonsense"
    lines[2990] = lines[2990].replace("aaaa0001", "xyz").replace("bbbb0002", "xyz")
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    refused = holdfast("train", *criteo("data.paths=[train.txt]"), cwd=tmp_path)
    assert refused.returncode == 1
    assert "train.txt, line 11: " in refused.stderr
    skipped = holdfast(
        "train", *criteo("data.paths=[train.txt]", "data.on_bad_line=skip"), "--run", "r", cwd=tmp_path
    )
    assert skipped.returncode == 0, skipped.stderr
    assert "2 bad lines were skipped" in skipped.stdout
    assert "train.txt, line 11: " in skipped.stdout
    assert "train.txt, line 2991: " in skipped.stdout
    assert read_events(tmp_path / "r")[-1]["bad_lines"] == 2
