"""Forecasts of whole runs against their ends: published step series, and real CPU runs.

    python benchmarks/forecast.py DATA_FOLDER [--runs]
    python benchmarks/forecast.py --recipe N [--megatron DIR] --out DIR

The series are those of MLPerf's training logs (``e2e_mlperf_steps.csv.gz``): the total is forecast
from the first 20 steps, three of them warm-up.  ``--recipe`` trains N times on two ranks, with
evaluation and checkpoints; ``--megatron``, a checkout of Megatron-LM, adds a batch-size ramp and
the final passes.  Nothing is tuned on either.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from forerun.calib.forecast import DRIFT_FRAC, forecast

ROOT = Path(__file__).parent.parent
NUM_SEEN = 20
NUM_WARMUP = 3
_KEYS = ("round", "submitter", "system", "benchmark", "result")
_COMMON = (
    "--num-layers", "2", "--num-attention-heads", "4", "--seq-length", "64",
    "--micro-batch-size", "2", "--global-batch-size", "16", "--mock-data", "--log-interval", "1",
)  # fmt: skip
_MEGATRON = (
    "--max-position-embeddings", "64", "--rampup-batch-size", "8", "4", "400", "--lr", "1e-4",
    "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000", "--transformer-impl", "local",
    "--distributed-backend", "gloo", "--no-persist-layer-norm", "--no-masked-softmax-fusion",
    "--no-gradient-accumulation-fusion", "--no-bias-gelu-fusion", "--no-bias-dropout-fusion",
    "--use-cpu-initialization", "--ckpt-format", "torch",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One forecast compared with the end of its run."""

    run: str
    after_steps: int
    error_frac: float
    """Predicted over actual total time, minus one."""
    is_inside: bool
    """True if the remaining time was within the 90 % interval."""
    is_within_p95: bool
    half_width_frac: float


def series(path: Path) -> Iterator[tuple[str, list[float]]]:
    """Yield the step times of each published run, in seconds and in order."""
    keys = dict.fromkeys(_KEYS, str)
    rows = pd.read_csv(path, dtype=keys, keep_default_na=False)
    for key, run in rows.groupby(list(_KEYS), sort=False):
        yield f"{key[0]} {key[1]} {key[2]} #{key[4]}", run["train_step_time_s"].tolist()


def published(path: Path) -> list[Row]:
    """Forecast each series' total from its first steps; warm-up counts but is not learned from."""
    rows = []
    for run, times in series(path):
        predicted = forecast(
            now_unix_s=0.0,
            steps_done=NUM_SEEN,
            steps_total=len(times),
            elapsed_s=sum(times[:NUM_SEEN]),
            step_times_s=times[NUM_WARMUP:NUM_SEEN],
            drift_frac=DRIFT_FRAC,
        )
        remaining_s = sum(times[NUM_SEEN:])
        rows.append(
            Row(
                run=run,
                after_steps=NUM_SEEN,
                error_frac=predicted.total_s / sum(times) - 1.0,
                is_inside=predicted.remaining_low_s <= remaining_s <= predicted.remaining_high_s,
                is_within_p95=remaining_s <= predicted.remaining_high_s,
                half_width_frac=0.5
                * (predicted.remaining_high_s - predicted.remaining_low_s)
                / remaining_s,
            )
        )
    return rows


