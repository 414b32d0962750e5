"""The card on top of a page: when the run ends, what it does now, and what it could do."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone

from ...calib.answers.analysis import Answer
from ...calib.answers.transcript import PREFIX
from ...calib.forecast.throughput import rest_of_run
from ...calib.units import HOUR_S, format_count, format_frac, format_time
from ..drawing.axes import moment_text

_DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a page says before anything else."""

    headline: str
    within: str
    """The interval of the headline; may be empty."""
    facts: tuple[str, ...]
    run: str
    """Model, devices, layout."""
    advice: str
    command: str
    """What a user would type next."""
    about: tuple[tuple[str, str], ...]
    """Names and values: run, device, versions, date."""


def card_of(answer: Answer, *, end_unix_s: float | None, directory: str, version: str) -> Card:
    """The card of an answer; ``directory`` is what the command names, ``version`` is ours."""
    headline, within = _ending(answer, end_unix_s)
    lines = [line.removeprefix(PREFIX).strip() for line in answer.transcript]
    made = datetime.fromtimestamp(answer.forecast.now_unix_s, tz=timezone.utc)
    return Card(
        headline=headline,
        within=within,
        facts=tuple(filter(None, (_rate(answer), *_gain(answer)))),
        run=lines[0] if lines else "",
        advice=next((line for line in lines if line.startswith("decision:")), ""),
        command=f"forerun plan {directory}" + " --show 1" * (answer.plan.best is not None),
        about=(
            ("run", answer.run_id),
            ("as of", f"{made:%Y-%m-%d %H:%M} UTC, step {answer.forecast.steps_done}"),
            ("device", answer.config.device),
            ("framework", answer.config.framework),
            ("forerun", version),
        ),
    )


def _ending(answer: Answer, end_unix_s: float | None) -> tuple[str, str]:
    ahead = answer.forecast
    if end_unix_s is not None:
        return f"Ended {_moment(end_unix_s, ahead.elapsed_s)} UTC", ""
    if answer.config.cadence.train_iters <= 0:
        return f"Step {format_time(answer.measured_step_s)}", "the end of the run is not known"
    low, high = (
        _moment(ahead.now_unix_s + left_s, ahead.total_s)
        for left_s in (ahead.remaining_low_s, ahead.remaining_high_s)
    )
    return f"Ends {_moment(ahead.finish_p50_unix_s, ahead.total_s)} UTC", f"90 %: {low} to {high}"


def _moment(unix_s: float, span_s: float) -> str:
    """With seconds where a run takes minutes, with the date where it takes weeks."""
    if span_s > 6 * _DAY_S:
        return datetime.fromtimestamp(unix_s, tz=timezone.utc).strftime("%a %-d %b %H:%M")
    return moment_text(unix_s, 60 if span_s > HOUR_S / 2 else 1, 2 * _DAY_S)


def _rate(answer: Answer) -> str:
    found = answer.throughput
    if found.mfu_frac is not None:
        return f"{format_frac(found.mfu_frac)} MFU"
    return f"{format_count(found.tokens_per_s)} tokens/s"


def _gain(answer: Answer) -> list[str]:
    best, left = answer.plan.best, answer.left
    if best is None:
        return ["nothing faster to offer"]
    words = [f"{format_frac(-best.time_frac)} less per step available"]
    if left is not None and answer.ended_unix_s is None:
        own = rest_of_run(left, answer.plan.own.config, answer.plan.own.step_time_s)
        other = rest_of_run(left, best.config, best.step_time_s)
        saved = own.gpu_hours - other.gpu_hours
        if saved > 0 and answer.config.device != "cpu":
            words.append(f"saves {format_count(saved)} GPU-hours")
        elif own.remaining_s > other.remaining_s:
            words.append(f"saves {format_time(own.remaining_s - other.remaining_s)}")
    return words
