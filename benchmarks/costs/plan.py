"""How many complete layouts a plan ranks per second on one core: step time, schedule and memory.

    python benchmarks/costs/plan.py [--gpus 64 256 1024] [--repetitions 3]

A Llama-3 70B on H100s, operators and transfers from the shipped priors.  ``cold`` includes building
the event orders of the pipelines, which later plans of the same process share.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from threadpoolctl import threadpool_limits

from forerun.benchmarks.markdown_text import markdown_head, markdown_row
from forerun.benchmarks.published.model_shapes import public_shape
from forerun.calib.advice.plan import enumerate_layouts, peaks_nbytes, ranking
from forerun.calib.steps.base_times import prior_times
from forerun.calib.steps.model import fit_steps
from forerun.calib.timeline.compiled import compile_layouts
from forerun.calib.timeline.evaluate import evaluate
from forerun.calib.timeline.steady import simulate_long
from forerun.calib.units import GIB
from forerun.calib.workload.config import Batch, Parallelism, Precision, RunConfig

DEVICE = "NVIDIA H100 80GB HBM3"
LLAMA_70B = public_shape("LLAMA3_70B", seq_length=8192)


def running(gpus: int) -> RunConfig:
    """A usual layout on so many GPUs."""
    return RunConfig(
        model=LLAMA_70B,
        parallelism=Parallelism(
            tp=8,
            pp=4,
            dp=gpus // 32,
            is_sequence_parallel=True,
            is_optimizer_distributed=True,
            overlaps_grad_reduce=True,
            overlaps_param_gather=True,
            ranks_per_node=8,
        ),
        batch=Batch(micro_batch_size=1, global_batch_size=1024),
        precision=Precision.BF16,
        device=DEVICE,
    )


def timed(gpus: int, repetitions: int) -> str:
    """One row: layouts, and layouts per second in all and in each part."""
    config = running(gpus)
    base = prior_times(DEVICE, is_attention_fused=True)
    steps = fit_steps(base)
    begin = time.process_time()
    layouts = enumerate_layouts(config, gpus)
    listed_s = time.process_time() - begin
    costs = []
    for _ in range(repetitions + 1):
        begin = time.process_time()
        ranking(layouts, steps, memory_nbytes=80 * GIB)
        costs.append(time.process_time() - begin)
    cold_s, warm_s = costs[0] + listed_s, min(costs[1:]) + listed_s
    begin = time.process_time()
    compiled = compile_layouts(layouts)
    compile_s = time.process_time() - begin
    times_s = base.estimates(compiled.items).time_s[:, np.newaxis]
    begin = time.process_time()
    evaluate(compiled, times_s, contention=1.3, run=simulate_long)
    evaluate_s = time.process_time() - begin
    begin = time.process_time()
    peaks_nbytes(layouts)
    memory_s = time.process_time() - begin
    number = len(layouts)
    parts = (cold_s, warm_s, listed_s, compile_s, evaluate_s, memory_s)
    return markdown_row([gpus, number, *(f"{number / part:,.0f}" for part in parts)])


PARTS = ("complete, cold", "complete", "list", "compile", "evaluate", "memory")


def main() -> None:
    """Print a row for each number of GPUs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    print(markdown_head(["GPUs", "layouts", *PARTS]))
    with threadpool_limits(1):
        for gpus in arguments.gpus:
            print(timed(gpus, arguments.repetitions), flush=True)


if __name__ == "__main__":
    main()
