"""Quality of the plan's first choice, and of its command's prediction, on two CPU ranks.

    python benchmarks/cpu_choice.py --out DIR [--parts choice,commands,probes] [--minutes 25]
        [--sizes recipe] [--from DP2,TP2,PP2] [--repetitions 3] [--cases NAME;NAME ...]
        [--clone DIR] [--only-table]

*choice*: every layout of ``recipes/pretrain_gpt.py`` that two ranks support (degrees, virtual
stages, optimizer, micro-batches, recompute) runs in every repetition, in a different order each
time; the running layouts of ``--from`` are calibrated, and the first choice of each is compared
with the layout that was truly the best.  Repetitions are paired: both ran within the same minutes.

*commands*: ten runs of the recipe and of unmodified Megatron-LM (``--clone``) are calibrated; the
command that ``forerun plan DIR --show 1`` prints is run unchanged, and its step is compared with
the predicted interval.

*probes*: the layouts of *choice*, predicted from one calibrated run with
``--calibrate-probe-seconds`` and from the same records without the rows of its probes.

Every run is stored in DIR as it ends: the same command resumes after ``--minutes`` or an
interruption, and ``--only-table`` only prints tables of the stored runs.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy import stats

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.runs.choice_runs import (
    CASES,
    PROBE_S,
    PROBED_ITERS,
    RECIPE,
    RunResults,
    calibrated,
    feasible,
    followed,
    sweep_times,
    swept,
)
from forerun.benchmarks.runs.cpu_runs import SIZES
from forerun.calib.advice import Candidate, compare
from forerun.calib.answers import run_steps
from forerun.calib.arguments import apply_options
from forerun.calib.memory import Verdict
from forerun.calib.samples import SampleTable
from forerun.calib.steps import FittedSteps
from forerun.calib.workload import Recompute, RunConfig
from forerun.launch.known import load, open_machine

PARTS = ("choice", "commands", "probes")
ITERS = 24
_BAR_FRAC = 0.05
_DEGREES: Mapping[str, tuple[str, ...]] = {
    "DP2": (),
    "TP2": ("--tensor-model-parallel-size", "2"),
    "PP2": ("--pipeline-model-parallel-size", "2"),
}
"""Options of a calibrated run, besides the recipe's own defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The first choice of one calibrated run, compared with the measured layouts."""

    chosen: str
    best: str
    over_best: float
    """Time of the chosen layout over that of the best, medians over repetitions."""
    low: float
    high: float
    """End of the 90 % interval of that ratio within repetitions; infinite with only one
    repetition."""
    error_frac: float
    """Median absolute error over all layouts."""

    @property
    def is_met(self) -> bool:
        """True if within 5 % of the best, or not distinguishable from it."""
        is_alike = math.isfinite(self.high) and self.low <= 1.0
        return self.over_best <= 1 + _BAR_FRAC or is_alike


def choice_of(predicted_s: Mapping[str, float], times: Mapping[str, Mapping[int, float]]) -> Choice:
    """Compare the layout predicted to be fastest with the one measured to be.

    >>> found = choice_of({"a": 1.0, "b": 2.0}, {"a": {0: 1.1, 1: 1.1}, "b": {0: 1.0, 1: 1.0}})
    >>> found.chosen, found.best, round(found.over_best, 2), found.is_met
    ('a', 'b', 1.1, False)
    """
    able = {name: dict(times[name]) for name in predicted_s if name in times}
    medians = {name: statistics.median(times_s.values()) for name, times_s in able.items()}
    chosen = min(able, key=lambda name: predicted_s[name])
    best = min(medians, key=lambda name: medians[name])
    logs = np.log([able[chosen][number] / able[best][number] for number in sorted(able[best])])
    half = math.inf
    if len(logs) > 1:
        half = float(stats.t.ppf(0.95, len(logs) - 1) * stats.sem(logs))
    errors = [abs(predicted_s[name] / medians[name] - 1) for name in able]
    return Choice(
        chosen=chosen,
        best=best,
        over_best=medians[chosen] / medians[best],
        low=math.exp(float(np.mean(logs)) - half),
        high=math.exp(float(np.mean(logs)) + half),
        error_frac=statistics.median(errors),
    )


