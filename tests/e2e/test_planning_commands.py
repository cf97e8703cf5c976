"""``holdfast plan`` and ``holdfast simulate`` as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.training.config import load
from tests.e2e.commands import holdfast


def test_a_plan_ends_in_a_recommendation_and_a_configuration(tmp_path: Path) -> None:
    done = holdfast(
        "plan", "--size", "220GB", "--servers", "5", "--mtbf", "20h", "--among", "full,chunked,full-stop",
        "--explain", "--out", "planned.yaml", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Use chunked, 4 bits: what changed since the last one, kept in order (IncrCP)" in done.stdout
    assert "assumed: rows of 64 weights (--dim)" in done.stdout
    assert "work done again" in done.stdout  # the arithmetic
    assert "wrote planned.yaml: holdfast train planned.yaml" in done.stdout
    checkpoint = load(tmp_path / "planned.yaml").checkpoint
    assert checkpoint is not None
    assert checkpoint.quantize == 4


def test_a_plan_for_machines(tmp_path: Path) -> None:
    arguments = (
        "plan", "--size", "220GB", "--servers", "6", "--machines", "3", "--mtbf", "20h", "--machine-mtbf",
        "90d", "-k", "4", "-r", "2", "--among", "ecrm",
    )  # fmt: skip
    done = holdfast(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "of these, 0.1 are of machines: there are 3, and each fails every 90 d" in done.stdout
    assert "The loss of a machine, with each code's servers on 3 machines:" in done.stdout
    assert "On 3, with 2 servers each, the loss of a machine takes 2 servers" in done.stdout
    (found,) = json.loads(holdfast(*arguments, "--json", cwd=tmp_path).stdout)["ranked"]
    assert found["machines"]["needed"] == 3
    assert found["machines"]["at_once"] == 1
    refused = holdfast(*arguments[:-6], "-k", "4", "-r", "1", "--among", "ecrm", cwd=tmp_path)
    assert refused.returncode == 1
    assert "use 6 machines" in " ".join(refused.stderr.split())


def test_a_plan_as_json_from_a_failure_log(tmp_path: Path) -> None:
    (tmp_path / "failures.csv").write_text("hours,failed\n" + "5,1\n20,1\n1,1\n7,1\n30,0\n2,1\n0.5,1\n")
    done = holdfast(
        "plan", "--size", "1TB", "--servers", "18", "--failure-log", "failures.csv", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["situation"]["mtbf_hours"] == found["fits"][0]["mean_hours"]
    for one in found["ranked"]:
        assert one["overhead"] == pytest.approx(sum(term["share"] for term in one["terms"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mtbf", "-20h"], "error: the mean time between failures in hours is -20: expected above 0\n"),
        (
            ["--mtbf", "20h", "-k", "5"],
            "error: k is 5 and r is 1 but there are 5 servers: each record of a stripe needs a server of its "
            "own, so k + r must be at most 5\n",
        ),
        (
            ["--mtbf", "20h", "--cost", "rebuild_share=0"],
            "error: the cost rebuild_share is 0: expected above 0, up to 1, a share of a server's network\n",
        ),
    ],
)
def test_impossible_input_is_refused_in_one_sentence(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = holdfast("plan", "--size", "220GB", "--servers", "5", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == message
    assert not done.stdout


def test_a_seed_below_zero_is_wrong_usage(tmp_path: Path) -> None:
    sized = ("--size", "1TB", "--servers", "100", "--mtbf", "50h")
    done = holdfast("simulate", *sized, "--seed", "-1", cwd=tmp_path)
    assert done.returncode == 2
    assert "--seed" in done.stderr
    assert "Traceback" not in done.stderr


def test_simulated_clusters_with_a_picture(tmp_path: Path) -> None:
    done = holdfast(
        "simulate", "--size", "1TB", "--servers", "100", "--mtbf", "50h", "--hours", "300h", "--runs", "2",
        "--nodes", "10,10000", "--among", "full,ecrm,partial", "--plot", "cost.png", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "MTBF falls linearly" in done.stdout
    assert "servers fail independently" in done.stdout
    assert "10,000 servers" in done.stdout
    assert "The closed forms are off by at most" in done.stdout
    picture = (tmp_path / "cost.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def test_figure_13(tmp_path: Path) -> None:
    done = holdfast("simulate", "--paper", "--runs", "1", "--nodes", "10,300", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)
    assert len(points) == 2 * 2 * 2
    assert {point["kind"] for point in points} == {"full-stop", "partial"}


SMALL = ["--scale", "2000", "--samples", "10000", "--test-samples", "5000", "--processes", "1"]


def test_emulated_failures_as_a_table_and_as_json(tmp_path: Path) -> None:
    done = holdfast(
        "emulate", *SMALL, "--ways", "full,cpr,cpr-mfu", "--at", "20h", "--at", "41h:3", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "failures of seed 0: 20 h (server" in done.stdout
    assert "41 h (server 3)" in done.stdout
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert "0.00000" in lines["full"]
    assert "lookups of a row and how far it moves: correlation 0." in done.stdout
    assert "44.8 h" in lines["cpr-mfu"]
    assert "partial recovery costs 0.51 % with a save every 44.8 h (PLS 0.1)" in done.stdout
    done = holdfast("emulate", *SMALL, "--ways", "cpr", "--distribution", "gamma=0.8", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["cluster"]["hours"] == 56
    assert found["runs"][0]["way"]["name"] == "cpr"
    assert found["runs"][0]["overhead"] < 0.02
    assert 0 < found["runs"][0]["plain"]["access_change"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ways", "none"], "error: there is no way 'none': there are full, partial"),
        (["--at", "60h"], "error: a failure after 60 hours: expected 0 to 56\n"),
        (["--failures", "-1"], "error: failures is -1: expected above 0\n"),
        (["--hours", "long"], "error: --hours is 'long': expected a time such as 45s"),
        (["--failure-log", "no.csv"], "error: the failure log no.csv cannot be read"),
        (["--criteo", "no.txt"], "error: no.txt "),
    ],
)
def test_emulations_that_cannot_be_meant_are_refused(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = holdfast("emulate", *SMALL, *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(message)