def train(out: Path, number: int, steps: int, megatron: Path | None, hidden_size: int) -> list[Row]:
    """Train one real run; return the forecasts it made of itself."""
    directory, saves = out / f"run-{number}", out / f"checkpoints-{number}"
    script = ROOT / "recipes" / "pretrain_gpt.py"
    options = [*_COMMON, "--train-iters", str(steps)]
    if megatron is not None:
        script = megatron / "pretrain_gpt.py"
        # 8 and 12 samples per step for 400 samples in total, then 16.
        options = [*_COMMON, *_MEGATRON, "--train-samples", str(400 + 16 * (steps - 43))]
    command = [
        *(str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2"),
        *(str(script), *options, "--hidden-size", str(hidden_size)),
        *("--eval-interval", "100", "--eval-iters", "2"),
        *("--save", str(saves), "--save-interval", "200", "--calibrate"),
        *(f"--calibrate-dir={directory}", "--calibrate-device=cpu", "--calibrate-wandb=off"),
    ]
    end_unix_s = run_to_end(command, script.parent)
    rows, run_id = [], None
    for line in (directory / "forecasts.jsonl").read_text(encoding="utf-8").splitlines():
        made = json.loads(line)
        if made.get("kind") != "forecast":
            continue
        run_id = run_id or made["run_id"]
        total_s = end_unix_s - (made["unix_s"] - made["elapsed_s"])
        low, high = made["finish_low_unix_s"], made["finish_p95_unix_s"]
        rows.append(
            Row(
                run=f"#{number} {run_id}",
                after_steps=made["iteration"],
                error_frac=(made["finish_p50_unix_s"] - end_unix_s) / total_s,
                is_inside=low <= end_unix_s <= high,
                is_within_p95=end_unix_s <= high,
                half_width_frac=0.5 * (high - low) / (end_unix_s - made["unix_s"]),
            )
        )
    return rows


def run_to_end(command: Sequence[str], directory: Path) -> float:
    """Return the Unix time of the last line that training itself wrote; exit if training fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    end_unix_s, last = time.time(), []
    for line in process.stdout:
        last = [*last[-40:], line]
        if "[forerun]" not in line and line.strip():
            end_unix_s = time.time()
    if process.wait():
        sys.exit(f"{' '.join(command)}\nfailed with {process.returncode}:\n{''.join(last)}")
    return end_unix_s


def table(rows: Sequence[Row]) -> str:
    """Return every row as Markdown."""
    lines = ["| run | after | error | 90 % interval | held |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.run} | {row.after_steps} | {row.error_frac * 100:+.2f} % | "
        f"+- {row.half_width_frac * 100:.1f} % | {'yes' if row.is_inside else 'no'} |"
        for row in rows
    ]
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """Return errors and coverage of many forecasts in one line."""
    errors = sorted(abs(row.error_frac) for row in rows)
    coverage = statistics.mean(row.is_inside for row in rows)
    below = statistics.mean(row.is_within_p95 for row in rows)
    return (
        f"{len(rows)} forecasts: median error {statistics.median(errors) * 100:.2f} %, largest "
        f"{errors[-1] * 100:.1f} %; 90 % interval held {coverage * 100:.0f} %, P95 not exceeded "
        f"{below * 100:.0f} %"
    )


def first_after(rows: Sequence[Row], steps: int) -> list[Row]:
    """Return each run's first forecast after ``steps`` steps."""
    first_rows: dict[str, Row] = {}
    for row in rows:
        if row.after_steps >= steps:
            first_rows.setdefault(row.run, row)
    return list(first_rows.values())


def main() -> None:
    """Print the requested tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, nargs="?", help="folder of e2e_mlperf_steps.csv.gz")
    parser.add_argument("--runs", action="store_true", help="every run, not only the summary")
    parser.add_argument("--recipe", type=int, default=0, metavar="N")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--megatron", type=Path)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("forecast-out"))
    args = parser.parse_args()
    if args.data is not None:
        rows = published(args.data / "e2e_mlperf_steps.csv.gz")
        print(table(rows) if args.runs else summary(rows))
        if args.runs:
            print(f"\n{summary(rows)}")
    rows = []
    for number in range(args.recipe):
        rows += train(args.out, number, args.steps, args.megatron, args.hidden_size)
    if rows:
        print(table(rows) + "\n")
    for steps in (20, 100):
        if first_rows := first_after(rows, steps):
            print(f"after {steps} steps: {summary(first_rows)}")


if __name__ == "__main__":
    main()
