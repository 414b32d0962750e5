"""The lines shown to the user, each self-contained, as text from the parts of an answer.

A value that is unknown is replaced by the reason and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..advice.decision import Decision, Reason, Rule, odds_text, saving_text
from ..advice.planning import Candidate, Plan
from ..fit.priors import UNKNOWN_DEVICE, device_prior
from ..forecast.batch_ratios import PredictedStep
from ..forecast.rates import Throughput, peak_flop_per_s
from ..layers.model_size import model_name
from ..records.iso_times import Action, action_text
from ..shell import printable, quoted
from ..units import GIB, INDISTINGUISHABLE, format_bytes, format_frac, format_time
from ..workload.choices import layout_words
from ..workload.config import RunConfig
from .run_measurements import Measurements, Overhead

PREFIX = "[forerun]"
_SEPARATOR = " · "
_DECISION = "decision: "


def with_prefix(lines: Sequence[str]) -> list[str]:
    """Return the lines with the log's prefix, without empty ones."""
    return [f"{PREFIX} {printable(line)}" for line in lines if line]


def advice_line(lines: Sequence[str]) -> str:
    """Return the line of a transcript that has the advice; empty if there is none."""
    return next((line for line in lines if line.startswith(f"{PREFIX} {_DECISION}")), "")


def run_line(
    config: RunConfig | None,
    num_ranks: int,
    measured_s: float | None,
    throughput: Throughput | None = None,
    *,
    device: str = "",
) -> str:
    """Return model, devices, layout and speed of the run.

    Without ``config``: ``device``, number of ranks and measured step.
    """
    device = device if config is None else config.device
    words = [] if config is None else [model_name(config)]
    words.append(f"{num_ranks} x {device_name(device)}" if device else f"{num_ranks} ranks")
    if config is not None:
        words.append(layout_words(config))
    if measured_s is not None:
        words.append(f"step {format_time(measured_s)}")
    if throughput is not None:
        words.append(throughput.text)
    if config is not None and config.device != "cpu" and peak_flop_per_s(config) is None:
        words.append(f"no MFU: the peak of {config.device} is not known")
    return _SEPARATOR.join(words)


def device_name(device: str) -> str:
    """Return the short name of a device, from its driver's name.

    >>> device_name("NVIDIA H100 80GB HBM3"), device_name("cpu"), device_name("Accelerator 9")
    ('H100', 'CPU', 'Accelerator 9')
    """
    name = device_prior(device).name
    return device if name == UNKNOWN_DEVICE else name.upper()


def faster_line(
    plan: Plan, decision: Decision | None, *, has_end: bool = True, next_launch: str = ""
) -> str:
    """Return the faster layout of the decision, with its gain, or why there is none.

    ``next_launch`` is the ``--calibrate-dir`` of a run that has ended, which a restart saves
    nothing.
    """
    best = decision.candidate if decision and decision.candidate else plan.best
    if plan.not_searched:
        return f"other layouts not compared: {plan.not_searched}"
    if plan.doubt and (best is None or best.is_unsure):
        return f"faster: {INDISTINGUISHABLE}{_SEPARATOR}{plan.doubt}"
    if best is None and (coded := plan.by_code) is not None:
        words = [f"faster by a change of the code: {layout_words(coded.config)}"]
        words += [coded.change_text, _memory(coded, plan.memory_capacity_nbytes)]
        return _SEPARATOR.join(filter(None, [*words, plan.obstacle(coded)]))
    if best is None:
        count = max(plan.num_layouts, len(plan.candidates))
        words = [f"faster: nothing to offer among {count:,} layout{'s' * (count != 1)}"]
        if (near := plan.nearest) is not None:
            words.append(plan.missed_by(near, layout_words(near.config)))
        return _SEPARATOR.join(words)
    running_num_ranks, other = (
        plan.running.config.parallelism.num_ranks,
        best.config.parallelism.num_ranks,
    )
    kind = "CPU ranks" if plan.running.config.device == "cpu" else "GPUs"
    where = "here" if running_num_ranks == other else f"on {other} {kind}"
    faster = "perhaps faster" if best.is_unsure else "faster"
    saving = "its saving depends on the end of the run, which is not known"
    if next_launch:
        faster, saving = f"next time {faster}", _shown_by(best, plan, next_launch)
    elif has_end:
        saving = _saving(decision)
    words = [
        f"{faster} {where}: {layout_words(best.config)}",
        best.change_text,
        _memory(best, plan.memory_capacity_nbytes),
        saving,
    ]
    return _SEPARATOR.join(filter(None, words))


