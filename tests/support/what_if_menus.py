"""Menus of the choices on ``report.html`` in a browser, and the answers of ``forerun predict``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from browser import Tab

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
