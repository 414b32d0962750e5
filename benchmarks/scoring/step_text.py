"""The acceptance table of the step model as Markdown."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.scoring.step_acceptance import FIGURE_NAMES, shown
from forerun.benchmarks.scoring.step_pairs import pairs_text

LEGEND = """\
Percent, but for tau.  Errors are mean absolute percentage errors of step time over the scored rows
of all draws; signed bias, coverage of the 90 % interval and its mean half-width are ours.  Rows
calibrate and are scored within one machine (device, cluster, stack, precision).  Subsets of the
calibration size are all run where there are no more than 256, else drawn.  *scale_out*: the rows of
the smallest scale of a series (one model, precision and sequence length on one system, submitter
and release) calibrate it alone, its larger scales are scored.  *more_nodes*: the same by nodes, so
that all layouts of one node, where there are several, calibrate.  Perfect scaling keeps the FLOP
rate of the smallest scale that calibrates.  Kendall's tau is scipy's tau-b within a group of one
model, number of GPUs and global batch with four scored rows or more; regret is the time of the
layout chosen over the best one, minus 1, median (p95).  *Synthetic* rows are a simulator's output
and test composition, not accuracy.  *Implied* times are computed from published predictions and
errors."""
COVERAGE = """\
Coverage over distinct rows, each with the mean of its draws: 85 to 95 where 20 rows or more were
scored; elsewhere the binomial 90 % interval of the coverage (in brackets) has to hold 90.  Pooled,
a row of several lines of one set counts once, with the mean of these lines."""
COMPARED = """\
Mean absolute error of ours less that of the baseline over distinct rows, in points, with the 90 %
interval of a paired bootstrap (10,000 resamples, one seed) over series, or over rows where all are
of one series.  Better: the whole interval is below 0."""
PAIRS = """\
Ratios of two rows that differ in one switch, from priors alone: right in sign where the measured
difference exceeds 5 %, within 0.05 of the measured log (never one answer for both), mean error of
the log."""
EXCLUDED = "Rows of each table that no fold holds, each by the first reason against it:"
_WORST = "Worst ten rows of each line, mean signed error over draws:"
Line = Mapping[str, Any]


def markdown(output: Mapping[str, Any], baselines: Sequence[str]) -> str:
    """Return all tables, from the figures as they are written to JSON."""
    lines, draws, jobs = output["results"], output["draws"], output["jobs"]
    today = datetime.datetime.now(datetime.timezone.utc).date()
    more = f" --jobs {jobs}" if jobs > 1 else ""
    command = (
        f"python benchmarks/steps.py DATA_DIR --draws {draws}{more} --model '{output['model']}'"
    )
    threads = "one thread" if jobs == 1 else f"{jobs} processes of one thread"
    machine = f"{os.cpu_count()} cores of a shared x86-64 machine, {threads}"
    parts = [f"`{command}`, {today}, {machine}.", LEGEND, _figures(output, baselines)]
    parts += [COVERAGE, _coverage(output["coverage"])]
    compared = _compared(lines)
    parts += [COMPARED, compared] if compared else []
    if output["pairs"]:
        parts += [PAIRS, pairs_text(output["pairs"])]
    parts += [EXCLUDED, _excluded(lines), _WORST, _worst(output["worst"])]
    return "\n\n".join(parts)


def _figures(output: Mapping[str, Any], baselines: Sequence[str]) -> str:
    head = ["set", "protocol", "n", "bar", output["model"], "met", "bias"]
    head += ["covers, width", "coverage verdict", *baselines]
    rows = [_cells(line, baselines) for line in output["results"]]
    return markdown_table(head, rows)


def _cells(line: Line, baselines: Sequence[str]) -> list[str]:
    ours = line["ours"]
    width = _percent(ours.get("interval_width_frac"))
    return [
        line["title"],
        line["protocol"],
        str(ours["n"]),
        _bars(line),
        _named(line["figures"], ours),
        _met(line),
        _percent(ours.get("bias_frac"), is_signed=True),
        f"{_percent(ours.get('coverage_90_frac'))}, {width}",
        _verdict(line["coverage"]),
        *(_named(line["figures"], line["baselines"][name]) for name in baselines),
    ]


def _bars(line: Line) -> str:
    texts = []
    for bar in line["bars"]:
        sign = ">=" if bar["is_least"] else "<="
        limit = shown(bar["figure"], bar["limit"])
        texts.append(f"{FIGURE_NAMES[bar['figure']]} {sign} {limit}".strip())
    if line["better_than"]:
        texts.append(f"better than {', '.join(line['better_than'])}")
    return "; ".join(texts) or "-"


def _met(line: Line) -> str:
    checks = [
        *line["met"],
        *(bool(one and one["is_better"]) for one in line["better_than"].values()),
    ]
    return " / ".join(_yes(is_met) for is_met in checks) or "-"


def _named(figures: Sequence[str], line: Line) -> str:
    texts = []
    for figure in figures:
        value = line.get(figure)
        text = "-" if value is None else shown(figure, value)
        texts.append(f"{FIGURE_NAMES[figure]} {text}".strip())
    return "; ".join(texts)


def _verdict(line: Line | None) -> str:
    """Return the verdict, the coverage and its limits: ``yes: 91.2 of 57 rows (85.0-95.0)``."""
    if line is None:
        return "-"
    limits = f"{_percent(line['low_frac'])}-{_percent(line['high_frac'])}"
    rows = f"{_percent(line['coverage_frac'])} of {line['num_rows']} rows"
    return f"{_yes(line['is_met'])}: {rows} ({limits})"


def _coverage(parts: Sequence[Line]) -> str:
    rows = [[one["title"], _verdict(one)] for one in parts]
    return markdown_table(["pooled over", "coverage verdict"], rows)


def _compared(lines: Sequence[Line]) -> str:
    head = ["set", "protocol", "against", "rows", "drawn", "difference [90 %]", "better"]
    rows = [
        [line["title"], line["protocol"], name, *_comparison(one)]
        for line in lines
        for name, one in line["better_than"].items()
    ]
    return markdown_table(head, rows) if rows else ""


def _comparison(one: Line | None) -> list[str]:
    if one is None:
        return ["0", "-", "-", "no"]
    ends = " to ".join(_percent(one[end], is_signed=True) for end in ("low_frac", "high_frac"))
    return [
        str(one["num_rows"]),
        f"{one['num_units']} {'series' if one['are_series'] else 'rows'}",
        f"{_percent(one['difference_frac'], is_signed=True)} [{ends}]",
        _yes(one["is_better"]),
    ]


def _excluded(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        reasons = line.get("left_out", {})
        if not reasons:
            continue
        reasons_text = "; ".join(f"{reason} ({number})" for reason, number in reasons.items())
        total = sum(reasons.values())
        rows.append([line["title"], line["protocol"], str(line["rows"]), str(total), reasons_text])
    return markdown_table(["set", "protocol", "rows", "left out", "reasons"], rows)


def _worst(worst: Mapping[str, Sequence[Line]]) -> str:
    rows = [
        [title, ", ".join(f"{r['row_id']} ({r['layout']}) {_signed(r)}" for r in worst_rows)]
        for title, worst_rows in worst.items()
        if worst_rows
    ]
    return markdown_table(["set", "rows"], rows)


def _signed(row: Line) -> str:
    return _percent(row["error_frac"], is_signed=True)


def _yes(is_met: bool) -> str:
    return "yes" if is_met else "no"


def _percent(value: float | None, *, is_signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.1f}" if is_signed else f"{100 * value:.1f}"
