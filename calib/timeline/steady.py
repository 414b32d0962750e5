"""Many pipelines at once: equal ones in one simulation, long ones by the pace they settle into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .graph import PipelineCosts, joined
from .programs import Pipeline
from .simulation import Simulation, simulate

_START = 2
"""Groups of micro-batches after which the pace is read off."""
_PERIOD = 1
"""Groups of micro-batches over which it is."""

Run = tuple[PipelineCosts, Pipeline]


def simulate_each(runs: Sequence[Run]) -> list[Simulation]:
    """What ``simulate`` gives for each; equal pipelines go through it side by side."""
    places: dict[Pipeline, list[int]] = {}
    for place, (_, pipeline) in enumerate(runs):
        places.setdefault(pipeline, []).append(place)
    out: dict[int, Simulation] = {}
    for pipeline, members in places.items():
        found = simulate(joined([runs[place][0] for place in members]), pipeline)
        begin = 0
        for place in members:
            end = begin + runs[place][0].num_columns
            out[place] = found.columns(begin, end)
            begin = end
    return [out[place] for place in range(len(runs))]


def simulate_long(
    runs: Sequence[Run], *, start: int = _START, period: int = _PERIOD
) -> list[Simulation]:
    """As ``simulate_each``, exact up to ``start + period`` groups of micro-batches.

    A schedule with constant costs becomes periodic: each further micro-batch adds what the slowest
    circuit of stages and messages takes (Baccelli et al. 1992, section 3.7).  Two short simulations
    tell that pace, and what comes before it.  The layouts of a 96-layer model on 1,024 GPUs come
    within 0.03 % of the exact step; stages that differ at random by 30 % within 3 %, and 8 % at
    worst with few virtual stages, whose pace settles late (0.1 and 2 % with ``start`` and
    ``period`` 4).

    >>> from .graph import pipeline_costs
    >>> costs = pipeline_costs([1.0] * 4, [2.0] * 4)
    >>> found = simulate_long([(costs, Pipeline(num_stages=4, num_microbatches=1000))])
    >>> found[0].makespan_s.tolist()
    [3009.0]
    """
    short = [_shortened(run, start, period) for run in runs]
    found = iter(simulate_each([run for group in short for run in group]))
    out = []
    for (_, pipeline), group in zip(runs, short, strict=True):
        early = next(found)
        if len(group) == 1:
            out.append(early)
            continue
        first, second = (run[1].num_microbatches for run in group)
        periods = (pipeline.num_microbatches - first) / (second - first)
        out.append(_continued(early, next(found), periods))
    return out


def _shortened(run: Run, start: int, period: int) -> list[Run]:
    """The run itself where it is short, otherwise its first groups, fewer and more of them."""
    costs, pipeline = run
    group, number = pipeline.group_size, pipeline.num_microbatches
    # The last group may be a part of one: it stays as it is.
    first = start * group + number % group
    second = first + period * group
    if number <= second:
        return [run]
    return [(costs, replace(pipeline, num_microbatches=m)) for m in (first, second)]


def _continued(early: Simulation, late: Simulation, periods: float) -> Simulation:
    return Simulation(
        **{
            name: getattr(early, name) + periods * (getattr(late, name) - getattr(early, name))
            for name in Simulation.__dataclass_fields__
        }
    )
