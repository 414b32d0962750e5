"""Rules on work between steps: timers, logs, profilers, data, evaluations and saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .rule import Find, Remedy, StatedLaunch, missing, rules_of

if TYPE_CHECKING:
    from .pricing import Pricing

_MOST_EVAL_FRAC, _WANTED_EVAL_FRAC = 0.05, 0.02
"""Shares of the run: the frequency of evaluations is the user's choice, so that only a large share
is reported, and the proposed interval is well below that."""
_LEAST_SAVE_GAIN_FRAC = 0.005
"""Smallest gain that is reported.  The loss is flat around its minimum: twice or half the interval
costs a quarter more of it, which is less than this if saves are cheap."""


def _exceeds_zero(launch: StatedLaunch, option: str) -> bool:
    return launch.is_on_gpu and (launch.number(option) or 0) > 0


def _lacks_gc(launch: StatedLaunch) -> bool:
    has_many = launch.is_on_gpu and launch.config.parallelism.num_ranks > 1
    return has_many and not launch.says("--manual-gc")


def _checks_nan(launch: StatedLaunch) -> bool:
    # Without overlap, the check delays nothing.
    has_overlap = launch.is_on_gpu and launch.config.parallelism.overlaps_grad_reduce
    return has_overlap and not launch.says("--no-check-for-nan-in-loss-and-grad")


def _async_save(launch: StatedLaunch, pricing: Pricing | None) -> Remedy | None:
    option, worker = "--async-save", "--use-persistent-ckpt-worker"
    interval = launch.config.cadence.save_interval
    is_able = launch.text("--ckpt-format", "torch_dist") == "torch_dist" and launch.is_on_gpu
    if not (is_able and interval and launch.says("--save")) or launch.says(option):
        return None
    gain = pricing.interval_gain(pricing.save, interval) if pricing is not None else None
    return Remedy(what=missing(option), put=((option,), (worker,)), gain=gain)


def _evaluations(launch: StatedLaunch, pricing: Pricing | None) -> Remedy | None:
    cadence = launch.config.cadence
    if pricing is None or not cadence.eval_interval or not cadence.eval_iters:
        return None
    part, step_s = pricing.evaluation, pricing.current.step_time_s
    if part.median / (part.median + step_s * cadence.eval_interval) < _MOST_EVAL_FRAC:
        return None
    wanted = _round_up(part.median * (1 / _WANTED_EVAL_FRAC - 1) / step_s)
    return Remedy(
        what=f"--eval-interval {cadence.eval_interval} with --eval-iters {cadence.eval_iters}",
        put=(("--eval-interval", str(wanted)),),
        gain=pricing.interval_gain(part, cadence.eval_interval, wanted),
    )


def _saves(launch: StatedLaunch, pricing: Pricing | None) -> Remedy | None:
    """Return the save interval that minimises the time lost to saves and to repeated steps.

    There is one failure per MTBI + MTTR (mean times between interrupts and to restart), and half an
    interval T is repeated: save / T + T / (2 (MTBI + MTTR)) is minimal at T = sqrt(2 (MTBI + MTTR)
    save), the first-order interval of Young (1974) and Daly (2006).
    """
    interval = launch.config.cadence.save_interval
    if pricing is None or not interval or not pricing.mtbf_s or launch.says("--async-save"):
        return None
    step_s, between_s = pricing.current.step_time_s, pricing.mtbf_s + pricing.restart_s
    wanted = max(1, round(math.sqrt(2 * between_s * pricing.save.median) / step_s))

    def lost_frac(steps: int, one_s: float) -> float:
        return one_s / (steps * step_s) + steps * step_s / (2 * between_s)

    gain = pricing.run_gain(
        pricing.save,
        lambda one_s: (1 + lost_frac(wanted, one_s)) / (1 + lost_frac(interval, one_s)) - 1,
    )
    if gain.time_frac >= -_LEAST_SAVE_GAIN_FRAC:
        return None
    put = (("--save-interval", str(wanted)),)
    return Remedy(what=f"--save-interval {interval}", put=put, gain=gain)


def _round_up(number: float) -> int:
    """Return a number rounded up to two digits, so that it is easy to remember.

    >>> _round_up(1234.5), _round_up(7.1)
    (1300, 8)
    """
    unit = 10 ** max(0, math.floor(math.log10(max(number, 1.0))) - 1)
    return math.ceil(number / unit) * unit


_HOLDS: Mapping[str, Callable[[StatedLaunch], bool]] = {
    "timing-log-level": lambda one: _exceeds_zero(one, "--timing-log-level"),
    # Reports that are ten steps apart let the host run ahead between them.
    "log-interval": lambda one: one.is_on_gpu and one.number("--log-interval") == 1,
    "check-for-nan": _checks_nan,
    "empty-unused-memory": lambda one: _exceeds_zero(one, "--empty-unused-memory-level"),
    "num-workers": lambda one: one.number("--num-workers") == 0 and not one.says("--mock-data"),
    # The interval is that of Megatron's guide for experts (core/transformer/moe/README.md).
    "manual-gc": _lacks_gc,
    "ckpt-format": lambda one: (
        one.is_on_gpu and one.text("--ckpt-format") == "torch" and one.says("--save")
    ),
    "async-save-worker": lambda one: (
        one.says("--async-save") and not one.says("--use-persistent-ckpt-worker")
    ),
}
_FIND: Mapping[str, Find] = {
    "async-save": _async_save,
    "eval-interval": _evaluations,
    "save-interval": _saves,
}
RULES = rules_of("host", holds=_HOLDS, then={}, find=_FIND)
