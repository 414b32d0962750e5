"""What probes add: a two-rank tensor-parallel step predicted from a data-parallel run.

    python benchmarks/fits/probes.py --seconds 10 -- --num-layers 2 --hidden-size 256

Trains the recipe data-parallel with probes and tensor-parallel for comparison, on this machine's
CPU over gloo, and holds the prediction with and without the probed rows against the real step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from forerun.calib.advice.plan import Candidate, compare
from forerun.calib.answers.run_measurements import measured_step_s
from forerun.calib.answers.run_steps import run_steps
from forerun.calib.arguments.megatron_args import apply_options
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import SampleTable, build_table

RECIPE = Path(__file__).parents[2] / "recipes" / "pretrain_gpt.py"
LAYOUT = ("--tensor-model-parallel-size", "2")


def main() -> None:
    """Print one row for each way to predict."""
    parser = argparse.ArgumentParser(description="what probes add to a prediction")
    parser.add_argument("--seconds", type=float, default=10.0, help="budget of the probes")
    parser.add_argument("--steps", type=int, default=16, help="steps of a window (default 16)")
    parser.add_argument("--train-iters", type=int, default=120)
    parser.add_argument("model", nargs="*", help="arguments of the recipe, behind --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        own = _train(home / "dp2", args, f"--calibrate-probe-seconds={args.seconds}")
        real = _train(home / "tp2", args, *LAYOUT)
    real_s = measured_step_s(real)
    print(
        f"DP 2 step {measured_step_s(own) * 1e3:.2f} ms, TP 2 step {real_s * 1e3:.2f} ms measured"
    )
    bare = replace(own, samples=own.samples[~own.samples["is_probe"]])
    for name, table in (("without probes", bare), ("with probes", own)):
        found = _predict(table)
        shares = ", ".join(f"{s.value} {f:.0%}" for s, f in found.source_frac.items() if f > 0.005)
        error = found.step_time_s / real_s - 1
        print(
            f"{name}: TP 2 {found.step_time_s * 1e3:.2f} ms "
            f"({found.low_s * 1e3:.2f} to {found.high_s * 1e3:.2f}), {error:+.1%}; {shares}"
        )


def _train(directory: Path, args: argparse.Namespace, *extra: str) -> SampleTable:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    flags = ["--calibrate", f"--calibrate-steps={args.steps}", "--calibrate-wandb=off"]
    subprocess.run(
        [
            *(*launcher, "--nproc-per-node", "2", str(RECIPE), "--log-interval", "1000"),
            *("--micro-batch-size", "2", "--global-batch-size", "16"),
            *("--train-iters", str(args.train_iters), *args.model),
            *(*flags, f"--calibrate-dir={directory}", *extra),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FORERUN_DEVICE": "cpu"},
    )
    return build_table(read_run(directory))


def _predict(table: SampleTable) -> Candidate:
    own = table.config()
    (found,) = compare(
        own,
        [apply_options(own, list(LAYOUT))],
        run_steps(table),
    )
    return found


if __name__ == "__main__":
    main()
