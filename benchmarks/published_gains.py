"""Gains predicted from one known step for other published layouts, by the setting changed.

    python benchmarks/published_gains.py DATA_DIR [--only TEXT]

Each row of a set in turn is the running layout, whose step is all that is known; the others of its
machine, model, number of GPUs and global batch are compared with it through the fit that live runs
use.  If exactly one setting differs (besides the number of replicas, which follows), the pair
counts for that setting, from the smaller value to the larger; so a bias shows how well a law
extrapolates.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from threadpoolctl import threadpool_limits

from forerun.benchmarks.decisions import SETS, Run, runs_of
from forerun.benchmarks.markdown_text import markdown_table
from forerun.calib.advice import compare
from forerun.calib.answers import fit_run_steps
from forerun.calib.steps import KnownStep
from forerun.calib.workload import RunConfig

AXES: Mapping[str, Callable[[RunConfig], Any]] = {
    "micro-batch": lambda config: config.batch.micro_batch_size,
    "tensor parallel": lambda config: config.parallelism.tp,
    "stages": lambda config: config.parallelism.pp,
    "virtual stages": lambda config: config.parallelism.vp,
    "context parallel": lambda config: config.parallelism.cp,
    "expert parallel": lambda config: config.parallelism.ep,
    "recompute": lambda config: (config.recompute.value, config.recompute_num_layers),
    "optimizer": lambda config: config.parallelism.is_optimizer_distributed,
    "sharding": lambda config: config.parallelism.sharding.value,
}
KNOWN_SIGMA_LOG = 0.02
"""Assumed uncertainty of a published step, in log."""
SEVERAL = "several at once"


def main() -> None:
    """Print a row for each setting changed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, metavar="DATA_DIR", help="public tables, CSV")
    parser.add_argument("--only", default="", metavar="TEXT", help="sets whose title holds this")
    arguments = parser.parse_args()
    with threadpool_limits(1):
        rows = [
            row
            for title in SETS
            if arguments.only.lower() in title.lower()
            for run in runs_of(title, arguments.data)
            for row in gains_of(run)
        ]
    print(table(pd.DataFrame(rows)))


def gains_of(run: Run) -> Iterator[dict[str, Any]]:
    """Yield predicted and true log ratio of each other row to the running one."""
    running = run.running
    known = KnownStep(config=running.config, time_s=running.measured_s, sigma_log=KNOWN_SIGMA_LOG)
    steps = fit_run_steps(run.base, [known], running.config)
    compared = compare(running.config, [row.config for row in run.others], steps)
    for row, one in zip(run.others, compared, strict=True):
        true = math.log(row.measured_s / running.measured_s)
        yield {
            "change": change_of(running.config, row.config),
            "machine": running.machine,
            "promised": math.log1p(one.time_frac),
            "true": true,
            "is_inside": one.time_frac_low <= math.expm1(true) <= one.time_frac_high,
            "half_width": (math.log1p(one.time_frac_high) - math.log1p(one.time_frac_low)) / 2,
        }


def change_of(running: RunConfig, other: RunConfig) -> str:
    """Return the one axis on which they differ, "" if it shrinks; else that it is several.

    Of a pair in both directions, one counts.
    """
    differing = [name for name, value in AXES.items() if value(running) != value(other)]
    if len(differing) != 1:
        return SEVERAL
    value = AXES[differing[0]]
    return differing[0] if value(running) < value(other) else ""


def table(rows: pd.DataFrame) -> str:
    """Return Markdown: a line for each change."""
    lines = []
    for name in (*AXES, SEVERAL):
        change_rows = rows[rows["change"] == name]
        if len(change_rows):
            off = change_rows["promised"] - change_rows["true"]
            lines.append(
                [
                    *(name, len(change_rows), change_rows["machine"].nunique()),
                    *(
                        f"{change_rows['true'].mean():+.3f}",
                        f"{off.mean():+.3f}",
                        f"{off.abs().mean():.3f}",
                    ),
                    *(
                        f"{100 * change_rows['is_inside'].mean():.0f} %",
                        f"{change_rows['half_width'].mean():.3f}",
                    ),
                ]
            )
    heads = ["change", "pairs", "machines", "mean true log ratio", "bias", "mean error", "held"]
    return markdown_table([*heads, "half-width"], lines)


if __name__ == "__main__":
    main()
