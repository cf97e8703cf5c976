"""Mutants that no test can kill, because they behave as the module does, each with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutate import Mutant


@dataclass(frozen=True)
class Equivalents:
    """What `equivalent.txt` says: four lines for each, and an empty one."""

    reasons: dict[tuple[str, str, str], str]

    @classmethod
    def read(cls, path: Path) -> Equivalents:
        """Read them from a file; lines that begin with # are comments."""
        lines = [line.strip() for line in path.read_text().splitlines() if not line.startswith("#")]
        blocks = [block.split("\n") for block in "\n".join(lines).strip().split("\n\n") if block.strip()]
        reasons = {}
        for block in blocks:
            if len(block) != 4 or not block[3].startswith("why: "):
                raise ValueError(f"{path}: expected path, before, after and why: …, got {block}")
            reasons[block[0], block[1], block[2]] = block[3].removeprefix("why: ")
        return cls(reasons)

    def why(self, mutant: Mutant) -> str:
        """Why a mutant is accepted; empty: it is not."""
        return self.reasons.get((mutant.path, mutant.before, mutant.after), "")
