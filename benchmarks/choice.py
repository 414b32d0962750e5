"""Which layout would be chosen, and how much longer it takes than the best one that was measured.

    python benchmarks/choice.py DATA_DIR [--draws 20] [--only TEXT] [--worst 10] [--json OUT]

On every published set with several measured layouts of one job (model, batch, GPUs, machine and
what else no layout changes), by the model that answers ``forerun predict``, knowing operators and
none, one (each in turn) or three of the job's layouts; known ones are measured, as in a plan.
Beside it the rules of ``baselines/layout_rules.py``, a constant rate, the best known layout, and
any layout.
Chosen over best: median, 95th percentile and maximum; each job has equal weight.  ``apart`` is the
95th percentile where a choice counts as the best that lies no farther from it than runs of one
layout lie from each other.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from forerun.benchmarks.baselines.layout_rules import RULES, Rule
from forerun.benchmarks.baselines.steps import ConstantRate
from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.published.readers import model_over, steps_of
from forerun.benchmarks.scoring.layout_choices import (
    Choice,
    Job,
    Scores,
    at_random,
    best_known,
    by_model,
    choice_figures,
    choices,
    jobs,
    known_places,
)
from forerun.calib.errors import ForerunError
from forerun.calib.validation.step_scores import layout_text

OPERATORS: Mapping[str, tuple[str, ...]] = {
    "e2e_simumax_b200_8gpu": ("ops_simumax_gemm_attention",),
    "e2e_sailor": ("ops_sailor_layer_profiles",),
}
"""Operators that were measured on the machine of a set of steps; elsewhere the priors stand in."""
NUMBERS_KNOWN = (0, 1, 3)
OURS = "ours"
MEDIAN_BAR, P95_BAR = 1.005, 1.06
"""Median 1.00 as it is printed."""
Found = dict[tuple[int, str], list[Choice]]


def main() -> None:
    """Print the tables."""
    arguments = _arguments()
    found: dict[str, Found] = {}
    with threadpool_limits(1):
        for table in _tables(arguments.data, arguments.only):
            here = jobs(steps_of(arguments.data, table).rows)
            if here:
                begin = time.process_time()
                found[table] = _chosen(here, _choosers(arguments.data, table), arguments.draws)
                seconds = time.process_time() - begin
                print(f"{table}: {len(here)} jobs, {seconds:.0f} s", file=sys.stderr, flush=True)
    parts = {**found, **_pools(found)}
    figures = [line for title, part in parts.items() for line in _lines(title, part)]
    print(_text(figures))
    worst = _worst(found, arguments.worst)
    print(_worst_text(worst))
    if arguments.json:
        told = {"schema": 1, "draws": arguments.draws, "results": figures, "worst": worst}
        arguments.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, metavar="DATA_DIR", help="public tables, CSV")
    parser.add_argument("--draws", type=int, default=20, help="sets of three known layouts (20)")
    parser.add_argument("--only", metavar="TEXT", help="sets whose name holds this text")
    parser.add_argument("--worst", type=int, default=10, help="jobs to name (10)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="all figures")
    return parser.parse_args()


def _tables(data: Path, only: str | None) -> Iterator[str]:
    """Names of the sets of steps that can be read."""
    for path in sorted(data.glob("e2e_*.csv*")):
        name = path.name.partition(".")[0]
        if only and only not in name:
            continue
        try:
            steps_of(data, name)
        except ForerunError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        yield name


def _choosers(data: Path, table: str) -> Mapping[str, Scores]:
    return {
        OURS: by_model(model_over(data, OPERATORS.get(table, ()))),
        **{name: _by_rule(rule) for name, rule in RULES.items()},
        "constant rate": by_model(ConstantRate()),
        "best known": best_known,
        "any": at_random,
    }


def _by_rule(rule: Rule) -> Scores:
    return lambda rows, known: rule([row.config for row in rows])


def _chosen(here: Sequence[Job], choosers: Mapping[str, Scores], num_draws: int) -> Found:
    found: Found = {}
    for number in NUMBERS_KNOWN:
        for job in here:
            known = list(known_places(job, number, num_draws))
            for name, scores in choosers.items():
                if known and (number or scores is not best_known):
                    found.setdefault((number, name), []).extend(choices(job, known, scores))
    return found


def _pools(found: Mapping[str, Found]) -> dict[str, Found]:
    """All jobs together, without and with those whose steps a simulator wrote."""
    pools: dict[str, Found] = {"all sets but the synthetic one": {}, "all sets": {}}
    for part in found.values():
        for key, made in part.items():
            measured = [one for one in made if not one.job.is_synthetic]
            for title, kept in zip(pools, (measured, made), strict=True):
                if kept:
                    pools[title].setdefault(key, []).extend(kept)
    return pools


def _lines(title: str, part: Found) -> Iterator[dict[str, Any]]:
    for (number, name), made in part.items():
        yield {"set": title, "known": number, "chooser": name, **choice_figures(made)}


def _text(lines: Sequence[Mapping[str, Any]]) -> str:
    """A row for each set and number of known layouts, a column for each chooser."""
    names = list(dict.fromkeys(line["chooser"] for line in lines))
    cells = {(line["set"], line["known"], line["chooser"]): line for line in lines}
    rows = []
    for title, number in dict.fromkeys((line["set"], line["known"]) for line in lines):
        ours = cells[title, number, OURS]
        is_met = ours["median"] <= MEDIAN_BAR and ours["p95"] <= P95_BAR
        rows.append(
            [
                *(title, number, ours["jobs"], ours["choices"]),
                *(_cell(cells.get((title, number, name))) for name in names),
                f"{ours['apart_p95']:.2f}",
                "yes" if is_met else "no",
            ]
        )
    head = ["set", "known", "jobs", "choices", *names, "ours, apart", "met"]
    told = "Chosen over best: median / p95 / max, share of choices that are the best.\n\n"
    return told + markdown_table(head, rows)


def _cell(line: Mapping[str, Any] | None) -> str:
    if line is None:
        return "-"
    figures = " / ".join(f"{line[name]:.2f}" for name in ("median", "p95", "max"))
    return f"{figures}, {100 * line['best_frac']:.0f} %"


def _worst(found: Mapping[str, Found], number: int) -> list[dict[str, Any]]:
    """Our dearest choices with no known layout, for each a line of what was chosen and best."""
    made = [one for part in found.values() for one in part.get((0, OURS), [])]
    made.sort(key=lambda one: -one.time_ratio)
    return [_told(one) for one in made[:number] if one.time_ratio > 1]


def _told(choice: Choice) -> dict[str, Any]:
    rows = choice.job.rows
    best, chosen = rows[int(choice.job.times_s.argmin())], rows[choice.chosen]
    return {
        "set": choice.job.table,
        "job": choice.job.name,
        "layouts": len(rows),
        "ratio": round(choice.time_ratio, 4),
        "scatter": round(choice.job.sigma_log, 4),
        "apart": round(choice.apart_ratio, 4),
        "chosen": f"{layout_text(chosen)} {chosen.config.recompute.value}",
        "best": f"{layout_text(best)} {best.config.recompute.value}",
        "rows": [chosen.row_id, best.row_id],
    }


def _worst_text(worst: Sequence[Mapping[str, Any]]) -> str:
    head = ["set", "job", "layouts", "ratio", "scatter", "apart", "chosen", "best"]
    return "\n" + markdown_table(head, [[one[name] for name in head] for one in worst])


if __name__ == "__main__":
    main()
