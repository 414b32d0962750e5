"""A stop on advice from begin to end, with an unmodified Megatron-LM on four CPU ranks.

    python benchmarks/stop.py MEGATRON_DIR --out DIR

Trains in a slow layout (TP 2, DP 2) under ``forerun run`` and ``--max-restarts=2`` until Forerun
stops it, then starts the script that it left, once for each signal that a scheduler may send.  The
first of these lives until it has calibrated itself: what its offline W&B run holds is read back,
and a third layout (PP 2, DP 2) is predicted from the directory before it and after it, then run
without Forerun.  Prints what was seen as JSON; exits 1 where anything is not as it should be.
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
"""The same of the first one: its window, and steps that are held against what it says."""
NUM_SKIPPED, NUM_PLAIN = 10, 40
"""Steps of the third layout that are not counted, and that are."""
NUM_AROUND = 10
"""Losses before and after the stop that are compared."""
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
    # The stand-in for CUDA, also where nothing is calibrated.
    "FORERUN_DEVICE": "cpu",
}
STEP, PREDICTED = "calib/step_time_s", "calib/step_time_predicted_s"
THIRD = ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "2")


@dataclass(slots=True)
class Launch:
    """What one launch has printed and how it ended."""

    code: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    times_ms: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=60))
    """Its last lines."""
    num_left: int = 0
    """Processes of it that were alive after its end."""

    def read(self, line: str) -> None:
        """Take one line of its output."""
        self.last.append(line)
        if "[forerun]" in line:
            self.said.append(line.strip())
        found = re.search(r"iteration +(\d+)/.*\(ms\): (\S+) .*lm loss: (\S+)", line)
        if found:
            self.losses[int(found[1])] = float(found[3])
            self.times_ms.append(float(found[2]))


def launch(
    command: Sequence[str], directory: Path, number: int | None = None, num_more: int = NUM_MORE
) -> Launch:
    """Run it to its end; with a signal, send that once ``num_more`` steps are done."""
    mark, found = uuid.uuid4().hex, Launch()
    process = subprocess.Popen(
        command,
        cwd=directory,
        env={**os.environ, **ENVIRONMENT, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell in the background ignores it, and so would all that we start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    is_sent = threading.Event()
    assert process.stdout is not None
    for line in process.stdout:
        found.read(line)
        if number is not None and len(found.losses) >= num_more and not is_sent.is_set():
            is_sent.set()
            process.send_signal(number)
    found.code = process.wait()
    time.sleep(1.0)
    found.num_left = _num_marked(mark)
    return found


def _num_marked(mark: str) -> int:
    """Processes that carry the mark of a launch in their environment."""
    count = 0
    for entry in Path("/proc").iterdir():
        try:
            is_marked = entry.name.isdecimal() and mark in (entry / "environ").read_text("latin-1")
        except OSError:
            continue
        count += is_marked and int(entry.name) != os.getpid()
    return count


def stopped(megatron: Path, out: Path) -> tuple[Launch, dict[str, Any]]:
    """The launch that is stopped, and what was seen of it."""
    bin_dir, saves, directory = Path(sys.executable).parent, out / "checkpoints", out / "forerun"
    found = launch(
        [
            *(str(bin_dir / "forerun"), "run", "--", str(bin_dir / "torchrun"), "--standalone"),
            *("--nproc-per-node", "4", "--max-restarts=2", str(megatron / "pretrain_gpt.py")),
            *(*OPTIONS, "--save", str(saves), f"--calibrate-dir={directory}"),
        ],
        megatron,
    )
    markers = list(directory.glob("runs/*/stop.json"))
    if not markers:
        sys.exit("".join(found.last) + f"ended with {found.code}, and not on advice")
    marker = _json(markers[0])
    saved = int((saves / "latest_checkpointed_iteration.txt").read_text())
    last = max(found.losses, default=0)
    return found, {
        "exit": found.code,
        "rule": marker["rule"],
        "iteration": marker["iteration"],
        "checks": {
            "exit 93": found.code == 93,
            "one iteration": marker["iteration"] == saved == last,
            "not begun again": list(found.losses) == list(range(1, last + 1)),
            "nobody left": found.num_left == 0,
        },
        "said": found.said,
    }


def resumed(
    before: Launch, out: Path, megatron: Path, number: int, last: int, num_more: int = NUM_MORE
) -> tuple[Launch, dict[str, Any]]:
    """The advised layout, begun from the checkpoint after step ``last`` and ended by a signal.

    ``before`` is the launch that trained up to that step.
    """
    found = launch(["bash", str(out / "forerun" / "resubmit.sh")], megatron, number, num_more)
    first = min(found.losses, default=0)
    old = [before.losses[step] for step in sorted(before.losses)]
    new = [found.losses[step] for step in sorted(found.losses)][:NUM_AROUND]
    fallen = fmean(old[:NUM_AROUND]) - fmean(old[-NUM_AROUND:])
    # Where the loss falls fast, what comes next lies on the line through what was last.
    slope, _ = linear_regression(range(NUM_AROUND), old[-NUM_AROUND:])
    expected = fmean(old[-NUM_AROUND:]) + NUM_AROUND * slope
    saved = int((out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    return found, {
        "exit": found.code,
        "steps": [first, max(found.losses, default=0)],
        "loss_before": fmean(old[-NUM_AROUND:]),
        "loss_expected": expected,
        "loss_after": fmean(new) if new else None,
        "step_ms_before": median(before.times_ms),
        "step_ms_after": median(found.times_ms) if found.times_ms else None,
        "saved": saved,
        "checks": {
            "goes on": first == last + 1,
            "loss goes on": bool(new) and abs(fmean(new) - expected) < 0.1 * fallen,
            "nobody left": found.num_left == 0,
            "saved on a warning": number != signal.SIGUSR1 or saved == max(found.losses),
        },
    }


def logged(out: Path, own: set[Path], promised_s: float) -> dict[str, Any]:
    """What the only W&B run that is not among ``own`` says of the resumed layout's steps.

    ``promised_s`` is what the stopped run had predicted of that layout.
    """
    (path,) = wandb_runs(out) - own
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
    """Files of the offline W&B runs so far."""
    return set((out / "forerun").glob("**/wandb/offline-run-*/run-*.wandb"))


def predicted_third(out: Path) -> dict[str, float]:
    """``forerun predict`` of the third layout, from what the directory holds by now."""
    command = [str(Path(sys.executable).parent / "forerun"), "predict", str(out / "forerun")]
    done = subprocess.run([*command, "--json", *THIRD], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return {name: found[name] for name in ("step_time_s", "low_s", "high_s")}


def third(
    megatron: Path, before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, Any]:
    """The third layout's real step beside its two predictions."""
    plain = [word for word in OPTIONS if not word.startswith("--calibrate")]
    found = launch(
        [
            *(str(Path(sys.executable).parent / "torchrun"), "--standalone"),
            *("--nproc-per-node", "4", str(megatron / "pretrain_gpt.py"), *plain, *THIRD),
            *("--train-iters", str(NUM_SKIPPED + NUM_PLAIN)),
        ],
        megatron,
    )
    if found.code:
        print("".join(found.last), file=sys.stderr)
        return {"exit": found.code, "checks": {"it ran": False}}
    actual_s = median(found.times_ms[NUM_SKIPPED:]) / 1e3

    def held(told: Mapping[str, float]) -> dict[str, Any]:
        return {
            **told,
            "error_frac": told["step_time_s"] / actual_s - 1,
            "is_inside": told["low_s"] <= actual_s <= told["high_s"],
        }

    errors = [abs(held(told)["error_frac"]) for told in (before, after)]
    return {
        "actual_s": actual_s,
        "before": held(before),
        "after": held(after),
        "is_nearer": errors[1] <= errors[0],
        "checks": {"it ran": True},
    }


def _json(path: Path) -> Mapping[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> int:
    """Print what was seen; 1 where a check has failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("megatron", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    out, megatron = args.out.resolve(), args.megatron.resolve()
    before, row = stopped(megatron, out)
    rows, last, own = {"stop on advice": row}, row["iteration"], wandb_runs(out)
    promised_s = _json(out / "forerun" / "decision.json")["candidate"]["step_time_s"]
    told_before = predicted_third(out)
    after, rows["SIGUSR1"] = resumed(before, out, megatron, signal.SIGUSR1, last, NUM_CALIBRATED)
    rows["W&B"] = logged(out, own, promised_s)
    rows["third layout"] = third(megatron, told_before, predicted_third(out))
    saved = rows["SIGUSR1"]["saved"]
    for number in (signal.SIGTERM, signal.SIGINT):
        _, rows[number.name] = resumed(after, out, megatron, number, saved)
    print(json.dumps(rows, indent=1))
    checks = [(name, *check) for name, row in rows.items() for check in row["checks"].items()]
    failed = [f"{name}: {what}" for name, what, is_good in checks if not is_good]
    print("all as it should be" if not failed else f"NOT: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
