"""Predicted against measured peak memory.

    python benchmarks/memory.py DATA_FOLDER

Every table that publishes peaks, each compared with the quantity that its source measures:
allocated bytes (SimuMax, Megatron-Bridge's cards), bytes reserved by the allocator (torchtitan), or
bytes in use on the device (Sailor).  Nothing is fitted, except that the last figure of a table
takes an offset from the first row, as a calibrated run does.  Then every published peak,
out-of-memory run and successful run is compared with the predicted probability that its layout
fits.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forerun.benchmarks.markdown_text import markdown_head, markdown_row
from forerun.benchmarks.published.memory_rows import MemoryRow, by_table, memory_rows
from forerun.calib.memory.peak import Verdict, fit_probability, memory, verdict
from forerun.calib.units import GIB
from forerun.calib.workload.parallelism import Sharding

HEADER = ["layout", "predicted GiB", "measured GiB", "error %"]
FIT_HEADER = [
    *("table", "rows", "ran", "ran out", "called fitting", "of these ran out", "ran out, refused"),
    *("refused though it ran", "mean probability of what ran", "error of peaks %"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Score peak memory against measured peaks.")
    parser.add_argument("data", type=Path)
    arguments = parser.parse_args()
    rows, skip_counts = memory_rows(arguments.data)
    for table, table_rows in by_table([row for row in rows if row.peak_nbytes]):
        score_peaks(table, table_rows)
    score_fits(rows, skip_counts)


def score_peaks(table: str, rows: Sequence[MemoryRow]) -> None:
    """Print one row for each measured peak of a table, and the mean and worst error."""
    print(f"\n{table}: {rows[0].peak.value}\n\n{markdown_head(HEADER)}")
    predicted_nbytes = np.array([getattr(memory(row.config), row.peak.value) for row in rows])
    measured = np.array([row.peak_nbytes for row in rows], dtype=float)
    for row, predicted, peak in zip(rows, predicted_nbytes, measured, strict=True):
        par = row.config.parallelism
        name = f"{row.name} TP{par.tp} PP{par.pp} CP{par.cp} EP{par.ep} DP{par.dp} "
        name += f"mbs{row.config.batch.micro_batch_size} m{row.config.num_microbatches}"
        error = f"{100 * (predicted / peak - 1):+.2f}"
        print(markdown_row([name, f"{predicted / GIB:.2f}", f"{peak / GIB:.2f}", error]))
    print_errors("no row", predicted_nbytes / measured - 1)
    offset = measured[0] - predicted_nbytes[0]
    print_errors("offset of the first row", (predicted_nbytes + offset)[1:] / measured[1:] - 1)


def score_fits(rows: Sequence[MemoryRow], skip_counts: Mapping[str, int]) -> None:
    """Print predictions of fit against outcomes, by table and sharding, and reasons for skips.

    Bars: of layouts predicted to fit at 90 %, at most 2 % ran out of memory; of layouts that ran,
    at most 5 % were refused.
    """
    print(f"\nwhat fits\n\n{markdown_head(FIT_HEADER)}")
    parts = [*by_table(rows), ("all", rows)]
    for sharding in Sharding:
        alike = [row for row in rows if row.config.parallelism.sharded is sharding]
        parts.append((f"of these sharded: {sharding.value}", alike))
    for table, table_rows in parts:
        if table_rows:
            print(markdown_row([table, *_fit_cells(table_rows)]))
    print("\nleft out:")
    for reason, number in skip_counts.items():
        print(f"- {number} {reason}")


def _fit_cells(rows: Sequence[MemoryRow]) -> list[str]:
    estimates = [memory(row.config) for row in rows]
    capacities = [int(row.capacity_nbytes) for row in rows]
    verdicts = [verdict(*pair) for pair in zip(estimates, capacities, strict=True)]
    chance = np.array(
        [fit_probability(*pair) for pair in zip(estimates, capacities, strict=True)], dtype=float
    )
    ran = np.array([row.ran for row in rows])
    is_fit = np.array([one is Verdict.FITS for one in verdicts])
    is_refused = np.array([one is Verdict.DOES_NOT_FIT for one in verdicts])
    errors = [
        row.error_frac(one) for one, row in zip(estimates, rows, strict=True) if row.peak_nbytes
    ]
    out = [len(rows), ran.sum(), (~ran).sum(), is_fit.sum()]
    out += [(is_fit & ~ran).sum(), (is_refused & ~ran).sum()]
    num_refused, num_ran = (is_refused & ran).sum(), max(ran.sum(), 1)
    refused = f"{num_refused} ({num_refused / num_ran:.1%})"
    peaks = f"{100 * np.mean(np.abs(errors)):.1f} of {len(errors)}" if errors else "-"
    mean = f"{chance[ran].mean():.2f}" if ran.any() else "-"
    return [*map(str, out), refused, mean, peaks]


def print_errors(name: str, errors: NDArray[np.float64]) -> None:
    """Print one line of errors."""
    absolute = 100 * np.abs(errors)
    print(
        f"\n{name}: {len(errors)} rows, mean error {absolute.mean():.2f} %, worst "
        f"{absolute.max():.2f} %, signed {100 * np.mean(errors):+.2f} %"
    )


if __name__ == "__main__":
    main()
