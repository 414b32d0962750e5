"""A page in a browser: its requests, its messages, and the lines that need a script."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from forerun.docs.pictures import browser

WHOLE = "<!DOCTYPE html><title>t</title><link rel=icon href='data:,'><p>here</p>"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(browser.find_chromium() is None, reason="no Chromium on PATH"),
]


@pytest.fixture(scope="module")
def screens() -> ModuleType:
    pytest.importorskip("PIL", reason="needs Pillow")
    return import_module("forerun.docs.pictures.screens")


def test_a_page_that_is_whole_by_itself(screens: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(WHOLE, encoding="utf-8")
    result = screens.check_page(page)
    assert (result.requested_urls, result.console_messages, result.unread) == ((), (), ())
    assert (result.nbytes, result.num_lines, result.num_sheets) == (len(WHOLE), 1, 1)
    shot = screens.picture(page, "390-dark", is_whole=False)
    assert shot.startswith(b"\x89PNG")


def test_requests_messages_and_lines_of_scripts_are_told(
    screens: ModuleType, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    script = "console.log('x'); document.body.append(document.createElement('p'), 'late')"
    page.write_text(f"{WHOLE}<img src='beside.png'><script>{script}</script>", encoding="utf-8")
    result = screens.check_page(page)
    assert (tmp_path / "beside.png").as_uri() in result.requested_urls
    assert result.console_messages and result.unread == ("late",)
