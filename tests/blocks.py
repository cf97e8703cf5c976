"""The code blocks of a page of the documentation, and a reader who follows it from top to bottom."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    """The file that the reader is to save it as."""
    code: str


def blocks_of(page: Path) -> Iterator[Block]:
    for language, title, code in _BLOCK.findall(page.read_text()):
        yield Block(language, title or None, code)


def prose_of(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())


class Follower:
    """Does what a page says, in a folder: saves files that have a title, runs Python and shell blocks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, object] = {"__name__": "page"}
        self.printed: list[str] = []
        """What each shell block printed."""

    def follow(self, page: Path, smaller: dict[str, str]) -> None:
        """Run every block of the page, on smaller sizes. The working folder must be this one's."""
        for block in blocks_of(page):
            code = block.code
            for shown, less in smaller.items():
                code = code.replace(shown, less)
            if block.title is not None:
                (self.folder / block.title).write_text(code)
            elif block.language == "python":
                exec(compile(code, str(page), "exec"), self.names)  # noqa: S102
            elif block.language == "sh":
                self.printed.append(self.run(code))

    def run(self, command: str) -> str:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=self.folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=240,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout
