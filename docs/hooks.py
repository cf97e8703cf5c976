"""Pages of the site that are not in this folder: one for each public name, and files of the root folder.

``mkdocs.yml`` names this file as a hook, and MkDocs calls the ``on_…`` functions in the order in which they
stand here. Pages are written with links that work in a checkout; this file makes them work on the site, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import holdfast

ROOT = Path(__file__).parents[1]
FROM_ROOT = {  # where files of the root folder are on the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
API_TITLE = "API reference"

# Every public name is in one group: a new one without a group fails the build.
GROUPS = {
    "Checkpoints": ["Checkpointer", "Policy", "Chunked", "Differential", "Incremental", "Full"],
    "Loading": ["load", "LoadedVersion", "saved_shapes", "SavedShapes", "SavedTensor"],
    "Quantization": ["AutoBits", "quantize", "QuantizedRows"],
    "Jobs": [
        "Job",
        "JobResult",
        "ErasureCode",
        "Replication",
        "PartialRecovery",
        "NoProtection",
        "Training",
        "Local",
        "Ray",
    ],
    "Data": ["Reader", "Batch", "Synthetic", "Criteo", "Prefetch"],
    "Models": ["DLRM", "DeepFM", "PNN", "Recommender"],
    "Errors": [],  # all exceptions
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^\s*(```|~~~)")
_LIST_OR_TABLE = re.compile(r"^(?:[-*] |\d+\. |\|)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the public names into the navigation."""
    groups = [{group: [{n: page_of(n)} for n in names]} for group, names in grouped().items()]
    for section in config.nav or []:
        if API_TITLE in section:
            section[API_TITLE] = ["api/index.md", *groups]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add those pages, and the files of the root folder."""
    files.append(File.generated(config, "api/index.md", content=index()))
    for names in grouped().values():
        for name in names:
            files.append(File.generated(config, page_of(name), content=f"::: holdfast.{name}\n"))
    for name, uri in FROM_ROOT.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links, and put blank lines where Python-Markdown needs them."""
    uri = page.file.src_uri
    folder = ROOT if uri in FROM_ROOT.values() else (ROOT / "docs" / uri).parent

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups()
        if ":" in target:
            return found[0]
        path = Path(os.path.normpath(folder / target))
        if path.parent == ROOT and path.name in FROM_ROOT:
            on_site = FROM_ROOT[path.name]
        elif path.is_relative_to(ROOT / "docs"):
            on_site = path.relative_to(ROOT / "docs").as_posix()
        elif path.exists():
            return text  # in the checkout, not on the site
        else:
            return found[0]  # leads nowhere: MkDocs says so
        return f"{image}[{text}]({os.path.relpath(on_site, Path(uri).parent)}{anchor or ''})"

    return "\n".join(
        line if fenced else _LINK.sub(link, line) for line, fenced in with_blank_lines(markdown.split("\n"))
    )


def with_blank_lines(lines: list[str]) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it is code. A blank line goes before a list or table that follows text."""
    fenced, before = False, ""
    for line in lines:
        is_fence = bool(_FENCE.match(line))
        starts = _LIST_OR_TABLE.match(line)
        if not fenced and starts and before.strip() and not _LIST_OR_TABLE.match(before) and before[0] != " ":
            yield "", False
        yield line, fenced or is_fence
        fenced, before = fenced != is_fence, line


def grouped() -> dict[str, list[str]]:
    """Every public name, by group."""
    public = {name: getattr(holdfast, name) for name in holdfast.__all__ if not name.startswith("_")}
    errors = [n for n, v in public.items() if isinstance(v, type) and issubclass(v, BaseException)]
    groups = {**GROUPS, "Errors": errors}
    placed = [name for names in groups.values() for name in names]
    if sorted(placed) != sorted(public):
        odd: Any = sorted(set(placed) ^ set(public))
        raise ValueError(f"public names without a group in docs/hooks.py, or groups without a name: {odd}")
    return groups


def page_of(name: str) -> str:
    """Where the page of a public name is."""
    return f"api/{name}.md"


def index() -> str:
    """A page with every public name and the first sentence about it."""
    lines = ["# API reference", "", "Everything here is imported as `import holdfast as hf`.", ""]
    for group, names in grouped().items():
        lines += [f"## {group}", ""]
        for name in names:
            said = (getattr(holdfast, name).__doc__ or "").split("\n\n")[0]
            said = re.sub(r"``(.+?)``", r"`\1`", " ".join(said.split()))
            lines.append(f"- [`{name}`]({name}.md): {said}")
        lines.append("")
    return "\n".join(lines)
