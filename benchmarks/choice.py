"""The layout that each model would choose, its regret, and the ranking of all layouts.

    python benchmarks/choice.py DATA_DIR [--draws 20] [--only TEXT] [--worst 10] [--json OUT]

Uses every published set with several measured layouts of one job (model, batch, GPUs, machine and
everything else that no layout changes), with the model behind ``forerun predict`` and operator
rates from other sources only (``generalise.py``).  Known rows are none; one (each in turn) or three
layouts of the job, as if measured for a plan; ten of other jobs on the machine; or up to forty of
one other model size.  Compared with the rules of ``baselines/layout_rules.py``, ten terms, a
constant rate, and staying with the best known layout.

Regret is the time of the chosen layout over that of the best, minus 1; tau is Kendall's, over the
layouts that are not known.  Each job has equal weight.  The last columns compare ours with the
better of the trivial rule and ten terms, paired by job: behind means worse at 95 % confidence.

The second table is for few rows: the choice with one running layout known, and with two more that a
plan names, that are predicted to be the fastest, or that are random.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from forerun.benchmarks.baselines.layout_rules import RULES, Rule
from forerun.benchmarks.baselines.steps import ConstantRate, TenTerms
from forerun.benchmarks.generalise import SOURCES, Source
from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.protocols.scores import layout_text
from forerun.benchmarks.protocols.table_steps import TableSteps
from forerun.benchmarks.published.readers import steps_of
from forerun.benchmarks.scoring.layout_choices import (
    Choice,
    Job,
    Scores,
    against_the_better,
    best_known,
    by_model,
    choice_figures,
    choices,
    jobs,
    known_rows,
    rows_of_one_size,
    rows_of_other_jobs,
)
from forerun.benchmarks.scoring.next_runs import after_next_runs
from forerun.calib.records import StepRow

NUMBERS_KNOWN = (0, 1, 3)
NUM_OF_OTHERS, MOST_OF_SIZE = 10, 40
OTHERS, ONE_SIZE = f"{NUM_OF_OTHERS} of other jobs", "one other size"
OURS, TRIVIAL, TEN = "ours", next(iter(RULES)), TenTerms.name
GroupedChoices = dict[tuple[str, str], list[Choice]]
"""Choices by number or kind of known rows, and by chooser."""


def main() -> None:
    """Print the tables."""
    arguments = _arguments()
    choices_by_table: dict[str, GroupedChoices] = {}
    followed: dict[str, GroupedChoices] = {}
    with threadpool_limits(1):
        for source, table in _tables(arguments.only):
            here = jobs(steps_of(arguments.data, table).rows)
            if here:
                begin = time.process_time()
                model = TableSteps(without=source.rates)
                choices_by_table[table] = _chosen(here, _choosers(model), arguments.draws)
                followed[table] = _followed(here, model, arguments.draws)
                seconds = time.process_time() - begin
                print(f"{table}: {len(here)} jobs, {seconds:.0f} s", file=sys.stderr, flush=True)
    figures = [_line(*of, made) for of, made in _all(choices_by_table)]
    rivals = [_against(title, part, (TRIVIAL, TEN)) for title, part in _parts(choices_by_table)]
    compared = [one for some in rivals for one in some]
    after = [_line(*of, made) for of, made in _all(followed)]
    print(_text(figures, compared))
    print(_next_text(after))
    worst = _worst(choices_by_table, arguments.worst)
    print(_worst_text(worst))
    if arguments.json:
        output = {"schema": 2, "draws": arguments.draws, "results": figures, "next": after}
        output |= {"against": compared, "worst": worst}
        arguments.json.write_text(json.dumps(output, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, metavar="DATA_DIR", help="public tables, CSV")
    parser.add_argument("--draws", type=int, default=20, help="drawn sets of known layouts (20)")
    parser.add_argument("--only", default="", metavar="TEXT", help="sets whose name holds this")
    parser.add_argument("--worst", type=int, default=10, help="jobs to name (10)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="all figures")
    return parser.parse_args()


def _tables(only: str) -> Iterator[tuple[Source, str]]:
    for source in SOURCES:
        yield from ((source, table) for table in source.steps if only in table)


def _choosers(model: TableSteps) -> Mapping[str, Scores]:
    return {
        OURS: by_model(model),
        **{name: _by_rule(rule) for name, rule in RULES.items()},
        TEN: by_model(TenTerms()),
        ConstantRate.name: by_model(ConstantRate()),
        "best known": best_known,
    }


def _by_rule(rule: Rule) -> Scores:
    return lambda rows, known: rule([row.config for row in rows])


def _chosen(here: Sequence[Job], choosers: Mapping[str, Scores], num_draws: int) -> GroupedChoices:
    grouped: GroupedChoices = {}
    for job in here:
        for known_label, known in _known(job, here, num_draws).items():
            for name, scores in choosers.items():
                if known and (known_label in ("1", "3") or scores is not best_known):
                    grouped.setdefault((known_label, name), []).extend(choices(job, known, scores))
    return grouped


def _known(
    job: Job, here: Sequence[Job], num_draws: int
) -> Mapping[str, Sequence[Sequence[StepRow]]]:
    return {
        **{str(number): [*known_rows(job, number, num_draws)] for number in NUMBERS_KNOWN},
        OTHERS: [*rows_of_other_jobs(job, here, NUM_OF_OTHERS, num_draws)],
        ONE_SIZE: [*rows_of_one_size(job, here, MOST_OF_SIZE)],
    }


def _followed(here: Sequence[Job], model: TableSteps, most_running: int) -> GroupedChoices:
    grouped: GroupedChoices = {}
    for job in here:
        for name, one in after_next_runs(job, model, most_running):
            grouped.setdefault(("1", name), []).append(one)
    return grouped


def _parts(choices_by_table: Mapping[str, GroupedChoices]) -> Iterator[tuple[str, GroupedChoices]]:
    """Yield each set, then all jobs pooled, without and with the sets written by a simulator."""
    pools: dict[str, GroupedChoices] = {"all but the synthetic set": {}, "all sets": {}}
    for part in choices_by_table.values():
        for key, made in part.items():
            measured = [one for one in made if not one.job.is_synthetic]
            for title, pooled in zip(pools, (measured, made), strict=True):
                if pooled:
                    pools[title].setdefault(key, []).extend(pooled)
    yield from choices_by_table.items()
    yield from pools.items()


def _all(
    choices_by_table: Mapping[str, GroupedChoices],
) -> Iterator[tuple[tuple[str, str, str], list[Choice]]]:
    for title, part in _parts(choices_by_table):
        yield from (((title, *key), made) for key, made in part.items())


def _line(title: str, known: str, name: str, made: Sequence[Choice]) -> dict[str, Any]:
    figures = {of: one if math.isfinite(one) else None for of, one in choice_figures(made).items()}
    return {"set": title, "known": known, "chooser": name, **figures}


def _against(title: str, part: GroupedChoices, rivals: Sequence[str]) -> Iterator[dict[str, Any]]:
    for known, chooser in part:
        if chooser != OURS:
            continue
        others = {name: part[known, name] for name in rivals}
        for field in ("time_ratio", "tau"):
            difference = against_the_better(part[known, OURS], others, field)
            if difference is not None:
                yield {"set": title, "known": known, "field": field, **asdict(difference)}


def _text(figures: Sequence[Mapping[str, Any]], compared: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each set and kind of known rows, with a column for each chooser."""
    names = list(dict.fromkeys(line["chooser"] for line in figures))
    cells = {(line["set"], line["known"], line["chooser"]): line for line in figures}
    against = {(one["set"], one["known"], one["field"]): one for one in compared}
    rows = []
    for title, known in dict.fromkeys((line["set"], line["known"]) for line in figures):
        ours = cells[title, known, OURS]
        regret, tau = (against.get((title, known, field)) for field in ("time_ratio", "tau"))
        rows.append(
            [
                *(title, known, ours["jobs"]),
                *(_cell(cells.get((title, known, name))) for name in names),
                *(_difference(regret, 100, 1), _difference(tau, 1, 2), _behind(regret, tau)),
            ]
        )
    head = ["set", "known", "jobs", *names, "regret less the better", "tau less the better"]
    text = "Regret in percent: mean / p95 / maximum; tau.\n\n"
    return text + markdown_table([*head, "behind"], rows)


