"""Calibrate on two CPU ranks, predict other layouts, then measure these and compare.

    python benchmarks/cpu_layouts.py --out DIR [--repetitions 5] [--sizes recipe,wider,deeper]
        [--iters 8] [--minutes 28] [--only-table]

Three sizes of ``recipes/pretrain_gpt.py`` (gloo).  Each repetition calibrates the running layout
(DP 2) anew, then runs it and seven other layouts without Forerun; it also calibrates the layouts
that ``forerun plan`` names as most informative.  Layouts and sizes are run in turn, in an order
that changes, so that a slow minute affects all alike.  Every run is stored in DIR as it ends
(``cpu_runs.py``): the same command resumes after ``--minutes`` or an interruption, and
``--only-table`` only prints the table of the stored runs.  Predictions are recomputed each time
through the functions behind the verbs: ``open_machine`` (``also`` is ``--also``) and ``compare``,
as ``forerun predict`` does, in one process.

Floor: the calibrated step of the running layout against its second run.  *One* knows that
calibration, *three* also the informative layouts, each from a sibling directory; an informative
layout that is among the seven is then not scored.  Errors are of single repetitions, not of
medians.
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
from forerun.calib.advice.planning import compare
from forerun.calib.arguments.megatron_args import apply_options
from forerun.calib.steps.known_steps import same_layout
from forerun.launch.known.machines import open_machine

ONE, THREE = "one layout", "three more, designed"
COVERAGE_BAR_FRAC = 0.85
LEGEND = """\
Floor: mean absolute error of the calibrated step of the running layout against a second run of it.
Error: mean absolute one of the other layouts, all repetitions.  Bias: mean signed error, 90 %
interval of its mean over repetitions; a common sign is one that the interval does not doubt and
that is larger than the floor.  Covers: share of the 90 % intervals that held, of the other layouts
and of the running one."""


def predictions(campaign: Campaign) -> pd.DataFrame:
    """Return a row for each layout of each repetition, ordered by size, repetition and layout.

    ``is_known``: the step was measured for the prediction, as for the running layout and the
    informative ones.  ``error_frac`` is above 0 if the layout was faster than predicted,
    ``is_inside`` is True if the 90 % interval held; all other columns are also stored in
    ``predictions.json``.
    """
    records: list[dict[str, Any]] = []
    calibrated = [job for job in campaign.ran if job.is_calibrated and job.layout == RUNNING]
    for job in sorted(calibrated, key=lambda job: (list(SIZES).index(job.size), job.repetition)):
        informative = [
            replace(job, layout=layout) for layout in campaign.informative.get(job.size, {})
        ]
        records += _predicted(campaign, job, ONE, [])
        if informative and all(one in campaign.ran for one in informative):
            records += _predicted(campaign, job, THREE, informative)
    (campaign.out / "predictions.json").write_text(json.dumps(records, indent=1) + "\n", "utf-8")
    rows = pd.DataFrame(records)
    if records:
        rows["error_frac"] = rows["predicted_s"] / rows["actual_s"] - 1
        rows["is_inside"] = rows["actual_s"].between(rows["low_s"], rows["high_s"])
    return rows


def _predicted(
    campaign: Campaign, job: Job, protocol: str, informative: Sequence[Job]
) -> Iterator[dict[str, Any]]:
    """Yield every layout of one repetition that was run without Forerun."""
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


def summary(frame: pd.DataFrame) -> str:
    """Return a line for each size and protocol, and for all sizes, as Markdown."""
    head = ["size", "calibrated on", "repetitions", "floor", "error", "bar", "met", "bias (90 %)"]
    head += ["floor's bias (90 %)", "common sign", "covers", "running covers", "85 % met"]
    rows = []
    for size in (*(name for name in SIZES if (frame["size"] == name).any()), "all"):
        for protocol in (ONE, THREE):
            mine = frame[
                (frame["protocol"] == protocol) & ((frame["size"] == size) | (size == "all"))
            ]
            running_rows, others = mine[mine["layout"] == RUNNING], mine[~mine["is_known"]]
            if len(running_rows) and len(others):
                rows.append([size, protocol, *_figures(running_rows, others, protocol)])
    return markdown_table(head, rows)


def _figures(running_rows: pd.DataFrame, others: pd.DataFrame, protocol: str) -> list[str]:
    """Return figures of the running layout and of layouts whose step was not known."""
    floor, error = (rows["error_frac"].abs().mean() for rows in (running_rows, others))
    bar = max(0.07, floor + 0.02) if protocol == ONE else floor + 0.015
    bias, bias_half = _bias(others)
    is_common = abs(bias) > max(floor, bias_half)
    covers, running_covers = (rows["is_inside"].mean() for rows in (others, running_rows))
    is_covered = min(covers, running_covers) >= COVERAGE_BAR_FRAC
    return [
        str(others["repetition"].nunique()),
        f"{floor:.1%}",
        f"{error:.1%}",
        f"{bar:.1%}",
        "yes" if error <= bar else "no",
        _interval(bias, bias_half),
        _interval(*_bias(running_rows)),
        "yes" if is_common else "no",
        f"{covers:.0%} of {len(others)}",
        f"{running_covers:.0%} of {len(running_rows)}",
        "yes" if is_covered else "no",
    ]


def _bias(frame: pd.DataFrame) -> tuple[float, float]:
    """Return the mean signed error, and half of the 90 % interval of its mean over repetitions.

    The half is infinite for a single repetition.
    """
    means = frame.groupby("repetition")["error_frac"].mean()
    if len(means) < 2:
        return means.iloc[0], math.inf
    return means.mean(), float(stats.t.ppf(0.95, len(means) - 1)) * means.sem()


def _interval(mean: float, half: float) -> str:
    return f"{mean:+.1%}" + (f" ± {half:.1%}" if math.isfinite(half) else "")


def report(campaign: Campaign) -> str:
    """Return all tables, as Markdown."""
    frame = predictions(campaign)
    if frame.empty:
        return "nothing was calibrated yet"
    parts = [LEGEND, summary(frame)]
    for size, informative in campaign.informative.items():
        parts.append(f"{size}; most telling: {', '.join(informative)}")
    spent_s = sum(ran.wall_s for ran in campaign.ran.values())
    parts.append(f"{len(campaign.ran)} runs, {spent_s / 60:.1f} minutes")
    return "\n\n".join(parts)


def main() -> None:
    """Make the missing runs, print the tables."""
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
