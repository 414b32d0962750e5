"""Cost of the search for the best layouts, on 1,024 H100s with operators from the shipped priors.

    python benchmarks/costs/plan.py [--cases "dense 175B" "experts 671B"]

``best_layouts`` of each model in a process of its own: processor seconds (including children), wall
time, peak memory of the largest process, and the fate of all layouts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from threadpoolctl import threadpool_limits

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.published.model_shapes import public_shape
from forerun.calib.search.best_layouts import best_layouts
from forerun.calib.search.results import MemoryBudget
from forerun.calib.steps.base_times import prior_times
from forerun.calib.steps.model import FittedSteps, fit_steps
from forerun.calib.units import GIB, MIB
from forerun.calib.workload.config import Batch, Precision, RunConfig
from forerun.calib.workload.parallelism import Parallelism

DEVICE = "NVIDIA H100 80GB HBM3"
NUM_GPUS = 1024
CAPACITY_NBYTES = 80 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCase:
    """A model, its batch, and its assumed running layout on all GPUs."""

    shape: str
    """Name for ``public_shape``."""
    seq_length: int
    global_batch_size: int
    degrees: Mapping[str, Any]

    def running(self) -> RunConfig:
        """Return the running layout; experts are routed evenly."""
        model = public_shape(self.shape, seq_length=self.seq_length)
        if model.experts is not None:
            model = replace(model, experts=replace(model.experts, is_balance_forced=True))
        parallelism = Parallelism(
            is_sequence_parallel=self.degrees.get("tp", 1) > 1,
            is_optimizer_distributed=True,
            overlaps_grad_reduce=True,
            overlaps_param_gather=True,
            ranks_per_node=8,
            **self.degrees,
        )
        return RunConfig(
            model=model,
            parallelism=parallelism,
            batch=Batch(micro_batch_size=1, global_batch_size=self.global_batch_size),
            precision=Precision.BF16,
            device=DEVICE,
            framework="Megatron-LM",
        )


CASES: Mapping[str, SearchCase] = {
    # Narayanan et al., SC 2021, Table 1: batch 1,536 on 1,024 A100, TP 8, PP 16.
    "dense 175B": SearchCase(
        shape="gpt3-175b",
        seq_length=2048,
        global_batch_size=1536,
        degrees={"tp": 8, "pp": 16, "dp": 8},
    ),
    # arXiv:2412.19437, 3.2.1 and 4.2: PP 16, EP 64, batch 15,360.
    "experts 671B": SearchCase(
        shape="deepseek-v3",
        seq_length=4096,
        global_batch_size=15360,
        degrees={"pp": 16, "dp": 64, "ep": 64, "chunk_layers": (*(4,) * 15, 1)},
    ),
}
Figures = Mapping[str, Any]


def main() -> None:
    """Print the table, or one case's figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        steps = fit_steps(prior_times(DEVICE, is_attention_fused=True))
        with threadpool_limits(1):
            print(json.dumps(measure_search(CASES[arguments.cases[0]].running(), steps)))
        return
    rows = []
    for case in arguments.cases:
        figures = answer_of("--one", "--cases", case)
        rows.append([case, *(text.format(figures[name]) for name, text in SEARCH.values())])
    print(markdown_table(["model", *SEARCH], rows))


SEARCH = {
    "processor s": ("processor_s", "{:.1f}"),
    "clock s": ("clock_s", "{:.1f}"),
    "peak MiB": ("peak_mib", "{:,.0f}"),
    "layouts": ("num_layouts", "{:,}"),
    "over memory": ("over_memory", "{:,}"),
    "slower": ("slower", "{:,}"),
    "evaluated": ("evaluated", "{:,}"),
    "best s": ("best_s", "{:.3f}"),
}


def answer_of(*words: object) -> Any:
    """Return the JSON that this script prints last in a single-threaded process of its own."""
    command = [sys.executable, "-m", "forerun.benchmarks.costs.plan", *map(str, words)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | threads
    )
    return json.loads(done.stdout.splitlines()[-1])


def processor_s() -> float:
    """Return processor seconds of this process and of the children it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def peak_nbytes() -> int:
    """Return peak resident bytes: the larger of this process and its largest reaped child."""
    used = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return 1024 * max(resource.getrusage(who).ru_maxrss for who in used)


def measure_search(config: RunConfig, steps: FittedSteps) -> Figures:
    """Run one search and return its cost."""
    budget = MemoryBudget(capacity_nbytes=CAPACITY_NBYTES)
    begin, processor = time.perf_counter(), processor_s()
    result = best_layouts(config, steps, NUM_GPUS, budget=budget)
    clock_s, spent_s = time.perf_counter() - begin, processor_s() - processor
    return {
        "processor_s": spent_s,
        "clock_s": clock_s,
        "peak_mib": peak_nbytes() / MIB,
        "best_s": result.best[0].time_s,
        **result.tried.to_json(),
    }


if __name__ == "__main__":
    main()
