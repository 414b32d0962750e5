"""Steps, brackets and energy observed in a run so far, and the schedule of its forecasts.

Energy is that of this node's accelerators, from NVML's counters, read by the companion and never
in the training process.  NVML is imported by name, without torch.
"""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from ...calib.answers.request import Request
from ...calib.answers.run_end import RunEnd
from ...calib.forecast.forecast_record import Forecast
from ...calib.units import format_frac, format_time
from ..store.run_log import LoggedStep

ReadEnergy = Callable[[], "float | None"]
NUM_RECENT_STEPS = 1000
"""Newest steps without hooks or flags that a forecast uses."""
NUM_RECENT_IRREGULAR = 200
"""Newest steps next to a garbage collection, an evaluation or a save that a forecast uses."""
NUM_RECENT_BRACKETS = 500
"""Newest evaluations, and saves, that a forecast uses."""
NUM_RECENT_ANSWERS = 100
"""Newest answers whose cost a forecast uses."""
NUM_LEVEL_STEPS = 50
"""Newest regular steps with which a step beside an answer is compared."""
LEAST_SLOWED, LEAST_ADDED_FRAC = 3, 0.05
"""Steps beside an answer, and the share that it adds to them, from which the log says so."""
RENEW_AFTER_STEPS = 20
RENEW_AFTER_S = 30.0
"""Minimum steps and seconds between forecasts; both must have passed."""
RENEW_AFTER_FRAC = 0.1
"""Fraction of the whole run that replaces ``RENEW_AFTER_S`` if shorter, for runs of a minute."""
JOULES_PER_MJ = 1e-3
"""NVML counts millijoules."""
_IRREGULAR = frozenset({"collected", "evaluated", "saved"})


@dataclass(slots=True)
class ObservedRun:
    """Accumulates steps, evaluations, saves and energy of this process."""

    num_nodes: float = 1.0
    """Nodes of the job per node whose energy is read."""
    meter: ReadEnergy = lambda: None
    last_iteration: int = 0
    last_unix_s: float = 0.0
    """End of the last step, which may precede its receipt."""
    level_since: int = 0
    """Iteration at which the current level began."""
    _bare: deque[LoggedStep] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_STEPS))
    _irregular: deque[LoggedStep] = field(
        default_factory=lambda: deque(maxlen=NUM_RECENT_IRREGULAR)
    )
    _brackets: dict[str, deque[float]] = field(default_factory=dict)
    answers: deque[AnswerCost] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_ANSWERS))
    """Steps beside each of the newest answers."""
    _older_answers_s: float = 0.0
    _energy: list[tuple[float, float]] = field(default_factory=list)
    """First and newest reading: Unix seconds and joules."""

    def add(self, row: LoggedStep, unix_s: float) -> None:
        """Add a finished step."""
        self.last_iteration, self.last_unix_s = row.iteration, unix_s
        self._add_slowed(row)
        if not (row.is_hooked or row.is_disturbed):
            if not row.flags:
                self._bare.append(row)
            elif _IRREGULAR.issuperset(row.flags):
                self._irregular.append(row)

    def begin_answer(self) -> AnswerCost:
        """Count the steps that come while another answer is computed."""
        if len(self.answers) == NUM_RECENT_ANSWERS:
            self._older_answers_s += self.answers[0].added_s
        self.answers.append(AnswerCost())
        return self.answers[-1]

    @property
    def answers_s(self) -> float:
        """Time that all answers have added to steps, seconds."""
        return self._older_answers_s + sum(one.added_s for one in self.answers)

    def _add_slowed(self, row: LoggedStep) -> None:
        if row.is_disturbed and not (row.is_hooked or row.flags) and self.answers and self._bare:
            newest = [one.time_s for one in self._bare][-NUM_LEVEL_STEPS:]
            self.answers[-1].add(row.time_s, median(newest))

    def with_waiting(self, request: Request, waiting: Sequence[LoggedStep]) -> Request:
        """Return the request at the end of steps that have not been added yet, since an answer is
        being computed."""
        if not waiting or waiting[-1].iteration <= request.last_step:
            return request
        later = replace(self, answers=deque(replace(one) for one in self.answers))
        for row in waiting:
            later._add_slowed(replace(row, is_disturbed=True))
        return replace(
            request,
            now_unix_s=waiting[-1].unix_s or request.now_unix_s,
            last_step=waiting[-1].iteration,
            answer_times_s=tuple(one.added_s for one in later.answers),
        )

    def rebase(self, since_iteration: int) -> None:
        """Start a new level after a drift; earlier steps then count only as evidence of drifts."""
        self.level_since = since_iteration
        while self._irregular and self._irregular[0].iteration < since_iteration:
            self._irregular.popleft()

    def add_bracket(self, event: dict[str, Any]) -> None:
        """Add a finished evaluation or save."""
        known = self._brackets.setdefault(str(event["name"]), deque(maxlen=NUM_RECENT_BRACKETS))
        known.append(float(event["time_s"]))

    def read_energy(self, now_unix_s: float) -> None:
        """Take one energy reading, if available."""
        energy_j = self.meter()
        if energy_j is not None:
            self._energy = [*self._energy[:1], (now_unix_s, energy_j)]

    def request(
        self, base_request: Request, now_unix_s: float, *, last_iteration: int | None = None
    ) -> Request:
        """Return the user's request with all observations; steps up to ``last_iteration``.

        Its time is the end of the last step, or ``now_unix_s`` if none has ended.
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
            answer_times_s=tuple(one.added_s for one in self.answers),
            energy_used_j=used_j,
            mean_power_w=power_w,
        )

    def _used(self) -> tuple[float | None, float | None]:
        if len(self._energy) < 2:
            return None, None
        (begin_s, begin_j), (end_s, end_j) = self._energy
        used_j = max(0.0, end_j - begin_j) * self.num_nodes
        return used_j, used_j / (end_s - begin_s) if end_s > begin_s else None


@dataclass(slots=True, kw_only=True)
class AnswerCost:
    """Steps while one answer was computed."""

    num_steps: int = 0
    time_s: float = 0.0
    regular_s: float = 0.0
    """Time that as many steps take before it."""

    def add(self, time_s: float, regular_s: float) -> None:
        """Add a step."""
        self.num_steps += 1
        self.time_s += time_s
        self.regular_s += regular_s

    @property
    def added_s(self) -> float:
        """Time that the answer has added to these steps, seconds."""
        return max(0.0, self.time_s - self.regular_s)

    @property
    def line(self) -> str:
        """The cost of the answer in words; empty if nothing that shows."""
        if self.num_steps < LEAST_SLOWED or self.added_s < LEAST_ADDED_FRAC * self.regular_s:
            return ""
        return (
            f"while Forerun answered, {self.num_steps} steps took "
            f"{format_frac(self.added_s / self.regular_s)} longer ({format_time(self.added_s)} in "
            "all), since it shares the processors; the forecast counts that"
        )


@dataclass(slots=True)
class AnalysisInterval:
    """Interval in which the companion analysed a window, which may disturb steps."""

    _begin_unix_s: float = math.inf
    _end_unix_s: float = -math.inf
    _is_over: bool = True

    def begin(self, unix_s: float) -> None:
        """Start the interval at the closing of a window."""
        self._begin_unix_s, self._end_unix_s, self._is_over = unix_s, math.inf, False

    def over(self) -> None:
        """End the interval; the next ``now`` sets the time."""
        self._is_over = True

    def now(self, unix_s: float) -> None:
        """Pass the loop's time."""
        if self._is_over and self._end_unix_s == math.inf:
            self._end_unix_s = unix_s

    def covers(self, unix_s: float) -> bool:
        """True if a step that ended at ``unix_s`` overlapped the analysis."""
        return self._begin_unix_s < unix_s <= self._end_unix_s


