"""What a run said last: the forecast and the decision that it keeps renewing while it trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime, timezone
from typing import Any, TypeVar

from ...calib.answers import moment
from ...calib.errors import RecordError
from ...calib.records import LONGEST_S, Action, action_text, stamped
from ...calib.units import format_time
from .told import Told

_T = TypeVar("_T", bound="_Said")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class _Said(Told):
    """Values of a file by their names in it."""

    run_id: str
    whole: Mapping[str, Any] = field(default_factory=dict)
    """All that was said."""

    @classmethod
    def of(cls: type[_T], value: Mapping[str, Any], **known: Any) -> _T:
        """What an object of JSON says; ``RecordError`` where a value is missing or of another
        kind."""
        found: dict[str, Any] = {"whole": dict(value), **known}
        for one in fields(cls):
            if one.name in found:
                continue
            given = value.get(one.name)
            kind = str if one.type == "str" else (int, float)
            is_right = isinstance(given, kind) and not isinstance(given, bool)
            if is_right:
                found[one.name] = given
            elif one.default is MISSING:
                raise RecordError(
                    f"{cls.__name__} has no readable {one.name}; delete the file that it is in, "
                    "and the records are analysed again"
                )
        return cls(**found)

    def to_json(self) -> dict[str, Any]:
        """All that was said."""
        return stamped(self.whole)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RunForecast(_Said):
    """When the run ends.  Intervals are 90 %; ``p95`` has 5 % beyond it."""

    now_unix_s: float
    """When it was made."""
    steps_done: int
    steps_left: int
    step_time_s: float
    step_low_s: float
    """Interval of the mean step."""
    step_high_s: float
    single_low_s: float
    """Interval in which the next single step lies."""
    single_high_s: float
    elapsed_s: float
    remaining_s: float
    remaining_low_s: float
    remaining_high_s: float
    total_s: float
    finish_p50_unix_s: float
    finish_p95_unix_s: float
    gpu_hours: float | None = None
    """Of this launch to its end; None on processors that have no price."""
    cost: float | None = None
    energy_j: float | None = None
    ended_unix_s: float | None = None
    """The end itself, where it has come."""

    @property
    def finish_p50(self) -> datetime:
        """The end as likely before as after, in UTC."""
        return _moment(self.finish_p50_unix_s)

    @property
    def finish_p95(self) -> datetime:
        """The end that 5 % lie beyond, in UTC."""
        return _moment(self.finish_p95_unix_s)

    @property
    def sentence(self) -> str:
        """When it ends, or ended, and what was done by when that was said."""
        if self.ended_unix_s is not None:
            return f"ended {_told(self.ended_unix_s)}"
        steps = self.steps_done + self.steps_left
        words = [
            f"ends {_told(self.finish_p50_unix_s)} (by {_told(self.finish_p95_unix_s)} with 95 %)",
            f"{format_time(self.remaining_s)} left after step {self.steps_done:,} of {steps:,}",
            f"step {format_time(self.step_time_s)}",
        ]
        if self.gpu_hours is not None:
            words.append(f"{self.gpu_hours:.3g} GPU-hours")
        if self.cost is not None:
            words.append(f"cost {self.cost:,.2f}")
        return " · ".join(words)

    def parts(self) -> Iterator[str]:
        """The sentence."""
        yield self.sentence


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RunDecision(_Said):
    """What is advised, and why."""

    action: str
    """``continue``, which lines tell as go on; ``stop``; ``abstain``: too little is known."""
    confidence: float
    """What a rule has to be sure of before it speaks for stopping."""

    @property
    def is_stop(self) -> bool:
        """True where the advice is to stop."""
        return self.action == Action.STOP.value

    @property
    def reasons(self) -> tuple[str, ...]:
        """What each rule says, in words."""
        told = (row.get("text") for row in _rows(self.whole, "reasons") if isinstance(row, dict))
        return tuple(text for text in told if isinstance(text, str))

    @property
    def command(self) -> tuple[str, ...]:
        """The launch with the layout that would be worth a restart; empty where none is."""
        return tuple(map(str, _rows(self.whole, "command")))

    @property
    def sentence(self) -> str:
        """The advice and its reasons."""
        why = "; ".join(self.reasons)
        return f"decision: {action_text(self.action)}" + (f" ({why})" if why else "")

    def parts(self) -> Iterator[str]:
        """The sentence."""
        yield self.sentence


def _rows(value: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = value.get(name)
    return found if isinstance(found, list) else ()


def _moment(unix_s: float) -> datetime:
    return datetime.fromtimestamp(min(max(unix_s, 0.0), 2 * LONGEST_S), timezone.utc)


def _told(unix_s: float) -> str:
    """With its date: a session may be of another day."""
    return moment(unix_s, 0.0)
