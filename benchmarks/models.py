"""Accuracy of the models of operators and collectives on public tables, as Markdown.

    python benchmarks/models.py TABLE... [--seeds 5] [--json OUT]

TABLE are tables of operators or of collectives, published or in our format.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from threadpoolctl import threadpool_limits

from forerun.benchmarks.protocols.scores import noise_floors
from forerun.benchmarks.published.readers import read_published
from forerun.benchmarks.scoring.collectives import OURS, collective_figures
from forerun.benchmarks.scoring.operator_text import (
    PRIOR,
    OperatorScores,
    collective_text,
    others_text,
    paper_text,
)
from forerun.benchmarks.scoring.operators import figures, joined
from forerun.calib.fit.machine import fit_machine
from forerun.calib.importers.canonical_tables import table_kind
from forerun.calib.workload.operators import OperatorKind
from forerun.launch.known.table_files import read_frame

LEGEND = """\
Percent throughout; "a / b" is forward / backward.  Errors are mean absolute percentage errors over
the rows of an operator and phase, then the mean over these.  Floor: mean distance of repeats of one
shape from their median, over operators that have repeats.  Rows that the gates refuse train none of
our models and are scored all the same, except where a row says "without".  `chosen_24` trains on 24
shapes spread over the sizes (farthest first, in octaves)."""
OTHERS = """\
All other tables of operators, mean over operators and phases of all devices of a table.  Bar of
`leave_gpu`: 8 %."""
COLLECTIVES = """\
Collectives, error over all sizes / from 16 MiB / above 256 MB, mean over collectives; in `random`,
`few` and `small_to_large` the group's own curve is known, in `leave_span` a quarter of the nodes at
most, or fewer ranks of one node.  In `leave_nodes`, `leave_ranks_per_node`, `one_ranks_per_node`,
`leave_collective` and `pair_to_node` the mean is over groups of ranks and nodes as well.  Bars: 7 %
over all sizes and 1.5 % above 256 MB in `random`; 15 % and, from 16 MiB, 6 % in `leave_span`; 20 %
for ranks per node, 25 % for a collective, 12 % from a pair to eight ranks with a switch."""


def main() -> None:
    """Score each table and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE", help="public table, CSV")
    parser.add_argument("--seeds", type=int, default=5, help="random splits (5)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="all figures of each group")
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    operators: list[OperatorScores] = []
    collectives: list[pd.DataFrame] = []
    with threadpool_limits(1):
        for path in arguments.tables:
            begin = time.process_time()
            name = path.name.split(".")[0]
            table = read_published(read_frame(path), path.name)
            if table_kind(table) == "operators":
                operators.append(_scores(table, name, seeds))
            else:
                collectives.append(collective_figures(table, name, seeds))
            taken_s = time.process_time() - begin
            print(f"{name}: {taken_s:.0f} s of processor time", file=sys.stderr, flush=True)
    print(_text(operators, collectives))
    if arguments.json:
        arguments.json.write_text(_json(operators, collectives), encoding="utf-8")


def _scores(frame: pd.DataFrame, name: str, seeds: Sequence[int]) -> OperatorScores:
    kinds = {kind.value for kind in OperatorKind if kind.is_linear}
    linear = frame[frame["kind"].isin(kinds)]
    tables = [figures(frame, OURS, fit_machine, seeds)]
    if len(linear):
        informed = partial(fit_machine, use_prior=True, without=(name,))
        tables.append(figures(linear, PRIOR, informed, seeds, protocols=["few_8", "few_24"]))
    return OperatorScores(
        table=name,
        figures=joined(tables),
        linears=frozenset(linear["group"]),
        floors=noise_floors(frame)["mean_frac"].to_dict(),
    )


def _text(operators: Sequence[OperatorScores], collectives: Sequence[pd.DataFrame]) -> str:
    parts = [f"{os.cpu_count()} cores, one thread.", *([LEGEND] if operators else [])]
    parts += [paper_text(one) for one in operators if one.is_paper]
    others = [one for one in operators if not one.is_paper and len(one.figures)]
    if others:
        parts += [OTHERS, others_text(others)]
    if collectives:
        parts += [COLLECTIVES, collective_text(joined(collectives))]
    return "\n\n".join(parts)


def _json(operators: Sequence[OperatorScores], collectives: Sequence[pd.DataFrame]) -> str:
    rows = {
        "operators": joined([o.figures.assign(table=o.table) for o in operators]),
        "collectives": joined(collectives),
    }
    tables = {name: json.loads(frame.to_json(orient="records")) for name, frame in rows.items()}
    return json.dumps({"schema": 1, **tables}, indent=1) + "\n"


if __name__ == "__main__":
    main()
