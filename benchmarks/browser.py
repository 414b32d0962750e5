"""A page in Chromium, driven over its debugging pipe by the standard library alone."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (1400, 390)
"""Pixels of a desk's screen and of a telephone's."""
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
_TAKES_S = 60.0


def found() -> str | None:
    """The path of a Chromium; None where none is on PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass(kw_only=True, eq=False)
class Tab:
    """One page in a browser, over the two pipes of its debugging protocol."""

    to: int
    back: int
    session: str = ""
    problems: list[str] = field(default_factory=list)
    """What the console said."""
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
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.problems.append(json.dumps(values))


@contextmanager
def opened(page: Path, width: int = WIDTHS[0], *, has_script: bool = True) -> Iterator[Tab]:
    """A page in a browser of its own, with or without its scripts."""
    path = found()
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
    attached = tab.call("Target.attachToTarget", targetId=target, flatten=True)
    tab.session = attached["sessionId"]
    for room in ("Page", "Runtime", "Network", "Log"):
        tab.call(f"{room}.enable")
    tab.call("Emulation.setScriptExecutionDisabled", value=not has_script)
    tab.call("Page.navigate", url=page.absolute().as_uri())
    until = time.monotonic() + _TAKES_S
    while tab.value("document.readyState + location.protocol") != "completefile:":
        if time.monotonic() > until:
            raise RuntimeError(f"{page} did not load within {_TAKES_S:.0f} s")
        time.sleep(0.05)