class ForecastSchedule:
    """Decides when to renew the forecast, and when to report it to the user."""

    def __init__(self) -> None:
        self._at_iteration, self._at_unix_s, self._every_s = 0, 0.0, RENEW_AFTER_S
        self._last: Forecast | None = None
        """Forecast last reported to the user."""

    def answered(self, forecast: Forecast, iteration: int) -> None:
        """Record a window's answer as reported."""
        self._last = forecast
        self._at_iteration, self._at_unix_s = iteration, forecast.now_unix_s
        self._every_s = min(RENEW_AFTER_S, RENEW_AFTER_FRAC * forecast.total_s)

    def rebase(self) -> None:
        """Make the next forecast due at once, and reported, after a drift."""
        self._at_iteration, self._at_unix_s, self._last = -RENEW_AFTER_STEPS, -math.inf, None

    def due(
        self, end: RunEnd, run: ObservedRun, base_request: Request, now_unix_s: float
    ) -> Request | None:
        """Return the request of the next forecast and mark it as made; None if none is due."""
        num_new = run.last_iteration - self._at_iteration
        if not end.horizon or 0 < end.steps_total <= run.last_iteration:
            return None
        if num_new < RENEW_AFTER_STEPS or 0.0 <= now_unix_s - self._at_unix_s < self._every_s:
            return None  # due if the clock was set back
        self._at_iteration, self._at_unix_s = run.last_iteration, now_unix_s
        return run.request(base_request, now_unix_s)

    def is_news(self, forecast: Forecast) -> bool:
        """True if the end has left the last reported interval; marks the forecast as reported."""
        middle_unix_s = forecast.finish_p50_unix_s
        if (last := self._last) is not None and (
            last.finish_low_unix_s <= middle_unix_s <= last.finish_p95_unix_s
        ):
            return False
        self._last = forecast
        return True


def open_meter(num_local_ranks: int, environ: Mapping[str, str]) -> ReadEnergy:
    """Return a function that reads joules since driver load, summed over this job's devices.

    The function returns None after a first error, without NVML, and if devices cannot be told apart
    from those of other jobs.
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
        except nvml.NVMLError:  # devices before Volta have no counter; a lost device raises too
            handles.clear()
            return None
        return sum(counts) * JOULES_PER_MJ if counts else None

    return read


def _handles(nvml: Any, num_local_ranks: int, environ: Mapping[str, str]) -> list[Any]:
    """Return the devices of the local ranks; empty if they cannot be identified."""
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
