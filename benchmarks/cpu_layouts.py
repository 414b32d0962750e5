"""Calibrate on DP 2, predict seven other layouts, then run them: predicted against actual.

    python benchmarks/cpu_layouts.py --out DIR [--repetitions 3] [--iters 40]

Each repetition calibrates anew and runs every layout once, interleaved, so that a slow minute of
the machine hits all alike.  Step times are the recipe's own log, medians after ten steps.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import spearmanr

ROOT = Path(__file__).parent.parent
SKIPPED = 10
LAYOUTS: dict[str, tuple[str, ...]] = {
    "DP2 (running)": (),
    "TP2": ("--tensor-model-parallel-size", "2"),
    "TP2, sequence parallel": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "PP2": ("--pipeline-model-parallel-size", "2"),
    "PP2, two virtual stages": (
        "--pipeline-model-parallel-size",
        "2",
        "--num-layers-per-virtual-pipeline-stage",
        "1",
    ),
    "DP2, micro-batch halved": ("--micro-batch-size", "1"),
    "DP2, micro-batch doubled": ("--micro-batch-size", "4"),
    "DP2, full recompute": ("--recompute-granularity", "full"),
}
_ELAPSED = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layout of one repetition, seconds."""

    layout: str
    predicted_s: float
    low_s: float
    high_s: float
    actual_s: float


def train(options: tuple[str, ...], iters: int, calibrate_dir: Path | None = None) -> float:
    """Run the recipe on two ranks; median step time in seconds after the first ten."""
    command = [
        str(Path(sys.executable).parent / "torchrun"),
        "--standalone",
        "--nproc-per-node",
        "2",
        str(ROOT / "recipes" / "pretrain_gpt.py"),
        "--train-iters",
        str(iters),
        *options,
    ]
    if calibrate_dir is not None:
        command += ["--calibrate", f"--calibrate-dir={calibrate_dir}", "--calibrate-wandb=off"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    times_ms = [float(found) for found in _ELAPSED.findall(done.stdout)]
    if done.returncode or len(times_ms) <= SKIPPED:
        sys.exit(f"{' '.join(command)}\nfailed with {done.returncode}:\n{done.stderr[-3000:]}")
    return statistics.median(times_ms[SKIPPED:]) / 1e3


def predict(directory: Path, options: tuple[str, ...]) -> dict[str, float]:
    """``forerun predict`` as JSON."""
    command = [sys.executable, "-m", "forerun.launch.cli", "predict", str(directory), "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def repetition(out: Path, number: int, iters: int) -> list[Row]:
    """Calibrate once, then run every layout once."""
    directory = out / f"calibration-{number}"
    train((), iters, directory)
    rows = []
    for layout, options in LAYOUTS.items():
        found = predict(directory, options)
        rows.append(
            Row(
                layout=layout,
                predicted_s=found["step_time_s"],
                low_s=found["low_s"],
                high_s=found["high_s"],
                actual_s=train(options, iters),
            )
        )
        print(f"{number} {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def table(rows: list[Row]) -> str:
    """Medians over the repetitions as Markdown."""
    lines = [
        "| layout | predicted | 90 % | actual | error | repetitions inside |",
        "|---|---|---|---|---|---|",
    ]
    errors, medians = [], []
    for layout in LAYOUTS:
        mine = [row for row in rows if row.layout == layout]
        predicted, low, high, actual = (
            statistics.median(getattr(row, name) for row in mine)
            for name in ("predicted_s", "low_s", "high_s", "actual_s")
        )
        error = predicted / actual - 1
        inside = sum(row.low_s <= row.actual_s <= row.high_s for row in mine)
        medians.append((predicted, actual))
        if layout != "DP2 (running)":
            errors.append(abs(error))
        lines.append(
            f"| {layout} | {predicted:.3f} s | {low:.3f} to {high:.3f} | {actual:.3f} s | "
            f"{error * 100:+.1f} % | {inside} of {len(mine)} |"
        )
    rank = spearmanr(*zip(*medians, strict=True)).statistic
    lines.append(
        f"\nMean absolute error of the other {len(errors)}: {statistics.mean(errors) * 100:.1f} %; "
        f"rank correlation (Spearman) {rank:.2f}"
    )
    return "\n".join(lines)


def main() -> None:
    """Run all repetitions; print the table and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--iters", type=int, default=40)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [row for n in range(args.repetitions) for row in repetition(args.out, n, args.iters)]
    values = [{name: getattr(row, name) for name in Row.__slots__} for row in rows]
    (args.out / "rows.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
