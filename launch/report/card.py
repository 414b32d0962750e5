"""The card on top of a page: when the run ends, what it does now, and what it could do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...calib.advice import Plan
from ...calib.answers import PREFIX, Answer, Modelled, moment, run_line
from ...calib.forecast import rest_of_run
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
    answer: Answer,
    *,
    end_unix_s: float | None,
    directory: str,
    version: str,
) -> Card:
    """The card of an answer; ``directory`` is what the command names, ``version`` is ours."""
    ahead, modelled = answer.forecast, answer.modelled
    headline, within = _ending(answer, end_unix_s)
    made = f"{moment(ahead.now_unix_s, 0.0)}, step {ahead.steps_done:,}"
    facts, run, about = _of_steps(answer) if modelled is None else _of_model(answer, modelled)
    return Card(
        headline=headline,
        within=within,
        facts=facts,
        run=run,
        slow="" if modelled is None else modelled.waiting.line,
        # The command that this line names stands below it.
        advice=answer.advice.removeprefix(PREFIX).partition(" · ")[0].strip(),
        command=_command(answer, quoted(directory)),
        about=(("run", answer.run_id), ("as of", made), *about, ("forerun", version)),
    )


def _ending(answer: Answer, end_unix_s: float | None) -> tuple[str, str]:
    ahead = answer.forecast
    has_seconds = ahead.total_s < _SECONDS_TELL_S
    if end_unix_s is not None:
        return f"Ended {moment(end_unix_s, 0.0, has_seconds=has_seconds)}", ""
    if not answer.has_finish:
        return f"{format_time(answer.measured_step_s)} per step", "end of the run not known"
    now = ahead.now_unix_s
    low, high = (
        moment(now + left_s, now, has_seconds=has_seconds).removesuffix(" UTC")
        for left_s in (ahead.remaining_low_s, ahead.remaining_high_s)
    )
    end = moment(ahead.finish_p50_unix_s, now, has_seconds=has_seconds)
    return f"Ends {end}", f"90 %: {low} to {high}"


_Facts = tuple[tuple[str, ...], str, tuple[tuple[str, str], ...]]


def _of_model(answer: Answer, modelled: Modelled) -> _Facts:
    config, found = modelled.config, modelled.throughput(answer.measured_step_s)
    rate = f"{format_count(found.tokens_per_s)} tokens/s"
    if found.mfu_frac is not None:
        rate = f"{format_frac(found.mfu_frac)} MFU"
    run = run_line(config, config.parallelism.num_ranks, answer.measured_step_s)
    about = ("device", config.device), ("framework", config.framework)
    return (rate, *_gain(answer, modelled.plan)), run, about


def _of_steps(answer: Answer) -> _Facts:
    rates = tuple(
        f"{format_count(rate)} {name.partition('_')[0]}/s"
        for name, rate in list(answer.rates.items())[:1]
    )
    run = run_line(None, answer.run.num_ranks, answer.measured_step_s, device=answer.device)
    return rates, run, (("device", answer.device),)


def _command(answer: Answer, directory: str) -> str:
    if answer.modelled is None:
        return f"forerun report {directory}"
    plan = answer.modelled.plan
    row = "" if plan.best is None else f" --show {plan.candidates.index(plan.best) + 1}"
    return f"forerun plan {directory}{row}"


def _gain(answer: Answer, plan: Plan) -> Iterator[str]:
    best, left = plan.best, answer.left
    if plan.doubt and (best is None or best.is_unsure):
        yield "the model cannot rank layouts"
        return
    if best is None and (coded := plan.by_code) is not None:
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
    own = rest_of_run(left, plan.own.config, plan.own.step_time_s)
    other = rest_of_run(left, best.config, best.step_time_s)
    saved = own.gpu_hours - other.gpu_hours
    if saved > 0 and answer.device != "cpu":
        yield f"saves {format_count(saved)} GPU-hours"
    elif own.remaining_s > other.remaining_s:
        yield f"saves {format_time(own.remaining_s - other.remaining_s)}"
