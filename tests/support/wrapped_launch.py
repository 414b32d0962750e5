"""``forerun run`` in a process of its own, around any command or a stand-in for torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

SUPPORT = Path(__file__).parent
PATIENCE_S = 240.0


class Launch:
    """One ``forerun run`` in a process of its own."""

    def __init__(self, home: Path, *command: str, options: tuple[str, ...] = ()) -> None:
        self.home = home
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forerun.launch.cli", "run", "--json", *options, "--", *command],
            cwd=home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.err = ""

    def end(self) -> tuple[int, dict[str, object]]:
        out, self.err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, json.loads(out.splitlines()[-1])


class Torchrun(Launch):
    """A wrapped stand-in for torchrun, with its workers running."""

    def __init__(
        self, home: Path, worker: str, *flags: str, options: tuple[str, ...] = ("--grace=3s",)
    ) -> None:
        self.pids = home / "pids"
        script = str(SUPPORT / "fake_launcher.py")
        super().__init__(
            home,
            *(sys.executable, "-S", script, str(self.pids), worker, "60", *flags),
            options=options,
        )
        wait_until(lambda: self.pids.exists() and self.pids.read_text().count("\n") == 2)

    @property
    def agent(self) -> int:
        return int((self.home / "pids.agent").read_text())

    def alive_pids(self) -> list[int]:
        everyone = [*map(int, self.pids.read_text().split()), self.agent, self.process.pid]
        return [pid for pid in everyone if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def wait_until(is_true: object) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_true():  # type: ignore[operator]
        assert time.monotonic() < end, "patience is over"
        time.sleep(0.02)
