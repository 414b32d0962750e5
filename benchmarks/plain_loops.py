"""Calibrate plain loops on four CPU ranks, predict the other shardings, measure them beside it.

    python benchmarks/plain_loops.py --out DIR [--rounds 4] [--only-table]
    python benchmarks/plain_loops.py --out DIR --finishes [--megatron CHECKOUT] [--only-table]

``tests/support/plain_llama.py`` under torchrun (gloo): each round calibrates FSDP2 on 4, HSDP 2x2
and DDP on 4, then all three again in the opposite order, so that a drift of the machine's load goes
both ways.  Every calibration predicts the other two shardings of its half of the round, whose
measured steps are held against that; a repeat of the same sharding, half against half, says how
much of the error is the machine.  With ``--finishes`` every kind of training loop runs once:
what it was told of its end, against that.
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
Told = tuple[float, bool]
"""Predicted over measured step minus one, and whether the 90 % interval held."""


def run(directory: Path) -> None:
    """One round, into an empty folder."""
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


def errors(directory: Path) -> dict[Change, list[Told]]:
    """Of each change of sharding in both halves of a round; of a kind to itself between them."""
    tables = [
        build_table(read_run(directory / f"{number}-{kind}")) for number, kind in enumerate(ORDER)
    ]
    halves = (
        dict(zip(ORDER[:3], tables[:3], strict=True)),
        dict(zip(ORDER[3:], tables[3:], strict=True)),
    )
    found: defaultdict[Change, list[Told]] = defaultdict(list)
    for half, other in (halves, halves[::-1]):
        for one, table in half.items():
            found[one, one].append(told(table, other[one]))
            for kind in (kind for kind in half if kind != one):
                found[one, kind].append(told(table, half[kind]))
    return dict(found)


def told(calibrated: SampleTable, changed: SampleTable) -> Told:
    """What one run says of the layout of another, against that one's measured step."""
    step = run_steps(calibrated, [known_step(calibrated)]).estimate(running_config(changed))
    measured_s = measured_step_s(changed)
    return step.time_s / measured_s - 1, step.low_s <= measured_s <= step.high_s


def table_of(rounds: Sequence[Mapping[Change, Sequence[Told]]]) -> str:
    """A line for each change: the errors of all rounds, and how many intervals held."""
    lines = []
    for one, other in rounds[0]:
        each = [pair for found in rounds for pair in found[one, other]]
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
    asked = parser.parse_args()
    if asked.finishes:
        print(finish_table(asked.out, asked.megatron, only_table=asked.only_table))
        return
    directories = [asked.out / f"round{number}" for number in range(asked.rounds)]
    for directory in directories:
        if not asked.only_table and not directory.exists():
            run(directory)
    print(table_of([errors(one) for one in directories if one.exists()]))


if __name__ == "__main__":
    main()
