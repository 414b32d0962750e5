"""A stop on advice from start to end, with an unmodified Megatron-LM on four CPU ranks.

    python benchmarks/stop.py MEGATRON_DIR --out DIR

Trains in a slow layout (TP 2, DP 2) under ``forerun run`` and ``--max-restarts=2`` until Forerun
stops it, then starts the script that it left, once for each signal that a scheduler may send.  The
first of these runs until it has calibrated itself: its offline W&B run is read back, and a third
layout (PP 2, DP 2) is predicted from the directory before and after it, then run without Forerun.
Prints the results as JSON; exits with 1 if any check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import wandb_file

MARK = "FORERUN_BENCHMARK_STOP"
NUM_MORE = 12
"""Steps after which a resumed run gets its signal."""
NUM_CALIBRATED = 60
"""Steps of the first resumed run before its signal: its window, and steps compared with its
forecast."""
NUM_SKIPPED, NUM_PLAIN = 10, 40
"""Skipped and counted steps of the third layout."""
NUM_AROUND = 10
"""Number of losses before and after the stop that are compared."""
OPTIONS = shlex.split("""
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128
    --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8
    --tensor-model-parallel-size 2 --train-iters 3000 --lr 1e-3 --mock-data --tokenizer-type
    NullTokenizer --vocab-size 1000 --transformer-impl local --distributed-backend gloo
    --no-persist-layer-norm --no-masked-softmax-fusion --no-gradient-accumulation-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --use-cpu-initialization --log-interval 1
    --eval-iters 1 --eval-interval 10000 --ckpt-format torch_dist --save-interval 1000
    --calibrate --calibrate-device=cpu --calibrate-wandb=on --calibrate-on-advice=stop
    --calibrate-restart-cost=30
