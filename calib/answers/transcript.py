"""The lines that a user sees: pure text from the parts of an answer, unknown parts left out."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from ..advice.decision import Action, Decision, Reason, Rule
from ..advice.micro_batch import MicroBatchAdvice
from ..advice.plan import Candidate, Plan
from ..forecast.batch_ratios import PredictedStep
from ..forecast.forecast import Forecast
from ..forecast.throughput import Throughput
from ..units import GIB, format_bytes, format_frac, format_time
from .run_measurements import HookSummary, Overhead

PREFIX = "[forerun]"
_SEPARATOR = " · "


def transcript_lines(
    *,
    hooks: HookSummary | None = None,
    overhead: Overhead | None = None,
    measured_s: float | None = None,
    modelled: PredictedStep | None = None,
    throughput: Throughput | None = None,
    slow: str = "",
    routing: str = "",
    network: str = "",
    forecast: Forecast | None = None,
    plan: Plan | None = None,
    micro_batch: MicroBatchAdvice | None = None,
    decision: Decision | None = None,
    time_limit_s: float | None = None,
) -> list[str]:
    """Up to nine lines with ``[forerun]`` before each; moments as UTC.

    ``time_limit_s`` is the scheduler's limit for the whole run.
    """
    lines = [
        _hook_line(hooks, overhead),
        _step_line(measured_s, modelled, throughput),
        slow,
        routing,
        network,
        _finish_line(forecast, time_limit_s),
        _plan_line(plan),
        micro_batch.line if micro_batch is not None else "",
        _decision_line(decision),
    ]
    return [f"{PREFIX} {line}" for line in lines if line]


def utc_moment(unix_s: float) -> str:
    """Weekday and time in UTC.

    >>> utc_moment(0.0)
    'Thu 00:00 UTC'
    """
    try:
        return datetime.fromtimestamp(unix_s, tz=timezone.utc).strftime("%a %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return "beyond any calendar"


def _hook_line(hooks: HookSummary | None, overhead: Overhead | None) -> str:
    words: list[str] = []
    if hooks is not None:
        words += [
            f"hooks: {hooks.num_fired}/{hooks.num_installed} fired",
            _plural(hooks.num_operator_kinds, "operator kind"),
            _plural(hooks.num_groups, "group"),
            *hooks.remarks,
        ]
    if overhead is not None:
        steps = overhead.num_hooked + overhead.num_bare
        low, high = _percent(overhead.low_frac), _percent(overhead.high_frac)
        words.append(
            f"overhead {_percent(overhead.overhead_frac)} % "
            f"(90 %: {low} to {high}; A/B over {_plural(steps, 'step')})"
        )
    return _SEPARATOR.join(words)


def _step_line(
    measured_s: float | None, modelled: PredictedStep | None, found: Throughput | None
) -> str:
    words: list[str] = []
    if measured_s is not None:
        words.append(f"{format_time(measured_s)} measured")
    if found is not None:
        words.append(found.text)
    if modelled is not None:
        ends = f"{format_time(modelled.low_s)} to {format_time(modelled.high_s)}"
        words.append(f"{format_time(modelled.time_s)} modelled (90 %: {ends})")
    if measured_s and modelled is not None:
        off_frac = abs(modelled.time_s - measured_s) / measured_s
        words.append(f"unexplained {format_frac(off_frac)}")
    return "step " + _SEPARATOR.join(words) if words else ""


def _finish_line(forecast: Forecast | None, time_limit_s: float | None) -> str:
    if forecast is None:
        return ""
    words = [
        f"finish {utc_moment(forecast.finish_p50_unix_s)} (P50) … "
        f"{utc_moment(forecast.finish_p95_unix_s)} (P95)",
        format_time(forecast.total_s),
    ]
    if forecast.gpu_hours is not None:
        words.append(f"{forecast.gpu_hours:.3g} GPU-hours")
    if forecast.cost is not None:
        words.append(f"cost {forecast.cost:,.2f}")
    if forecast.energy_j is not None:
        words.append(_energy(forecast.energy_j))
    if time_limit_s is not None:
        worst_s = forecast.elapsed_s + forecast.remaining_high_s
        fits = "ok" if worst_s <= time_limit_s else "at risk"
        if forecast.total_s > time_limit_s:
            done = _done_frac(forecast, time_limit_s - forecast.elapsed_s)
            fits = f"will not finish: {done * 100:.0f} % done at the limit"
        words.append(f"Slurm limit {format_time(time_limit_s)}: {fits}")
    return _SEPARATOR.join(words)


def _done_frac(forecast: Forecast, ahead_s: float) -> float:
    """Share of the steps that will be done so many seconds from now, at the expected speed."""
    steps = forecast.steps_done + forecast.steps_left
    more = min(1.0, max(0.0, ahead_s) / forecast.remaining_s) * forecast.steps_left
    return (forecast.steps_done + more) / steps


def _energy(energy_j: float) -> str:
    kilowatt_hours = energy_j / 3.6e6
    if kilowatt_hours >= 100:
        return f"{kilowatt_hours / 1000:.3g} MWh"
    return f"{kilowatt_hours:.3g} kWh"


def _plan_line(plan: Plan | None) -> str:
    if plan is None:
        return ""
    best = plan.best
    if best is None:
        words = [f"nothing faster to offer among {len(plan.candidates)} layouts", plan.nearest_miss]
        return _SEPARATOR.join(filter(None, words))
    own, other = plan.own.config.parallelism.num_ranks, best.config.parallelism.num_ranks
    ranks = "the same GPUs" if own == other else f"{other} GPUs"
    if plan.own.config.device == "cpu":
        ranks = "the same ranks" if own == other else _plural(other, "rank")
    low, high = _signed(best.time_frac_high), _signed(best.time_frac_low)
    words = [
        f"faster on {ranks}: {best.label}",
        f"{_signed(best.time_frac)} % ({low} … {high})",
        _memory(best, plan.memory_capacity_nbytes),
    ]
    return _SEPARATOR.join(words)


def _memory(candidate: Candidate, capacity_nbytes: int | None) -> str:
    needed = candidate.memory.total_nbytes
    if not capacity_nbytes:
        return f"memory {format_bytes(needed)}"
    if capacity_nbytes >= GIB:
        return f"memory {needed / GIB:.3g} of {capacity_nbytes / GIB:.3g} GiB"
    return f"memory {format_bytes(needed)} of {format_bytes(capacity_nbytes)}"


def _decision_line(decision: Decision | None) -> str:
    if decision is None:
        return ""
    text = f"decision: {decision.action.value}"
    reason = _leading(decision)
    return f"{text} ({reason.text})" if reason else text


def _leading(decision: Decision) -> Reason | None:
    """The reason that carries the action: what is missing, what is met, or the nearest to it."""
    reasons: Sequence[Reason] = decision.reasons
    if decision.action is Action.ABSTAIN:
        reasons = [r for r in reasons if r.rule is Rule.EVIDENCE] or reasons
    if decision.action is Action.STOP:
        reasons = [r for r in reasons if r.is_met] or reasons
    return max(reasons, key=lambda r: r.probability or 0.0, default=None)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _percent(frac: float) -> str:
    return f"{frac * 100:.1f}"


def _signed(frac: float) -> str:
    return f"{frac * 100:+.0f}"