def decision_line(decision: Decision, plan: Plan | None = None, *, directory: str = "DIR") -> str:
    """Return the advice, its probability, and the command that shows how to follow it.

    ``directory`` is the value of ``--calibrate-dir``.
    """
    reason = _leading(decision)
    text = f"{_DECISION}{action_text(decision.action.value)}"
    if reason is not None:
        if reason.is_met and decision.action is Action.CONTINUE:
            text += " until another window confirms it"
        why = reason.text
        if reason.probability is not None:
            why = odds_text(reason.rule, reason.probability, decision.confidence)
        text += f" ({why})"
    return _SEPARATOR.join(filter(None, (text, _shown_by(decision.candidate, plan, directory))))


def checked_line(measured: Measurements, modelled: PredictedStep | None) -> str:
    """Return the self-check: modelled against measured step, hooks and their overhead."""
    step_s, hooks, overhead = measured.step_s, measured.hooks, measured.overhead
    words = []
    if modelled is not None:
        ends = f"{format_time(modelled.low_s)} to {format_time(modelled.high_s)}"
        off_text = format_frac(abs(modelled.time_s - step_s) / step_s)
        words.append(f"model {format_time(modelled.time_s)} ({ends}), {off_text} off")
    most_frac = max(overhead.high_frac, overhead.noise_frac) if overhead else 0.0
    if most_frac >= 1.0:
        words = [
            f"a step of {format_time(step_s)} is too short to tell its parts from hooks and "
            f"noise (up to {format_time(most_frac * step_s)}); record longer steps (a larger "
            "batch), or more (--calibrate-steps)"
        ]
    fired = f"hooks {hooks.num_fired} of {hooks.num_installed}, {_cost(overhead)}"
    words += [fired] * (hooks.num_installed > 0) + [*hooks.remarks]
    return f"checked: {_SEPARATOR.join(words)}" if words else ""


def _memory(candidate: Candidate, capacity_nbytes: int | None) -> str:
    needed = candidate.memory.total_nbytes
    if not capacity_nbytes:
        return f"memory {format_bytes(needed)} (capacity not known)"
    if capacity_nbytes >= GIB:
        return f"memory {needed / GIB:.3g} of {capacity_nbytes / GIB:.3g} GiB"
    return f"memory {format_bytes(needed)} of {format_bytes(capacity_nbytes)}"


def _saving(decision: Decision | None) -> str:
    for reason in decision.reasons if decision else ():
        if reason.rule is Rule.RESTART and "saved_s" in reason.numbers:
            return saving_text(reason.numbers["saved_s"], reason.numbers["restart_cost_s"])
    return ""


def _cost(overhead: Overhead | None) -> str:
    """Return the overhead of hooks in words; only its bound if the interval contains 0."""
    if overhead is None:
        return "cost not measured: too few steps with and without hooks"
    part = ""
    if overhead.at_operators is not None:
        at, low, high = (f"{100 * frac:.1f}" for frac in overhead.at_operators)
        part = f"; {at} % ({low} to {high}) at recorded operators"
    if overhead.below_frac is not None:
        return f"cost {overhead.text}{part}"
    ends = f"{overhead.low_frac * 100:.1f} to {overhead.high_frac * 100:.1f}"
    return f"cost {overhead.text} of a step ({ends}){part}"


def _leading(decision: Decision) -> Reason | None:
    """Return the reason for the action: missing evidence, a met rule, or the one nearest to it."""
    reasons: Sequence[Reason] = decision.reasons
    if decision.action is Action.ABSTAIN:
        reasons = [r for r in reasons if r.rule is Rule.EVIDENCE] or reasons
    if decision.action is Action.STOP:
        reasons = [r for r in reasons if r.is_met] or reasons
    return max(reasons, key=lambda r: r.probability or 0.0, default=None)


def _shown_by(candidate: Candidate | None, plan: Plan | None, directory: str) -> str:
    """Return the command that prints a candidate's launch line, or what would tell if it is faster;
    empty if the plan lacks it."""
    if candidate is None or plan is None:
        return ""
    if candidate.is_unsure:
        return f"a short run of {candidate.label} with --calibrate would decide"
    running_num_ranks, ranks = (
        plan.running.config.parallelism.num_ranks,
        candidate.config.parallelism.num_ranks,
    )
    rows = [c for c in plan.candidates if c.config.parallelism.num_ranks == ranks]
    if candidate not in rows:
        return ""
    gpus = f" --gpus {ranks}" if ranks != running_num_ranks else ""
    row = rows.index(candidate) + 1
    return f"forerun plan {quoted(directory)}{gpus} --show {row} prints the command"
