"""Cost of all sinks together to training: blocks of steps with and without them, in one run.

    python benchmarks/costs/sinks.py [--steps 1500] [--block 40] [--ranks 2] [-- recipe options]

The recipe trains under torchrun with its real companion, whose sinks (W&B offline, TensorBoard,
Prometheus, a TrainJob's server, Slurm's comment) receive values in half of the blocks, in the order
ABBA.  Compared are medians of neighbouring blocks, and the processor time of the companion and its
children, an upper bound on what training could lose to them.  Finally one call into a host's own
W&B run is timed, which is made in the training process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
SKIPPED_S = 1.5
"""Seconds skipped at the beginning of a block, while values of the one before are still in flight:
the companion polls steps a second apart."""
_TICKS = os.sysconf("SC_CLK_TCK")
_ROWS, _BLOCK, _SCONTROL = "SINKS_ROWS", "SINKS_BLOCK", "#!/bin/sh\nexit 0\n"


def is_on(block: int) -> bool:
    """Return True in the blocks with sinks: ABBA, so that a trend affects both alike."""
    return block % 4 in (0, 3)


def run_companion() -> int:
    """Run the real companion with sinks off in half of the blocks; an extra sink takes notes."""
    from forerun.launch.companion import main as run
    from forerun.launch.sinks import Sink, registry

    block = int(os.environ[_BLOCK])

    def switched(opener: registry.OpenSink) -> registry.OpenSink:
        def opened(settings: Any) -> Sink:
            sink = opener(settings)
            take = sink.step

            def step(number: int, values: Mapping[str, float]) -> None:
                if is_on(number // block):
                    take(number, values)

            sink.step = step  # type: ignore[method-assign]
            return sink

        return opened

    class Noted(Sink):
        def __init__(self, settings: Any) -> None:
            super().__init__("noted")
            self._rows: list[tuple[int, float, float]] = []

        def step(self, step: int, values: Mapping[str, float]) -> None:
            if "step_time_s" in values and "step_time_predicted_s" in values:
                self._rows.append((step, values["step_time_s"], cpu_s()))

        def close(self, summary: Mapping[str, Any]) -> None:
            Path(os.environ[_ROWS]).write_text(json.dumps(self._rows))

    registry.SINKS |= {name: switched(opener) for name, opener in registry.SINKS.items()}
    registry.SINKS["noted"] = Noted
    return run(sys.argv[sys.argv.index("--settings-fd") :])


def cpu_s() -> float:
    """Return processor seconds of this process and of its living children."""
    used_s = time.process_time()
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            words = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            used_s += (int(words[11]) + int(words[12])) / _TICKS
    return used_s


def train(home: Path, args: argparse.Namespace) -> list[tuple[int, float, float]]:
    """Return (step, its time, processor seconds so far) of each step after the window."""
    from status_server import status_server

    for name, text in (
        ("scontrol", _SCONTROL),
        ("python", f'#!/bin/sh\nexec {sys.executable} {Path(__file__)} --as-companion "$@"\n'),
    ):
        (home / name).write_text(text)
        (home / name).chmod(0o755)
    command = [
        str(Path(sys.executable).parent / "torchrun"), "--standalone",
        f"--nproc-per-node={args.ranks}", str(ROOT / "recipes" / "pretrain_gpt.py"),
        f"--train-iters={args.steps}", *args.options, "--calibrate", "--calibrate-every=0",
        f"--calibrate-dir={home / 'out'}", f"--calibrate-python={home / 'python'}",
        f"--calibrate-prometheus={home / 'forerun.prom'}", "--calibrate-slurm-comment=on",
    ]  # fmt: skip
    with status_server(home) as server:
        environ = {
            **os.environ, **server.environ, "SLURM_JOB_ID": "1", "WANDB_MODE": "offline",
            "PATH": f"{home}:{os.environ['PATH']}", _ROWS: str(home / "rows.json"),
            _BLOCK: str(args.block),
        }  # fmt: skip
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        posts = len(server.taken)
    if done.returncode or not (home / "rows.json").exists():
        output = done.stdout[-3000:] + done.stderr[-3000:]
        sys.exit(f"{' '.join(command)}\nfailed with {done.returncode}:\n{output}")
    where = [line for line in done.stdout.splitlines() if "] report: " in line]
    print(f"{where[0] if where else ''}\n{posts} posts to the TrainJob's server")
    rows = json.loads((home / "rows.json").read_text())
    return [(int(step), float(time_s), float(used_s)) for step, time_s, used_s in rows]


def blocks_of(
    rows: Sequence[tuple[int, float, float]], size: int
) -> tuple[list[float], list[float], list[bool]]:
    """Return each whole block's median step, processor share of its time, and if sinks were on."""
    medians, shares, on = [], [], []
    first, last = rows[0][0] // size + 1, rows[-1][0] // size
    for block in range(first, last):
        whole = [row for row in rows if row[0] // size == block]
        since_s = np.cumsum([time_s for _, time_s, _ in whole])
        settled = [row for row, end_s in zip(whole, since_s, strict=True) if end_s > SKIPPED_S]
        if len(whole) < size or len(settled) < size // 2:
            continue
        medians.append(float(np.median([time_s for _, time_s, _ in settled])))
        wall_s = sum(time_s for _, time_s, _ in settled[1:])
        shares.append((settled[-1][2] - settled[0][2]) / wall_s)
        on.append(is_on(block))
    return medians, shares, on


def host_call_s(num_calls: int = 400) -> tuple[float, float]:
    """Return median and 95th percentile, in seconds, of a call into a host's offline run."""
    import wandb

    from forerun.hooks.process import CompanionFiles, CompanionOutput, HostWandb

    with tempfile.TemporaryDirectory() as home:
        quiet = wandb.Settings(silent=True, console="off")
        run = wandb.init(project="host", dir=home, mode="offline", settings=quiet)
        files = CompanionFiles(Path(home), lambda: "")
        values = {"step_time_s": 1.0, "finish_p50_unix_s": 2e9, "tokens_per_s": 1e4}
        files.output = CompanionOutput(values=values)
        host = HostWandb(files)
        taken = []
        for step in range(num_calls):
            begin_s = time.perf_counter()
            host.log(step=step, time_s=1.0, is_after_window=True, unix_s=1e9)
            taken.append(time.perf_counter() - begin_s)
            time.sleep(0.002)
        run.finish()
    return float(np.median(taken[10:])), float(np.quantile(taken[10:], 0.95))


def main() -> None:
    """Train, read the rows, print both shares and the call."""
    from forerun.calib.answers import overhead

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--block", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        rows = train(Path(home), args)
    medians, shares, on = blocks_of(rows, args.block)
    cost = overhead(medians, on)
    bare_s = float(
        np.median([time_s for time_s, taken in zip(medians, on, strict=True) if not taken])
    )
    print(
        f"step with all sinks against none: {cost.overhead_frac:+.3%} (upper 95 % bound "
        f"{cost.high_frac:+.3%}; {cost.num_hooked} and {cost.num_bare} blocks of {args.block}, "
        f"step {bare_s * 1e3:.1f} ms)"
    )
    share = np.asarray(shares)
    companion_cost = overhead(1.0 + share, on)
    print(
        f"processor time of the companion: {share[~np.asarray(on)].mean():.3%} of one processor "
        f"without sinks, {companion_cost.overhead_frac:+.3%} by them "
        f"(upper 95 % bound {companion_cost.high_frac:+.3%})"
    )
    median_s, late_s = host_call_s()
    print(
        f"a call into a host's W&B run: {median_s * 1e6:.0f} us (95 %: {late_s * 1e6:.0f} us), "
        f"{median_s / bare_s:.3%} of that step, {median_s:.3%} of one of a second"
    )


if __name__ == "__main__":
    if "--as-companion" in sys.argv:
        sys.exit(run_companion())
    main()
