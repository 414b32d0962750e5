"""What a run has shown so far, and when its forecast is made anew between windows."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from ...calib.answers import Request, RunEnd
from ...calib.forecast import Forecast
from ..directory.run_log import LoggedStep
from .energy import ReadEnergy

NUM_KEPT_STEPS = 1000
"""Bare steps that a forecast rests on: the newest."""
NUM_KEPT_IRREGULAR = 200
"""Steps beside a collection, an evaluation or a save: the newest."""
NUM_KEPT_BRACKETS = 500
"""Evaluations, and saves, that a forecast rests on: the newest."""
AGAIN_AFTER_STEPS = 20
AGAIN_AFTER_S = 30.0
"""Both must have passed until a forecast is made anew."""
AGAIN_AFTER_FRAC = 0.1
"""Of the whole run, where that is less than those seconds: a run of a minute has forecasts too."""
_IRREGULAR = frozenset({"collected", "evaluated", "saved"})


@dataclass(slots=True)
class RunSoFar:
    """Steps, evaluations, saves and energy of this process, as they come in."""

    num_nodes: float = 1.0
    """Nodes of the job for each one whose energy is read."""
    meter: ReadEnergy = lambda: None
    last_iteration: int = 0
    last_unix_s: float = 0.0
    """When the last step ended: it may have been waiting here for a while."""
    level_since: int = 0
    """Iteration from which on the level of now holds."""
    _bare: deque[LoggedStep] = field(default_factory=lambda: deque(maxlen=NUM_KEPT_STEPS))
    _irregular: deque[LoggedStep] = field(default_factory=lambda: deque(maxlen=NUM_KEPT_IRREGULAR))
    _brackets: dict[str, deque[float]] = field(default_factory=dict)
    _energy: list[tuple[float, float]] = field(default_factory=list)
    """First and newest reading: Unix seconds and joules."""

    def add(self, row: LoggedStep, unix_s: float) -> None:
        """A step has ended."""
        self.last_iteration, self.last_unix_s = row.iteration, unix_s
        if row.is_hooked or row.is_disturbed:
            return
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
        name = str(event["name"])
        known = self._brackets.setdefault(name, deque(maxlen=NUM_KEPT_BRACKETS))
        known.append(float(event["time_s"]))

    def read_energy(self, now_unix_s: float) -> None:
        """Take one reading where there are any."""
        energy_j = self.meter()
        if energy_j is not None:
            self._energy = [*self._energy[:1], (now_unix_s, energy_j)]

    def request(
        self, asked: Request, now_unix_s: float, *, last_iteration: int | None = None
    ) -> Request:
        """The asked of the user with all that is known; steps up to ``last_iteration``.

        Its moment is the end of the last step, ``now_unix_s`` only where none has ended.
        """
        end = self.last_iteration if last_iteration is None else last_iteration
        bare = [row for row in self._bare if row.iteration <= end]
        irregular = [row for row in self._irregular if row.iteration <= end]
        is_full = len(irregular) == NUM_KEPT_IRREGULAR
        since = max(self.level_since, irregular[0].iteration if is_full else 0)
        used_j, power_w = self._used()
        return replace(
            asked,
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
class OwnWork:
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


class Forecasts:
    """Makes the forecast anew once enough has come in, and says when it is news."""

    def __init__(self) -> None:
        self._at_iteration = 0
        self._at_unix_s = 0.0
        self._every_s = AGAIN_AFTER_S
        self._said: Forecast | None = None

    def answered(self, forecast: Forecast, iteration: int) -> None:
        """A window has had its answer, which the user has seen."""
        self._said = forecast
        self._at_iteration, self._at_unix_s = iteration, forecast.now_unix_s
        self._every_s = min(AGAIN_AFTER_S, AGAIN_AFTER_FRAC * forecast.total_s)

    def rebase(self) -> None:
        """The step has drifted: the next forecast is due now, and is news."""
        self._at_iteration, self._at_unix_s, self._said = -AGAIN_AFTER_STEPS, -math.inf, None

    def due(self, end: RunEnd, run: RunSoFar, asked: Request, now_unix_s: float) -> Request | None:
        """What the next forecast rests on, which now counts as made; None where none is due."""
        num_new = run.last_iteration - self._at_iteration
        if not end.horizon or 0 < end.steps_total <= run.last_iteration:
            return None
        if num_new < AGAIN_AFTER_STEPS or 0.0 <= now_unix_s - self._at_unix_s < self._every_s:
            return None  # a clock that was set back says nothing of when the last one was
        self._at_iteration, self._at_unix_s = run.last_iteration, now_unix_s
        return run.request(asked, now_unix_s)

    def is_news(self, forecast: Forecast) -> bool:
        """True where the end has left the interval that was said last; then it counts as said."""
        said = self._said
        if said is not None:
            early_s = said.now_unix_s + said.remaining_low_s
            if early_s <= forecast.finish_p50_unix_s <= said.finish_p95_unix_s:
                return False
        self._said = forecast
        return True
