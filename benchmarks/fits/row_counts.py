"""Errors of an operator at another number of rows, from one timed number of rows.

    python benchmarks/fits/row_counts.py DATA_DIR [--pairs 120] [--least-us 50]

In the public tables of GPUs, pairs of shapes that differ in their first size alone (tokens of a
product, samples of attention, rows of a norm) by a factor of two: each is predicted from the other
one, alone, by the models that a run's calibration uses.  The deviations of the errors are
``ROWS_SIGMA_LOG`` of ``calib/fit/calibration.py``.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from forerun.benchmarks.fits.build_priors import read_tables
from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.protocols.operator_samples import Cell, operator_samples
from forerun.calib.fit import family, fit_machine
from forerun.calib.regressors import robust_sigma

FACTORS = (2.0, 0.5, 4.0, 0.25)


def main() -> None:
    """Print a row for each table and kind, then one for each family."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--least-us", type=float, default=50.0)
    args = parser.parse_args()
    errors = defaultdict(list)
    for table, frame in read_tables(args.data_dir).items():
        for samples in operator_samples(frame):
            for cell in samples.cells:
                for factor in FACTORS:
                    for error, z in errors_of(
                        table, samples.device, cell, args.pairs, 1e-6 * args.least_us, factor
                    ):
                        errors[
                            factor, family(samples.kind).value, samples.kind.value, table
                        ].append((error, z))
    rows = []
    for (factor, *names), found in sorted(errors.items()):
        logs, z = np.array(found).T
        rows.append(
            (
                factor,
                *names,
                len(logs),
                f"{np.median(logs):+.3f}",
                f"{robust_sigma(logs):.3f}",
                f"{np.sqrt(np.mean(logs**2)):.3f}",
                f"{np.sqrt(np.mean(z**2)):.2f}",
            )
        )
    print(
        markdown_table(
            ["factor", "family", "kind", "table", "pairs", "median", "robust", "rms", "rms z"], rows
        )
    )


def errors_of(
    table: str, device: str, cell: Cell, most: int, least_s: float, factor: float
) -> Iterator[tuple[float, float]]:
    """Yield log errors and how many stated deviations they are."""
    timed = cell.timed
    sizes = np.column_stack([timed.batch.sizes, timed.batch.element_nbytes])
    index = {tuple(row): place for place, row in enumerate(sizes.tolist())}
    pairs = [
        (place, index[other])
        for row, place in index.items()
        if (other := (factor * row[0], *row[1:])) in index
        and min(timed.time_s[place], timed.time_s[index[other]]) >= least_s
    ]
    for one, other in pairs[:: max(1, len(pairs) // most)][:most]:
        machine = fit_machine(
            {cell.name: timed.take(np.array([one]))},
            device=device,
            use_prior=True,
            without=(table,),
        )
        found = machine.predict(cell.name, timed.take(np.array([other])).batch)
        error = float(found.log_time[0] - np.log(timed.time_s[other]))
        yield error, error / (float(found.high[0] - found.low[0]) / 3.29)


if __name__ == "__main__":
    main()
