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
"""Screen widths in pixels: desktop and phone."""
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
_TAKES_S = 60.0


def find_chromium() -> str | None:
    """Return the path of a Chromium; None if there is none on PATH."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass(kw_only=True, eq=False)
class Tab:
    """One page in a browser, driven over the two pipes of its debugging protocol."""

    to: int
    back: int
    session: str = ""
    problems: list[str] = field(default_factory=list)
    """Messages of the console."""
    requested_urls: list[str] = field(default_factory=list)
    """URLs that the page requested."""
    _number: int = 0
    _unparsed: bytes = b""

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """Return the result of one command; raise ``RuntimeError`` with the browser's error."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": values}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.to, json.dumps(request).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]
            self._note(reply)

    def value(self, expression: str) -> Any:
        """Return the value of an expression evaluated on the page."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{expression}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys in sequence, as a reader types them."""
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
        while b"\0" not in self._unparsed:
            got = os.read(self.back, 1 << 16)
            if not got:
                raise RuntimeError("the browser has ended")
            self._unparsed += got
        message, _, self._unparsed = self._unparsed.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Mapping[str, Any]) -> None:
        method, values = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requested_urls.append(values["request"]["url"])
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.problems.append(json.dumps(values))


@contextmanager
def open_page(page: Path, width: int = WIDTHS[0], *, has_script: bool = True) -> Iterator[Tab]:
    """Open a page in a browser of its own, with or without scripts."""
    path = find_chromium()
    if path is None:
        raise RuntimeError(f"no browser is on PATH; install one of {', '.join(NAMES)}")
    here, theirs = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile_dir:
        # The browser reads the protocol from descriptor 3 and writes it to 4.
        words = [path, *_OPTIONS, f"--user-data-dir={profile_dir}", f"--window-size={width},1000"]
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
    for domain in ("Page", "Runtime", "Network", "Log"):
        tab.call(f"{domain}.enable")
    tab.call("Emulation.setScriptExecutionDisabled", value=not has_script)
    tab.call("Page.navigate", url=page.absolute().as_uri())
    until = time.monotonic() + _TAKES_S
    while tab.value("document.readyState + location.protocol") != "completefile:":
        if time.monotonic() > until:
            raise RuntimeError(f"{page} did not load within {_TAKES_S:.0f} s")
        time.sleep(0.05)