def choice_table(rows: RunResults, sizes: list[str], degrees: list[str]) -> str:
    """Return a table with a line for each model and calibrated layout."""
    head = ["model", "calibrated on", "layouts", "repetitions", "first choice", "truly best"]
    head += ["chosen over best", "90 %, paired", "met", "error of all"]
    lines: list[list[str]] = []
    for size in sizes:
        times = sweep_times(rows, size)
        for name in degrees:
            if not times or f"calibration/{size} {name}" not in rows.values:
                continue
            machine = open_machine(rows.directory(f"{size} {name}"))
            predicted_s = predictions(
                size, machine.running, machine.steps, machine.memory_capacity_nbytes
            )
            one = choice_of(predicted_s, times)
            number = len(next(iter(times.values())))
            ends = f"{one.low:.2f} to {one.high:.2f}" if math.isfinite(one.high) else "-"
            lines.append(
                [
                    *(size, name, str(len(times)), str(number), one.chosen, one.best),
                    *(f"{one.over_best:.3f}", ends, "yes" if one.is_met else "no"),
                    f"{one.error_frac:.1%}",
                ]
            )
    return markdown_table(head, lines) if lines else "nothing was run yet"


def predictions(
    size: str, running: RunConfig, steps: FittedSteps, capacity_nbytes: int | None = None
) -> dict[str, float]:
    """Return the predicted step of every layout of a size that fits, in seconds."""
    candidates = compared(size, running, steps, capacity_nbytes)
    fitting = {k: one for k, one in candidates.items() if one.verdict is not Verdict.DOES_NOT_FIT}
    return {name: one.step_time_s for name, one in fitting.items()}


def compared(
    size: str, running: RunConfig, steps: FittedSteps, capacity_nbytes: int | None = None
) -> dict[str, Candidate]:
    """Return every layout of a size, through the entry point of ``forerun predict``."""
    plain = replace(running, recompute=Recompute.NONE, recompute_modules=(), recompute_num_layers=0)
    one_each = ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1")
    base = apply_options(plain, (*one_each, "--gpus", str(running.parallelism.num_ranks)))
    of_model = len(SIZES[size].options)
    layouts = {
        name: apply_options(base, words[of_model:]) for name, words in feasible(size).items()
    }
    candidates = compare(
        running, [*layouts.values()], steps, memory_capacity_nbytes=capacity_nbytes
    )
    return dict(zip(layouts, candidates, strict=True))


def commands_table(rows: RunResults) -> str:
    """Return a line for each case: the prediction, and the measured step of the command."""
    head = ["case", "first choice", "predicted", "90 %", "measured", "error", "inside"]
    lines: list[list[str]] = []
    num_inside = 0
    for name in CASES:
        row = rows.values.get(f"followed/{name}")
        if row is None:
            continue
        actual, low, high = row["actual_s"], row["low_s"], row["high_s"]
        is_inside = actual is not None and low <= actual <= high
        num_inside += is_inside
        cells = ["did not run", "-"]
        if actual is not None:
            cells = [f"{actual:.3f} s", f"{row['step_time_s'] / actual - 1:+.1%}"]
        lines.append(
            [
                *(name, row["label"], f"{row['step_time_s']:.3f} s", f"{low:.3f} to {high:.3f}"),
                *(*cells, "yes" if is_inside else "no"),
            ]
        )
    if not lines:
        return "nothing was run yet"
    return markdown_table(head, lines) + f"\n\nInside: {num_inside} of {len(lines)} (bar: 8 of 10)"


def probes_table(rows: RunResults, sizes: list[str]) -> str:
    """Return errors with and without rows of probes, by degree, from one calibrated run each."""
    head = ["model", "degree", "layouts", "error without probes", "with", "bias without", "with"]
    head += ["chosen over best without", "with"]
    lines: list[list[str]] = []
    for size in sizes:
        times = sweep_times(rows, size)
        if not times or f"calibration/{size} probed" not in rows.values:
            continue
        table = load(rows.directory(f"{size} probed"), None).table
        running, pair = table.config(), (without_probes(table), table)
        predicted = [predictions(size, running, run_steps(one)) for one in pair]
        chosen = [f"{choice_of(one, times).over_best:.3f}" for one in predicted]
        for degree in ("DP2", "TP2", "PP2"):
            names = [name for name in times if name.startswith(degree) and name in predicted[0]]
            truth = {name: statistics.median(times[name].values()) for name in names}
            ratios = [np.array([one[name] / truth[name] for name in names]) for one in predicted]
            errors = [f"{np.median(np.abs(ratio - 1)):.1%}" for ratio in ratios]
            biases = [f"{np.median(ratio) - 1:+.1%}" for ratio in ratios]
            lines.append([size, degree, str(len(names)), *errors, *biases, *chosen])
    return markdown_table(head, lines) if lines else "nothing was run yet"


