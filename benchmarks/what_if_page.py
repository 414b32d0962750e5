"""Set the menus of ``report.html`` in a browser; compare the answers with ``forerun predict``.

    python benchmarks/what_if_page.py quickstart-out [--settings 50]

The page is rewritten from the records.  Settings are spread evenly over the choices of the page;
each is made by ``change`` events on the menus, and the displayed result is compared with the answer
of ``forerun predict`` to the displayed command.  Chromium has to be on PATH.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forerun
from forerun.benchmarks.browser import Tab, open_page
from forerun.calib.units import format_bytes, format_count, format_time

SET = """(wanted => {
  const menus = [...document.querySelectorAll("#what-if-panel select")];
  wanted.forEach((value, place) => {
    menus[place].value = value;
    menus[place].dispatchEvent(new Event("change", {bubbles: true}));
  });
  return true;
})(%s)"""
SHOWN = """(() => {
  const panel = document.getElementById("what-if-panel");
  const command = panel.querySelector("pre");
  return {
    menus: [...panel.querySelectorAll("select")].map(menu => menu.value),
    cells: [...panel.querySelectorAll("dd")].map(cell => cell.textContent),
    command: command.hidden ? "" : command.textContent,
    is_hidden: panel.hidden,
    is_folded: !document.getElementById("what-if-rows").open,
  };
})()"""
ROWS = """JSON.parse(document.getElementById("what-if-data").textContent).rows"""


def spread(rows: Sequence[Sequence[str]], number: int) -> list[Sequence[str]]:
    """Return ``number`` rows, spread evenly, including the first."""
    each = max(1.0, len(rows) / number)
    return [rows[int(place * each)] for place in range(min(number, len(rows)))]


def predicted_cells(run: Any, command: str) -> list[str]:
    """Return the cells that ``forerun predict`` gives for a command that the page shows."""
    _, verb, _, *words = shlex.split(command)
    if verb != "predict":
        raise ValueError(f"{command} is no forerun predict")
    prediction = run.predict(words)
    return [
        format_time(prediction.step_time_s),
        f"{format_time(prediction.low_s)} to {format_time(prediction.high_s)}",
        prediction.layout.against_text,
        format_count(prediction.layout.throughput.tokens_per_s),
        format_bytes(prediction.memory.total_nbytes),
        prediction.layout.verdict.value,
    ]


def differences(tab: Tab, run: Any, number: int) -> tuple[int, list[str]]:
    """Return the number of settings made, and a line for each whose answers differ."""
    wrong, settings = [], spread(tab.value(ROWS), number)
    for row in settings:
        tab.value(SET % json.dumps(row[:4]))
        shown = tab.value(SHOWN)
        if shown["menus"] != list(row[:4]):
            wrong.append(f"asked for {row[:4]}, the menus say {shown['menus']}")
        elif not shown["command"]:
            wrong.append(f"{row[:4]}: no command is shown")
        elif (cells := predicted_cells(run, shown["command"])) != shown["cells"]:
            wrong.append(f"{shown['command']}: the page says {shown['cells']}, predict {cells}")
    return len(settings), wrong


def main() -> None:
    """Print what was compared; exit with 1 if a setting differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--settings", type=int, default=50)
    args = parser.parse_args()
    run = forerun.load(args.directory)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        run.report().write(page)
        with open_page(page) as tab:
            number, wrong = differences(tab, run, args.settings)
            page_problems = [*tab.problems, *(f"asked for {url}" for url in tab.requested_urls[1:])]
        print(
            f"page of {page.stat().st_size / 1000:.0f} kB: {number} settings, {len(wrong)} differ"
        )
    for line in (*wrong, *page_problems):
        print(line)
    raise SystemExit(bool(wrong or page_problems))


if __name__ == "__main__":
    main()
