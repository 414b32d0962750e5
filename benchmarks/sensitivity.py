"""What the chosen constants of the models do: errors with each halved and doubled, as Markdown.

    python benchmarks/sensitivity.py DATA_DIR [--only TEXT]

DATA_DIR holds the public tables.  A constant is changed where it is defined; one that a class took
as its default keeps it.  Percent: mean absolute error, and in brackets the share of rows within the
90 % interval.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pandas as pd
from threadpoolctl import threadpool_limits

from forerun.benchmarks.published.readers import read_published
from forerun.calib.validation.collectives import validate_collectives
from forerun.calib.validation.operators import validate_operators
from forerun.calib.validation.scores import score_rows

OPERATORS = ("ops_simumax_gemm_attention", ("few_8", "few_24", "leave_gpu"))
COLLECTIVES = ("coll_aceso", ("few_8", "leave_span"))
FIT = (
    ("regressors.gaussian", "CONSTANT"),
    ("regressors.trees", "_NUM_TREES"),
    ("regressors.gaussian", "_NUM_REWEIGHTS"),
    ("regressors.intervals", "_LEAST_QUANTILE"),
    ("fit.machine", "_FREE_SIGMA_LOG"),
    ("fit.outliers", "_COPY_EXCESS"),
    ("fit.outliers", "_LEAST_LEFT"),
    ("fit.pools", "_FEWEST_FOR_FOREST"),
    ("fit.pools", "_LEAST_FREEDOM"),
    ("regressors.robust", "_WILD_DEVIATIONS"),
    ("regressors.robust", "_LEAST_SIGMA"),
    ("fit.rates", "_SAMPLE_SIGMA_LOG"),
    ("fit.roofline", "_SAMPLE_SIGMA_LOG"),
    ("fit.rate_priors", "_USUAL_PAIRS"),
    ("fit.rate_priors", "_OTHER_VENDOR_YEARS"),
    ("fit.rate_priors", "_OTHER_ELEMENT_YEARS"),
)
NETWORK = (
    ("network.collective_times", "_MACHINE_SIGMA_LOG"),
    ("network.collective_times", "_GROUP_SIGMA_LOG"),
    ("network.collective_times", "_LEAST_OCTAVES"),
    ("network.curves", "_SAMPLE_SIGMA_LOG"),
    ("network.curves", "_LEAST_HALVED"),
    ("network.extrapolation", "_TREE_BASE_S"),
    ("network.extrapolation", "_LEAST_GROWTH_LOG"),
    ("network.groups", "_OTHER_OCTAVES"),
    ("network.transfer_widths", "_PRIOR_PAYLOADS"),
    ("network.transfer_widths", "_PRIOR_RESIDUALS"),
    ("network.transfer_widths", "_PRIOR_PAIRS"),
    ("network.transfer_widths", "_BEYOND_LATENCY"),
    ("network.transfer_widths", "_PRIOR_HALVES"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors with each constant halved and doubled.")
    parser.add_argument("data", type=Path, metavar="DATA_DIR", help="public tables, CSV")
    parser.add_argument("--only", default="", metavar="TEXT", help="constants with this text")
    arguments = parser.parse_args()
    with threadpool_limits(1):
        for constants, (name, protocols) in ((FIT, OPERATORS), (NETWORK, COLLECTIVES)):
            asked = [one for one in constants if arguments.only in ".".join(one)]
            if not asked:
                continue
            raw = pd.read_csv(arguments.data / f"{name}.csv.gz", low_memory=False)
            frame = read_published(raw, name)
            print(f"\n{name}\n\n| constant | factor | {' | '.join(protocols)} |")
            print("| --- | ---: |" + " ---: |" * len(protocols))
            print(_line("as it is", 1.0, frame, protocols), flush=True)
            for module, constant in asked:
                for factor in (0.5, 2.0):
                    with changed(module, constant, factor):
                        label = f"{module}.{constant}"
                        print(_line(label, factor, frame, protocols), flush=True)


@contextmanager
def changed(module: str, constant: str, factor: float) -> Iterator[None]:
    """The constant times ``factor``; each value of a mapping; whole numbers stay whole."""
    home = import_module(f"forerun.calib.{module}")
    old = getattr(home, constant)
    if isinstance(old, dict):
        new: object = {key: value * factor for key, value in old.items()}
    else:
        new = type(old)(old * factor)
    setattr(home, constant, new)
    try:
        yield
    finally:
        setattr(home, constant, old)


def _line(label: str, factor: float, frame: pd.DataFrame, protocols: tuple[str, ...]) -> str:
    run = validate_operators if "kind" in frame.columns else validate_collectives
    found = pd.DataFrame(score_rows(run(frame, seeds=range(1), protocols=protocols), "table"))
    cells = {
        row.protocol: f"{100 * row.mape_frac:.2f} ({100 * row.coverage_90_frac:.0f})"
        for row in found[found["group"] == "all"].itertuples()
    }
    return f"| {label} | {factor:g} | {' | '.join(cells.get(p, '') for p in protocols)} |"


if __name__ == "__main__":
    main()
