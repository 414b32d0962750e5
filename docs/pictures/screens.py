"""Screenshots of ``report.html`` of real runs, and a browser's checks of each page.

    python docs/pictures/screens.py NAME=DIR ... --out FOLDER [--views 1400-light ...] [--whole]

DIR is the directory of a calibrated run.  Writes FOLDER/report_NAME_WIDTH_SCHEME.png (the top of
the page, or with ``--whole`` all of it) and FOLDER/report_NAME.pdf, the page on paper.  Prints a
row for each run.  Exits with 1 if a page requested any other resource, the console printed a
message, or a line is readable only with scripts.  Chromium has to be on PATH.
"""

from __future__ import annotations

import argparse
import base64
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from forerun.benchmarks.markdown_text import markdown_table
from forerun.docs.pictures.browser import WIDTHS, Tab, open_page

SCHEMES = ("light", "dark")
VIEWS = tuple(f"{width}-{scheme}" for width in WIDTHS for scheme in SCHEMES)
_HEIGHTS: dict[int, int] = dict(zip(WIDTHS, (1000, 844), strict=True))
_SCALES: dict[int, int] = dict(zip(WIDTHS, (1, 2), strict=True))
"""Device pixels per CSS pixel: those of a phone are small."""
_SURFACES, _COLOURS = 16, 56
_LINES = """[...document.body.innerText.split("\\n")].map(one => one.trim()).filter(one => one)"""
_OPEN = "document.querySelectorAll('details').forEach(one => { one.open = true; })"
_NO_PANEL = "document.getElementById('what-if-panel')?.remove()"
"""Removes the script's own menus; their content is also in the table below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCheck:
    """Observations of a browser on a page."""

    nbytes: int
    requested_urls: tuple[str, ...]
    """Addresses other than the page's own."""
    console_messages: tuple[str, ...]
    """Messages of the console."""
    num_lines: int
    """Lines of text, with all folded parts open."""
    unread: tuple[str, ...]
    """Lines that need a script."""
    widths: tuple[int, ...]
    """Widths of the page on the screens of ``WIDTHS``, in pixels."""
    num_sheets: int
    """Sheets of paper."""
    pdf: bytes


def check_page(page: Path) -> PageCheck:
    """Open a page with and without scripts, on each screen and on paper."""
    requested_urls: list[str] = []
    console_messages: list[str] = []
    widths, with_script, pdf = [], [], b""
    for width in WIDTHS:
        with open_page(page, width) as tab:
            _screen(tab, width, "light")
            widths.append(tab.value("document.documentElement.scrollWidth"))
            pdf = base64.b64decode(tab.call("Page.printToPDF", preferCSSPageSize=True)["data"])
            if width == WIDTHS[0]:
                tab.value(_NO_PANEL)
                with_script = _lines(tab)
            allowed_urls = (page.absolute().as_uri(), "about:blank")
            requested_urls += [
                url
                for url in tab.requested_urls
                if url not in allowed_urls and not url.startswith("data:")
            ]
            console_messages += tab.problems
    with open_page(page, has_script=False) as tab:
        without = _lines(tab)
    return PageCheck(
        nbytes=page.stat().st_size,
        requested_urls=tuple(requested_urls),
        console_messages=tuple(console_messages),
        num_lines=len(without),
        unread=tuple(sorted(set(with_script) - set(without))),
        widths=tuple(widths),
        num_sheets=len(re.findall(rb"/Type\s*/Page\b", pdf)),
        pdf=pdf,
    )


def picture(page: Path, view: str, *, is_whole: bool) -> bytes:
    """Return a PNG, with few colours, of the top of a page, or of all of it."""
    width, scheme = int(view.partition("-")[0]), view.partition("-")[2]
    with open_page(page, width) as tab:
        _screen(tab, width, scheme)
        height = _HEIGHTS[width]
        if is_whole:
            height = tab.value("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        got = tab.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
    image = Image.open(io.BytesIO(base64.b64decode(got["data"]))).convert("RGB")
    buffer = io.BytesIO()
    few = image.quantize(palette=_palette(image), dither=Image.Dither.NONE)
    few.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _palette(image: Image.Image) -> Image.Image:
    """Return a palette of the picture's most frequent colours, and others that cover the rest."""
    counted: Any = image.getcolors(image.width * image.height)
    frequent = [colour for _, colour in sorted(counted, reverse=True)[:_SURFACES]]
    rest = image.quantize(_COLOURS - _SURFACES, method=Image.Quantize.MAXCOVERAGE)
    palette = Image.new("P", (1, 1))
    palette.putpalette([*(part for colour in frequent for part in colour), *rest.getpalette()])
    return palette


def _screen(tab: Tab, width: int, scheme: str) -> None:
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    tab.call("Emulation.setEmulatedMedia", features=media)
    tab.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=_HEIGHTS[width],
        deviceScaleFactor=_SCALES[width],
        mobile=False,
    )


def _lines(tab: Tab) -> list[str]:
    tab.value(_OPEN)
    return tab.value(_LINES)


def _row(name: str, check: PageCheck) -> list[str]:
    return [
        name,
        f"{check.nbytes / 1000:.0f} kB",
        str(len(check.requested_urls)),
        str(len(check.console_messages)),
        f"{check.num_lines - len(check.unread)} of {check.num_lines}",
        " and ".join(map(str, check.widths)),
        f"{check.num_sheets} ({len(check.pdf) / 1000:.0f} kB)",
    ]


def main() -> int:
    """Write and print; return 1 if a page is not self-contained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="NAME=DIR")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--views", nargs="+", choices=VIEWS, default=VIEWS)
    parser.add_argument("--whole", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows, wrong = [], []
    for name, _, directory in (run.partition("=") for run in args.runs):
        page = Path(directory) / "report.html"
        check = check_page(page)
        (args.out / f"report_{name}.pdf").write_bytes(check.pdf)
        for view in args.views:
            shot = picture(page, view, is_whole=args.whole)
            path = args.out / f"report_{name}_{view.replace('-', '_')}.png"
            path.write_bytes(shot)
            print(f"{path}: {len(shot) / 1000:.0f} kB", file=sys.stderr)
        rows.append(_row(name, check))
        wrong += [f"{name}: asked for {url}" for url in check.requested_urls]
        wrong += [f"{name}: the console said {line}" for line in check.console_messages]
        wrong += [f"{name}: only with scripts: {line}" for line in check.unread]
    heads = ["run", "page", "requests", "console", "lines without script", "pixels wide", "sheets"]
    print(markdown_table(heads, rows))
    for line in wrong:
        print(line)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
