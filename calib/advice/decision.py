"""The decision to go on, to stop for a faster layout or a limit, or to abstain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ClassVar

import numpy as np

from ..arguments.megatron_args import resumed_command, rewrite_command
from ..arguments.passed_on import MASK
from ..errors import check_ascending
from ..forecast.forecast_record import Forecast
from ..memory.peak import Verdict
from ..plain_json import JsonObject
from ..records.iso_times import Action, action_text
from ..units import HOUR_S, format_frac, format_time
from ..workload.config import CheckpointForm
from ..workload.config_json import Encoded, decode, encode_fields, encoded
from ..workload.run_options import Goals
from .planning import Candidate, Plan

SCHEMA = 2
MIN_COVERAGE_FRAC = 0.9
"""Share of installed hooks that must have fired before other layouts are compared."""
MIN_STEPS = 5
"""Fewest measured steps for a decision."""
# Midpoints of 128 equal parts are within 1/256 of the probability that rules compare with 0.90.
_NUM_NODES = 128
# The mean of 512 draws has 1/22 of their scatter; the fixed seed is for reproducibility.
_NUM_DRAWS = 512
_SEED = 0
_NEAR_SIGMAS = 6.0
"""Distance (standard deviations) beyond which a layout cannot be mistaken for the best."""
UNKNOWN_LAYOUT = (
    "other layouts not compared: the model and its layout are not known; give them with "
    "forerun.attach(model, optimizer, config), or the launch line to forerun predict"
)
_MASKED = f"{MASK} replaces a value that was not recorded; write your own there"


class Rule(Enum):
    """Rules of a decision; each answers one question."""

    RESTART = "restart"
    DEADLINE = "deadline"
    BUDGET = "budget"
    EVIDENCE = "evidence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason(Encoded):
    """One rule with its outcome; ``numbers`` carry their units in their names.

    For a restart, ``saved_s`` is the time saved over the remaining steps (at least 0),
    ``restart_cost_s`` the cost of the restart, and ``net_s`` the difference, below 0 if the restart
    does not pay.
    """

    rule: Rule
    is_met: bool
    """True if the rule on its own calls for stopping."""
    text: str
    probability: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ascending(f"probability of the rule {self.rule.value}", 0.0, self.probability, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Decision(Encoded):
    """The advice of one window, with its reasons."""

    schema: ClassVar[int] = SCHEMA

    action: Action
    confidence: float
    now_unix_s: float | None = None
    reasons: tuple[Reason, ...]
    candidate: Candidate | None = None
    """Layout that the restart rule was applied to."""
    command: tuple[str, ...] = ()
    """User's command line with that layout, resuming from the checkpoint; empty unless a restart
    pays or the run is to end in any case."""
    command_absent: str = ""
    """Reason why there is no command; empty if there is one."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        values = encode_fields(self) | encoded(command=self.command or None)
        note = _MASKED if any(MASK in word for word in self.command) else ""
        return encoded(schema=self.schema, **values, command_note=note)

    @staticmethod
    def from_json(value: Mapping[str, object]) -> Decision:
        """Return the advice of a file's object, without the candidate, which a file has in words.

        Raises ``ForerunError`` if it is damaged.
        """
        command = value.get("command") or ()
        return decode(Decision, {**value, "candidate": None, "command": command})

    def __repr__(self) -> str:
        why = "; ".join(reason.text for reason in self.reasons)
        return f"decision: {action_text(self.action.value)}" + (f" ({why})" if why else "")

    @property
    def is_stop(self) -> bool:
        """True if the advice is to stop."""
        return self.action is Action.STOP

    @property
    def rules_met(self) -> frozenset[Rule]:
        """Rules that call for stopping in this window."""
        return frozenset(reason.rule for reason in self.reasons if reason.is_met)


def decide(
    goals: Goals,
    *,
    forecast: Forecast,
    plan: Plan | None,
    recalibration_s: float = 0.0,
    coverage_frac: float | None = None,
    silent: str = "",
    host_argv: Sequence[str] = (),
    previously_met: Set[Rule] = frozenset(),
) -> Decision:
    """Return the advice of this window; ``previously_met`` are the rules met in the previous one.

    The advice is to stop if a rule holds with the requested confidence in this and the previous
    window.  It is to abstain if too few steps were measured, or if the hooks covered too little of
    a step to compare other layouts; ``silent`` names parts that no hook can measure, for which
    another window does not help.
    """
    if (steps := forecast.num_samples) < MIN_STEPS:
        text = f"{steps} measured steps are too few; record at least {MIN_STEPS} clean ones"
        reason = _evidence(text, {"num_steps": float(steps)})
        return _abstain(goals, [reason], forecast.now_unix_s)
    reasons = [*_limit_reasons(goals, forecast)]
    candidate = _candidate(plan)
    gaps = _gaps(plan, candidate, coverage_frac, silent)
    if not gaps:
        cost_s = goals.restart_cost_s + recalibration_s
        reasons.append(_restart_reason(cost_s, goals.confidence, forecast, candidate, plan))
    met = {reason.rule for reason in reasons if reason.is_met}
    confirmed = met & previously_met
    if gaps and not confirmed:
        return _abstain(goals, [*gaps, *reasons], forecast.now_unix_s)
    if not confirmed:
        waits = "; another window must confirm it"
        reasons = [replace(one, text=one.text + waits * one.is_met) for one in reasons]
    command: tuple[str, ...] = ()
    is_worth = Rule.RESTART in met or bool(confirmed)
    absent = _command_absent(candidate, plan, host_argv, is_worth=is_worth)
    if not absent and candidate is not None:
        running = plan.running.config if plan else None
        command = resumed_command(rewrite_command(host_argv, candidate.config, running=running))
    return Decision(
        action=Action.STOP if confirmed else Action.CONTINUE,
        reasons=(*reasons, *gaps),
        confidence=goals.confidence,
        now_unix_s=forecast.now_unix_s,
        candidate=candidate,
        command=command,
        command_absent=absent,
    )


