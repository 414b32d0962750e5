"""Growth of operator times with the micro-batch, predicted from one size and measured.

    python benchmarks/larger_batches.py --out DIR [--only-table]

The recipe is calibrated with micro-batches of 2, 4 and 8, in turns of a few steps
(``runs/interleaved.py``), so that all run within the same minutes.  Operators of 4 and 8 are
predicted from the calibration of 2; growth is the time of an operator over its time at 2.  The
optimizer, whose work does not grow, is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from forerun.benchmarks.gains import ENDLESS, Loop
from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.runs.interleaved import interleaved_step_times
from forerun.calib.fit import calibrate, measured_operators
from forerun.calib.samples import SampleTable
from forerun.calib.workload import OperatorKind
from forerun.launch.known import load

SIZES = (2, 4, 8)
STEPS, TURNS = 40, 24


def main() -> int:
    """Make the missing runs, then print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only-table", action="store_true")
    args = parser.parse_args()
    if not args.only_table:
        _calibrate(args.out)
    tables = {size: load(args.out / f"mb{size}", None).table for size in SIZES}
    print(table(pd.DataFrame(growths(tables))))
    return 0


def _calibrate(out: Path) -> None:
    loop = Loop.of("recipe", None)
    flags = ("--calibrate", "--calibrate-wandb=off", f"--calibrate-steps={STEPS}")
    commands = {
        f"mb{size}": loop.command(
            ENDLESS, "--micro-batch-size", str(size), *flags, f"--calibrate-dir={out / f'mb{size}'}"
        )
        for size in SIZES
    }
    interleaved_step_times(commands, logs=out / "logs", num_turns=TURNS)


def growths(tables: dict[int, SampleTable]) -> Iterator[dict[str, object]]:
    """Yield each operator's predicted and measured growth, and seconds per step of the smallest."""
    first = SIZES[0]
    measured = {size: measured_operators(tables[size]) for size in SIZES}
    calibration = calibrate(tables[first], device="cpu")
    rows = tables[first].operators
    counts = rows.groupby(["kind", "phase"])["count"].mean()
    for operator, one in measured[first].items():
        if operator.kind is OperatorKind.OPTIMIZER:
            continue
        row: dict[str, object] = {"operator": f"{operator.kind.value} {operator.phase.value}"}
        row["weight_s"] = one.time_s * counts[operator.kind.value, operator.phase.value]
        for size in SIZES[1:]:
            factor = size // first
            larger = replace(operator, shape=(operator.shape[0] * factor, *operator.shape[1:]))
            predicted_s = float(calibration.operators([larger]).time_s[0])
            row[f"predicted {size}"] = predicted_s / one.time_s
            row[f"measured {size}"] = measured[size][larger].time_s / one.time_s
        yield row


def table(rows: pd.DataFrame) -> str:
    """Return Markdown: a line for each operator, and all of them by time per sample."""
    names = [name for name in rows.columns if name.startswith(("predicted", "measured"))]
    lines = [
        [row["operator"], *(f"{row[name]:.2f}" for name in names)] for _, row in rows.iterrows()
    ]
    sums = []
    for name in names:
        per_sample = rows[name] * SIZES[0] / int(name.split()[1])
        sums.append(f"{np.average(per_sample, weights=rows['weight_s']):.3f}")
    return markdown_table(["operator", *names], [*lines, ["all, per sample", *sums]])


if __name__ == "__main__":
    sys.exit(main())
