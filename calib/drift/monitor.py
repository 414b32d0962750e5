"""Detection of lasting step-time changes: robust CUSUM, confirmed by Bayesian change points.

A change is reported only if three criteria agree: the cumulative sum of clipped deviations exceeds
its threshold (Page, 1954), a new level has begun with high probability (online detection on
standardised values, Adams and MacKay, 2007), and the medians before and after differ by at least
10 %, which keeps steady runs free of alarms (Greyhound, ATC 2025).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from ..plain_json import JsonObject
from ..samples.reduce import MEDIAN_OVER_MEAN, mad_sigma
from ..samples.table import SampleTable, only_windows
from ..units import format_frac, format_time
from ..workload.config_json import Encoded, encode_fields, encoded
from .attribution import Cause, find_causes, find_group_causes

_MOST_LEVELS = 100
"""Number of earlier levels that are remembered to detect recovery."""
_MIN_CHANGE_FRAC = 0.10
_NUM_BASELINE, _MAX_BASELINE = 16, 400
"""Fewest steady steps for detection, and the largest number of newest ones in the baseline."""
_NUM_CONFIRM = 7
"""Number of steps whose median is the new level."""
_NUM_RECENT = 4 * _NUM_CONFIRM
# CUSUM is in standard deviations of a single step; an allowance of 0.5 is quickest for shifts of 1
# (Montgomery).
_ALLOWANCE = 0.5
# h = 5 has a false alarm every 465 steps; with autocorrelated steps 8 and more are needed.
_THRESHOLD = 8.0
# One very slow step must not exceed the threshold on its own: it takes three in a row.
_CLIP = 4.0
# As in Greyhound (ATC 2025).
_MIN_PROBABILITY = 0.9
_MIN_SIGMAS = 4.0
"""Smallest change in standard errors of the difference of two medians."""
_MIN_SIGMA_LOG = 0.004
"""Lower bound on the noise of steps, as from timers and logging alone."""
_RECOVERED_FRAC = 0.04
"""Largest distance from an earlier level that counts as a return to it; more for noisy steps."""
Floats = NDArray[np.float64]

_HAZARD = 1.0 / 1000.0
"""Probability that a new level begins at a given step."""
_MAX_RUN = 256
"""Longest run length that is tracked separately; longer ones are merged."""
# Prior: a level's mean is unconstrained (weight near 0), its noise near that of the steady steps
# (gamma with mean 1).  Half or twice any of the three, and a hazard ten times smaller or larger,
# left the delay (3 steps) and the alarms (none) of 24 planted series with 2 % noise unchanged.
_PRIOR_WEIGHT = 0.05
_PRIOR_SHAPE = 2.0
_PRIOR_RATE = 2.0


class ChangePoints:
    """Posterior of the current level's run length.

    Levels are normal with unknown mean and variance (normal-gamma prior, so the next value is
    Student-t); values should be standardised by the noise of a steady run and clipped, which
    prevents single outliers from becoming separate levels.
    """

    def __init__(self) -> None:
        self._log_chance = np.zeros(1)
        self._count = np.zeros(1)
        self._mean = np.zeros(1)
        self._rate = np.full(1, _PRIOR_RATE)

    def add(self, value: float) -> None:
        """Update with the next value, in time proportional to ``_MAX_RUN``."""
        predictive = self._log_chance + self._log_predictive(value)
        grown = predictive + math.log1p(-_HAZARD)
        begun = np.logaddexp.reduce(predictive) + math.log(_HAZARD)
        self._update(value)
        chance = np.concatenate(([begun], grown))
        if chance.size > _MAX_RUN:
            chance[-2] = np.logaddexp(chance[-2], chance[-1])
            chance = chance[:-1]
            self._count, self._mean = self._count[:-1], self._mean[:-1]
            self._rate = self._rate[:-1]
        self._log_chance = chance - np.logaddexp.reduce(chance)

    def recent_probability(self, num_values: int) -> float:
        """Return P(the current level began within the last ``num_values`` values)."""
        recent = self._log_chance[: num_values + 1]
        if recent.size == self._log_chance.size:
            return 1.0
        return float(np.exp(np.logaddexp.reduce(recent)))

    def _log_predictive(self, value: float) -> Floats:
        weight = _PRIOR_WEIGHT + self._count
        shape = _PRIOR_SHAPE + 0.5 * self._count
        scale2 = self._rate * (weight + 1.0) / (shape * weight)
        freedom = 2.0 * shape
        distance = (value - self._mean) ** 2 / (freedom * scale2)
        return (
            gammaln(0.5 * (freedom + 1.0))
            - gammaln(0.5 * freedom)
            - 0.5 * np.log(math.pi * freedom * scale2)
            - 0.5 * (freedom + 1.0) * np.log1p(distance)
        )

    def _update(self, value: float) -> None:
        weight = _PRIOR_WEIGHT + self._count
        rate = self._rate + 0.5 * weight / (weight + 1.0) * (value - self._mean) ** 2
        mean = (weight * self._mean + value) / (weight + 1.0)
        self._rate = np.concatenate(([_PRIOR_RATE], rate))
        self._mean = np.concatenate(([0.0], mean))
        self._count = np.concatenate(([0.0], self._count + 1.0))


class DriftKind(Enum):
    """Direction of a change of step time."""

    SLOWER = "slower"
    FASTER = "faster"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift(Encoded):
    """A change of level that was confirmed at ``iteration`` and began at ``since_iteration``."""

    kind: DriftKind
    iteration: int
    since_iteration: int
    before_s: float
    after_s: float
    probability: float

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(**encode_fields(self), change_frac=self.change_frac)

    @property
    def change_frac(self) -> float:
        """Relative change of the step time."""
        return self.after_s / self.before_s - 1.0


class DriftMonitor:
    """Online detector; ``add`` returns a drift at the step that confirms it."""

    def __init__(self) -> None:
        self._steady: deque[float] = deque(maxlen=_MAX_BASELINE)
        self._recent: deque[tuple[int, float]] = deque(maxlen=_NUM_RECENT)
        self._levels: deque[float] = deque(maxlen=_MOST_LEVELS)
        self._begin()

    @property
    def level_s(self) -> float | None:
        """Current level, seconds; None while it is being learned."""
        return math.exp(self._center) if self._is_known else None

    def add(self, iteration: int, time_s: float, *, is_masked: bool = False) -> Drift | None:
        """Add one step; masked ones (evaluation, save, collection, probes, hooks) are ignored.

        Times that are not positive and finite are ignored, too.
        """
        if is_masked or not time_s > 0 or not math.isfinite(time_s):
            return None
        value = math.log(time_s)
        if not self._is_known:
            self._steady.append(value)
            if len(self._steady) >= _NUM_BASELINE:
                self._is_known = True
                self._refresh()
            return None
        self._recent.append((iteration, value))
        z = (value - self._center) / self._sigma
        z = max(-_CLIP, min(_CLIP, z))
        self._points.add(z)
        # Without a cap, a long drift would delay the detection of recovery by as many steps.
        cap = 2.0 * _THRESHOLD
        self._up = min(cap, max(0.0, self._up + z - _ALLOWANCE))
        self._down = min(cap, max(0.0, self._down - z - _ALLOWANCE))
        drift = self._confirmed()
        if drift is None:
            self._settle()
        return drift

    def _begin(self) -> None:
        self._is_known = False
        self._center, self._sigma, self._level_sigma = 0.0, 1.0, 1.0
        self._points = ChangePoints()
        self._up = self._down = 0.0

    def _refresh(self) -> None:
        """Recompute level and noise of the steady steps, with their autocorrelation."""
        values = np.asarray(self._steady)
        self._center = float(np.median(values))
        self._sigma = max(mad_sigma(values), _MIN_SIGMA_LOG)
        clipped = np.clip((values - self._center) / self._sigma, -3.0, 3.0)
        related = max(0.0, _autocorrelation(clipped))
        inflation = (1.0 + related) / (1.0 - related)
        self._level_sigma = MEDIAN_OVER_MEAN * self._sigma * math.sqrt(inflation / _NUM_CONFIRM)
        # The spread of block medians needs several blocks.
        if values.size >= 6 * _NUM_CONFIRM:
            whole = values[: values.size // _NUM_CONFIRM * _NUM_CONFIRM]
            blocks = np.median(whole.reshape(-1, _NUM_CONFIRM), axis=1)
            self._level_sigma = max(self._level_sigma, mad_sigma(blocks))

    def _settle(self) -> None:
        """Move the oldest recent step to the baseline unless a change is suspected.

        Under suspicion the baseline is frozen, so that it does not follow a slow change.
        """
        is_suspect = max(self._up, self._down) > _THRESHOLD
        if len(self._recent) < _NUM_RECENT or is_suspect:
            return
        self._steady.append(self._recent[0][1])
        self._refresh()

    def _confirmed(self) -> Drift | None:
        if max(self._up, self._down) <= _THRESHOLD:
            return None
        # Noisy steps need a longer median; twice the size still confirms within fifteen steps.
        for size in (_NUM_CONFIRM, 2 * _NUM_CONFIRM):
            if len(self._recent) < size:
                return None
            latest = [value for _, value in self._recent][-size:]
            level = float(np.median(latest))
            change = level - self._center
            sign = math.copysign(1.0, change)
            # Medians of ``size`` steps and of the steady ones differ by noise.
            share = _NUM_CONFIRM / size + _NUM_CONFIRM / max(len(self._steady), 1)
            noise = _MIN_SIGMAS * self._level_sigma * math.sqrt(share)
            least = max(sign * math.log1p(sign * _MIN_CHANGE_FRAC), noise)
            if abs(change) >= least:
                break
        else:
            return None
        probability = self._points.recent_probability(_NUM_RECENT)
        if probability < _MIN_PROBABILITY:
            # A slow change has no sharp begin; then the median of all recent steps must differ.
            slow = float(np.median([value for _, value in self._recent])) - self._center
            if len(self._recent) < _NUM_RECENT or abs(slow) < least or slow * change < 0:
                return None
        return self._drift(level, change, probability)

    def _drift(self, level: float, change: float, probability: float) -> Drift:
        since = self._since(change)
        values = [value for iteration, value in self._recent if iteration >= since]
        before, after = self._center, float(np.median(values)) if values else level
        drift = Drift(
            kind=self._kind(before, after),
            iteration=self._recent[-1][0],
            since_iteration=since,
            before_s=math.exp(before),
            after_s=math.exp(after),
            probability=probability,
        )
        self._levels.append(before)
        self._rebase(values)
        return drift

    def _since(self, change: float) -> int:
        """Return the first recent step from which all but outliers are beyond half the change."""
        middle = self._center + 0.5 * change
        sign = 1.0 if change > 0 else -1.0
        sums, best, since = 0.0, 0.0, self._recent[-1][0]
        for iteration, value in reversed(self._recent):
            sums += max(-1.0, min(1.0, sign * (value - middle) / (0.5 * abs(change))))
            if sums > best:
                best, since = sums, iteration
        return since

    def _kind(self, before: float, after: float) -> DriftKind:
        near = max(_RECOVERED_FRAC, min(2.0 * self._level_sigma, 0.5 * abs(after - before)))
        is_back = any(abs(after - old) < near for old in self._levels)
        if after < before:
            return DriftKind.RECOVERED if is_back else DriftKind.FASTER
        return DriftKind.SLOWER

    def _rebase(self, values: Sequence[float]) -> None:
        """Make the new level the baseline; its noise carries over until re-estimated."""
        sigma, level_sigma = self._sigma, self._level_sigma
        self._steady.clear()
        self._recent.clear()
        self._begin()
        self._steady.extend(values)
        if len(values) >= _NUM_CONFIRM:
            self._is_known = True
            self._center = float(np.median(values))
            self._sigma, self._level_sigma = sigma, level_sigma


def _autocorrelation(values: np.ndarray) -> float:
    """Return the lag-one autocorrelation, shrunk for short series, at most 0.9."""
    centered = values - values.mean()
    total = float(np.dot(centered, centered))
    if total <= 0 or values.size < 4:
        return 0.0
    lag = float(np.dot(centered[1:], centered[:-1])) / total
    # Shrink towards 0 with a weight of ten values, as the estimate from 16 steps scatters by 0.25.
    return min(0.9, lag * values.size / (values.size + 10.0))


SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftEvent(Encoded):
    """A change of the step or, without ``drift``, of transfers that are hidden in the step."""

    run_id: str
    unix_s: float
    iteration: int
    drift: Drift | None = None
    causes: tuple[Cause, ...] = ()
    """Causes; empty until a window has been compared with the previous one."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        event = encoded(
            run_id=self.run_id,
            unix_s=self.unix_s,
            iteration=self.iteration,
            kind=self.kind,
            causes=self.causes,
            line=self.line,
        )
        return event | (self.drift.to_json() if self.drift else {})

    @property
    def line(self) -> str:
        """The event as one line of the log.

        >>> from forerun.calib.drift.monitor import Drift, DriftKind
        >>> found = Drift(kind=DriftKind.SLOWER, iteration=1208, since_iteration=1200,
        ...     before_s=1.84, after_s=2.12, probability=1.0)
        >>> DriftEvent(run_id="r", unix_s=0.0, iteration=1208, drift=found).line
        'drift: a step takes 2.120 s since iteration 1200, 15.2 % more than before (1.840 s)'
        """
        if self.drift is None:
            return f"drift of transfers, seen at iteration {self.iteration}: {self._why}"
        drift = self.drift
        what = "recovered" if drift.kind is DriftKind.RECOVERED else "drift"
        side = "more" if drift.change_frac >= 0 else "less"
        text = (
            f"{what}: a step takes {format_time(drift.after_s)} since iteration "
            f"{drift.since_iteration}, {format_frac(abs(drift.change_frac))} {side} than before "
            f"({format_time(drift.before_s)})"
        )
        return f"{text}; {self._why}" if self.causes else text

    @property
    def _why(self) -> str:
        return "; ".join(cause.text for cause in self.causes)

    @property
    def kind(self) -> str:
        """Kind of the drift; ``transfers`` if only these have changed."""
        return "transfers" if self.drift is None else self.drift.kind.value


def drift_causes(table: SampleTable, drift: Drift, window: int) -> tuple[Cause, ...]:
    """Return causes from comparing window ``window`` with the last one before the drift.

    Empty if no window closed before the drift, or if this one opened before it.
    """
    rows = table.newest("windows")
    # Iterations count from 1, steps from 0.
    since = drift.since_iteration - 1
    earlier = rows[rows["last_step"] < since]["window"]
    opened = rows[rows["window"] == window]["first_step"]
    if earlier.empty or opened.empty or int(opened.max()) < since:
        return ()
    return find_causes(
        only_windows(table, [int(earlier.max())]),
        only_windows(table, [window]),
        change_s=drift.after_s - drift.before_s,
        step_s=drift.before_s,
    )


def transfer_causes(table: SampleTable, windows: Sequence[int], step_s: float) -> tuple[Cause, ...]:
    """Return groups whose transfers differ between the last two ``windows``; empty for fewer."""
    if len(windows) < 2:
        return ()
    before, after = (only_windows(table, [window]) for window in windows[-2:])
    return find_group_causes(before, after, step_s=step_s)
