"""Cost of ``--calibrate`` to a run of the recipe, in the window and after it, from its records.

    python benchmarks/costs/overhead.py [--steps 240] [--ranks 2] [--after 40] [-- recipe options]

Hooked and bare steps alternate (ABBA) within the window; the interval is that of the report.  After
the window nothing alternates: the step timer is timed alone, in this process, and compared with the
run's median step.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from forerun.calib.answers.run_measurements import overhead
from forerun.calib.records.record_kinds import WindowRecord
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.calib.workload.run_options import AutoSwitch
from forerun.hooks.process.settings import RankInfo, Settings
from forerun.hooks.session.session import Session
from forerun.launch.store.forecast_log import read_forecasts
from forerun.launch.store.run_log import read_steps

ROOT = Path(__file__).parents[2]
PAUSE_S = 0.002
_READER = (sys.executable, "-c", "import sys; [line for line in sys.stdin]")


def run(directory: Path, args: argparse.Namespace) -> None:
    """Run the recipe under torchrun with one window of ``--steps``; exit if it fails."""
    command = [
        str(Path(sys.executable).parent / "torchrun"),
        "--standalone",
        f"--nproc-per-node={args.ranks}",
        str(ROOT / "recipes" / "pretrain_gpt.py"),
        f"--train-iters={args.steps + args.after}",
        *args.options,
        "--calibrate",
        f"--calibrate-steps={args.steps}",
        f"--calibrate-dir={directory}",
        "--calibrate-wandb=off",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nfailed with {done.returncode}:\n{done.stderr[-3000:]}")


def steps_of(directory: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the time of each step of the window, median over ranks, and a mask of hooked steps."""
    steps = build_table(read_run(directory)).steps
    by_step = steps[steps["is_clean"]].groupby("step", sort=True)
    return by_step["time_s"].median().to_numpy(), by_step["is_hooked"].last().to_numpy()


def first_forecast_s(directory: Path) -> float:
    """Return the seconds from the end of the window to the first forecast; NaN without one."""
    run = read_run(directory)
    last = next(one.last_step for one in run.records[0] if isinstance(one, WindowRecord))
    steps, made = read_steps(directory, run.run_id), read_forecasts(directory).made.get(run.run_id)
    if steps is None or not made:
        return float("nan")
    end_unix_s = steps.set_index("iteration")["unix_s"].get(last + 1, float("nan"))
    return made[0].now_unix_s - float(end_unix_s)


@contextmanager
def idle_session(*, is_last: bool) -> Iterator[Session]:
    """Yield a session outside its window; the last of two ranks has a pipe to a companion."""
    rank = int(is_last)
    place = {"rank": rank, "world_size": 2, "local_rank": rank, "local_world_size": 2}
    with tempfile.TemporaryDirectory() as home:
        session = Session(
            Settings(
                rank=RankInfo(**place, run_id="timer"),
                steps=0,
                every=10**9,
                directory=Path(home),
                wandb=AutoSwitch.OFF,
                companion_command=_READER if is_last else (),
            )
        )
        yield session
        session.finish()


def timer_s(*, is_last: bool, num_calls: int = 300) -> float:
    """Return median seconds of ``begin_step`` and ``end_step`` outside the window, caches cold."""
    taken = []
    with idle_session(is_last=is_last) as session:
        for _ in range(num_calls):
            begin_s = time.perf_counter()
            session.begin_step()
            session.end_step()
            taken.append(time.perf_counter() - begin_s)
            time.sleep(PAUSE_S)
    return float(np.median(taken[10:]))


def main() -> None:
    """Run, read the records, print both shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--after", type=int, default=10)
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        run(Path(home), args)
        times, hooked = steps_of(Path(home))
        print(f"first forecast {first_forecast_s(Path(home)):.1f} s after the window's last step")
    cost = overhead(times, hooked)
    bare_s = float(np.median(times[~hooked]))
    print(
        f"in the window: {cost.overhead_frac:+.2%} (90 %: {cost.low_frac:+.2%} to "
        f"{cost.high_frac:+.2%}; {cost.num_hooked} hooked and {cost.num_bare} bare steps, "
        f"bare step {bare_s * 1e3:.1f} ms)"
    )
    for name, is_last in (("the last rank", True), ("other ranks", False)):
        taken_s = timer_s(is_last=is_last)
        print(f"after it, {name}: {taken_s * 1e6:.1f} us per step, {taken_s / bare_s:.4%}")


if __name__ == "__main__":
    main()
