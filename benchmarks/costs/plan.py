"""Cost of the search for the best layouts, on 1,024 H100s with operators from the shipped priors.

    python benchmarks/costs/plan.py [--cases "dense 175B" "experts 671B"]
        [--bulk 4000] [--repetitions 3]

The first table is ``best_layouts`` of a model, each in a process of its own: processor seconds
(including children), wall time, peak memory of the largest process, and the fate of all layouts.
The second is the bulk rate of one core in complete layouts per second, time by
``FittedSteps.median_times`` and memory by ``needed_nbytes``, over the given number of distinct
layouts of the same space: random ones, which share little, and whole splits with all their
variants, as the search evaluates them.  ``cold`` is the first pass, which builds the event orders
of pipelines.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

from threadpoolctl import threadpool_limits

from forerun.benchmarks.child_process import answer_of, peak_nbytes, processor_s
from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.peers.search_cases import CASES, DEVICE, NUM_GPUS
from forerun.calib.memory import LayoutMemory
from forerun.calib.search import (
    MemoryBudget,
    Tally,
    best_layouts,
    cells_of,
    num_nodes,
    recomputes,
    states,
)
from forerun.calib.steps import FittedSteps, fit_steps, prior_times
from forerun.calib.units import GIB, MIB
from forerun.calib.workload import RunConfig

CAPACITY_NBYTES = 80 * GIB
COUNTS = (*Tally.__slots__,)
Figures = Mapping[str, Any]


def main() -> None:
    """Print both tables, or one case's figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--bulk", type=int, default=4000, help="distinct layouts in bulk (4000)")
    parser.add_argument("--repetitions", type=int, default=3, help="of the bulk, after the first")
    parser.add_argument("--one", choices=("search", "bulk"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        with threadpool_limits(1):
            print(json.dumps(_figures(arguments)))
        return
    for what, columns in (("search", SEARCH), ("bulk", BULK)):
        rows = []
        for case in arguments.cases:
            for case_figures in answer_of("costs.plan", *_words(what, case, arguments)):
                figures = (text.format(case_figures[name]) for name, text in columns.values())
                rows.append([case, *figures])
        print(markdown_table(["model", *columns], rows), flush=True)
        print()


SEARCH = {
    "processor s": ("processor_s", "{:.1f}"),
    "clock s": ("clock_s", "{:.1f}"),
    "peak MiB": ("peak_mib", "{:,.0f}"),
    "layouts": ("num_layouts", "{:,}"),
    "over memory": ("over_memory", "{:,}"),
    "by a bound": ("bounded", "{:,}"),
    "by another of their split": ("dominated", "{:,}"),
    "evaluated": ("evaluated", "{:,}"),
    "best s": ("best_s", "{:.3f}"),
    "gap": ("gap_frac", "{:.1%}"),
}
BULK = {
    "drawn": ("drawn", "{}"),
    "layouts": ("number", "{:,}"),
    "complete/s, cold": ("cold_per_s", "{:,.0f}"),
    "complete/s": ("complete_per_s", "{:,.0f}"),
    "time/s": ("time_per_s", "{:,.0f}"),
    "memory/s": ("memory_per_s", "{:,.0f}"),
}


def _words(what: str, case: str, arguments: argparse.Namespace) -> list[object]:
    bulk = ("--bulk", arguments.bulk, "--repetitions", arguments.repetitions)
    return ["--one", what, "--cases", case, *bulk]


def _figures(arguments: argparse.Namespace) -> list[Figures]:
    (case,) = arguments.cases
    config = running(case)
    steps = fit_steps(prior_times(DEVICE, is_attention_fused=True))
    if arguments.one == "search":
        return [measure_search(config, steps)]
    variants = {"by chance": 1, "whole splits": None}
    return [
        {
            "drawn": name,
            **measure_bulk(
                sample_layouts(config, arguments.bulk, each), steps, arguments.repetitions
            ),
        }
        for name, each in variants.items()
    ]


def running(case: str) -> RunConfig:
    """Return the running layout of a case on all GPUs."""
    return CASES[case].on_all(CASES[case].eight_ranks())


def measure_search(config: RunConfig, steps: FittedSteps) -> Figures:
    """Run one search and return its cost."""
    budget = MemoryBudget(capacity_nbytes=CAPACITY_NBYTES)
    begin, processor = time.perf_counter(), processor_s()
    result = best_layouts(config, steps, NUM_GPUS, budget=budget)
    clock_s, spent_s = time.perf_counter() - begin, processor_s() - processor
    tally = result.proof.tally
    return {
        "processor_s": spent_s,
        "clock_s": clock_s,
        "peak_mib": peak_nbytes() / MIB,
        "num_layouts": tally.num_layouts,
        **{name: getattr(tally, name) for name in COUNTS},
        "best_s": result.best[0].time_s,
        "gap_frac": result.proof.gap_frac,
    }


def measure_bulk(layouts: list[RunConfig], steps: FittedSteps, repetitions: int) -> Figures:
    """Return layouts per second of one core."""
    costs: list[tuple[float, float]] = []
    for _ in range(repetitions + 1):
        begin = time.process_time()
        steps.median_times(layouts)
        middle = time.process_time()
        LayoutMemory().needed_nbytes(layouts)
        costs.append((middle - begin, time.process_time() - middle))
    time_s, memory_s = min(costs[1:], default=costs[0])
    return {
        "number": len(layouts),
        "cold_per_s": len(layouts) / sum(costs[0]),
        "complete_per_s": len(layouts) / (time_s + memory_s),
        "time_per_s": len(layouts) / time_s,
        "memory_per_s": len(layouts) / memory_s,
    }


def sample_layouts(
    config: RunConfig, number: int, each: int | None, seed: int = 0
) -> list[RunConfig]:
    """Return distinct random layouts of the space: ``each`` variants per cell, or all."""
    rng, cells = random.Random(seed), cells_of(config, NUM_GPUS)
    layouts: dict[RunConfig, None] = {}
    for place in rng.sample(range(len(cells)), min(2 * number, len(cells))):
        variants = list(variants_of(cells.layout(place)))
        some = variants if each is None else rng.sample(variants, min(each, len(variants)))
        layouts |= dict.fromkeys(some)
        if len(layouts) >= number:
            break
    return list(layouts)[:number]


def variants_of(layout: RunConfig) -> Iterator[RunConfig]:
    """Yield a cell's layout with every sharding of the states and every choice of recompute."""
    recompute_options = recomputes(layout)
    for choice in states(layout, num_nodes(layout)):
        sharded = choice.of(layout)
        yield from (recompute.applied_to(sharded) for recompute in recompute_options)


if __name__ == "__main__":
    main()
