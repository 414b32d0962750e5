"""Predicted gains compared with actual gains, as ratios of runs that take turns.

    python benchmarks/gains.py --out DIR [--rounds 5] [--sizes recipe,wider,deeper] [--load]
        [--megatron DIR] [--minutes 60] [--only-table]

Each round of a size calibrates the running layout of ``recipes/pretrain_gpt.py`` (DP 2, gloo), then
trains that layout bare, eight changes of it, and it bare once more, in turns of a few steps, each
paused while another runs (``runs/interleaved.py``).  A run's figure is the lower quartile of its
step times; the true gain of a change is its ratio to the mean of both bare runs.  Floor: one bare
run of a round against the other; a round whose floor is above 0.08 is repeated, up to three times.
``--load`` runs a process that is busy at random times alongside all runs.  ``--megatron`` adds two
sizes of the loop of Megatron-LM's own ``pretrain_gpt.py`` (an exported tag with ``helpers_cpp``
built).  Predictions come from the function behind ``forerun predict`` and the round's own
calibration.  Runs are stored in DIR as they end: the same command resumes, and ``--only-table``
only makes the table of the stored runs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.megatron_matrix import MODEL
from forerun.benchmarks.runs.cpu_runs import ROOT, WINDOW_STEPS
from forerun.benchmarks.runs.interleaved import interleaved_step_times
from forerun.benchmarks.runs.launches import output_of, torchrun_words
from forerun.calib.advice import compare
from forerun.calib.arguments import apply_options
from forerun.launch.known import open_machine

CHANGES: dict[str, tuple[str, ...]] = {
    "micro-batch 4": ("--micro-batch-size", "4"),
    "micro-batch 8": ("--micro-batch-size", "8"),
    "overlapped reduction": ("--overlap-grad-reduce",),
    "full recompute": (
        *("--recompute-granularity", "full"),
        *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
    "selective recompute": ("--recompute-granularity", "selective"),
    "TP2": ("--tensor-model-parallel-size", "2"),
    "PP2": ("--pipeline-model-parallel-size", "2"),
    "ZeRO1": ("--use-distributed-optimizer",),
}
Turns = dict[str, list[list[float]]]
"""Seconds of the steps of each run, by turn."""
BASES = ("base", "base again")
SIZES: dict[str, tuple[str, ...]] = {
    "recipe": (),
    "wider": ("--hidden-size", "256"),
    "deeper": ("--num-layers", "8"),
}
MEGATRON_SIZES: dict[str, tuple[str, ...]] = {
    "megatron": ("--hidden-size", "128", "--seq-length", "128", "--global-batch-size", "16"),
    "megatron wider": ("--hidden-size", "256", "--seq-length", "128", "--global-batch-size", "16"),
}
TURNS, ENDLESS = 12, "1000000"
FLOOR_BAR, TRIES = 0.08, 3
WARMUP = 3
LIMIT_S = 240.0
LOAD = """
import random, time
while True:
    end = time.monotonic() + random.uniform(1.0, 8.0)
    while time.monotonic() < end:
        pass
    time.sleep(random.uniform(1.0, 8.0))
"""


def main() -> int:
    """Make the missing runs, then print the table; return 0 if anything could be judged."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--megatron", type=Path)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--only-table", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + 60 * args.minutes
    sizes = [*filter(None, args.sizes.split(",")), *(MEGATRON_SIZES if args.megatron else ())]
    if not args.only_table:
        with _background_load(is_loaded=args.load):
            for number in range(args.rounds):
                for size in sizes:
                    _round(args.out, Loop.of(size, args.megatron), number, end_s)
    rows = [row for path in sorted(args.out.glob("*.json")) for row in score_round(path)]
    print(table(rows))
    return 0 if rows else 1


