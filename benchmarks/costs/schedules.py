"""Cost of simulating pipeline schedules on one core, in seconds of processor time.

    python benchmarks/costs/schedules.py [--stages 8] [--microbatches 64] [--layouts 1000]

Bulk: layouts of one size per second, each with its own passes and messages on every stage; one:
milliseconds for a single layout with all spans.  "First" includes computing the order of events,
done once per size and schedule.  Each figure is the median of the repetitions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from forerun.benchmarks.markdown_text import markdown_head, markdown_row
from forerun.calib.timeline import (
    Pipeline,
    PipelineCosts,
    bulk_program,
    event_graph,
    pipeline_costs,
    simulate,
    spans,
)

HEADER = ["schedule", "events", "layouts / s", "bar", "one, ms", "one, first, ms", "bar"]
BULK_BARS = {"1F1B": "150,000", "interleaved 4": "20,000"}
ONE_BAR_MS = "20"
MS_PER_S = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the simulation of pipeline schedules.")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--layouts", type=int, default=1000)
    parser.add_argument("--repetitions", type=int, default=9)
    given = parser.parse_args()
    print(markdown_head(HEADER))
    for name, pipeline in cases(given.stages, given.microbatches).items():
        costs = uneven_costs(pipeline, given.layouts)
        first_s = median_cpu_s(lambda p=pipeline, c=costs: spans(c, p), 1)
        one_s = median_cpu_s(lambda p=pipeline, c=costs: spans(c, p), given.repetitions)
        bulk_program(pipeline)
        bulk_s = median_cpu_s(lambda p=pipeline, c=costs: simulate(c, p), given.repetitions)
        cells = [
            *(name, f"{len(event_graph(pipeline).events):,}", f"{given.layouts / bulk_s:,.0f}"),
            *(BULK_BARS.get(name, ""), f"{one_s * MS_PER_S:.1f}", f"{first_s * MS_PER_S:.1f}"),
            ONE_BAR_MS,
        ]
        print(markdown_row(cells))


def cases(num_stages: int, num_microbatches: int) -> dict[str, Pipeline]:
    """Return one pipeline of the given size per schedule."""

    def pipeline(**settings: object) -> Pipeline:
        size = {"num_stages": num_stages, "num_microbatches": num_microbatches}
        return Pipeline(**{**size, **settings})  # pyright: ignore[reportArgumentType]

    return {
        "1F1B": pipeline(),
        "interleaved 2": pipeline(num_virtual_stages=2),
        "interleaved 4": pipeline(num_virtual_stages=4),
        "interleaved 4, blocking": pipeline(num_virtual_stages=4, overlaps_p2p=False),
    }


def uneven_costs(pipeline: Pipeline, num_layouts: int) -> PipelineCosts:
    """Return passes that differ by half between chunks, and messages of a few percent of a pass."""
    rng = np.random.default_rng(0)
    passes, edges = (pipeline.num_chunks, num_layouts), (pipeline.num_chunks - 1, num_layouts)
    return pipeline_costs(
        rng.uniform(1.0, 1.5, passes),
        rng.uniform(2.0, 3.0, passes),
        activation_s=rng.uniform(0.02, 0.1, edges),
        gradient_s=rng.uniform(0.02, 0.1, edges),
        num_virtual_stages=pipeline.num_virtual_stages,
    )


def median_cpu_s(act: Callable[[], object], repetitions: int) -> float:
    """Return the median processor time in seconds."""
    times_s = []
    for _ in range(repetitions):
        begin = time.process_time()
        act()
        times_s.append(time.process_time() - begin)
    return statistics.median(times_s)


if __name__ == "__main__":
    main()
