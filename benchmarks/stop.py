"""A stop on advice from begin to end, with an unmodified Megatron-LM on four CPU ranks.

    python benchmarks/stop.py MEGATRON_DIR --out DIR

Trains in a slow layout (TP 2, DP 2) under ``forerun run`` and ``--max-restarts=2`` until Forerun
stops it, then starts the script that it left, once for each signal that a scheduler may send.
Prints what was seen as JSON; exits 1 where anything is not as it should be.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

MARK = "FORERUN_BENCHMARK_STOP"
NUM_MORE = 12
"""Steps after which a resumed run gets its signal."""
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
    --calibrate --calibrate-device=cpu --calibrate-wandb=off --calibrate-on-advice=stop
    --calibrate-restart-cost=30
""")


@dataclass(slots=True)
class Launch:
    """What one launch has printed and how it ended."""

    code: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    times_ms: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    num_left: int = 0
    """Processes of it that were alive after its end."""

    def read(self, line: str) -> None:
        """Take one line of its output."""
        if "[forerun]" in line:
            self.said.append(line.strip())
        found = re.search(r"iteration +(\d+)/.*\(ms\): (\S+) .*lm loss: (\S+)", line)
        if found:
            self.losses[int(found[1])] = float(found[3])
            self.times_ms.append(float(found[2]))


def launch(command: Sequence[str], directory: Path, number: int | None = None) -> Launch:
    """Run it to its end; with a signal, send that once ``NUM_MORE`` steps are done."""
    mark, found = uuid.uuid4().hex, Launch()
    process = subprocess.Popen(
        command,
        cwd=directory,
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", MARK: mark},
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
        if number is not None and len(found.losses) >= NUM_MORE and not is_sent.is_set():
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
    marker = _json(directory / "stop.json")
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


def resumed(before: Launch, out: Path, megatron: Path, number: int, last: int) -> dict[str, Any]:
    """The advised layout, begun from the checkpoint and ended by a signal."""
    found = launch(["bash", str(out / "forerun" / "resubmit.sh")], megatron, number)
    first = min(found.losses, default=0)
    old = [before.losses[step] for step in sorted(before.losses)]
    new = [found.losses[step] for step in sorted(found.losses)][:NUM_AROUND]
    fallen = fmean(old[:NUM_AROUND]) - fmean(old[-NUM_AROUND:])
    saved = int((out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    return {
        "exit": found.code,
        "steps": [first, max(found.losses, default=0)],
        "loss_before": fmean(old[-NUM_AROUND:]),
        "loss_after": fmean(new) if new else None,
        "step_ms_before": median(before.times_ms),
        "step_ms_after": median(found.times_ms) if found.times_ms else None,
        "saved": saved,
        "checks": {
            "goes on": first == last + 1,
            "loss goes on": bool(new) and abs(fmean(new) - fmean(old[-NUM_AROUND:])) < 0.1 * fallen,
            "nobody left": found.num_left == 0,
            "saved on a warning": number != signal.SIGUSR1 or saved == max(found.losses),
        },
    }


def _json(path: Path) -> Mapping[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> int:
    """Print what was seen; 1 where a check has failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("megatron", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    out = args.out.resolve()
    before, row = stopped(args.megatron.resolve(), out)
    rows = {"stop on advice": row}
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        number = getattr(signal, name)
        rows[name] = resumed(before, out, args.megatron.resolve(), number, row["iteration"])
    print(json.dumps(rows, indent=1))
    checks = [(name, *check) for name, row in rows.items() for check in row["checks"].items()]
    failed = [f"{name}: {what}" for name, what, is_good in checks if not is_good]
    print("all as it should be" if not failed else f"NOT: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
