"""The step model on published step times: the acceptance table, as Markdown and JSON.

    python benchmarks/steps.py DATA_DIR [--draws 20] [--jobs 1] [--model NAME] [--only TEXT]
        [--protocol NAME] [--json OUT]

DATA_DIR contains the public tables (``e2e_*``, ``ops_*``, ``coll_*``); missing ones are looked up
in ``recipes/published``.  Baselines run on the same rows and folds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from forerun.benchmarks.baselines.steps import BASELINES
from forerun.benchmarks.protocols.scores import concat_scored, step_results, worst_rows
from forerun.benchmarks.published.readers import steps_of
from forerun.benchmarks.scoring.step_acceptance import CLAIMS, Claim
from forerun.benchmarks.scoring.step_comparisons import compare
from forerun.benchmarks.scoring.step_coverage import coverage_verdict, pooled, row_coverage
from forerun.benchmarks.scoring.step_pairs import score_pairs
from forerun.benchmarks.scoring.step_runs import MODELS, Key, Scored, count_excluded, score
from forerun.benchmarks.scoring.step_text import markdown
from forerun.calib.records.step_rows import StepKind

Lines = list[dict[str, Any]]
ScoresByKey = Mapping[tuple[Key, str], Scored]


def main() -> None:
    arguments = _arguments()
    chosen = arguments.model
    if chosen not in MODELS:
        sys.exit(f"--model {chosen} is none of {', '.join(MODELS)}")
    claims = [claim for claim in CLAIMS if _is_requested(claim, arguments)]
    scores = score(arguments.data, claims, chosen, arguments.draws, arguments.jobs)
    lines, worst = [], {}
    for claim in claims:
        line, rows = _line(claim, chosen, scores, arguments)
        lines.append(line)
        worst[f"{claim.title}, {claim.protocol}"] = rows
    lines += _pools(claims, chosen, scores)
    output = {
        "schema": 2,
        "model": chosen,
        "draws": arguments.draws,
        "jobs": arguments.jobs,
        "results": lines,
        "coverage": list(_coverage(claims, chosen, scores)),
        "worst": worst,
        "pairs": _pairs(claims, arguments.data),
    }
    print(markdown(output, [baseline.name for baseline in BASELINES]))
    if arguments.json:
        arguments.json.write_text(json.dumps(output, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The acceptance table of the step model.")
    parser.add_argument("data", type=Path, metavar="DATA_DIR", help="public tables, CSV")
    parser.add_argument("--draws", type=int, default=20, help="random calibrations (20)")
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each (1)")
    parser.add_argument(
        "--model", metavar="NAME", default=MODELS[0], help="which to hold to the bars (ours)"
    )
    parser.add_argument("--only", metavar="TEXT", help="lines whose set holds this text")
    parser.add_argument("--protocol", metavar="NAME", help="lines of this protocol")
    parser.add_argument("--json", type=Path, metavar="OUT", help="all figures")
    parsed = parser.parse_args()
    for name in ("draws", "jobs"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name} {getattr(parsed, name)} is below 1; give 1 or more")
    return parsed


def _is_requested(claim: Claim, arguments: argparse.Namespace) -> bool:
    is_titled = not arguments.only or arguments.only.lower() in claim.title.lower()
    return is_titled and arguments.protocol in (None, claim.protocol)


def _line(
    claim: Claim, chosen: str, scores: ScoresByKey, arguments: argparse.Namespace
) -> tuple[dict[str, Any], Lines]:
    """Return figures of the model and the baselines for one claim, and the model's worst rows."""
    ours = scores[claim.key, chosen]
    theirs = {one.name: scores[claim.key, one.name].of(claim.is_scored) for one in BASELINES}
    line = _figures(claim, ours.of(claim.is_scored), theirs)
    num_rows, reasons = count_excluded(arguments.data, claim, arguments.draws)
    line |= {"rows": num_rows, "left_out": dict(reasons), "seconds": ours.seconds}
    return line, worst_rows(concat_scored(ours.of(claim.is_scored)))


def _pairs(claims: Sequence[Claim], data: Path) -> Lines:
    """Return the pairs of all requested tables, each once."""
    tables = dict.fromkeys(claim.table for claim in claims)
    return [pair for table in tables for pair in score_pairs(steps_of(data, table).rows)]


def _pools(claims: Sequence[Claim], chosen: str, scores: ScoresByKey) -> Iterator[dict[str, Any]]:
    """Yield lines of several sets as one, with their folds concatenated."""
    pools: dict[tuple[str, str], list[Claim]] = {}
    for claim in claims:
        if claim.pool:
            pools.setdefault((claim.pool, claim.protocol), []).append(claim)
    for (title, _), members in pools.items():
        if len(members) > 1:
            ours = _together(members, chosen, scores)
            theirs = {one.name: _together(members, one.name, scores) for one in BASELINES}
            yield _figures(replace(members[0], title=f"pooled: {title}"), ours, theirs)


def _together(members: Iterable[Claim], name: str, scores: ScoresByKey) -> list[pd.DataFrame]:
    return [fold for claim in members for fold in scores[claim.key, name].folds]


def _figures(
    claim: Claim, ours: Sequence[pd.DataFrame], theirs: Mapping[str, Sequence[pd.DataFrame]]
) -> dict[str, Any]:
    figures = _whole(ours, claim)
    verdict = coverage_verdict(list(row_coverage(ours).values()))
    comparisons = {name: compare(ours, theirs[name]) for name in claim.better_than}
    return {
        "title": claim.title,
        "table": claim.table,
        "protocol": claim.protocol,
        "bars": [asdict(bar) for bar in claim.bars],
        "figures": claim.figures,
        "met": [bar.is_met(figures.get(bar.figure)) for bar in claim.bars],
        "ours": figures,
        "coverage": asdict(verdict) if verdict else None,
        "better_than": {
            name: asdict(one) | {"is_better": one.is_better} if one else None
            for name, one in comparisons.items()
        },
        "baselines": {one.name: _whole(theirs[one.name], claim) for one in BASELINES},
    }


def _whole(scored: Sequence[pd.DataFrame], claim: Claim) -> dict[str, Any]:
    results = step_results(concat_scored(scored), claim.table)
    return results[0] if results else {"n": 0}


def _coverage(
    claims: Sequence[Claim], chosen: str, scores: ScoresByKey
) -> Iterator[dict[str, Any]]:
    """Yield coverage over the rows of all sets, each once; without synthetic rows, then with."""
    by_table: dict[str, dict[Key, list[pd.DataFrame]]] = {}
    for claim in claims:
        by_table.setdefault(claim.table, {})[claim.key] = list(scores[claim.key, chosen].folds)
    rows: dict[bool, list[float]] = {False: [], True: []}
    for lines in by_table.values():
        coverage = pooled([row_coverage(folds) for folds in lines.values()])
        kinds = {row.kind for folds in lines.values() for fold in folds for row in fold["row"]}
        rows[kinds == {StepKind.SYNTHETIC}] += coverage.values()
    parts = {"all sets but the synthetic one": rows[False], "all sets": rows[False] + rows[True]}
    for title, values in parts.items():
        if verdict := coverage_verdict(values):
            yield {"title": title, **asdict(verdict)}


if __name__ == "__main__":
    main()
