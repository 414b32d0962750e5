"""The forecast of a run's end: one form from the fit to its files and to Python.

Standard library only, as a wrapper and a companion read it before they load anything else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..errors import check_ascending
from ..plain_json import Json, JsonObject
from ..records.iso_times import format_span
from ..units import format_time
from ..workload.config_json import KEY, Encoded, decode, encode_fields, encoded
from ._remaining_time import RemainingTime

SCHEMA = 1
LINE = "forecast"
"""``kind`` of a line of the forecast log."""
NOMINAL_FRAC = (0.5, 0.8, 0.9, 0.95)
"""Nominal shares of central intervals whose coverage is counted."""
_LINE_NAMES = {"now_unix_s": "unix_s", "steps_done": "iteration"}
"""Keys of a line that differ from those of ``forecast.json``."""
_IN_LINE = (
    *_LINE_NAMES,
    *("steps_left", "elapsed_s", "finish_p50_unix_s", "finish_p95_unix_s"),
    *("step_time_s", "step_low_s", "step_high_s", "single_low_s", "single_high_s"),
    *("num_samples", "is_measured", "extras_s", "failures_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastPart:
    """One kind of remaining work, with the provenance of its time."""

    name: str
    num_left: float
    time_s: float
    """Total time of the remaining ones."""
    sigma_s: float
    provenance: str

    @staticmethod
    def repeated(
        name: str,
        num_left: int,
        each_s: float,
        *,
        sigma_s: float = 0.0,
        scatter_s: float = 0.0,
        provenance: str = "measured",
    ) -> ForecastPart:
        """Return ``num_left`` repetitions of ``each_s``, whose error ``sigma_s`` is common to all,
        and which scatter individually."""
        return ForecastPart(
            name=name,
            num_left=num_left,
            time_s=num_left * each_s,
            sigma_s=math.hypot(num_left * sigma_s, math.sqrt(num_left) * scatter_s),
            provenance=provenance,
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Forecast(Encoded):
    """Forecast of the run to its end, as made, and as read from a file.

    All intervals are 90 %; ``p95`` is exceeded with 5 % probability.  Values that are not stated
    are 0.
    """

    schema: ClassVar[int] = SCHEMA

    now_unix_s: float = 0.0
    """Time of the forecast."""
    steps_done: int = 0
    steps_left: int = 0
    is_measured: bool = False
    num_samples: int = 0
    """Number of measured steps that it is based on."""
    step_time_s: float = 0.0
    step_low_s: float = 0.0
    """Interval of the mean step."""
    step_high_s: float = 0.0
    single_low_s: float = 0.0
    """Interval of the next single step."""
    single_high_s: float = 0.0
    steps_s: float = 0.0
    """Time of the remaining steps."""
    extras_s: float = 0.0
    """Time of remaining evaluations, saves and other work between steps."""
    failures_s: float = 0.0
    """Expected cost of failures and restarts."""
    remaining_s: float = 0.0
    """Median of ``remaining_time``."""
    remaining_low_s: float = 0.0
    remaining_high_s: float = 0.0
    remaining_time: RemainingTime = field(default_factory=RemainingTime)
    """Distribution; in no file."""
    elapsed_s: float = 0.0
    total_s: float = 0.0
    finish_p50_unix_s: float = 0.0
    finish_p95_unix_s: float = 0.0
    finish_intervals_unix_s: Mapping[str, tuple[float, float]] = field(
        default_factory=dict, hash=False
    )
    """Central intervals by their nominal share, as ``"0.9"``; only in lines of the log."""
    breakdown: tuple[ForecastPart, ...] = field(default=(), metadata={KEY: "parts"})
    """Parts of ``remaining_time``."""
    gpu_hours: float | None = None
    """GPU-hours of this launch from begin to end; None on CPUs without a price."""
    cost: float | None = None
    """Cost in the currency of the stated price."""
    energy_j: float | None = None
    """Energy of all accelerators from the first reading to the end."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        values = encode_fields(self, "remaining_time", "finish_intervals_unix_s")
        return encoded(schema=self.schema, **values)

    def to_line(self) -> JsonObject:
        """Return the line of the forecast log, with which the end of the run is compared."""
        whole, now = self.to_json(), self.now_unix_s
        bounds = {
            str(share): [
                now + self.remaining_time.quantile(0.5 + side * share) for side in (-0.5, 0.5)
            ]
            for share in NOMINAL_FRAC
        }
        return encoded(
            schema=self.schema,
            kind=LINE,
            **{_LINE_NAMES.get(name, name): whole[name] for name in _IN_LINE},
            finish_low_unix_s=self.finish_low_unix_s,
            finish_intervals_unix_s=bounds,
        )

    @staticmethod
    def from_line(line: Mapping[str, Json]) -> Forecast:
        """Return the forecast of a line; raises ``KeyError`` if it is none, and ``ForerunError`` if
        it is damaged."""
        one = decode(Forecast, {**line, **{ours: line[name] for ours, name in _LINE_NAMES.items()}})
        now, low_unix_s = one.now_unix_s, decode(float, line["finish_low_unix_s"])
        ends = low_unix_s, one.finish_p50_unix_s, one.finish_p95_unix_s
        low_s, middle_s, high_s = (max(0.0, end_unix_s - now) for end_unix_s in ends)
        return replace(
            one,
            remaining_s=middle_s,
            remaining_low_s=low_s,
            remaining_high_s=high_s,
            total_s=one.elapsed_s + middle_s,
        )

    def __repr__(self) -> str:
        # With the day, since it may be read on another one.
        finish = format_span(self.finish_p50_unix_s, self.finish_p95_unix_s, 0.0)
        steps = f"step {self.steps_done:,} of {self.steps_done + self.steps_left:,}"
        parts = (
            f"ends {finish}",
            f"{format_time(self.remaining_s)} left after {steps}",
            f"step {format_time(self.step_time_s)}",
            "" if self.gpu_hours is None else f"{self.gpu_hours:.3g} GPU-hours",
            "" if self.cost is None else f"cost {self.cost:,.2f}",
        )
        return " · ".join(filter(None, parts))

    @property
    def finish_text(self) -> str:
        """``ends`` with the median and the 95 % quantile of the finish, as seen from its time."""
        ends = self.finish_p50_unix_s, self.finish_p95_unix_s
        return f"ends {format_span(*ends, self.now_unix_s)}"

    @property
    def begin_unix_s(self) -> float:
        """Begin of this launch."""
        return self.now_unix_s - self.elapsed_s

    @property
    def finish_low_unix_s(self) -> float:
        """5 % quantile of the finish."""
        return self.now_unix_s + self.remaining_low_s

    def remaining_after_s(self, age_s: float) -> float:
        """Return the remaining time (P95) ``age_s`` later, if training has continued."""
        return max(0.0, self.remaining_high_s - max(0.0, age_s))

    def done_frac_after(self, age_s: float) -> float:
        """Return the share of steps done ``age_s`` later, at the expected speed."""
        if self.remaining_s <= 0:
            return 1.0
        more = min(1.0, max(0.0, age_s) / self.remaining_s) * self.steps_left
        return (self.steps_done + more) / (self.steps_done + self.steps_left)

    def __post_init__(self) -> None:
        step_s, ahead_s = self.step_time_s, self.remaining_s
        high_s, single_s, late_s = (  # 0 is not stated
            one or None for one in (self.step_high_s, self.single_high_s, self.remaining_high_s)
        )
        check_ascending("steps", 0, self.steps_done, self.steps_done + self.steps_left)
        check_ascending("seconds of the mean step", 0.0, self.step_low_s, step_s, high_s)
        check_ascending("seconds of the next step", 0.0, self.single_low_s, step_s, single_s)
        check_ascending("seconds to go", 0.0, self.remaining_low_s, ahead_s, late_s)
