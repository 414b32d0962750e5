"""Cost of each verb on calibrated runs, compared with importing the packages that read tables.

    python benchmarks/verbs.py quickstart-out [--repetitions 5]

A row for each verb, on that directory and on one of 8 ranks and 20 windows with planted times
(``runs/synthetic_run.py``).  Processor time (user and system) and wall time of whole processes, the
minimum over the repetitions; the reference is ``import pandas, pyarrow`` in the same run.  The
first answer fits and caches the fit, or caches the report; the others read it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from forerun.benchmarks.markdown_text import markdown_head, markdown_row
from forerun.benchmarks.published.model_shapes import public_shape
from forerun.benchmarks.runs.synthetic_run import RUN_ID, write_synthetic_run
from forerun.calib.answers import Request, analyse
from forerun.calib.forecast import Ended
from forerun.calib.samples import build_table, read_run
from forerun.calib.workload import Batch, Cadence, Parallelism, Precision, RunConfig
from forerun.launch.store import Place, append_end
from forerun.launch.views import write_answer

OVER_BAR_S = 0.5
NUM_WINDOWS = 20
START_UNIX_S = 1.79e9
FORERUN = (sys.executable, "-m", "forerun")
REFERENCE = "import pandas, pyarrow"
HEAD = ("directory", "what", "first s", "least s", "least wall s", "over the import s", "bar s")
EIGHT_RANKS = RunConfig(
    model=public_shape("GPT3_175B", seq_length=512, num_layers=2),
    parallelism=Parallelism(
        tp=4, dp=2, is_sequence_parallel=True, is_optimizer_distributed=True, ranks_per_node=8
    ),
    batch=Batch(micro_batch_size=1, global_batch_size=4),
    precision=Precision.BF16,
    device="NVIDIA H100 80GB HBM3",
    cadence=Cadence(train_iters=1000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Time used by one process."""

    processor_s: float
    wall_s: float

    def least(self, other: Spent) -> Spent:
        """Return the minimum of each."""
        return Spent(
            processor_s=min(self.processor_s, other.processor_s),
            wall_s=min(self.wall_s, other.wall_s),
        )


def main() -> None:
    """Print a row for each verb."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--eight-ranks", type=Path, help="where the other run is kept, or lies")
    arguments = parser.parse_args()
    print(markdown_head(HEAD))
    with tempfile.TemporaryDirectory() as name:
        large = arguments.eight_ranks or Path(name)
        homes = {"quick start": arguments.directory, "8 ranks x 20 windows": large}
        if not (large / "forecasts.jsonl").exists():
            write_answered_run(large)
        for run_label, home in homes.items():
            for row in rows(run_label, commands(home), arguments.repetitions):
                print(markdown_row(row), flush=True)


def commands(home: Path) -> dict[str, tuple[str, ...]]:
    """Return the command lines of every verb on a run, and of those that need none."""
    for cached in (*home.glob("fit-*.npz"), *home.glob("report-*.json")):
        cached.unlink()
    where = str(home)
    return {
        REFERENCE: (sys.executable, "-c", REFERENCE),
        "--version": (*FORERUN, "--version"),
        "plan --help": (*FORERUN, "plan", "--help"),
        "doctor": (*FORERUN, "doctor"),
        "status": (*FORERUN, "status", where),
        "status --watch": (*FORERUN, "status", where, "--watch"),
        "report": (*FORERUN, "report", where),
        "predict": (*FORERUN, "predict", where, "--tp", "2"),
        "plan": (*FORERUN, "plan", where),
        "explain": (*FORERUN, "explain", where, "1", "running"),
    }


def rows(
    run_label: str, argvs: Mapping[str, tuple[str, ...]], repetitions: int
) -> Iterator[tuple[object, ...]]:
    """Yield a row for each command; they take turns, so that all see the same machine load."""
    first = {name: spent(argv) for name, argv in argvs.items()}
    least = dict(first)
    for _ in range(repetitions):
        for name, argv in argvs.items():
            least[name] = least[name].least(spent(argv))
    reference_s = least[REFERENCE].processor_s
    for name, cost in least.items():
        over_s = cost.processor_s - reference_s
        times = (first[name].processor_s, cost.processor_s, cost.wall_s)
        figures = (f"{time_s:.2f}" for time_s in times)
        yield run_label, name, *figures, f"{over_s:+.2f}", "" if name == REFERENCE else OVER_BAR_S


def spent(argv: tuple[str, ...]) -> Spent:
    """Return the time of a process with its children; it must succeed or cross a threshold."""
    before, begin_s = os.times(), time.perf_counter()
    done = subprocess.run(argv, check=False, stdout=subprocess.DEVNULL)
    wall_s, after = time.perf_counter() - begin_s, os.times()
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}")
    user_s = after.children_user - before.children_user
    system_s = after.children_system - before.children_system
    return Spent(processor_s=user_s + system_s, wall_s=wall_s)


def write_answered_run(directory: Path) -> None:
    """Write a finished run of 8 ranks, with everything that its companion would have written."""
    write_synthetic_run(directory, EIGHT_RANKS, num_windows=NUM_WINDOWS)
    run = read_run(directory)
    table = build_table(run)
    request = Request(now_unix_s=START_UNIX_S, last_step=int(table.steps["step"].max()) + 1)
    answer = analyse(table, request, problems=run.problems)
    place = Place(directory=directory, run_id=RUN_ID)
    write_answer(place, table, request, answer)
    end_unix_s = answer.forecast.finish_p50_unix_s
    total = EIGHT_RANKS.cadence.train_iters
    ended = Ended(
        run_id=RUN_ID,
        last_step_unix_s=end_unix_s,
        end_unix_s=end_unix_s,
        iteration=total,
        steps_total=total,
    )
    append_end(place, ended)


if __name__ == "__main__":
    main()
