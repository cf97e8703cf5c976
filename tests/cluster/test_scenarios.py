"""Scenarios on virtual time, as text with recorded output (see ``script``). They are documentation, too.

``HOLDFAST_RECORD=1 pytest tests/cluster/test_scenarios.py`` records the output anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster import script

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_goes_as_recorded(path: Path) -> None:
    recorded = path.read_text()
    found = script.run(recorded)
    if os.environ.get("HOLDFAST_RECORD"):
        path.write_text(found)
    else:
        assert found == recorded


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_tells_its_story_and_ends_with_a_verdict(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# ")
    verdict = text.split("check\n----\n")[1]
    assert "bit for bit: yes" in verdict or verdict.startswith("the job ends (lost)")


def test_what_is_no_command_is_refused() -> None:
    with pytest.raises(ValueError, match="no such command: sing"):
        script.run("sing\n")


def test_a_wrong_row_is_told() -> None:
    """Otherwise every scenario might end well."""

    class Spoiled(script.Play):
        def __call__(self, command: str) -> list[str]:
            if command == "check":
                self.cluster.servers[0].shards[0].records[0] ^= 1
            return super().__call__(command)

    play = Spoiled()
    play("cluster servers=3 workers=1 k=2 r=1 batches=10")
    play("run until the end")
    assert "rows, parities and checkpoints as these lead to, bit for bit: no" in play("check")
