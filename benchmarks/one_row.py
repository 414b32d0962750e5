"""One known step: for every ordered pair of layouts of one machine, one calibrates, one is scored.

    python benchmarks/one_row.py DATA_DIR [--only TEXT] [--most-folds 60] [--json OUT]

This is the state of a run after its first window, on published rows and through the model behind
``forerun predict``.  Folds are the known rows; for a large set only the first ``--most-folds`` are
run.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.protocols.scores import (
    Fold,
    concat_scored,
    machines,
    score_folds,
    step_results,
)
from forerun.benchmarks.published.readers import model_over, steps_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRowSet:
    """A published set and the score of the validated model of 2026-11-21 on it."""

    title: str
    table: str
    before_frac: float
    before_coverage_frac: float
    operators: tuple[str, ...] = ()
    """Tables that the model is built on."""


SETS = (
    OneRowSet(
        title="SimuMax",
        table="e2e_simumax_b200_8gpu",
        before_frac=0.072,
        before_coverage_frac=0.96,
        operators=("ops_simumax_gemm_attention",),
    ),
    OneRowSet(
        title="vTrain multi node",
        table="e2e_vtrain_multi_node",
        before_frac=0.104,
        before_coverage_frac=0.79,
    ),
    OneRowSet(
        title="tables of papers",
        table="e2e_small_tables",
        before_frac=0.133,
        before_coverage_frac=0.46,
    ),
    OneRowSet(
        title="Sailor",
        table="e2e_sailor",
        before_frac=0.068,
        before_coverage_frac=0.87,
        operators=("ops_sailor_layer_profiles",),
    ),
    OneRowSet(
        title="Megatron-Bridge",
        table="e2e_megatron_bridge",
        before_frac=0.174,
        before_coverage_frac=0.83,
    ),
)


def main() -> None:
    """Print a row for each set."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, metavar="DATA_DIR", help="public tables, CSV")
    parser.add_argument("--only", metavar="TEXT", help="sets whose title holds this text")
    parser.add_argument("--most-folds", type=int, default=60, help="known rows of a set (60)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="all figures")
    arguments = parser.parse_args()
    results = []
    with threadpool_limits(1):
        for one in SETS:
            if not arguments.only or arguments.only.lower() in one.title.lower():
                results.append(_scored(one, arguments))
                print(f"{one.title}: {results[-1]['n']} pairs", flush=True)
    print(_table(results))
    if arguments.json:
        output = {"schema": 1, "results": results}
        arguments.json.write_text(json.dumps(output, indent=1) + "\n", encoding="utf-8")


def _scored(one: OneRowSet, arguments: argparse.Namespace) -> dict[str, Any]:
    rows = steps_of(arguments.data, one.table).rows
    folds = [
        Fold("one_row", machine, 0, places, [known])
        for machine, places in machines(rows).items()
        for known in places
        if len(places) > 1
    ]
    model = model_over(arguments.data, one.operators)
    scored = concat_scored(score_folds(rows, islice(folds, arguments.most_folds), model.fit))
    whole = step_results(scored, one.table)[0]
    return {
        "title": one.title,
        "n": whole["n"],
        "mape_frac": whole["mape_frac"],
        "median_ape_frac": float(np.median(np.abs(scored["error_frac"]))),
        "coverage_frac": next(v for name, v in whole.items() if "coverage" in name),
        "half_width_frac": next(v for name, v in whole.items() if "width" in name),
        "before_frac": one.before_frac,
        "before_coverage_frac": one.before_coverage_frac,
    }


def _table(results: list[dict[str, Any]]) -> str:
    names = ("mape_frac", "median_ape_frac", "coverage_frac", "half_width_frac")
    rows = [
        [
            one["title"],
            str(one["n"]),
            *(f"{100 * one[name]:.1f}" for name in names),
            f"{100 * one['before_frac']:.1f}",
            f"{100 * one['before_coverage_frac']:.0f}",
        ]
        for one in results
    ]
    head = ["set", "pairs", "error", "median", "covers", "half-width", "before", "covered"]
    return markdown_table(head, rows)


if __name__ == "__main__":
    main()
