"""What leaves the training process while it runs: events to the companion, metrics to W&B."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import Any

from ..calib.samples.records import StepFlag
from .companion import CompanionPipe
from .host_wandb import ForecastFile, HostWandb, host_run
from .settings import Settings, WandbMode
from .window import StepPlan


class Live:
    """Active on the last rank only, where Megatron prints and logs; elsewhere it does nothing."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pipe: CompanionPipe | None = None
        self._forecast = ForecastFile(settings.directory / "forecast.json")
        self._wandb: HostWandb | None = None
        self._is_after_window = False

    def start(self) -> None:
        """Start the companion and look for the host's W&B run."""
        if not self._settings.rank.is_last:
            return
        has_host_wandb = host_run() is not None
        if has_host_wandb and self._settings.wandb is not WandbMode.OFF:
            self._wandb = HostWandb(self._forecast)
        command = self._settings.companion_command
        if command and self._pipe is None:
            arguments = companion_arguments(self._settings, has_host_wandb=has_host_wandb)
            self._pipe = CompanionPipe((*command, *arguments), os.environ)

    def step(
        self, number: int, plan: StepPlan, duration_ns: int, gap_ns: int, flags: Iterable[StepFlag]
    ) -> None:
        """A step has ended."""
        time_s = (duration_ns + gap_ns) * 1e-9
        is_after_window = self._is_after_window and plan.window is None
        if self._pipe is not None:
            self._pipe.send(
                {
                    "event": "step",
                    "step": number,
                    "time_s": time_s,
                    "gap_s": gap_ns * 1e-9,
                    "is_hooked": plan.is_hooked,
                    "window": plan.window,
                    "is_after_window": is_after_window,
                    "flags": [flag.value for flag in flags],
                    "unix_s": time.time(),
                }
            )
        self._is_after_window = self._is_after_window or plan.is_last
        if self._wandb is not None:
            if plan.window is not None and not plan.is_hooked and not plan.is_warmup:
                self._wandb.note_bare(time_s)
            self._wandb.log(step=number, time_s=time_s, is_after_window=is_after_window)

    def phase(self, name: str, step: int, duration_ns: int) -> None:
        """An evaluation or a save has ended."""
        self._send({"event": "phase", "name": name, "time_s": duration_ns * 1e-9, "step": step})

    def window_closed(self, window: int, last_step: int) -> None:
        """This rank's records of a window are on disk."""
        self._send({"event": "window_closed", "window": window, "last_step": last_step})

    def end(self, step: int) -> None:
        """Training has ended."""
        self._send({"event": "end", "step": step})

    def poll(self) -> None:
        """Look for a new forecast; from the writer's thread."""
        if self._wandb is not None:
            self._forecast.poll()

    def close(self) -> None:
        """Wait for the companion's last words, at most its patience."""
        if self._pipe is not None:
            self._pipe.close()

    def _send(self, event: dict[str, Any]) -> None:
        if self._pipe is not None:
            self._pipe.send(event)


def companion_arguments(settings: Settings, *, has_host_wandb: bool) -> tuple[str, ...]:
    """What the companion is told on its command line."""
    told = {
        "steps": settings.steps,
        "every": settings.every,
        "on_advice": settings.on_advice.value,
        "deadline_unix_s": settings.deadline_unix_s,
        "budget_hours": settings.budget_hours,
        "restart_cost_s": settings.restart_cost_s,
        "confidence": settings.confidence,
        "gpus": list(settings.gpus),
        "wandb": settings.wandb.value,
        "host_argv": list(settings.host_argv),
        "has_host_wandb": has_host_wandb,
    }
    return (
        "--directory",
        str(settings.directory),
        "--run-id",
        settings.rank.run_id,
        "--settings",
        json.dumps(told),
    )