def _cell(line: Mapping[str, Any] | None) -> str:
    if line is None:
        return "-"
    figures = (100 * line[name] for name in ("mean_frac", "p95_frac", "max_frac"))
    tau = "-" if line["tau"] is None else f"{line['tau']:.2f}"
    return f"{' / '.join(f'{figure:.1f}' for figure in figures)}; {tau}"


def _difference(one: Mapping[str, Any] | None, factor: float, digits: int) -> str:
    if one is None:
        return "-"
    mean, low, high = (f"{factor * one[name]:+.{digits}f}" for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def _behind(regret: Mapping[str, Any] | None, tau: Mapping[str, Any] | None) -> str:
    """Name the figures in which ours is worse than the better of the others at 95 % confidence."""
    worse_criteria = ["regret"] if regret is not None and regret["low"] > 0 else []
    worse_criteria += ["tau"] if tau is not None and tau["high"] < 0 else []
    return " and ".join(worse_criteria) or "no"


def _next_text(after: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(line["chooser"] for line in after))
    cells = {(line["set"], line["chooser"]): line for line in after}
    rows = [
        [title, cells[title, names[0]]["jobs"], *(_cell(cells[title, name]) for name in names)]
        for title in dict.fromkeys(line["set"] for line in after)
    ]
    return "\nOne layout runs; two more are run, then chosen:\n\n" + markdown_table(
        ["set", "jobs", *names], rows
    )


def _worst(choices_by_table: Mapping[str, GroupedChoices], number: int) -> list[dict[str, Any]]:
    """Return our choices of highest regret with no known layout: one line each, chosen and best."""
    made = [one for part in choices_by_table.values() for one in part.get(("0", OURS), [])]
    made.sort(key=lambda one: -one.time_ratio)
    return [_choice_row(one) for one in made[:number] if one.time_ratio > 1]


def _choice_row(choice: Choice) -> dict[str, Any]:
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
