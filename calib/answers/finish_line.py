"""The end of a run and its limits as one self-contained line; times are UTC."""

from __future__ import annotations

from collections.abc import Iterator

from ..forecast.evaluation import Ended
from ..forecast.forecast_record import Forecast
from ..records.iso_times import SHOW_SECONDS_BELOW_S, format_moment
from ..units import HOUR_S, format_time
from ..workload.run_options import Goals


def finish_line(forecast: Forecast, goals: Goals) -> str:
    """Return the finish with its interval, the total time, and each limit of the run.

    The finish is the median and the 95 % quantile; durations count from the begin of this launch.
    """
    words = [forecast.finish_text, f"{format_time(forecast.total_s)} in all"]
    if forecast.gpu_hours is not None:
        words.append(f"{forecast.gpu_hours:.3g} GPU-hours")
    if forecast.cost is not None:
        words.append(f"costs {forecast.cost:,.2f}")
    if forecast.energy_j is not None:
        words.append(_energy(forecast.energy_j))
    words += [_limit(forecast, name, unix_s) for name, unix_s in _limits(forecast, goals)]
    return " · ".join(words)


def ended_line(ended: Ended, forecast: Forecast) -> str:
    """Return how a run ended, how long it took and what it used, by the newest forecast of that."""
    took_s = duration_s(ended, forecast)
    has_seconds = took_s < SHOW_SECONDS_BELOW_S
    words = [ended_text(ended, has_seconds=has_seconds), f"{format_time(took_s)} in all"]
    share = took_s / forecast.total_s if forecast.total_s else 0.0
    if forecast.gpu_hours is not None:
        words.append(f"{share * forecast.gpu_hours:.3g} GPU-hours")
    if forecast.cost is not None:
        words.append(f"cost {share * forecast.cost:,.2f}")
    return " · ".join(words)


def duration_s(ended: Ended, forecast: Forecast) -> float:
    """Return how long this launch took from its begin to its end, seconds."""
    return max(0.0, ended.end_unix_s - forecast.begin_unix_s)


def ended_text(ended: Ended, *, has_seconds: bool = False) -> str:
    """Return when a run ended, or where it stopped before its last step."""
    moment = format_moment(ended.end_unix_s, 0.0, has_seconds=has_seconds)
    if ended.is_complete or not ended.steps_total:
        return f"ended {moment} after {ended.iteration:,} steps"
    return f"stopped {moment} at step {ended.iteration:,} of {ended.steps_total:,}"


def _limits(forecast: Forecast, goals: Goals) -> Iterator[tuple[str, float]]:
    """Yield the name and time of each limit."""
    if goals.limit_unix_s is not None:
        length = _length(goals.limit_unix_s - forecast.begin_unix_s)
        yield f"the Slurm limit of {length}", goals.limit_unix_s
    if goals.deadline_unix_s is not None:
        at = format_moment(goals.deadline_unix_s, forecast.now_unix_s)
        yield f"the deadline, {at}", goals.deadline_unix_s
    if goals.budget_hours is not None:
        budget_s = goals.budget_hours * HOUR_S
        yield f"the budget of {_length(budget_s)}", forecast.begin_unix_s + budget_s


def _limit(forecast: Forecast, name: str, limit_unix_s: float) -> str:
    if forecast.finish_p95_unix_s <= limit_unix_s:
        return f"inside {name}"
    late = forecast.remaining_time.chance_beyond(limit_unix_s - forecast.now_unix_s)
    if forecast.finish_p50_unix_s <= limit_unix_s:
        return f"ends after {name} with probability {late:.2f}"
    done = forecast.done_frac_after(limit_unix_s - forecast.now_unix_s)
    return f"over {name}, when {done * 100:.0f} % of the steps will be done"


def _length(time_s: float) -> str:
    """Return a duration without trailing zeros.

    >>> _length(172_800.0), _length(5400.0)
    ('48 h', '1.5 h')
    """
    return format_time(time_s).replace(".0 ", " ").replace(".000 ", " ")


def _energy(energy_j: float) -> str:
    kilowatt_hours = energy_j / 3.6e6
    if kilowatt_hours >= 100:
        return f"energy {kilowatt_hours / 1000:.3g} MWh"
    return f"energy {kilowatt_hours:.3g} kWh"
