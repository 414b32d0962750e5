"""What a run has shown so far, its energy too, and when its forecast is made anew.

Energy is that of this node's accelerators, from NVML's own counters, read by the companion and
never in training.  NVML is loaded by name, without torch.
"""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...calib.answers import Request, RunEnd
from ...calib.forecast import Forecast
from ..store import LoggedStep

ReadEnergy = Callable[[], "float | None"]
NUM_RECENT_STEPS = 1000
"""Bare steps that a forecast rests on: the newest."""
NUM_RECENT_IRREGULAR = 200
"""Steps beside a collection, an evaluation or a save: the newest."""
NUM_RECENT_BRACKETS = 500
"""Evaluations, and saves, that a forecast rests on: the newest."""
RENEW_AFTER_STEPS = 20
RENEW_AFTER_S = 30.0
"""Both must have passed until a forecast is made anew."""
RENEW_AFTER_FRAC = 0.1
"""Of the whole run, where that is less than those seconds: a run of a minute has forecasts too."""
JOULES_PER_MJ = 1e-3
"""NVML counts millijoules."""
_IRREGULAR = frozenset({"collected", "evaluated", "saved"})


@dataclass(slots=True)
class ObservedRun:
    """Steps, evaluations, saves and energy of this process, as they come in."""

    num_nodes: float = 1.0
    """Nodes of the job for each one whose energy is read."""
    meter: ReadEnergy = lambda: None
    last_iteration: int = 0
    last_unix_s: float = 0.0
    """When the last step ended: it may have been waiting here for a while."""
    level_since: int = 0
    """Iteration from which on the level of now holds."""
    _bare: deque[LoggedStep] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_STEPS))
    _irregular: deque[LoggedStep] = field(
        default_factory=lambda: deque(maxlen=NUM_RECENT_IRREGULAR)
    )
    _brackets: dict[str, deque[float]] = field(default_factory=dict)
    _energy: list[tuple[float, float]] = field(default_factory=list)
    """First and newest reading: Unix seconds and joules."""

    def add(self, row: LoggedStep, unix_s: float) -> None:
        """A step has ended."""
        self.last_iteration, self.last_unix_s = row.iteration, unix_s
        if not (row.is_hooked or row.is_disturbed):
            if not row.flags:
                self._bare.append(row)
            elif _IRREGULAR.issuperset(row.flags):
                self._irregular.append(row)

    def rebase(self, since_iteration: int) -> None:
        """The step has drifted: what came before tells of its level no more, but of its drifts."""
        self.level_since = since_iteration
        while self._irregular and self._irregular[0].iteration < since_iteration:
            self._irregular.popleft()

    def add_bracket(self, event: dict[str, Any]) -> None:
        """An evaluation or a save has ended."""
        known = self._brackets.setdefault(str(event["name"]), deque(maxlen=NUM_RECENT_BRACKETS))
        known.append(float(event["time_s"]))

    def read_energy(self, now_unix_s: float) -> None:
        """Take one reading where there are any."""
        energy_j = self.meter()
        if energy_j is not None:
            self._energy = [*self._energy[:1], (now_unix_s, energy_j)]

    def request(
        self, base_request: Request, now_unix_s: float, *, last_iteration: int | None = None
    ) -> Request:
        """The asked of the user with all that is known; steps up to ``last_iteration``.

        Its moment is the end of the last step, ``now_unix_s`` only where none has ended.
        """
        end = self.last_iteration if last_iteration is None else last_iteration
        bare = [row for row in self._bare if row.iteration <= end]
        irregular = [row for row in self._irregular if row.iteration <= end]
        is_full = len(irregular) == NUM_RECENT_IRREGULAR
        since = max(self.level_since, irregular[0].iteration if is_full else 0)
        used_j, power_w = self._used()
        return replace(
            base_request,
            now_unix_s=self.last_unix_s or now_unix_s,
            last_step=self.last_iteration,
            step_times_s=tuple(row.time_s for row in bare),
            step_numbers=tuple(row.iteration for row in bare),
            irregular_times_s=tuple(row.time_s for row in irregular),
            num_regular=sum(row.iteration >= since for row in bare),
            level_since_step=max(0, self.level_since - 1),
            eval_times_s=tuple(self._brackets.get("eval", ())),
            save_times_s=tuple(self._brackets.get("save-checkpoint", ())),
            energy_used_j=used_j,
            mean_power_w=power_w,
        )

    def _used(self) -> tuple[float | None, float | None]:
        if len(self._energy) < 2:
            return None, None
        (begin_s, begin_j), (end_s, end_j) = self._energy
        used_j = max(0.0, end_j - begin_j) * self.num_nodes
        return used_j, used_j / (end_s - begin_s) if end_s > begin_s else None


