"""The running layout and its neighbours, for what-if questions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from ..advice.axes import changed
from ..advice.planning import Candidate, Plan, compare, unsupported_reason
from ..arguments.megatron_args import apply_options, options
from ..errors import ConfigError
from ..search.results import ANY_MEMORY, MemoryBudget
from ..steps.model import FittedSteps
from ..workload.choices import NAMED_CHOICES, is_usually_split
from ..workload.config import Recompute, RunConfig, takes_options

MOST_ROWS = 200
"""Limit of rows, so that a page stays within 200 kB."""
_MOST_DOUBLINGS = 3
"""Limit of doublings and halvings of each choice."""
_DOUBLINGS = range(-_MOST_DOUBLINGS, _MOST_DOUBLINGS + 1)


def what_if(
    plan: Plan,
    steps: FittedSteps,
    gpus: Sequence[int] = (),
    budget: MemoryBudget = ANY_MEMORY,
) -> tuple[Candidate, ...]:
    """Return the running layout, those of the plan, and the nearest that the program supports.

    At most ``MOST_ROWS`` are returned, in this order.  The nearest differ in the fewest doublings
    of ranks, tp, pp and micro-batch; ranks are half, as many, twice and ``gpus``.  ``steps`` and
    ``budget`` are those that ``forerun predict`` uses.
    """
    running = plan.running.config
    wanted = dict.fromkeys((running, *(one.config for one in plan.candidates)))
    for config in _neighbours(running, gpus):
        if len(wanted) >= MOST_ROWS:
            break
        wanted.setdefault(config)
    rows = compare(
        running,
        list(wanted)[:MOST_ROWS],
        steps,
        budget=budget,
    )
    return tuple(rows)


def predict_words(config: RunConfig, running: RunConfig) -> tuple[str, ...] | None:
    """Return options of ``forerun predict`` for this layout, in short names if they suffice, else
    in Megatron's; None if no options give exactly this layout."""
    follows = ("dp",) if running.model.experts is not None else ("dp", "etp")
    short = [
        word
        for axis in NAMED_CHOICES
        if axis.name not in follows and axis.read(config) != axis.read(running)
        for word in (f"--{axis.name}", str(axis.read(config)))
    ]
    whole = ["--gpus", str(config.parallelism.num_ranks), *options(config)]
    switches = _switches(config)
    ways = (short, [*short, *switches], whole, [*whole, *switches])
    return next((tuple(words) for words in ways if _gives(words, config, running)), None)


def _switches(config: RunConfig) -> list[str]:
    """Return options that switch each feature explicitly on or off."""
    par = config.parallelism
    is_on = {
        "sequence-parallel": par.is_sequence_parallel,
        "use-distributed-optimizer": par.is_optimizer_distributed,
        "overlap-grad-reduce": par.overlaps_grad_reduce,
        "overlap-param-gather": par.overlaps_param_gather,
    }
    return [f"--{name}" if on else f"--no-{name}" for name, on in is_on.items()]


def _gives(words: Sequence[str], config: RunConfig, running: RunConfig) -> bool:
    try:
        return apply_options(running, words) == config
    except ConfigError:
        return False


def _neighbours(running: RunConfig, gpus: Sequence[int]) -> Iterator[RunConfig]:
    """Yield layouts that differ from the running one, nearest first."""
    par = running.parallelism
    is_free = takes_options(running)
    degrees = _DOUBLINGS if is_free else (0,)
    other_kinds = (Recompute.NONE, Recompute.FULL) if is_free else ()
    kinds = tuple(dict.fromkeys((running.recompute, *other_kinds)))
    half = par.num_ranks // 2 if par.num_ranks % 2 == 0 else par.num_ranks
    counts = tuple(dict.fromkeys((par.num_ranks, half, 2 * par.num_ranks, *gpus)))
    choices = product(counts, degrees, degrees, _DOUBLINGS, kinds)

    def distance(choice: tuple[int, int, int, int, Recompute]) -> float:
        count, tp, pp, micro, kind = choice
        away = abs(math.log2(count / par.num_ranks))
        return away + abs(tp) + abs(pp) + abs(micro) + (kind is not running.recompute)

    for count, tp, pp, micro, kind in sorted(choices, key=distance):
        size = running.batch.micro_batch_size
        sizes = _doubled(par.tp, tp), _doubled(par.pp, pp), _doubled(size, micro)
        if 0 in sizes:
            continue
        config = _changed(running, count, *sizes, kind)
        if config is not None and not (is_free and unsupported_reason(config, running)):
            yield config


def _changed(
    running: RunConfig, num_ranks: int, tp: int, pp: int, micro: int, kind: Recompute
) -> RunConfig | None:
    """Return the layout with these choices; None if it cannot run."""
    par = running.parallelism
    values: dict[str, Any] = {"num_ranks": num_ranks, "tp": tp, "pp": pp, "micro_batch_size": micro}
    if pp != par.pp:
        values |= {"vp": 1, "microbatch_group_size": 0}
    if tp > par.tp == 1:
        values["is_sequence_parallel"] = is_usually_split(running)
    if kind is not running.recompute:
        values |= {"recompute": kind, "recompute_num_layers": 0, "recompute_modules": ()}
    try:
        config = changed(running, values)
    except ConfigError:
        return None
    return None if 0 in config.parallelism.chunk_layers else config


def _doubled(number: int, times: int) -> int:
    """Return ``number`` times 2**``times``; 0 if that is no whole number."""
    if times >= 0:
        return number << times
    return number >> -times if number % (1 << -times) == 0 else 0