def _command_absent(
    candidate: Candidate | None, plan: Plan | None, host_argv: Sequence[str], *, is_worth: bool
) -> str:
    """Return the reason why no command is given; empty if one is."""
    if candidate is None:
        return _none_offered(plan)
    if not host_argv:
        return "the command line of the run is not known"
    return (
        ""
        if is_worth
        else (
            "it is not certain enough that a restart pays off; `forerun plan DIR --show N` prints "
            "commands"
        )
    )


def saving_probability(
    forecast: Forecast, candidate: Candidate, cost_s: float, *, bias_log: float = 0.0
) -> float:
    """Return P(remaining time here - remaining time there > cost).

    The ratio of the two is log-normal; the remaining time has its own distribution, which is
    integrated over.  Steps, evaluations and failures shrink in the same proportion.  ``bias_log``
    is the bias of the log ratio towards low values, see ``selection_bias_log``.
    """
    ratio = replace(candidate.ratio, median=math.exp(bias_log) * candidate.ratio.median)
    nodes_s = forecast.remaining_time.nodes(_NUM_NODES)
    chances = [ratio.below(1.0 - cost_s / node_s) for node_s in nodes_s if node_s > cost_s]
    return math.fsum(chances) / _NUM_NODES


def selection_bias_log(chosen: Candidate, candidates: Sequence[Candidate]) -> float:
    """Return the mean amount by which the log ratio of the fastest of several layouts is too low.

    Errors are redrawn from the plan's distributions, with errors of one name shared by all layouts,
    and the fastest is chosen again: its mean error is the bias (parametric bootstrap; Efron and
    Tibshirani, 1993, chapter 10).  0 for a single layout; deterministic.
    """
    best_log = math.log(chosen.ratio.median)
    near = [
        c
        for c in candidates
        if math.log(c.ratio.median) - best_log
        <= _NEAR_SIGMAS * max(c.ratio.sigma_log, chosen.ratio.sigma_log)
    ]
    if len(near) < 2:
        return 0.0
    logs = np.array([math.log(c.ratio.median) for c in near])
    names = sorted({name for c in near for name in c.ratio.error_log})
    shared = np.array([[c.ratio.error_log.get(name, 0.0) for name in names] for c in near])
    shared = shared.reshape(len(near), len(names))
    independent_sigmas = np.array([c.ratio.unshared_sigma_log for c in near])
    random = np.random.default_rng(_SEED)
    errors = independent_sigmas * random.standard_normal((_NUM_DRAWS, len(near)))
    errors += random.standard_normal((_NUM_DRAWS, len(names))) @ shared.T
    winners = (logs + errors).argmin(axis=1)
    return max(0.0, -float(errors[np.arange(_NUM_DRAWS), winners].mean()))


def odds_text(rule: Rule, probability: float, confidence: float) -> str:
    """Return a probability with its event and the requested confidence.

    >>> odds_text(Rule.RESTART, 0.71, 0.9)
    '71 % chance that a restart pays off, threshold 90 %'
    >>> odds_text(Rule.DEADLINE, 0.897, 0.9)
    '89.7 % chance that the run ends after its deadline, threshold 90 %'
    """
    event = "a restart pays off" if rule is Rule.RESTART else f"the run ends after its {rule.value}"
    chance, threshold = (f"{100.0 * one:.3g} %" for one in (probability, confidence))
    return f"{chance} chance that {event}, threshold {threshold}"


def saving_text(saved_s: float, cost_s: float) -> str:
    """Return a restart's saving and cost in words; both are at least 0.

    The gain of a layout picked as the fastest of many may be selection bias only.

    >>> saving_text(11_160.0, 600.0), saving_text(17.0, 600.0)
    ('saves 3.1 h less 10.0 min for the restart', 'saves 17.000 s, but a restart costs 10.0 min')
    """
    cost = format_time(cost_s)
    if saved_s <= 0:
        return f"saves nothing beyond chance, but a restart costs {cost}"
    saved = f"saves {format_time(saved_s)}"
    if saved_s < cost_s:
        return f"{saved}, but a restart costs {cost}"
    return f"{saved} less {cost} for the restart"


