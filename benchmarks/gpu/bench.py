"""Base of every measurement of ``collect.py``: a device or its stand-in, and stored figures."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_CALIBRATION_CYCLES = 20_000_000


class NotHere(Exception):
    """A measurement cannot be made on this machine; the message says why."""


@dataclass(slots=True)
class Bench:
    """Figures of one measurement, written at each update, as a process may end at any moment."""

    out: Path
    work: Path
    end_s: float
    is_cpu: bool
    figures: dict[str, Any] = field(default_factory=dict)
    state: str = "begun"
    why: str = ""
    _cycles_per_s: float = 0.0

    @property
    def remaining_s(self) -> float:
        """Return the seconds until the process will be ended."""
        return self.end_s - time.monotonic()

    def put(self, **figures: Any) -> None:
        """Add figures to those recorded so far, and write all of them."""
        self.figures |= figures
        self.write()

    def write(self) -> None:
        """Write all figures atomically."""
        value = {"schema": 1, "state": self.state, "why": self.why, "figures": self.figures}
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.out)

    def figures_of(self, name: str) -> dict[str, Any]:
        """Return the figures of another measurement; none if it has not run."""
        place = self.out.with_name(f"{name}.json")
        return json.loads(place.read_text())["figures"] if place.exists() else {}

    def begin_device(self) -> None:
        """Use CUDA, or its stand-in, of which Forerun sees a CPU."""
        if not self.is_cpu:
            if not torch.cuda.is_available():
                raise NotHere("needs a GPU: torch sees none")
            torch.cuda.set_device(0)
            torch.ones(1, device="cuda")
            return
        from forerun.recipes.stand_in_cuda import install

        install.install()

    def occupy(self, time_s: float) -> None:
        """Queue a kernel of about ``time_s`` seconds on the current stream; none on a CPU."""
        if not self.is_cpu:
            self._cycles_per_s = self._cycles_per_s or _measured_cycles_per_s()
            torch.cuda._sleep(int(time_s * self._cycles_per_s))


def free_port() -> str:
    """Return a port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return str(one.getsockname()[1])


def timed_event() -> Any:
    """Return a new event with timing enabled."""
    return torch.cuda.Event(enable_timing=True)


def _measured_cycles_per_s() -> float:
    torch.cuda._sleep(_CALIBRATION_CYCLES)  # clocks rise during the first call
    begin, end = timed_event(), timed_event()
    begin.record()
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    end.record()
    torch.cuda.synchronize()
    return _CALIBRATION_CYCLES / (begin.elapsed_time(end) / 1e3)
