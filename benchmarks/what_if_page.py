"""Sets the menus of ``report.html`` in a browser; holds the answers against ``forerun predict``.

    python benchmarks/what_if_page.py quickstart-out [--settings 50]

The page is written anew from the records.  Settings are spread evenly over the choices of the page;
each is made by ``change`` events on the menus, and what is then shown is compared with the answer
of ``forerun predict`` to the command that is shown.  Chromium has to be on PATH.
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
from forerun.benchmarks.browser import Tab, opened
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
    """So many of the rows, evenly over all, the first among them."""
    each = max(1.0, len(rows) / number)
    return [rows[int(place * each)] for place in range(min(number, len(rows)))]


def predicted_cells(run: Any, command: str) -> list[str]:
    """The cells that ``forerun predict`` says of a command that the page shows."""
    _, verb, _, *words = shlex.split(command)
    if verb != "predict":
        raise ValueError(f"{command} is no forerun predict")
    found = run.predict(words)
    return [
        format_time(found.step_time_s),
        f"{format_time(found.low_s)} to {format_time(found.high_s)}",
        found.layout.against_text,
        format_count(found.layout.throughput.tokens_per_s),
        format_bytes(found.memory.total_nbytes),
        found.layout.verdict.value,
    ]


def differences(tab: Tab, run: Any, number: int) -> tuple[int, list[str]]:
    """How many settings were made, and those whose answers differ, in words."""
    wrong, settings = [], spread(tab.value(ROWS), number)
    for row in settings:
        tab.value(SET % json.dumps(row[:4]))
        shown = tab.value(SHOWN)
        if shown["menus"] != list(row[:4]):
            wrong.append(f"asked for {row[:4]}, the menus say {shown['menus']}")
        elif not shown["command"]:
            wrong.append(f"{row[:4]}: no command is shown")
        elif (said := predicted_cells(run, shown["command"])) != shown["cells"]:
            wrong.append(f"{shown['command']}: the page says {shown['cells']}, predict {said}")
    return len(settings), wrong


def main() -> None:
    """Print what was compared; exit with 1 where a setting differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--settings", type=int, default=50)
    args = parser.parse_args()
    run = forerun.load(args.directory)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        run.report().write(page)
        with opened(page) as tab:
            number, wrong = differences(tab, run, args.settings)
            said = [*tab.problems, *(f"asked for {url}" for url in tab.asked[1:])]
        print(
            f"page of {page.stat().st_size / 1000:.0f} kB: {number} settings, {len(wrong)} differ"
        )
    for line in (*wrong, *said):
        print(line)
    raise SystemExit(bool(wrong or said))


if __name__ == "__main__":
    main()
