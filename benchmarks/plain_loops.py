"""Calibrate plain loops on four CPU ranks, predict the other shardings, measure them alongside.

    python benchmarks/plain_loops.py --out DIR [--rounds 4] [--only-table]
    python benchmarks/plain_loops.py --out DIR --finishes [--megatron CHECKOUT] [--only-table]

``tests/support/plain_llama.py`` under torchrun (gloo): each round calibrates FSDP2 on 4, HSDP 2x2
and DDP on 4, then all three in the opposite order, so that a drift of the machine's load cancels.
Every calibration predicts the other two shardings of its half of the round, which are compared with
their measured steps; a repeat of the same sharding, half against half, shows how much of the error
is the machine's.  With ``--finishes`` every kind of training loop runs once, and the end it
reported is compared with its actual end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.runs.loop_finishes import finish_table
from forerun.calib.answers import known_step, measured_step_s, run_steps, running_config
from forerun.calib.samples import SampleTable, build_table, read_run

KINDS: tuple[str, ...] = ("fsdp2", "hsdp", "ddp")
ORDER = (*KINDS, *KINDS[::-1])
SCRIPT = Path(__file__).parents[1] / "tests" / "support" / "plain_llama.py"
Change = tuple[str, str]
PairError = tuple[float, bool]
"""Predicted over measured step minus one, and whether the 90 % interval held."""


def run(directory: Path) -> None:
    """Run one round, into an empty folder."""
    directory.mkdir(parents=True)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    with (directory / "log.txt").open("w") as log:
        subprocess.run(
            [sys.executable, *launch, str(SCRIPT), str(directory), *ORDER],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            check=True,
        )


def errors(directory: Path) -> dict[Change, list[PairError]]:
    """Return errors of each change of sharding in both halves of a round, and of repeats."""
    tables = [
        build_table(read_run(directory / f"{number}-{kind}")) for number, kind in enumerate(ORDER)
    ]
    passes = (
        dict(zip(ORDER[:3], tables[:3], strict=True)),
        dict(zip(ORDER[3:], tables[3:], strict=True)),
    )
    errors_by_change: defaultdict[Change, list[PairError]] = defaultdict(list)
    for half, other in (passes, passes[::-1]):
        for one, table in half.items():
            errors_by_change[one, one].append(pair_error(table, other[one]))
            for kind in (kind for kind in half if kind != one):
                errors_by_change[one, kind].append(pair_error(table, half[kind]))
    return dict(errors_by_change)


def pair_error(calibrated: SampleTable, changed: SampleTable) -> PairError:
    """Return the error of one run's prediction for the layout of another."""
    step = run_steps(calibrated, [known_step(calibrated)]).estimate(running_config(changed))
    measured_s = measured_step_s(changed)
    return step.time_s / measured_s - 1, step.low_s <= measured_s <= step.high_s


def table_of(rounds: Sequence[Mapping[Change, Sequence[PairError]]]) -> str:
    """Return a line for each change: errors of all rounds, and number of intervals that held."""
    lines = []
    for one, other in rounds[0]:
        each = [pair for round_errors in rounds for pair in round_errors[one, other]]
        words = ", ".join(f"{error:+.0%}" for error, _ in each)
        logs = np.log1p([error for error, _ in each])
        inside = f"{sum(is_inside for _, is_inside in each)} of {len(each)}"
        median = f"{float(np.expm1(np.median(logs))):+.0%}"
        lines.append([f"{one} to {other}", words, median, inside])
    return markdown_table(["change", "errors", "median", "inside"], lines)


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only-table", action="store_true")
    parser.add_argument("--finishes", action="store_true")
    parser.add_argument("--megatron", type=Path)
    args = parser.parse_args()
    if args.finishes:
        print(finish_table(args.out, args.megatron, only_table=args.only_table))
        return
    directories = [args.out / f"round{number}" for number in range(args.rounds)]
    for directory in directories:
        if not args.only_table and not directory.exists():
            run(directory)
    print(table_of([errors(one) for one in directories if one.exists()]))


if __name__ == "__main__":
    main()