def without_probes(table: SampleTable) -> SampleTable:
    """Return the table without probes."""
    return replace(table, samples=table.samples[table.samples["is_probe"] != True])  # noqa: E712


def run(rows: RunResults, args: argparse.Namespace, parts: list[str], until_unix_s: float) -> bool:
    """Make the missing runs; return False if time runs out before all are done."""
    for job in _jobs(rows, args, parts):
        if time.time() > until_unix_s:
            return False
        job()
    return True


def _jobs(
    rows: RunResults, args: argparse.Namespace, parts: list[str]
) -> list[Callable[[], object]]:
    """Return calibrations interleaved with repetitions, so that a slow minute affects both."""
    tasks: list[Callable[[], object]] = []
    for number in range(args.repetitions if {"choice", "probes"} & {*parts} else 0):
        for size in args.sizes.split(","):
            tasks.append(lambda size=size, number=number: swept(rows, size, number))
            names = args.degrees.split(",") if "choice" in parts and not number else []
            for name in names:
                tasks.append(lambda size=size, name=name: _calibrate(rows, size, name))
            if "probes" in parts and not number:
                tasks.append(lambda size=size: _probe(rows, size))
    if "commands" in parts:
        cases = [CASES[name] for name in _cases(args)]
        tasks += [lambda case=case: followed(rows, case, args.clone) for case in cases]
    return tasks


def _cases(args: argparse.Namespace) -> list[str]:
    return args.cases.split(";") if args.cases else [*CASES]


def _calibrate(rows: RunResults, size: str, name: str) -> None:
    words = (str(RECIPE), *SIZES[size].options, *_DEGREES[name], "--train-iters", str(ITERS))
    calibrated(rows, f"{size} {name}", words)


def _probe(rows: RunResults, size: str) -> None:
    words = (str(RECIPE), *SIZES[size].options, "--train-iters", str(PROBED_ITERS))
    calibrated(rows, f"{size} probed", (*words, f"--calibrate-probe-seconds={PROBE_S}"))


def _check(
    parser: argparse.ArgumentParser, args: argparse.Namespace, parts: list[str], sizes: list[str]
) -> None:
    """Exit with a message if an argument names nothing, or if the clone is missing."""
    for words, known in (
        (parts, PARTS),
        (sizes, SIZES),
        (args.degrees.split(","), _DEGREES),
        (_cases(args), CASES),
    ):
        if unknown := {*words} - {*known}:
            parser.error(f"{', '.join(sorted(unknown))} is not known; give of {', '.join(known)}")
    needs_clone = "commands" in parts and any(CASES[name].is_megatron for name in _cases(args))
    if needs_clone and args.clone is None and not args.only_table:
        parser.error("commands of Megatron-LM need its clone; give --clone DIR, or other --cases")


def main() -> None:
    """Make the runs that are missing, print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="all runs")
    parser.add_argument("--parts", default="choice,commands", help="choice,commands,probes")
    parser.add_argument("--sizes", default="recipe", help="recipe,wider,deeper")
    parser.add_argument("--from", dest="degrees", default="DP2,TP2,PP2", help="DP2,TP2,PP2")
    parser.add_argument("--repetitions", type=int, default=3, help="of all layouts (3)")
    parser.add_argument("--cases", default="", help="names with ; between (all)")
    parser.add_argument(
        "--clone", type=Path, metavar="DIR", help="of Megatron-LM, for its commands"
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="begin no run after these (25)")
    parser.add_argument("--only-table", action="store_true", help="run nothing")
    args = parser.parse_args()
    parts, sizes = args.parts.split(","), args.sizes.split(",")
    _check(parser, args, parts, sizes)
    # Exit through SystemExit, so that launched processes are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows = RunResults.opened(args.out)
    is_whole = args.only_table or run(rows, args, parts, time.time() + 60 * args.minutes)
    tables = {
        "choice": lambda: choice_table(rows, sizes, args.degrees.split(",")),
        "commands": lambda: commands_table(rows),
        "probes": lambda: probes_table(rows, sizes),
    }
    print("\n\n".join(f"{part}\n\n{tables[part]()}" for part in parts))
    if not is_whole:
        print("not all was run; the same command goes on", file=sys.stderr)


if __name__ == "__main__":
    main()