""")


ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "1",
    "WANDB_MODE": "offline",
    # Use the CUDA stand-in even if nothing is calibrated.
    "FORERUN_DEVICE": "cpu",
}
STEP, PREDICTED = "calib/step_time_s", "calib/step_time_predicted_s"
THIRD = ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "2")


@dataclass(slots=True)
class Launch:
    """Output of one launch and how it ended."""

    code: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    times_ms: list[float] = field(default_factory=list)
    forerun_lines: list[str] = field(default_factory=list)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=60))
    """Last lines of its output."""
    num_survivors: int = 0
    """Number of its processes alive after its end."""

    def read(self, line: str) -> None:
        """Process one line of its output."""
        self.last.append(line)
        if "[forerun]" in line:
            self.forerun_lines.append(line.strip())
        iteration_match = re.search(r"iteration +(\d+)/.*\(ms\): (\S+) .*lm loss: (\S+)", line)
        if iteration_match:
            self.losses[int(iteration_match[1])] = float(iteration_match[3])
            self.times_ms.append(float(iteration_match[2]))


def launch(
    command: Sequence[str], directory: Path, number: int | None = None, num_more: int = NUM_MORE
) -> Launch:
    """Run a launch to its end; given a signal, send it once ``num_more`` steps are done."""
    mark, outcome = uuid.uuid4().hex, Launch()
    process = subprocess.Popen(
        command,
        cwd=directory,
        env={**os.environ, **ENVIRONMENT, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A background shell ignores SIGINT, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    is_sent = threading.Event()
    assert process.stdout is not None
    for line in process.stdout:
        outcome.read(line)
        if number is not None and len(outcome.losses) >= num_more and not is_sent.is_set():
            is_sent.set()
            process.send_signal(number)
    outcome.code = process.wait()
    time.sleep(1.0)
    outcome.num_survivors = _num_marked(mark)
    return outcome


def _num_marked(mark: str) -> int:
    """Count processes that carry the mark of a launch in their environment."""
    count = 0
    for entry in Path("/proc").iterdir():
        try:
            is_marked = entry.name.isdecimal() and mark in (entry / "environ").read_text("latin-1")
        except OSError:
            continue
        count += is_marked and int(entry.name) != os.getpid()
    return count


def run_stopped_launch(megatron: Path, out: Path) -> tuple[Launch, dict[str, Any]]:
    """Return the launch that is stopped, and the observations of it."""
    bin_dir, saves, directory = Path(sys.executable).parent, out / "checkpoints", out / "forerun"
    outcome = launch(
        [
            *(str(bin_dir / "forerun"), "run", "--", str(bin_dir / "torchrun"), "--standalone"),
            *("--nproc-per-node", "4", "--max-restarts=2", str(megatron / "pretrain_gpt.py")),
            *(*OPTIONS, "--save", str(saves), f"--calibrate-dir={directory}"),
        ],
        megatron,
    )
    markers = list(directory.glob("runs/*/stop.json"))
    if not markers:
        sys.exit("".join(outcome.last) + f"ended with {outcome.code}, and not on advice")
    marker = _json(markers[0])
    saved = int((saves / "latest_checkpointed_iteration.txt").read_text())
    last = max(outcome.losses, default=0)
    return outcome, {
        "exit": outcome.code,
        "rule": marker["rule"],
        "iteration": marker["iteration"],
        "checks": {
            "exit 93": outcome.code == 93,
            "one iteration": marker["iteration"] == saved == last,
            "not begun again": list(outcome.losses) == list(range(1, last + 1)),
            "nobody left": outcome.num_survivors == 0,
        },
        "said": outcome.forerun_lines,
    }


def run_resumed_launch(
    before: Launch, out: Path, megatron: Path, number: int, last: int, num_more: int = NUM_MORE
) -> tuple[Launch, dict[str, Any]]:
    """Run the advised layout from the checkpoint after step ``last`` until a signal ends it.

    ``before`` is the launch that trained up to that step.
    """
    outcome = launch(["bash", str(out / "forerun" / "resubmit.sh")], megatron, number, num_more)
    first = min(outcome.losses, default=0)
    old = [before.losses[step] for step in sorted(before.losses)]
    new = [outcome.losses[step] for step in sorted(outcome.losses)][:NUM_AROUND]
    fallen = fmean(old[:NUM_AROUND]) - fmean(old[-NUM_AROUND:])
    # Extrapolate linearly, since the loss may be falling fast.
    slope, _ = linear_regression(range(NUM_AROUND), old[-NUM_AROUND:])
    expected = fmean(old[-NUM_AROUND:]) + NUM_AROUND * slope
    saved = int((out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    return outcome, {
        "exit": outcome.code,
        "steps": [first, max(outcome.losses, default=0)],
        "loss_before": fmean(old[-NUM_AROUND:]),
        "loss_expected": expected,
        "loss_after": fmean(new) if new else None,
        "step_ms_before": median(before.times_ms),
        "step_ms_after": median(outcome.times_ms) if outcome.times_ms else None,
        "saved": saved,
        "checks": {
            "goes on": first == last + 1,
            "loss goes on": bool(new) and abs(fmean(new) - expected) < 0.1 * fallen,
            "nobody left": outcome.num_survivors == 0,
            "saved on a warning": number != signal.SIGUSR1 or saved == max(outcome.losses),
        },
    }


def score_logged_steps(out: Path, earlier_runs: set[Path], promised_s: float) -> dict[str, Any]:
    """Score the resumed layout's steps in the only W&B run that is not among ``earlier_runs``.

    ``promised_s`` is the stopped run's prediction for that layout.
    """
    (path,) = wandb_runs(out) - earlier_runs
    rows = [row for _, row in wandb_file.rows_of(path)]
    both = [row for row in rows if {STEP, PREDICTED} <= row.keys()]
    row: dict[str, Any] = {"file": path.name, "rows": len(rows), "predicted_rows": len(both)}
    if both:
        actual_s = median(one[STEP] for one in both)
        predicted_s = median(one[PREDICTED] for one in both)
        row |= {
            "actual_s": actual_s,
            "predicted_s": predicted_s,
            "error_frac": predicted_s / actual_s - 1,
            "promised_s": promised_s,
            "promised_error_frac": promised_s / actual_s - 1,
        }
    return {**row, "checks": {"predicted against actual": len(both) >= NUM_AROUND}}


def wandb_runs(out: Path) -> set[Path]:
    """Return files of the offline W&B runs so far."""
    return set((out / "forerun").glob("**/wandb/offline-run-*/run-*.wandb"))


def predict_third_layout(out: Path) -> dict[str, float]:
    """Return ``forerun predict`` of the third layout, from the directory's current content."""
    command = [str(Path(sys.executable).parent / "forerun"), "predict", str(out / "forerun")]
    done = subprocess.run([*command, "--json", *THIRD], capture_output=True, text=True, check=True)
    prediction = json.loads(done.stdout)
    return {name: prediction[name] for name in ("step_time_s", "low_s", "high_s")}


