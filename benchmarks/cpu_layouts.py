"""Calibrate on two CPU ranks, predict other layouts, then hold that against what they take.

    python benchmarks/cpu_layouts.py --out DIR [--repetitions 5] [--sizes recipe,wider,deeper]
        [--iters 8] [--minutes 28] [--only-table]

Three sizes of ``recipes/pretrain_gpt.py`` (gloo).  Each repetition calibrates the running layout
(DP 2) anew and runs it again without Forerun, with seven other layouts; calibrated runs of the
layouts that ``forerun plan`` calls most telling are among them.  All of a size are run in turn, the
sizes too, in an order that changes, so that a slow minute hits all alike.  Every run is kept in DIR
as it ends (``cpu_runs.py``): the same command goes on after ``--minutes`` or a break, and
``--only-table`` makes the table of what is there.  Predictions are asked anew each time, of
the door of the verbs: ``open_machine`` (``also`` is ``--also``) and ``compare``, as ``forerun
predict`` does, in one process.

Floor: the calibrated step of the running layout against its second run.  *One* knows that
calibration, *three* the telling layouts besides, each from a sibling directory; a telling layout
that is also among the seven is not scored then.  Errors are of single repetitions, not of medians.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.runs.cpu_runs import RUNNING, SIZES, Campaign, Job
from forerun.calib.advice import compare
from forerun.calib.arguments import apply_options
from forerun.calib.steps import same_layout
from forerun.launch.known import open_machine

ONE, THREE = "one layout", "three more, designed"
COVERAGE_BAR_FRAC = 0.85
LEGEND = """\
Floor: mean absolute error of the calibrated step of the running layout against a second run of it.
Error: mean absolute one of the other layouts, all repetitions.  Bias: mean signed error, 90 %
interval of its mean over repetitions; a common sign is one that the interval does not doubt and
that is larger than the floor.  Covers: share of the 90 % intervals that held, of the other layouts
and of the running one."""


def predictions(campaign: Campaign) -> pd.DataFrame:
    """A row for each layout of each repetition, in the order of sizes, repetitions and layouts.

    ``is_known``: the step was measured for the prediction, as those of the running layout and of
    the telling ones.  ``error_frac`` is above 0 where the layout was faster than predicted,
    ``is_inside`` says whether the 90 % interval held; all but these two are also kept in
    ``predictions.json``.
    """
    found: list[dict[str, Any]] = []
    calibrated = [job for job in campaign.ran if job.is_calibrated and job.layout == RUNNING]
    for job in sorted(calibrated, key=lambda job: (list(SIZES).index(job.size), job.repetition)):
        informative = [
            replace(job, layout=layout) for layout in campaign.informative.get(job.size, {})
        ]
        found += _predicted(campaign, job, ONE, [])
        if informative and all(one in campaign.ran for one in informative):
            found += _predicted(campaign, job, THREE, informative)
    (campaign.out / "predictions.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    rows = pd.DataFrame(found)
    if found:
        rows["error_frac"] = rows["predicted_s"] / rows["actual_s"] - 1
        rows["is_inside"] = rows["actual_s"].between(rows["low_s"], rows["high_s"])
    return rows


def _predicted(
    campaign: Campaign, job: Job, protocol: str, informative: Sequence[Job]
) -> Iterator[dict[str, Any]]:
    """Every layout of one repetition that was run without Forerun."""
    size = SIZES[job.size]
    machine = open_machine(
        campaign.directory(job.size, job.repetition, job.layout),
        also=[campaign.directory(one.size, one.repetition, one.layout) for one in informative],
    )
    known = {same_layout(one.config) for one in machine.steps.known}
    plain = {
        layout: campaign.ran.get(replace(job, layout=layout, is_calibrated=False))
        for layout in size.layouts()
    }
    actual_s = {layout: ran.step_s for layout, ran in plain.items() if ran and ran.step_s}
    configs = [apply_options(machine.running, size.layouts()[layout]) for layout in actual_s]
    for layout, one in zip(actual_s, compare(machine.running, configs, machine.steps), strict=True):
        yield {
            "size": job.size,
            "repetition": job.repetition,
            "protocol": protocol,
            "layout": layout,
            "is_known": same_layout(one.config) in known,
            "predicted_s": one.step_time_s,
            "low_s": one.low_s,
            "high_s": one.high_s,
            "actual_s": actual_s[layout],
        }


def summary(found: pd.DataFrame) -> str:
    """A line for each size and protocol, and for all sizes, as Markdown."""
    head = ["size", "calibrated on", "repetitions", "floor", "error", "bar", "met", "bias (90 %)"]
    head += ["floor's bias (90 %)", "common sign", "covers", "running covers", "85 % met"]
    rows = []
    for size in (*(name for name in SIZES if (found["size"] == name).any()), "all"):
        for protocol in (ONE, THREE):
            mine = found[
                (found["protocol"] == protocol) & ((found["size"] == size) | (size == "all"))
            ]
            own, others = mine[mine["layout"] == RUNNING], mine[~mine["is_known"]]
            if len(own) and len(others):
                rows.append([size, protocol, *_figures(own, others, protocol)])
    return markdown_table(head, rows)


def _figures(own: pd.DataFrame, others: pd.DataFrame, protocol: str) -> list[str]:
    """Of the running layout and of those whose step was not known."""
    floor, error = (rows["error_frac"].abs().mean() for rows in (own, others))
    bar = max(0.07, floor + 0.02) if protocol == ONE else floor + 0.015
    bias, bias_half = _bias(others)
    is_common = abs(bias) > max(floor, bias_half)
    covers, own_covers = (rows["is_inside"].mean() for rows in (others, own))
    is_covered = min(covers, own_covers) >= COVERAGE_BAR_FRAC
    return [
        str(others["repetition"].nunique()),
        f"{floor:.1%}",
        f"{error:.1%}",
        f"{bar:.1%}",
        "yes" if error <= bar else "no",
        _interval(bias, bias_half),
        _interval(*_bias(own)),
        "yes" if is_common else "no",
        f"{covers:.0%} of {len(others)}",
        f"{own_covers:.0%} of {len(own)}",
        "yes" if is_covered else "no",
    ]


def _bias(found: pd.DataFrame) -> tuple[float, float]:
    """Mean signed error, and half of the 90 % interval of its mean over repetitions.

    The half is infinite where there is one repetition alone.
    """
    means = found.groupby("repetition")["error_frac"].mean()
    if len(means) < 2:
        return means.iloc[0], math.inf
    return means.mean(), float(stats.t.ppf(0.95, len(means) - 1)) * means.sem()


def _interval(mean: float, half: float) -> str:
    return f"{mean:+.1%}" + (f" ± {half:.1%}" if math.isfinite(half) else "")


def layout_table(found: pd.DataFrame, size: str) -> str:
    """Medians over the repetitions of one size, calibrated on one layout; the last column after
    three more."""
    head = ["layout", "predicted", "90 %", "actual", "error", "repetitions inside", THREE]
    rows, medians = [], []
    for layout in SIZES[size].layouts():
        mine = found[(found["size"] == size) & (found["layout"] == layout)]
        first, after = (mine[mine["protocol"] == protocol] for protocol in (ONE, THREE))
        if first.empty:
            continue
        middle = first[["predicted_s", "low_s", "high_s", "actual_s"]].median()
        predicted, low, high, actual = middle
        medians.append((predicted, actual))
        told = "-"
        if len(after):
            told = f"{after['error_frac'].median():+.1%}"
            told += " (known)" if after["is_known"].iloc[0] else ""
        rows.append(
            [
                layout,
                f"{predicted:.3f} s",
                f"{low:.3f} to {high:.3f}",
                f"{actual:.3f} s",
                f"{predicted / actual - 1:+.1%}",
                f"{first['is_inside'].sum()} of {len(first)}",
                told,
            ]
        )
    told = markdown_table(head, rows)
    if len(medians) > 2:
        told += f"\n\nRank correlation (Spearman) {stats.spearmanr(medians).statistic:.2f}"
    return told


def report(campaign: Campaign) -> str:
    """All tables, as Markdown."""
    found = predictions(campaign)
    if found.empty:
        return "nothing was calibrated yet"
    parts = [LEGEND, summary(found)]
    for size, informative in campaign.informative.items():
        parts += [f"{size}; most telling: {', '.join(informative)}", layout_table(found, size)]
    spent_s = sum(ran.wall_s for ran in campaign.ran.values())
    parts.append(f"{len(campaign.ran)} runs, {spent_s / 60:.1f} minutes")
    return "\n\n".join(parts)


def main() -> None:
    """Make the runs that are missing, print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--sizes", default=",".join(SIZES), help="recipe,wider,deeper")
    parser.add_argument("--iters", type=int, default=8, help="steps of a run that count (8)")
    parser.add_argument("--minutes", type=float, default=28.0, help="begin no run after these (28)")
    parser.add_argument("--only-table", action="store_true", help="run nothing")
    args = parser.parse_args()
    sizes = args.sizes.split(",")
    if unknown := set(sizes) - set(SIZES):
        parser.error(f"--sizes {', '.join(sorted(unknown))}: none of {', '.join(SIZES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    campaign = Campaign.opened(args.out, args.iters)
    is_whole = args.only_table or campaign.run(
        sizes, args.repetitions, until_unix_s=time.time() + 60 * args.minutes
    )
    print(report(campaign))
    if not is_whole:
        print("not all was run; the same command goes on", file=sys.stderr)


if __name__ == "__main__":
    main()
