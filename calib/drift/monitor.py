"""Whether the step time has changed for good: robust CUSUM, confirmed by Bayesian change points.

A change is reported only where three things agree: the cumulative sum of clipped deviations has run
over (Page, 1954), a new level has begun with high probability (Adams and MacKay, 2007), and the
medians before and after differ by at least 10 %, which is what keeps steady runs free of alarms
(Greyhound, ATC 2025).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ..samples.reduce import MEDIAN_OVER_MEAN, mad_sigma
from .change_points import ChangePoints

_MOST_LEVELS = 100
"""Earlier levels that a step can come back to."""


class DriftKind(Enum):
    """Which way the step time went."""

    SLOWER = "slower"
    FASTER = "faster"
    RECOVERED = "recovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftSettings:
    """Thresholds of the detector.  CUSUM's are in standard deviations of a single step."""

    min_change_frac: float = 0.10
    num_baseline: int = 16
    """Steady steps before anything is judged."""
    max_baseline: int = 400
    num_confirm: int = 7
    """Steps whose median is the new level."""
    # Half of one deviation: CUSUM is then quickest for shifts of one (Montgomery).
    allowance: float = 0.5
    # h = 5 has a false alarm every 465 steps; with autocorrelated steps 8 and more are needed.
    threshold: float = 8.0
    # A step that waited a minute must not fill the sum by itself: it takes three in a row.
    clip: float = 4.0
    # As Greyhound has it (ATC 2025).
    min_probability: float = 0.9
    min_sigmas: float = 4.0
    """The change in standard errors of the difference of two medians."""
    min_sigma_log: float = 0.004
    """Steps are never taken to be quieter than this: timers and logging alone do as much."""
    recovered_frac: float = 0.04
    """A level this close to an earlier one is that level again, also one within its noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A change of level that was confirmed at ``iteration`` and began at ``since_iteration``."""

    kind: DriftKind
    iteration: int
    since_iteration: int
    before_s: float
    after_s: float
    probability: float

    @property
    def change_frac(self) -> float:
        """Relative change of the step time."""
        return self.after_s / self.before_s - 1.0


