"""Comparison of two runs: false verdicts on equal runs, and detection of planted slow-downs.

    python benchmarks/diff.py --runs FOLDER [--make] [--series DATA_FOLDER]

``--make`` trains the CPU recipe on two ranks into FOLDER, one run after the other, unless done
already: 32 equal runs, one with a throttled rank, and two that differ only in the micro-batch.
``--series`` adds published steps of repeated runs on accelerators.  Slow-downs are planted by
scaling a run's steps.  Exits with 1 if adjacent equal runs get a verdict, or one of the planted
cases gets none.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from markdown_text import markdown_table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from launched import torchrun  # noqa: E402

from forerun.calib.differences import (  # noqa: E402
    Change,
    Difference,
    Floats,
    Verdict,
    compare_levels,
    difference,
    estimate_repeat_sigma_log,
    log_level,
    step_windows,
)
from forerun.calib.samples import SampleTable  # noqa: E402
from forerun.launch.known import read  # noqa: E402
from forerun.launch.views import difference_lines  # noqa: E402

SLOWER = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Planted slow-downs, in shares of a run's time."""
RECIPE = ROOT / "recipes" / "pretrain_gpt.py"
THROTTLE = ROOT / "tests" / "support" / "throttled_rank.py"
CALIBRATED = ("--train-iters", 72, "--calibrate-steps=16", "--calibrate-every=16")
"""Options for four windows."""
SMALL = ("--hidden-size", 32, "--seq-length", 32)
MORE = ("--train-iters", 240, "--calibrate-steps=8", "--calibrate-every=16")
"""Options for fourteen windows."""
BURN_S = 0.06
"""Seconds that each layer of the throttled rank burns in a forward pass."""
SERIES = "e2e_mlperf_steps.csv.gz"
WINDOWS, STEPS = 4, 10
"""Number of windows cut out of a published run, and steps of each."""
Run = tuple[str, list[Floats]]
"""Device, and the bare steps of each window."""
Pair = tuple[Run, Run]
NUM_CHOSEN, NUM_RUNS = 21, 32
"""Numbers of equal runs: those that the rule for processors was tuned on, and all."""


def names(first: int = 1, last: int = NUM_RUNS) -> list[str]:
    """Return the names of equal runs."""
    return [f"base{number:02d}" for number in range(first, last + 1)]


def train_missing(folder: Path) -> None:
    """Train the missing runs."""
    for name in (*names(), "throttled", "small1", "small8"):
        home = folder / name
        if (home / "samples.parquet").exists():
            continue
        forerun_options = ("--calibrate", "--calibrate-wandb=off", f"--calibrate-dir={home}")
        if name == "throttled":
            burn = {"THROTTLED_RANK": "1", "THROTTLED_S": str(BURN_S)}
            torchrun(folder, THROTTLE, RECIPE, *CALIBRATED, *forerun_options, **burn)
        elif name.startswith("small"):
            micro = ("--micro-batch-size", name.removeprefix("small"))
            torchrun(folder, RECIPE, *SMALL, *micro, *MORE, *forerun_options)
        else:
            torchrun(folder, RECIPE, *CALIBRATED, *forerun_options)
        print(f"{name} trained", file=sys.stderr)


@cache
def table(home: Path) -> SampleTable:
    return read(home, None).table


def compare_like_verb(folder: Path, first: str, second: str) -> Difference:
    """Compare two runs through the function behind the verb."""
    return difference(table(folder / first), table(folder / second))


def bare_runs(folder: Path, alike: Sequence[str]) -> list[Run]:
    """Return the bare steps of runs on CPUs."""
    tables = (step_windows(table(folder / name)).values() for name in alike)
    return [("cpu", [part["time_s"].to_numpy() for part in parts]) for parts in tables]


