"""The step model on unseen sources: each is held out of everything that was derived from rows.

    python benchmarks/generalise.py DATA_DIR [--draws 5] [--jobs 1] [--only TEXT]

A source is all tables of one repository or publication (``SOURCES``).  For each in turn, operator
rates come only from the tables of the others, and steps of its machines are predicted from no row
and from three random ones.  Baselines are a constant rate and ten terms.  The last lines are means
over sources with equal weights.  Not held out: widths and allowances that are numbers in the
package and were once chosen with some of these sources in view.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from forerun.benchmarks.baselines.steps import ConstantRate, TenTerms
from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.protocols.scores import score_folds, step_folds
from forerun.benchmarks.protocols.steps import StepModel
from forerun.benchmarks.protocols.table_steps import TableSteps
from forerun.benchmarks.published.readers import steps_of
from forerun.benchmarks.scoring.step_comparisons import Comparison, compare
from forerun.benchmarks.scoring.step_coverage import row_coverage

KNOWN = (0, 3)
"""Numbers of a machine's rows used for calibration."""
BASELINES = (ConstantRate.name, TenTerms.name)
Frames = list[pd.DataFrame]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The tables of one repository or publication."""

    name: str
    steps: tuple[str, ...]
    """Tables of step times."""
    rates: tuple[str, ...] = ()
    """Operator tables that the shipped priors are made from."""


SOURCES = (
    Source(name="VIA-Research/vTrain", steps=("e2e_vtrain_single_node", "e2e_vtrain_multi_node")),
    Source(name="bigscience-workshop", steps=("e2e_bigscience_v100",)),
    Source(name="mosaicml/llm-foundry", steps=("e2e_llmfoundry_mpt_fsdp",)),
    Source(name="NVIDIA-NeMo/Megatron-Bridge", steps=("e2e_megatron_bridge", "e2e_bridge_cards")),
    Source(name="NVIDIA/dgxc-benchmarking", steps=("e2e_dgxc_scaling",)),
    Source(name="mlcommons", steps=("e2e_mlperf_llm_systems",)),
    Source(
        name="eth-easl/sailor",
        steps=("e2e_sailor",),
        rates=("ops_sailor_layer_profiles", "ops_aceso_fwd_bwd"),
    ),
    Source(
        name="MooreThreads/SimuMax",
        steps=("e2e_simumax_b200_8gpu",),
        rates=("ops_simumax_gemm_attention",),
    ),
    Source(name="huggingface/nanotron", steps=("e2e_nanotron_llama1b",)),
    Source(name="NVIDIA/Megatron-LM, CI", steps=("e2e_mcore_ci_golden",)),
    Source(name="papers and small tables", steps=("e2e_small_tables",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One source, calibrated on a number of rows, by all models."""

    data: Path
    place: int
    """Index of the source."""
    num_known: int
    draws: int

    @property
    def source(self) -> Source:
        """The source at ``place``."""
        return SOURCES[self.place]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Predictions of all models for one source and number of known rows."""

    source: str
    num_known: int
    frames: Mapping[str, Frames]
    """Scored rows of each fold, by model, in equal order of folds."""

    @property
    def ours(self) -> Frames:
        """Rows scored by the package's model."""
        return self.frames[TableSteps.name]

    @property
    def num_rows(self) -> int:
        """Number of distinct scored rows."""
        return len({row.row_id + row.machine for one in self.ours for row in one["row"]})

    def mape_frac(self, model: str) -> float | None:
        """Return the mean absolute error over rows of all draws; None without predictions."""
        if model not in self.frames:
            return None
        errors = np.concatenate([[], *(one["error_frac"].abs() for one in self.frames[model])])
        return float(np.nanmean(errors)) if np.isfinite(errors).any() else None

    @property
    def coverage_frac(self) -> float | None:
        """Share of rows whose 90 % interval held, each row counted once."""
        coverage = row_coverage(self.ours)
        return float(np.mean([*coverage.values()])) if coverage else None

    @property
    def half_width_frac(self) -> float:
        """Mean over rows of half the interval over the prediction."""
        rows = pd.concat(self.ours)
        return float(((rows["high_s"] - rows["low_s"]) / 2 / rows["predicted_s"]).mean())


def main() -> int:
    """Score the requested sources and print the table."""
    arguments = _arguments()
    tasks = [
        Task(data=arguments.data, place=place, num_known=known, draws=arguments.draws)
        for place, source in enumerate(SOURCES)
        if arguments.only.lower() in source.name.lower()
        for known in KNOWN
    ]
    lines = [line for line in scored(tasks, arguments.jobs) if line.num_rows]
    print(table(lines))
    return 0 if lines else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, metavar="DATA_DIR", help="public tables, CSV")
    parser.add_argument("--draws", type=int, default=5, help="random calibrations (5)")
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each (1)")
    parser.add_argument("--only", default="", metavar="TEXT", help="sources with this text")
    return parser.parse_args()


def scored(tasks: Sequence[Task], num_jobs: int) -> Iterator[Line]:
    """Yield the line of each task, in order."""
    if num_jobs == 1:
        yield from map(_run, tasks)
        return
    with ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_run, tasks)


def _run(task: Task) -> Line:
    frames: dict[str, Frames] = {name: [] for name in (TableSteps.name, *BASELINES)}
    with threadpool_limits(1):
        for table_name in task.source.steps:
            rows = steps_of(task.data, table_name).usable
            folds = list(step_folds(rows, task.num_known, task.draws))
            for model in _models(task.source):
                frames[model.name] += score_folds(rows, folds, model.fit)
    print(f"{task.source.name}, {task.num_known} rows", file=sys.stderr, flush=True)
    return Line(source=task.source.name, num_known=task.num_known, frames=frames)


def _models(source: Source) -> tuple[StepModel, ...]:
    return TableSteps(without=source.rates), ConstantRate(), TenTerms()


HEAD = (
    *("source", "known", "rows", "ours", "held, half-width", *BASELINES),
    "ours less the best of these",
)


def table(lines: Sequence[Line]) -> str:
    """Return a Markdown line for each source and number of known rows, then means over sources."""
    rows = [_cells(line) for line in lines]
    for known in KNOWN:
        these = [line for line in lines if line.num_known == known]
        means = [_mean(these, name) for name in (TableSteps.name, *BASELINES)]
        ours, *others = map(_percent, means)
        rows.append(["**mean over sources**", known, "", ours, "", *others, ""])
    return markdown_table(HEAD, rows)


def _mean(lines: Sequence[Line], model: str) -> float | None:
    """Return the mean over the sources that the model predicts, with equal weights."""
    errors = [error for line in lines if (error := line.mape_frac(model)) is not None]
    return float(np.mean(errors)) if errors else None


def _cells(line: Line) -> list[object]:
    others = {name: line.mape_frac(name) for name in BASELINES}
    return [
        line.source,
        line.num_known,
        line.num_rows,
        _percent(line.mape_frac(TableSteps.name)),
        f"{_percent(line.coverage_frac)}, {_percent(line.half_width_frac)}",
        *map(_percent, others.values()),
        _difference(line, {name: error for name, error in others.items() if error is not None}),
    ]


def _difference(line: Line, others: Mapping[str, float]) -> str:
    """Return the paired difference of the mean errors and its 90 % interval."""
    best = min(others, key=lambda name: others[name], default=None)
    comparison: Comparison | None = compare(line.ours, line.frames[best]) if best else None
    if best is None or comparison is None:
        return "-"
    ends = f"{100 * comparison.low_frac:+.1f} to {100 * comparison.high_frac:+.1f}"
    return f"{100 * comparison.difference_frac:+.1f} ({ends})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