def _limit_reasons(goals: Goals, forecast: Forecast) -> Iterator[Reason]:
    hours, begin = goals.budget_hours, forecast.begin_unix_s
    budget_end = None if hours is None else begin + hours * HOUR_S
    for rule, end in ((Rule.DEADLINE, goals.deadline_unix_s), (Rule.BUDGET, budget_end)):
        if end is None:
            continue
        chance = forecast.remaining_time.chance_beyond(end - forecast.now_unix_s)
        over_s = forecast.finish_p50_unix_s - end
        expected = f"{format_time(abs(over_s))} {'after' if over_s > 0 else 'before'}"
        odds = odds_text(rule, chance, goals.confidence)
        yield Reason(
            rule=rule,
            is_met=chance >= goals.confidence,
            text=f"{odds}; the run is expected to end {expected} the {rule.value}",
            probability=chance,
            numbers={"over_s": over_s},
        )


def _none_offered(plan: Plan | None) -> str:
    if plan is not None and plan.by_code is not None:
        return "faster layouts need a change of the code"
    return "no other layout is faster and fits"


def _restart_reason(
    cost_s: float,
    confidence: float,
    forecast: Forecast,
    best: Candidate | None,
    plan: Plan | None,
) -> Reason:
    if best is None or plan is None:
        return Reason(rule=Rule.RESTART, is_met=False, text=_none_offered(plan))
    is_unsaved = plan.running.config.cadence.checkpoint_form is CheckpointForm.NONE
    cost_s += forecast.elapsed_s * is_unsaved
    rivals = [c for c in plan.candidates if c.verdict is best.verdict]
    bias_log = selection_bias_log(best, rivals)
    chance = saving_probability(forecast, best, cost_s, bias_log=bias_log)
    expected_frac = math.exp(bias_log) * best.ratio.median - 1.0
    saved_s = max(0.0, -forecast.remaining_s * expected_frac)
    fits = best.verdict is Verdict.FITS
    is_met = chance >= confidence and fits
    text = f"{odds_text(Rule.RESTART, chance, confidence)}; it {saving_text(saved_s, cost_s)}"
    if is_unsaved:
        text += "; without --save it begins anew"
    if not fits:
        text += f"; memory: {best.verdict.value}, but it must fit"
    return Reason(
        rule=Rule.RESTART,
        is_met=is_met,
        text=text,
        probability=chance,
        numbers={
            "saved_s": saved_s,
            "restart_cost_s": cost_s,
            "net_s": saved_s - cost_s,
            "remaining_s": forecast.remaining_s,
            "time_frac": best.time_frac,
            "expected_time_frac": expected_frac,
            "time_frac_low": best.ratio.low - 1,
            "time_frac_high": best.ratio.high - 1,
        },
    )


def _candidate(plan: Plan | None) -> Candidate | None:
    """Return the fastest layout that surely fits, else the fastest that may."""
    if plan is None:
        return None
    faster = (c for c in plan.candidates if c.verdict is Verdict.FITS and not plan.obstacle(c))
    return next(faster, plan.best)


def _gaps(
    plan: Plan | None, candidate: Candidate | None, coverage_frac: float | None, silent: str
) -> list[Reason]:
    """Return the evidence that is missing to compare other layouts."""
    out: list[Reason] = []
    if plan is None:
        out.append(_evidence(UNKNOWN_LAYOUT, {}))
    elif plan.not_searched:
        out.append(_evidence(f"other layouts not compared: {plan.not_searched}", {}))
    elif candidate is not None and candidate.is_doubtful:
        out.append(_evidence(plan.doubt, {"misfit_log": plan.misfit_log}))
    if coverage_frac is not None and coverage_frac < MIN_COVERAGE_FRAC:
        remedy = f"{silent}; record a few steps without" if silent else "record another window"
        text = (
            f"{format_frac(coverage_frac)} of the hooks fired, "
            f"{format_frac(MIN_COVERAGE_FRAC)} are needed; {remedy}"
        )
        out.append(_evidence(text, {"coverage_frac": coverage_frac}))
    return out


def _evidence(text: str, numbers: Mapping[str, float]) -> Reason:
    return Reason(rule=Rule.EVIDENCE, is_met=False, text=text, numbers=numbers)


def _abstain(goals: Goals, reasons: Sequence[Reason], now_unix_s: float) -> Decision:
    return Decision(
        action=Action.ABSTAIN,
        reasons=tuple(reasons),
        confidence=goals.confidence,
        now_unix_s=now_unix_s,
        command_absent="nothing is advised yet",
    )
