"""The card on top of a page: when the run ends, what it does now, and what it could do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...calib.answers.answer import Answer
from ...calib.answers.finish_line import moment
from ...calib.answers.measured_answer import MeasuredAnswer
from ...calib.answers.transcript import PREFIX, run_line
from ...calib.forecast.forecast import Forecast
from ...calib.forecast.throughput import rest_of_run
from ...calib.shell import quoted
from ...calib.units import format_count, format_frac, format_time

_SECONDS_TELL_S = 1800.0
"""The ends of shorter runs are told with their seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a page says before anything else."""

    headline: str
    within: str
    """The interval of the headline; may be empty."""
    facts: tuple[str, ...]
    run: str
    """Model, devices, layout."""
    slow: str
    """Who holds the others up; may be empty."""
    advice: str
    command: str
    """What a user would type next."""
    about: tuple[tuple[str, str], ...]
    """Names and values: run, device, versions, date."""


def card_of(
    answer: Answer | MeasuredAnswer,
    *,
    end_unix_s: float | None,
    directory: str,
    version: str,
) -> Card:
    """The card of an answer; ``directory`` is what the command names, ``version`` is ours."""
    ahead = answer.forecast if isinstance(answer, Answer) else answer.ahead
    headline, within = _ending(answer, ahead, end_unix_s)
    made = f"{moment(ahead.now_unix_s, 0.0)}, step {ahead.steps_done:,}"
    facts, run, about = _of_model(answer) if isinstance(answer, Answer) else _of_steps(answer)
    return Card(
        headline=headline,
        within=within,
        facts=facts,
        run=run,
        slow=answer.waiting.line if isinstance(answer, Answer) else "",
        # The command that this line names stands below it.
        advice=answer.advice.removeprefix(PREFIX).partition(" · ")[0].strip(),
        command=_command(answer, quoted(directory)),
        about=(("run", answer.run_id), ("as of", made), *about, ("forerun", version)),
    )


def _ending(
    answer: Answer | MeasuredAnswer, ahead: Forecast, end_unix_s: float | None
) -> tuple[str, str]:
    has_seconds = ahead.total_s < _SECONDS_TELL_S
    if end_unix_s is not None:
        return f"Ended {moment(end_unix_s, 0.0, has_seconds=has_seconds)}", ""
    if not answer.end.steps_total:
        return f"{format_time(answer.measured_step_s)} per step", "end of the run not known"
    now = ahead.now_unix_s
    low, high = (
        moment(now + left_s, now, has_seconds=has_seconds).removesuffix(" UTC")
        for left_s in (ahead.remaining_low_s, ahead.remaining_high_s)
    )
    end = moment(ahead.finish_p50_unix_s, now, has_seconds=has_seconds)
    return f"Ends {end}", f"90 %: {low} to {high}"


def _of_model(answer: Answer) -> tuple[tuple[str, ...], str, tuple[tuple[str, str], ...]]:
    config, found = answer.config, answer.throughput
    rate = f"{format_count(found.tokens_per_s)} tokens/s"
    if found.mfu_frac is not None:
        rate = f"{format_frac(found.mfu_frac)} MFU"
    run = run_line(config, config.parallelism.num_ranks, answer.measured_step_s)
    about = ("device", config.device), ("framework", config.framework)
    return (rate, *_gain(answer)), run, about


def _of_steps(answer: MeasuredAnswer) -> tuple[tuple[str, ...], str, tuple[tuple[str, str], ...]]:
    rates = tuple(
        f"{format_count(rate)} {name.partition('_')[0]}/s"
        for name, rate in list(answer.rates.items())[:1]
    )
    run = run_line(None, answer.run.num_ranks, answer.measured_step_s, device=answer.device)
    return rates, run, (("device", answer.device),)


def _command(answer: Answer | MeasuredAnswer, directory: str) -> str:
    if not isinstance(answer, Answer):
        return f"forerun report {directory}"
    best = answer.plan.best
    row = "" if best is None else f" --show {answer.plan.candidates.index(best) + 1}"
    return f"forerun plan {directory}{row}"


def _gain(answer: Answer) -> Iterator[str]:
    best, left = answer.plan.best, answer.left
    if answer.plan.doubt and (best is None or best.is_unsure):
        yield "the model cannot rank layouts"
        return
    if best is None and (coded := answer.plan.by_code) is not None:
        yield f"{format_frac(-coded.time_frac)} less per step by a change of the code"
        return
    if best is None:
        yield "nothing faster to offer"
        return
    if best.is_unsure:
        yield "nothing is surely faster"
        return
    yield f"{format_frac(-best.time_frac)} less per step available"
    if left is None or answer.ended_unix_s is not None:
        return
    own = rest_of_run(left, answer.plan.own.config, answer.plan.own.step_time_s)
    other = rest_of_run(left, best.config, best.step_time_s)
    saved = own.gpu_hours - other.gpu_hours
    if saved > 0 and answer.config.device != "cpu":
        yield f"saves {format_count(saved)} GPU-hours"
    elif own.remaining_s > other.remaining_s:
        yield f"saves {format_time(own.remaining_s - other.remaining_s)}"