@contextmanager
def _background_load(*, is_loaded: bool) -> Iterator[None]:
    """Run a process that is busy at random times, for the duration of the runs."""
    process = subprocess.Popen([sys.executable, "-c", LOAD]) if is_loaded else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A program with the options of one size."""

    size: str
    words: tuple[str, ...]
    cwd: Path | None = None

    @staticmethod
    def of(size: str, megatron: Path | None) -> Loop:
        """Return the recipe's loop, or Megatron-LM's own."""
        if size not in MEGATRON_SIZES:
            recipe = str(ROOT / "recipes" / "pretrain_gpt.py")
            return Loop(size=size, words=(recipe, *SIZES[size]))
        place = MODEL.index("--train-iters")
        model = (*MODEL[:place], *MODEL[place + 2 :])
        options = ("--max-position-embeddings", "128", *MEGATRON_SIZES[size])
        return Loop(size=size, words=("pretrain_gpt.py", *model, *options), cwd=megatron)

    def command(self, iters: str, *more: str) -> list[str]:
        """Return the launch on two ranks; the last of repeated options wins."""
        return [*torchrun_words(), *self.words, "--train-iters", iters, *more]


def _round(out: Path, loop: Loop, number: int, end_s: float) -> None:
    """Make one calibration and all runs of a round, unless stored already."""
    for attempt in range(TRIES):
        path = out / f"{loop.size.replace(' ', '_')}-{number}-{attempt}.json"
        record = json.loads(path.read_text("utf-8")) if path.exists() else {}
        if not record:
            if time.monotonic() > end_s:
                return
            record = _ran(path.with_suffix(""), loop, number)
            path.write_text(json.dumps(record) + "\n", "utf-8")
            print(f"{path.stem}: floor {floor_of(record):.3f}", file=sys.stderr, flush=True)
        if floor_of(record) <= FLOOR_BAR:
            return


def _ran(directory: Path, loop: Loop, number: int) -> Turns:
    flags = ["--calibrate", f"--calibrate-dir={directory}", "--calibrate-wandb=off"]
    flags += [f"--calibrate-steps={WINDOW_STEPS}"]
    iters = str(WARMUP + WINDOW_STEPS + 1)
    output_of(loop.command(iters, *flags), limit_s=LIMIT_S, cwd=loop.cwd)
    names = [*CHANGES]
    random.Random(number).shuffle(names)
    names = [BASES[0], *names[:4], BASES[1], *names[4:]]
    commands = {name: loop.command(ENDLESS, *CHANGES.get(name, ())) for name in names}
    logs = directory.with_name(f"{directory.name}-logs")
    return interleaved_step_times(commands, logs=logs, num_turns=TURNS, cwd=loop.cwd)


def step_s(turns: Turns, name: str) -> float:
    """Return the lower quartile of all steps of a run."""
    return statistics.quantiles([one for turn in turns[name] for one in turn], n=4)[0]


def floor_of(turns: Turns) -> float:
    """Return the log difference of the two bare runs; infinite if either failed."""
    if not all(name in turns for name in BASES):
        return math.inf
    first, second = (step_s(turns, name) for name in BASES)
    return abs(math.log(first / second))


def score_round(path: Path) -> Iterator[dict]:
    """Yield a row for each change of a round: predicted and true log ratio, and interval ends."""
    turns = json.loads(path.read_text("utf-8"))
    directory = path.with_suffix("")
    if floor_of(turns) > FLOOR_BAR or not directory.is_dir():
        return
    machine = open_machine(directory)
    names = [name for name in CHANGES if name in turns]
    configs = [apply_options(machine.running, CHANGES[name]) for name in names]
    base = statistics.mean(math.log(step_s(turns, name)) for name in BASES)
    for name, one in zip(names, compare(machine.running, configs, machine.steps), strict=True):
        yield {
            "size": path.stem.partition("-")[0],
            "change": name,
            "floor": floor_of(turns),
            "promised": math.log1p(one.time_frac),
            "low": math.log1p(one.time_frac_low),
            "high": math.log1p(one.time_frac_high),
            "true": math.log(step_s(turns, name)) - base,
        }


def table(rows: list[dict]) -> str:
    """Return Markdown: a line for each change, and a summary over all."""
    if not rows:
        return "no round whose floor is low enough"
    lines = []
    for name in CHANGES:
        change_rows = [row for row in rows if row["change"] == name]
        if change_rows:
            promised, true = (
                statistics.median(row[key] for row in change_rows) for key in ("promised", "true")
            )
            error = statistics.mean(abs(row["promised"] - row["true"]) for row in change_rows)
            lines.append(
                [name, len(change_rows), _percent(promised), _percent(true), f"{error:.3f}"]
            )
    heads = ["change", "rounds", "promised", "came", "mean error of the log ratio"]
    return "\n\n".join([markdown_table(heads, lines), "\n".join(_sums(rows))])


def _percent(log: float) -> str:
    return f"{100 * math.expm1(log):+.1f} %"


def _sums(rows: list[dict]) -> Iterator[str]:
    off = [row["promised"] - row["true"] for row in rows]
    large = [row for row in rows if abs(row["true"]) > math.log(1.05)]
    wide = [row for row in rows if abs(row["true"]) > math.log(1.1)]
    right = sum(row["promised"] * row["true"] > 0 for row in large)
    unsure = sum(row["low"] < 0 < row["high"] for row in wide)
    inside = sum(row["low"] <= row["true"] <= row["high"] for row in rows)
    yield f"- mean absolute error of the log ratio: {statistics.mean(map(abs, off)):.3f}"
    yield f"- floor, mean over rounds: {statistics.mean(row['floor'] for row in rows):.3f}"
    yield f"- bias: {statistics.mean(off):+.3f}"
    yield f"- sign right where the truth exceeds 5 %: {right} of {len(large)}"
    yield f"- cannot tell where the truth exceeds 10 %: {unsure} of {len(wide)}"
    yield f"- 90 % intervals that held: {inside} of {len(rows)}, at a half-width of " + (
        f"{statistics.mean((row['high'] - row['low']) / 2 for row in rows):.3f}"
    )


if __name__ == "__main__":
    sys.exit(main())
