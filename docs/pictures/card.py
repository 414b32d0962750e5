"""The card on top of a report as one SVG, light or dark like its reader, for the README.

python docs/pictures/card.py DIR/report.html --out docs/pictures/card.svg
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

WIDTH, HEIGHT = 860, 292
_ALONE = f".card {{ color: var(--ink); box-sizing: border-box; min-height: {HEIGHT}px; }}"


def card_svg(page: str) -> str:
    """Return the header of a page with the page's own style.

    Raises ``ValueError`` if the page has none.
    """
    style = re.search(r"<style>(.*?)</style>", page, re.S)
    header = re.search(r'<header class="card">.*?</header>', page, re.S)
    title = re.search(r"<title>.*?</title>", page, re.S)
    if not (style and header and title):
        raise ValueError("the page has no card on top; give the report.html of a run")
    body = header[0].replace("<header", '<header xmlns="http://www.w3.org/1999/xhtml"')
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" role="img">',
            title[0],
            f"<style><![CDATA[{style[1]}\n{_ALONE}]]></style>",
            f'<foreignObject width="{WIDTH}" height="{HEIGHT}">',
            body,
            "</foreignObject>",
            "</svg>",
            "",
        )
    )


def main() -> int:
    """Draw the card; return 0."""
    parser = argparse.ArgumentParser(description="The card of a report as a picture.")
    parser.add_argument("page", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(card_svg(args.page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