def run_third_layout(
    megatron: Path, before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, Any]:
    """Return the third layout's measured step and its two predictions."""
    plain = [word for word in OPTIONS if not word.startswith("--calibrate")]
    outcome = launch(
        [
            *(str(Path(sys.executable).parent / "torchrun"), "--standalone"),
            *("--nproc-per-node", "4", str(megatron / "pretrain_gpt.py"), *plain, *THIRD),
            *("--train-iters", str(NUM_SKIPPED + NUM_PLAIN)),
        ],
        megatron,
    )
    if outcome.code:
        print("".join(outcome.last), file=sys.stderr)
        return {"exit": outcome.code, "checks": {"it ran": False}}
    actual_s = median(outcome.times_ms[NUM_SKIPPED:]) / 1e3

    def compared(prediction: Mapping[str, float]) -> dict[str, Any]:
        return {
            **prediction,
            "error_frac": prediction["step_time_s"] / actual_s - 1,
            "is_inside": prediction["low_s"] <= actual_s <= prediction["high_s"],
        }

    errors = [abs(compared(predicted)["error_frac"]) for predicted in (before, after)]
    return {
        "actual_s": actual_s,
        "before": compared(before),
        "after": compared(after),
        "is_nearer": errors[1] <= errors[0],
        "checks": {"it ran": True},
    }


def _json(path: Path) -> Mapping[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> int:
    """Print the results; return 1 if a check has failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("megatron", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ckpt-format", default="torch_dist", help="torch: only TP stays")
    args = parser.parse_args()
    OPTIONS[OPTIONS.index("--ckpt-format") + 1] = args.ckpt_format
    out, megatron = args.out.resolve(), args.megatron.resolve()
    before, row = run_stopped_launch(megatron, out)
    rows, last, earlier_runs = {"stop on advice": row}, row["iteration"], wandb_runs(out)
    promised_s = _json(out / "forerun" / "decision.json")["candidate"]["step_time_s"]
    predicted_before = predict_third_layout(out)
    after, rows["SIGUSR1"] = run_resumed_launch(
        before, out, megatron, signal.SIGUSR1, last, NUM_CALIBRATED
    )
    rows["W&B"] = score_logged_steps(out, earlier_runs, promised_s)
    rows["third layout"] = run_third_layout(megatron, predicted_before, predict_third_layout(out))
    saved = rows["SIGUSR1"]["saved"]
    for number in (signal.SIGTERM, signal.SIGINT):
        _, rows[number.name] = run_resumed_launch(after, out, megatron, number, saved)
    print(json.dumps(rows, indent=1))
    checks = [(name, *check) for name, row in rows.items() for check in row["checks"].items()]
    failed = [f"{name}: {what}" for name, what, is_good in checks if not is_good]
    print("all as it should be" if not failed else f"NOT: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
