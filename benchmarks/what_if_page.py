"""Sets the menus of ``report.html`` in a browser; holds the answers against ``forerun predict``.

    python benchmarks/what_if_page.py quickstart-out [--settings 50] [--pictures FOLDER]

The page is written anew from the records.  Settings are spread evenly over the choices of the page;
each is made by ``change`` events on the menus, and what is then shown is compared with the answer
of ``forerun predict`` to the command that is shown.  Chromium has to be on PATH: it is driven over
its debugging pipe, by the standard library alone.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forerun
from forerun.calib.units import format_bytes, format_count, format_frac, format_time

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (1400, 390)
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
_TAKES_S = 60.0
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


def browser() -> str | None:
    """The path of a Chromium; None where none is on PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass(kw_only=True, eq=False)
class Tab:
    """One page in a browser, over the two pipes of its debugging protocol."""

    to: int
    back: int
    session: str = ""
    problems: list[str] = field(default_factory=list)
    """What the console said of errors."""
    asked: list[str] = field(default_factory=list)
    """Addresses that were asked for."""
    _number: int = 0
    _left: bytes = b""

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """The result of one command; ``RuntimeError`` with what the browser answers instead."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": values}
        if self.session:
            asked["sessionId"] = self.session
        os.write(self.to, json.dumps(asked).encode() + b"\0")
        while True:
            told = self._read()
            if told.get("id") == self._number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                return told["result"]
            self._note(told)

    def value(self, expression: str) -> Any:
        """What an expression gives on the page."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{expression}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def press(self, *keys: str) -> None:
        """Keys as a reader types them."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            code = {"Tab": 9, "ArrowDown": 40, "ArrowUp": 38}.get(key, 0)
            for kind in ("keyDown", "keyUp"):
                self.call(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    key=key,
                    windowsVirtualKeyCode=code,
                    **(text if kind == "keyDown" else {}),
                )

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            got = os.read(self.back, 1 << 16)
            if not got:
                raise RuntimeError("the browser has ended")
            self._left += got
        told, _, self._left = self._left.partition(b"\0")
        return json.loads(told)

    def _note(self, told: Mapping[str, Any]) -> None:
        method, values = told.get("method"), told.get("params", {})
        if method == "Network.requestWillBeSent":
            self.asked.append(values["request"]["url"])
        if method in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(json.dumps(values))


@contextmanager
def opened(page: Path, width: int = WIDTHS[0], *, has_script: bool = True) -> Iterator[Tab]:
    """A page in a browser of its own, with or without its scripts."""
    path = browser()
    if path is None:
        raise RuntimeError(f"no browser is on PATH; install one of {', '.join(NAMES)}")
    here, theirs = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as kept:
        # The protocol is on descriptors 3 and 4 of the browser.
        words = [path, *_OPTIONS, f"--user-data-dir={kept}", f"--window-size={width},1000"]
        line = f"exec {shlex.join(words)} about:blank 3<&{here[0]} 4>&{theirs[1]}"
        process = subprocess.Popen(
            ["bash", "-c", line], pass_fds=(here[0], theirs[1]), stderr=subprocess.DEVNULL
        )
        os.close(here[0])
        os.close(theirs[1])
        tab = Tab(to=here[1], back=theirs[0])
        try:
            _load(tab, page, has_script=has_script)
            yield tab
            tab.session = ""
            tab.call("Browser.close")
        finally:
            os.close(tab.to)
            os.close(tab.back)
            process.kill()
            process.wait()


def _load(tab: Tab, page: Path, *, has_script: bool) -> None:
    target = tab.call("Target.createTarget", url="about:blank")["targetId"]
    found = tab.call("Target.attachToTarget", targetId=target, flatten=True)
    tab.session = found["sessionId"]
    for room in ("Page", "Runtime", "Network", "Log"):
        tab.call(f"{room}.enable")
    tab.call("Emulation.setScriptExecutionDisabled", value=not has_script)
    tab.call("Page.navigate", url=page.absolute().as_uri())
    until = time.monotonic() + _TAKES_S
    while tab.value("document.readyState + location.protocol") != "completefile:":
        if time.monotonic() > until:
            raise RuntimeError(f"{page} did not load within {_TAKES_S:.0f} s")
        time.sleep(0.05)


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
        format_frac(found.time_frac, signed=True),
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


def pictures(page: Path, folder: Path) -> None:
    """The page in two widths, light and dark, and on paper."""
    folder.mkdir(parents=True, exist_ok=True)
    for width in WIDTHS:
        with opened(page, width) as tab:
            for scheme in ("light", "dark"):
                media = [{"name": "prefers-color-scheme", "value": scheme}]
                tab.call("Emulation.setEmulatedMedia", features=media)
                metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
                tab.call("Emulation.setDeviceMetricsOverride", **metrics)
                tab.value("document.getElementById('what-if').scrollIntoView()")
                got = tab.call("Page.captureScreenshot")
                (folder / f"{width}-{scheme}.png").write_bytes(base64.b64decode(got["data"]))
            got = tab.call("Page.printToPDF")
            (folder / f"{width}.pdf").write_bytes(base64.b64decode(got["data"]))


def main() -> None:
    """Print what was compared; exit with 1 where a setting differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--settings", type=int, default=50)
    parser.add_argument("--pictures", type=Path)
    args = parser.parse_args()
    run = forerun.load(args.directory)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        run.report().write(page)
        with opened(page) as tab:
            number, wrong = differences(tab, run, args.settings)
            said = [*tab.problems, *(f"asked for {url}" for url in tab.asked[1:])]
        if args.pictures:
            pictures(page, args.pictures)
        print(
            f"page of {page.stat().st_size / 1000:.0f} kB: {number} settings, {len(wrong)} differ"
        )
    for line in (*wrong, *said):
        print(line)
    raise SystemExit(bool(wrong or said))


if __name__ == "__main__":
    main()
