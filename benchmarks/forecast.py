"""Forecasts of whole runs from their first steps, against the ends of published series.

    python benchmarks/forecast.py DATA_FOLDER [--runs]

The series are those of MLPerf's training logs (``e2e_mlperf_steps.csv.gz``): the total is forecast
from the first 20 steps, three of them warm-up.  Nothing is tuned on them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from forerun.benchmarks.markdown_text import markdown_table
from forerun.calib.forecast.forecasts import DRIFT_FRAC, forecast

NUM_SEEN = 20
NUM_WARMUP = 3
_KEYS = ("round", "submitter", "system", "benchmark", "result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One forecast compared with the end of its run."""

    run: str
    error_frac: float
    """Predicted over actual total time, minus one."""
    is_inside: bool
    """True if the remaining time was within the 90 % interval."""
    is_within_p95: bool
    half_width_frac: float


def series(path: Path) -> Iterator[tuple[str, list[float]]]:
    """Yield the step times of each published run, in seconds and in order."""
    keys = dict.fromkeys(_KEYS, str)
    rows = pd.read_csv(path, dtype=keys, keep_default_na=False)
    for key, run in rows.groupby(list(_KEYS), sort=False):
        yield f"{key[0]} {key[1]} {key[2]} #{key[4]}", run["train_step_time_s"].tolist()


def published(path: Path) -> Iterator[Row]:
    """Forecast each series' total from its first steps; warm-up counts but is not learned from."""
    for run, times in series(path):
        predicted = forecast(
            now_unix_s=0.0,
            steps_done=NUM_SEEN,
            steps_total=len(times),
            elapsed_s=sum(times[:NUM_SEEN]),
            step_times_s=times[NUM_WARMUP:NUM_SEEN],
            drift_frac=DRIFT_FRAC,
        )
        remaining_s = sum(times[NUM_SEEN:])
        half_s = (predicted.remaining_high_s - predicted.remaining_low_s) / 2
        yield Row(
            run=run,
            error_frac=predicted.total_s / sum(times) - 1.0,
            is_inside=predicted.remaining_low_s <= remaining_s <= predicted.remaining_high_s,
            is_within_p95=remaining_s <= predicted.remaining_high_s,
            half_width_frac=half_s / remaining_s,
        )


def summary(rows: Sequence[Row]) -> str:
    """Return errors and coverage of many forecasts in one line."""
    errors = sorted(abs(row.error_frac) for row in rows)
    coverage = statistics.mean(row.is_inside for row in rows)
    below = statistics.mean(row.is_within_p95 for row in rows)
    return (
        f"{len(rows)} forecasts: median error {statistics.median(errors) * 100:.2f} %, largest "
        f"{errors[-1] * 100:.1f} %; 90 % interval held {coverage * 100:.0f} %, P95 not exceeded "
        f"{below * 100:.0f} %"
    )


def main() -> None:
    """Print the summary, and each run if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="folder of e2e_mlperf_steps.csv.gz")
    parser.add_argument("--runs", action="store_true", help="every run as well")
    args = parser.parse_args()
    rows = [*published(args.data / "e2e_mlperf_steps.csv.gz")]
    if args.runs:
        cells = [
            (row.run, f"{row.error_frac:+.2%}", f"{row.half_width_frac:.1%}", row.is_inside)
            for row in rows
        ]
        print(markdown_table(("run", "error", "half-width", "held"), cells), end="\n\n")
    print(summary(rows))


if __name__ == "__main__":
    main()
