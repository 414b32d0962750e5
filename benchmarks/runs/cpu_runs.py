"""Runs of the recipe on two CPU ranks in many layouts, for ``cpu_layouts.py``: measured and stored.

A folder contains ``rows.jsonl``, one line per run as it ends, and a directory for each calibrated
run.  Stored runs are not repeated, so that a campaign may be interrupted and resumed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from forerun.benchmarks.runs.launches import output_of, step_times_s, torchrun_words
from forerun.calib.advice.planning import plan
from forerun.calib.arguments.megatron_args import rewrite_command
from forerun.launch.known.machines import open_machine

ROOT = Path(__file__).parents[2]
RUNNING = "DP2 (running)"
SKIPPED = 4
"""First steps of a run that are not counted."""
WINDOW_STEPS, TELLING_STEPS = 16, 8
"""Calibrated steps of the running layout, and of layouts that only contribute their step time."""
_WARMUP = 3
_LIMIT_S = 240.0
"""Seconds after which a run is considered hung."""
_TRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model, as options of the recipe."""

    name: str
    options: tuple[str, ...]
    virtual_layers: int
    """Layers of a virtual stage, for two of them on each of two ranks."""

    def layouts(self) -> dict[str, tuple[str, ...]]:
        """Return the layouts by name; the middle one is the running layout."""
        virtual = ("--num-layers-per-virtual-pipeline-stage", str(self.virtual_layers))
        return {
            "TP2": _TP2,
            "PP2": _PP2,
            "DP2, micro-batch halved": ("--micro-batch-size", "1"),
            RUNNING: (),
            "TP2, sequence parallel": (*_TP2, "--sequence-parallel"),
            "PP2, two virtual stages": (*_PP2, *virtual),
            "DP2, micro-batch doubled": ("--micro-batch-size", "4"),
            "DP2, full recompute": ("--recompute-granularity", "full"),
        }