@dataclass(slots=True)
class AnalysisInterval:
    """From when to when the companion computed: steps at that time are not as others are."""

    _begin_unix_s: float = math.inf
    _end_unix_s: float = -math.inf
    _is_over: bool = True

    def begin(self, unix_s: float) -> None:
        """A window has closed: its analysis is next."""
        self._begin_unix_s, self._end_unix_s, self._is_over = unix_s, math.inf, False

    def over(self) -> None:
        """It is done; when, the next ``now`` says."""
        self._is_over = True

    def now(self, unix_s: float) -> None:
        """The clock of the loop."""
        if self._is_over and self._end_unix_s == math.inf:
            self._end_unix_s = unix_s

    def covers(self, unix_s: float) -> bool:
        """True where a step that ended then ran beside it."""
        return self._begin_unix_s < unix_s <= self._end_unix_s


class ForecastSchedule:
    """Makes the forecast anew once enough has come in, and says when it is news."""

    def __init__(self) -> None:
        self._at_iteration, self._at_unix_s, self._every_s = 0, 0.0, RENEW_AFTER_S
        self._last: Forecast | None = None
        """What the user was told."""

    def answered(self, forecast: Forecast, iteration: int) -> None:
        """A window has had its answer, which the user has seen."""
        self._last = forecast
        self._at_iteration, self._at_unix_s = iteration, forecast.now_unix_s
        self._every_s = min(RENEW_AFTER_S, RENEW_AFTER_FRAC * forecast.total_s)

    def rebase(self) -> None:
        """The step has drifted: the next forecast is due now, and is news."""
        self._at_iteration, self._at_unix_s, self._last = -RENEW_AFTER_STEPS, -math.inf, None

    def due(
        self, end: RunEnd, run: ObservedRun, base_request: Request, now_unix_s: float
    ) -> Request | None:
        """What the next forecast rests on, which now counts as made; None where none is due."""
        num_new = run.last_iteration - self._at_iteration
        if not end.horizon or 0 < end.steps_total <= run.last_iteration:
            return None
        if num_new < RENEW_AFTER_STEPS or 0.0 <= now_unix_s - self._at_unix_s < self._every_s:
            return None  # a clock that was set back says nothing of when the last one was
        self._at_iteration, self._at_unix_s = run.last_iteration, now_unix_s
        return run.request(base_request, now_unix_s)

    def is_news(self, forecast: Forecast) -> bool:
        """True where the end has left the interval that was said last; then it counts as said."""
        if (last := self._last) is not None:
            early_s = last.now_unix_s + last.remaining_low_s
            if early_s <= forecast.finish_p50_unix_s <= last.finish_p95_unix_s:
                return False
        self._last = forecast
        return True


def open_meter(num_local_ranks: int, environ: Mapping[str, str]) -> ReadEnergy:
    """A function that returns joules since the driver was loaded, summed over this job's devices.

    It returns None from the first error on, where there is no NVML, and for devices that cannot be
    told apart from those of other jobs.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return lambda: None
    try:
        nvml.nvmlInit()
        handles = _handles(nvml, num_local_ranks, environ)
    except nvml.NVMLError:  # no driver, no permission, no such device
        handles = []

    def read() -> float | None:
        try:
            counts = [nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles]
        except nvml.NVMLError:  # before Volta they do not count; a lost one raises too
            handles.clear()
            return None
        return sum(counts) * JOULES_PER_MJ if counts else None

    return read


def _handles(nvml: Any, num_local_ranks: int, environ: Mapping[str, str]) -> list[Any]:
    """Devices of the local ranks; none where it is not known which of them they are."""
    words = [word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    words = [word for word in words if word]
    if not words:
        words = [str(index) for index in range(nvml.nvmlDeviceGetCount())]
        if len(words) != num_local_ranks:
            return []
    chosen = words[:num_local_ranks]
    if len(chosen) != num_local_ranks or any(word.startswith("MIG") for word in chosen):
        return []
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(word))
        if word.isdecimal()
        else nvml.nvmlDeviceGetHandleByUUID(word)
        for word in chosen
    ]
