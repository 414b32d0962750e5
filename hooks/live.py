"""What leaves the training process while it runs: events to the companion, metrics to W&B."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable
from typing import Any

from ..calib.samples.records import StepFlag
from .companion import CompanionPipe
from .host import Host
from .host_wandb import ForecastFile, HostWandb, host_run
from .interpreter import waiting
from .settings import Settings, WandbMode
from .window import StepPlan

_log = logging.getLogger(__name__)


class Live:
    """Events on the rank where the host logs (Megatron: the last), metrics where its run is."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pipe: CompanionPipe | None = None
        self._forecast = ForecastFile(settings.directory / "forecast.json")
        self._wandb: HostWandb | None = None
        self._is_after_window = False
        self._has_said_where = False

    def start(self, host: Host | None = None) -> None:
        """Start the companion on the rank that logs; look for the host's W&B run on every one."""
        has_host_wandb = host_run() is not None
        if has_host_wandb and self._settings.wandb is not WandbMode.OFF:
            self._wandb = HostWandb(
                self._forecast, is_stepped=host is None or host.is_wandb_stepped
            )
        is_home = None if host is None else host.is_home
        if not (self._settings.rank.is_last if is_home is None else is_home):
            return
        command = self._settings.companion_command
        if command and self._pipe is None:
            arguments = companion_arguments(
                self._settings,
                has_host_wandb=has_host_wandb,
                num_steps=0 if host is None else host.num_steps,
            )
            self._pipe = CompanionPipe((*command, *arguments), os.environ)
        if not command and self._settings.is_answered and not self._has_said_where:
            self._has_said_where = True
            _log.warning("[forerun] %s", waiting(self._settings.directory))

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
            try:
                self._wandb.log(step=number, time_s=time_s, is_after_window=is_after_window)
            except Exception as err:  # W&B raises its own, network and service errors alike.
                self._wandb = None
                _log.warning("[forerun] W&B is off: %s; records are written", str(err))

    def orders(self) -> list[dict[str, Any]]:
        """What the companion has asked of this run since the last call; elsewhere nothing."""
        return [] if self._pipe is None else self._pipe.receive()

    def phase(self, name: str, step: int, duration_ns: int) -> None:
        """An evaluation or a save has ended."""
        self._send({"event": "phase", "name": name, "time_s": duration_ns * 1e-9, "step": step})

    def window_closed(self, window: int, last_step: int) -> None:
        """This rank's records of a window are on disk."""
        self._send({"event": "window_closed", "window": window, "last_step": last_step})

    def probed(self, window: int, last_step: int) -> None:
        """This rank's probes are on disk: the answer of a window can be given again."""
        self._send({"event": "probed", "window": window, "last_step": last_step})

    def end(self, step: int) -> None:
        """Training has ended."""
        self._send({"event": "end", "step": step, "unix_s": time.time()})

    def poll(self) -> None:
        """Look for a new forecast; from the writer's thread."""
        if self._wandb is not None:
            self._forecast.poll()

    def leave(self) -> None:
        """In a forked child: the companion and the W&B run are the parent's."""
        self._pipe = self._wandb = None

    def close(self) -> None:
        """Wait for the companion's last words, at most its patience."""
        if self._pipe is not None:
            self._pipe.close()

    def _send(self, event: dict[str, Any]) -> None:
        if self._pipe is not None:
            self._pipe.send(event)


def companion_arguments(
    settings: Settings, *, has_host_wandb: bool, num_steps: int = 0
) -> tuple[str, ...]:
    """What the companion is told on its command line."""
    told = {
        "steps": settings.steps,
        "every": settings.every,
        "on_advice": settings.on_advice.value,
        "deadline_unix_s": settings.deadline_unix_s,
        "budget_hours": settings.budget_hours,
        "restart_cost_s": settings.restart_cost_s,
        "mtbf_hours": settings.mtbf_hours,
        "price_per_gpu_hour": settings.price_per_gpu_hour,
        "limit_unix_s": settings.limit_unix_s,
        "started_unix_s": time.time(),
        "num_restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
        "num_ranks": settings.rank.world_size,
        "num_local_ranks": settings.rank.local_world_size,
        "confidence": settings.confidence,
        "gpus": list(settings.gpus),
        "wandb": settings.wandb.value,
        "host_argv": list(settings.host_argv),
        "has_host_wandb": has_host_wandb,
        "num_steps": num_steps or settings.cadence.train_iters or 0,
    }
    return (
        "--directory",
        str(settings.directory),
        "--run-id",
        settings.rank.run_id,
        "--settings",
        json.dumps(told),
    )
