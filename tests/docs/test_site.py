"""The site is whole: every page has its place, and no page needs a network."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_every_page_has_its_place() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    placed = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", settings, re.M)
    assert sorted(placed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs mkdocs-material: forerun[docs]")
def test_it_is_built_without_a_warning_and_asks_no_server(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    pages = [path.read_text("utf-8") for path in (tmp_path / "site").rglob("*.html")]
    loaded = [one for page in pages for one in re.findall(r'(?:src|href)="(https?://[^"]+)"', page)]
    assert len(pages) > 30 and not loaded


def test_its_pictures_are_there() -> None:
    shown = re.findall(r"\((pictures/\w+\.svg)\)", (DOCS / "how-it-works.md").read_text("utf-8"))
    assert len(shown) >= 4 and all((DOCS / path).is_file() for path in shown)