def published_runs(folder: Path) -> Iterator[list[Run]]:
    """Yield the repeated runs of each system, as windows at equal distances."""
    rows = pd.read_csv(folder / SERIES)
    for _, system in rows.groupby(["round", "submitter", "system"]):
        runs: list[Run] = []
        for _, run in system.groupby("result"):
            times = run["train_step_time_s"].to_numpy(dtype=np.float64)[1:]
            if len(times) >= WINDOWS * STEPS:
                starts = np.linspace(0, len(times) - STEPS, WINDOWS).astype(int)
                runs.append(("accelerator", [times[s : s + STEPS] for s in starts]))
        if len(runs) > 1:
            yield runs


def compare_runs(first: Run, second: Run, frac: float = 0.0) -> Change:
    """Compare the second run, its steps scaled by 1 plus ``frac``, with the first."""
    longer = [times * (1 + frac) for times in second[1]]
    repeat_sigma_log = max(
        estimate_repeat_sigma_log(run[1], run[0], is_one_run=False) for run in (first, second)
    )
    return compare_levels(
        log_level(first[1], repeat_sigma_log=repeat_sigma_log),
        log_level(longer, repeat_sigma_log=repeat_sigma_log),
    )


def row(name: str, pairs: Sequence[Pair]) -> list[str]:
    """Return false verdicts, coverage, detectable change and detected planted slow-downs."""
    equal = [compare_runs(*pair) for pair in pairs]
    false = sum(one.is_shown for one in equal)
    inside = sum(one.low <= 0 <= one.high for one in equal)
    least = np.expm1(np.quantile([one.least for one in equal], [0.1, 0.5, 0.9]))
    cells = [name, str(len(pairs)), str(false), f"{100 * inside / len(pairs):.0f} %"]
    cells.append(" / ".join(f"{100 * value:.0f}" for value in least) + " %")
    for frac in SLOWER:
        changes = [compare_runs(*pair, frac) for pair in pairs]
        share = sum(one.is_shown and one.value > 0 for one in changes) / len(pairs)
        cells.append(f"{100 * share:.0f} %")
    return cells


def adjacent_pairs(runs: Sequence[Run]) -> list[Pair]:
    return list(itertools.pairwise(runs))


def all_pairs(runs: Sequence[Run]) -> list[Pair]:
    return list(itertools.combinations(runs, 2))


def table_of(rows: Iterable[list[str]]) -> str:
    """Return the results as Markdown."""
    head = ["pairs", "number", "false verdicts", "90 % interval holds", "least shown, 10/50/90 %"]
    return markdown_table([*head, *(f"+{100 * frac:.0f} %" for frac in SLOWER)], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--series", type=Path, metavar="DATA_FOLDER")
    args = parser.parse_args()
    if args.make:
        train_missing(args.runs)
    cases = [
        compare_like_verb(args.runs, *pair)
        for pair in (("base01", "throttled"), ("small1", "small8"))
    ]
    for run_difference in cases:
        print("\n".join(difference_lines(run_difference)), end="\n\n")
    false, rows = 0, []
    for text, alike in (
        ("first", names(last=NUM_CHOSEN)),
        ("later", names(first=NUM_CHOSEN + 1)),
    ):
        whole = [compare_like_verb(args.runs, *pair) for pair in itertools.pairwise(alike)]
        shown = sum(run_difference.verdict is not Verdict.NO_DIFFERENCE for run_difference in whole)
        runs = bare_runs(args.runs, alike)
        levels = [log_level(windows, repeat_sigma_log=0.0).mean for _, windows in runs]
        print(
            f"{text}: {shown} verdicts on {len(whole)} adjacent pairs of equal runs, whose levels "
            f"have a standard deviation of {100 * float(np.std(levels, ddof=1)):.0f} % (logarithm)"
        )
        false += shown
        rows.append(row(f"{text}, adjacent", adjacent_pairs(runs)))
        rows.append(row(f"{text}, any two", all_pairs(runs)))
    print()
    if args.series:
        systems = list(published_runs(args.series))
        rows.append(
            row(
                "published",
                [pair for run_difference in systems for pair in all_pairs(run_difference)],
            )
        )
    print(table_of(rows))
    is_detected = all(
        run_difference.verdict in (Verdict.SLOWER, Verdict.FASTER) for run_difference in cases
    )
    return int(false > 0 or not is_detected)


if __name__ == "__main__":
    sys.exit(main())