_TP2 = ("--tensor-model-parallel-size", "2")
_PP2 = ("--pipeline-model-parallel-size", "2")
_SMALL_BATCH = ("--global-batch-size", "8")
SIZES = {
    size.name: size
    for size in (
        Size(name="recipe", options=(), virtual_layers=1),
        Size(name="wider", options=("--hidden-size", "256", *_SMALL_BATCH), virtual_layers=1),
        Size(name="deeper", options=("--num-layers", "8", *_SMALL_BATCH), virtual_layers=2),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A requested run."""

    size: str
    repetition: int
    layout: str
    is_calibrated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A finished run; a failed run has no step."""

    job: Job
    step_s: float | None
    """Median after ``SKIPPED`` steps; in a calibrated run this includes hooked steps."""
    wall_s: float
    begun_unix_s: float


@dataclass(slots=True)
class Campaign:
    """The folder of all runs, and the finished ones."""

    out: Path
    iters: int
    ran: dict[Job, FinishedRun] = field(default_factory=dict)
    informative: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    """By size: the layouts that the product asks to have measured, with their options."""

    @staticmethod
    def opened(out: Path, iters: int) -> Campaign:
        """Open a folder with the rows of earlier calls; a truncated line is skipped."""
        campaign = Campaign(out=out, iters=iters)
        path = out / "rows.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text and not text.endswith("\n"):
            path.write_text(text + "\n", encoding="utf-8")
        for line in text.splitlines():
            try:
                campaign._take(json.loads(line))
            except ValueError:
                print(f"passed over: {line[:80]}", file=sys.stderr)
        return campaign

    def directory(self, size: str, repetition: int, layout: str) -> Path:
        """Return the directory of a calibrated run."""
        name = re.sub(r"[^A-Za-z0-9]+", "-", layout).strip("-")
        return self.out / "calibrations" / f"{size}-{repetition}-{name}"

    def run(self, sizes: Sequence[str], repetitions: int, *, until_unix_s: float) -> bool:
        """Make the missing runs; return False if time runs out before all are done."""
        for number in range(repetitions):
            for size in _turned(list(sizes), number):
                for job in self._jobs(size, number):
                    if time.time() > until_unix_s:
                        return False
                    if self.ran.get(job) is None:
                        self._run(job)
        return True

    def _jobs(self, size: str, number: int) -> Iterator[Job]:
        """Yield one repetition of a size, in an order that varies between repetitions."""
        calibrated = Job(size=size, repetition=number, layout=RUNNING, is_calibrated=True)
        if size not in self.informative:
            yield calibrated  # the first calibration decides which others to calibrate
            self._design(size)
        plain = [
            replace(calibrated, layout=layout, is_calibrated=False)
            for layout in SIZES[size].layouts()
        ]
        informative = [replace(calibrated, layout=layout) for layout in self.informative[size]]
        merged = [calibrated]
        for place, job in enumerate(plain):
            merged.append(job)
            if place % 2:
                merged += informative[place // 2 : place // 2 + 1]
        yield from _turned(merged, number)

    def _run(self, job: Job) -> None:
        size = SIZES[job.size]
        options = (size.layouts() | self.informative.get(job.size, {}))[job.layout]
        directory = self.directory(job.size, job.repetition, job.layout)
        begun, step_s = time.time(), None
        for _ in range(_TRIES):
            if job.is_calibrated:
                shutil.rmtree(directory, ignore_errors=True)
                steps = WINDOW_STEPS if job.layout == RUNNING else TELLING_STEPS
                step_s = train((*size.options, *options), _WARMUP + steps + 1, directory, steps)
            else:
                step_s = train((*size.options, *options), SKIPPED + self.iters)
            if step_s is not None:
                break
        wall_s = time.time() - begun
        ran = FinishedRun(job=job, step_s=step_s, wall_s=wall_s, begun_unix_s=begun)
        self._keep({"run": asdict(ran)})
        print(f"{job}: {step_s} s, {wall_s:.1f} s in all", file=sys.stderr, flush=True)

    def _design(self, size: str) -> None:
        """Store the most informative layouts in ``forerun plan`` of the first calibration."""
        machine = open_machine(self.directory(size, 0, RUNNING))
        layout_plan = plan(
            machine.running,
            machine.steps,
            budget=machine.budget,
        )
        size_options = SIZES[size].options
        layouts = {
            one.label: rewrite_command(size_options, one.config, running=machine.running)
            for one in layout_plan.worth_measuring
        }
        self._keep({"telling": {"size": size, "layouts": layouts}})

    def _keep(self, row: Mapping[str, object]) -> None:
        text = json.dumps(row)
        with (self.out / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(json.loads(text))

    def _take(self, row: Mapping[str, dict]) -> None:
        if "telling" in row:
            layouts = row["telling"]["layouts"]
            self.informative[row["telling"]["size"]] = {k: tuple(v) for k, v in layouts.items()}
            return
        ran = FinishedRun(**{**row["run"], "job": Job(**row["run"]["job"])})
        if ran.step_s is None:
            self.ran.pop(ran.job, None)  # so that a later call retries it
        else:
            self.ran[ran.job] = ran


def train(
    options: Sequence[str], iters: int, calibrate_dir: Path | None = None, steps: int = 0
) -> float | None:
    """Run the recipe on two ranks; return the median step in seconds, None if it fails or hangs."""
    recipe = str(ROOT / "recipes" / "pretrain_gpt.py")
    command = [*torchrun_words(), recipe, "--train-iters", str(iters), *options]
    if calibrate_dir is not None:
        command += ["--calibrate", f"--calibrate-dir={calibrate_dir}", "--calibrate-wandb=off"]
        command += [f"--calibrate-steps={steps}"]
    done = output_of(command, limit_s=_LIMIT_S)
    times_s = step_times_s(done or "")[SKIPPED:]
    return statistics.median(times_s) if times_s else None


def _turned(items: list, number: int) -> list:
    """Return the items rotated by a different amount in every repetition, reversed in odd ones."""
    place = number * max(1, len(items) // 3) % len(items)
    rotated = items[place:] + items[:place]
    return rotated[::-1] if number % 2 else rotated
