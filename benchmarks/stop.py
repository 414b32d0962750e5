"""A stop on advice from start to end, with an unmodified Megatron-LM on four CPU ranks.

    python benchmarks/stop.py MEGATRON_DIR --out DIR

Trains in a slow layout (TP 2, DP 2) under ``forerun run`` and ``--max-restarts=2`` until Forerun
stops it, then starts the script that it left, once for each signal that a scheduler may send.
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

MARK = "FORERUN_BENCHMARK_STOP"
NUM_MORE = 12
"""Steps after which a resumed run gets its signal."""
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
    --calibrate --calibrate-device=cpu --calibrate-wandb=off --calibrate-on-advice=stop
    --calibrate-restart-cost=30
""")


ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "1",
    # Use the CUDA stand-in even if nothing is calibrated.
    "FORERUN_DEVICE": "cpu",
}


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


def launch(command: Sequence[str], directory: Path, number: int | None = None) -> Launch:
    """Run a launch to its end; given a signal, send it once ``NUM_MORE`` steps are done."""
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
        if number is not None and len(outcome.losses) >= NUM_MORE and not is_sent.is_set():
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
    before: Launch, out: Path, megatron: Path, number: int, last: int
) -> tuple[Launch, dict[str, Any]]:
    """Run the advised layout from the checkpoint after step ``last`` until a signal ends it.

    ``before`` is the launch that trained up to that step.
    """
    outcome = launch(["bash", str(out / "forerun" / "resubmit.sh")], megatron, number)
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
    rows, last = {"stop on advice": row}, row["iteration"]
    after, rows["SIGUSR1"] = run_resumed_launch(before, out, megatron, signal.SIGUSR1, last)
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
