"""First answers from zero, one, two and four samples of each operator, with and without the prior.

    python benchmarks/fits/cold_start.py ops_ett_fwd_bwd.csv.gz [--seeds 5]

The prior leaves out the scored table and its sister table of optimizers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from forerun.benchmarks.markdown_text import markdown_head
from forerun.benchmarks.protocols.operator_samples import OperatorSamples, operator_samples
from forerun.benchmarks.published.readers import read_published
from forerun.calib.fit import MachineModel, Timed, fit_machine
from forerun.calib.importers import table_kind
from forerun.calib.workload import Phase
from forerun.launch.known import read_frame

MOST_SCORED = 300
HEADER = ("samples", "prior", "all operators, MAPE", "coverage", "half-width", "linears, MAPE")
Row = tuple[Phase, bool, float, float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    name = arguments.file.name.split(".")[0]
    table = read_published(read_frame(arguments.file), arguments.file.name)
    if table_kind(table) != "operators":
        raise SystemExit(f"{arguments.file} holds no operators")
    without = (name, name.replace("fwd_bwd", "optimizer"))
    samples = operator_samples(table)
    print(markdown_head(HEADER))
    for number in (0, 1, 2, 4):
        for use_prior in (False, True) if number else (True,):
            rows: list[Row] = []
            for seed in range(arguments.seeds):
                rows += score(samples, number, seed, without if use_prior else None)
            print(f"| {number} | {'with' if use_prior else 'without'} | {text(rows)} |", flush=True)


def score(
    samples: list[OperatorSamples], number: int, seed: int, without: tuple[str, ...] | None
) -> list[Row]:
    """Return error, coverage and half-width of each operator and phase."""
    known: dict[str, Timed] = {}
    cases = []
    for one in samples:
        order = np.random.default_rng(seed).permutation(len(one))
        for cell in one.cells:
            if number:
                known[cell.name] = cell.timed.take(np.isin(cell.sample, order[:number]))
            scored = np.isin(cell.sample, order[number : number + MOST_SCORED])
            cases.append((cell.name, cell.timed.take(scored)))
    model = fit_machine(
        known, device=samples[0].device, use_prior=without is not None, without=without or ()
    )
    return [figures(model, name, timed) for name, timed in cases]


def figures(model: MachineModel, name: str, timed: Timed) -> Row:
    """Return the figures of one operator in one phase."""
    prediction = (
        model.predict(name, timed.batch)
        if name in model.pools
        else model.predict_unmeasured(timed.batch)
    )
    logs = np.log(timed.time_s)
    error = np.abs(np.expm1(prediction.log_time - logs)).mean()
    coverage = ((logs >= prediction.low) & (logs <= prediction.high)).mean()
    width = np.sinh((prediction.high - prediction.low) / 2).mean()
    batch = timed.batch
    return batch.phase, batch.kind.is_linear, float(error), float(coverage), float(width)


def text(rows: list[Row]) -> str:
    """Return a table, forward / backward."""

    def mean(column: int, chosen: list[Row]) -> str:
        parts = [[r[column] for r in chosen if r[0] is p] for p in (Phase.FORWARD, Phase.BACKWARD)]
        return " / ".join(f"{100 * float(np.mean([float(v) for v in p])):.1f}" for p in parts)

    linears = [r for r in rows if r[1]]
    return " | ".join([*(mean(i, rows) for i in (2, 3, 4)), mean(2, linears)])


if __name__ == "__main__":
    main()