class DriftMonitor:
    """Takes steps one by one; ``add`` returns a drift at the step that confirms it."""

    def __init__(self, settings: DriftSettings | None = None) -> None:
        self._settings = settings or DriftSettings()
        self._steady: deque[float] = deque(maxlen=self._settings.max_baseline)
        self._num_recent = 4 * self._settings.num_confirm
        self._recent: deque[tuple[int, float]] = deque(maxlen=self._num_recent)
        self._levels: deque[float] = deque(maxlen=_MOST_LEVELS)
        self._begin()

    @property
    def level_s(self) -> float | None:
        """The present level, seconds; None while it is being learned."""
        return math.exp(self._center) if self._is_known else None

    def add(self, iteration: int, time_s: float, *, is_masked: bool = False) -> Drift | None:
        """Take one step; masked ones (evaluation, save, collection, probes, hooks) are passed over.

        Times that are not positive and finite are passed over as well.
        """
        if is_masked or not time_s > 0 or not math.isfinite(time_s):
            return None
        value = math.log(time_s)
        if not self._is_known:
            self._learn(value)
            return None
        self._recent.append((iteration, value))
        z = (value - self._center) / self._sigma
        z = max(-self._settings.clip, min(self._settings.clip, z))
        self._points.add(z)
        self._sum(z)
        found = self._confirmed()
        if found is None:
            self._settle()
        return found

    def add_all(
        self, iterations: Sequence[int], times_s: Sequence[float], is_masked: Sequence[bool] = ()
    ) -> list[Drift]:
        """All drifts of a series."""
        masks = is_masked or [False] * len(times_s)
        rows = zip(iterations, times_s, masks, strict=True)
        return [d for i, t, m in rows if (d := self.add(i, t, is_masked=m)) is not None]

    def _begin(self) -> None:
        self._is_known = False
        self._center, self._sigma, self._level_sigma = 0.0, 1.0, 1.0
        self._points = ChangePoints()
        self._up = self._down = 0.0

    def _learn(self, value: float) -> None:
        self._steady.append(value)
        if len(self._steady) >= self._settings.num_baseline:
            self._is_known = True
            self._refresh()

    def _refresh(self) -> None:
        """Level and noise of the steady steps; neighbours that go together count as fewer."""
        values = np.asarray(self._steady)
        self._center = float(np.median(values))
        self._sigma = max(mad_sigma(values), self._settings.min_sigma_log)
        clipped = np.clip((values - self._center) / self._sigma, -3.0, 3.0)
        size = self._settings.num_confirm
        related = max(0.0, _autocorrelation(clipped))
        inflation = (1.0 + related) / (1.0 - related)
        self._level_sigma = MEDIAN_OVER_MEAN * self._sigma * math.sqrt(inflation / size)
        # A spread of block medians needs several blocks.
        if values.size >= 6 * size:
            blocks = np.median(values[: values.size // size * size].reshape(-1, size), axis=1)
            self._level_sigma = max(self._level_sigma, mad_sigma(blocks))

    def _sum(self, z: float) -> None:
        # Uncapped, a long drift would have to be undone step by step before a recovery shows.
        cap = 2.0 * self._settings.threshold
        self._up = min(cap, max(0.0, self._up + z - self._settings.allowance))
        self._down = min(cap, max(0.0, self._down - z - self._settings.allowance))

    def _settle(self) -> None:
        """A step leaves the recent ones for the baseline when it is old and nothing is suspected.

        Under suspicion the baseline stands still, so that a slow change cannot hide in it.
        """
        is_suspect = max(self._up, self._down) > self._settings.threshold
        if len(self._recent) < self._num_recent or is_suspect:
            return
        self._steady.append(self._recent[0][1])
        self._refresh()

    def _confirmed(self) -> Drift | None:
        settings = self._settings
        if max(self._up, self._down) <= settings.threshold:
            return None
        # Noisy steps need more of them; twice as many still tell within fifteen.
        for size in (settings.num_confirm, 2 * settings.num_confirm):
            if len(self._recent) < size:
                return None
            latest = [value for _, value in self._recent][-size:]
            level = float(np.median(latest))
            change = level - self._center
            least = max(_log_change(settings, change), self._least_change(size))
            if abs(change) >= least:
                break
        else:
            return None
        probability = self._points.recent_probability(self._num_recent)
        if probability < settings.min_probability:
            # What creeps in has no begin; then all recent steps together must have changed.
            slow = float(np.median([value for _, value in self._recent])) - self._center
            if len(self._recent) < self._num_recent or abs(slow) < least or slow * change < 0:
                return None
        return self._drift(level, change, probability)

    def _least_change(self, size: int) -> float:
        """What the medians of ``size`` steps and of the steady ones differ by at most, by noise."""
        confirm = self._settings.num_confirm
        share = confirm / size + confirm / max(len(self._steady), 1)
        return self._settings.min_sigmas * self._level_sigma * math.sqrt(share)

    def _drift(self, level: float, change: float, probability: float) -> Drift:
        since = self._since(change)
        values = [value for iteration, value in self._recent if iteration >= since]
        before, after = self._center, float(np.median(values)) if values else level
        found = Drift(
            kind=self._kind(before, after),
            iteration=self._recent[-1][0],
            since_iteration=since,
            before_s=math.exp(before),
            after_s=math.exp(after),
            probability=probability,
        )
        self._levels.append(before)
        self._rebase(values)
        return found

    def _since(self, change: float) -> int:
        """First recent step of the unbroken tail beyond half the change, outliers bridged."""
        middle = self._center + 0.5 * change
        sign = 1.0 if change > 0 else -1.0
        sums, best, since = 0.0, 0.0, self._recent[-1][0]
        for iteration, value in reversed(self._recent):
            sums += max(-1.0, min(1.0, sign * (value - middle) / (0.5 * abs(change))))
            if sums > best:
                best, since = sums, iteration
        return since

    def _kind(self, before: float, after: float) -> DriftKind:
        near = max(
            self._settings.recovered_frac, min(2.0 * self._level_sigma, 0.5 * abs(after - before))
        )
        is_back = any(abs(after - old) < near for old in self._levels)
        if after < before:
            return DriftKind.RECOVERED if is_back else DriftKind.FASTER
        return DriftKind.SLOWER

    def _rebase(self, values: Sequence[float]) -> None:
        """The new level is the baseline; noise carries over until it has been seen anew."""
        sigma, level_sigma = self._sigma, self._level_sigma
        self._steady.clear()
        self._recent.clear()
        self._begin()
        self._steady.extend(values)
        if len(values) >= self._settings.num_confirm:
            self._is_known = True
            self._center = float(np.median(values))
            self._sigma, self._level_sigma = sigma, level_sigma


def _log_change(settings: DriftSettings, change: float) -> float:
    """The least change as a log ratio, on its side."""
    frac = settings.min_change_frac
    return math.log1p(frac) if change > 0 else -math.log1p(-frac)


def _autocorrelation(values: np.ndarray) -> float:
    """Lag-one autocorrelation, shrunk for short series, at most 0.9."""
    centered = values - values.mean()
    total = float(np.dot(centered, centered))
    if total <= 0 or values.size < 4:
        return 0.0
    lag = float(np.dot(centered[1:], centered[:-1])) / total
    # Ten values' worth of shrinkage towards none: of 16 steps the estimate itself scatters by 0.25.
    return min(0.9, lag * values.size / (values.size + 10.0))
