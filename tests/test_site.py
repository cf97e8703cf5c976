"""The documentation site, built as ``make docs`` builds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the site needs pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_there_is_a_page_for_each_public_name(site: Path) -> None:
    for name in set(holdfast.__all__) - {"__version__"}:
        assert f'id="holdfast.{name}"' in (site / "api" / f"{name}.html").read_text(), name


def test_the_constructor_of_a_struct_is_documented(site: Path) -> None:
    page = (site / "api" / "ErasureCode.html").read_text()
    assert "scrub_seconds" in page
    assert "Parameters:" in page


def test_links_to_files_outside_of_the_docs_folder(site: Path) -> None:
    assert 'href="SECURITY.html"' in (site / "jobs.html").read_text()
    assert 'src="images/throughput-through-a-failure.png"' in (site / "index.html").read_text()


def test_lists_and_tables_after_a_paragraph_are_lists_and_tables(site: Path) -> None:
    for page in site.glob("*.html"):
        article = page.read_text().split("<article", 1)[-1].split("</article>")[0]
        for paragraph in article.split("<p>")[1:]:
            lines = paragraph.split("</p>")[0].splitlines()
            assert not any(line.startswith(("- ", "| ")) for line in lines), (page.name, lines)
