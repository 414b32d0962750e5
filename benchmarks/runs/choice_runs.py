"""Runs for ``cpu_choice.py``: calibrations, sweeps over layouts, and commands printed by a plan.

A folder contains ``rows.jsonl``, one line for each run as it ends, under a key that identifies it;
runs stored there are not repeated.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from forerun.benchmarks.megatron_matrix import LAYOUTS, MODEL
from forerun.benchmarks.runs.cpu_runs import ROOT, SIZES
from forerun.benchmarks.runs.launches import (
    NUM_RANKS,
    output_of,
    step_times_s,
    torchrun_words,
)

sys.path.insert(0, str(ROOT / "recipes"))

from gpt_arguments import fit_to_world, parse_args

RECIPE, SWEEP = ROOT / "recipes" / "pretrain_gpt.py", Path(__file__).parent / "layout_sweep.py"
WINDOW, ITERS, SKIPPED = 16, 24, 4
"""Calibrated steps, steps of a run, and first steps of it that are not counted."""
SWEPT_STEPS = 6
PROBE_S, PROBED_ITERS = 10, 200
"""Seconds of probes, and number of steps long enough to contain them."""
_LIMIT_S, _SWEEP_LIMIT_S = 240.0, 900.0
"""Seconds after which a run is considered hung."""
_TRIES = 2
_SEED = 17
_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run that is calibrated, and whose plan's first command is then run."""

    name: str
    words: tuple[str, ...]
    is_megatron: bool = False


def _recipe(name: str, size: str, *words: str) -> Case:
    return Case(name=name, words=(*SIZES[size].options, *words))


def _megatron(name: str, *words: str) -> Case:
    place = MODEL.index("--train-iters")
    plain = [*MODEL[:place], *MODEL[place + 2 :]]
    return Case(name=f"Megatron-LM, {name}", words=(*plain, *words), is_megatron=True)


CASES = {
    case.name: case
    for case in (
        _recipe("recipe, DP2", "recipe"),
        _recipe("recipe, TP2", "recipe", _TP, "2"),
        _recipe("wider, PP2", "wider", _PP, "2"),
        _recipe("deeper, DP2", "deeper", "--micro-batch-size", "1"),
        _recipe("longer, DP2, full", "recipe", "--seq-length", "256",
            "--recompute-granularity", "full"),
        _megatron("DP2"),
        _megatron("TP2 SP", *LAYOUTS["tp2-sp"][1].split()),
        _megatron("PP2", *LAYOUTS["pp2"][1].split()),
        _megatron("DP2, full", *LAYOUTS["recompute"][1].split()),
        _megatron("wider, DP2", "--hidden-size", "128", "--micro-batch-size", "1"),
    )
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class RunResults:
    """The folder of all runs, and their results."""

    out: Path
    values: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def opened(out: Path) -> RunResults:
        """Open a folder with the results of earlier calls; a truncated line is skipped."""
        out.mkdir(parents=True, exist_ok=True)
        rows = RunResults(out=out)
        path = out / "rows.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                rows.values[row["key"]] = row["value"]
        return rows

    def keep(self, key: str, value: Any) -> None:
        """Store the result of one finished run."""
        with (self.out / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write("\n" * (not self._is_at_line(file.tell())))
            file.write(json.dumps({"key": key, "value": value}) + "\n")
        self.values[key] = value
        print(f"{key}: {json.dumps(value)[:160]}", file=sys.stderr, flush=True)

    def _is_at_line(self, size: int) -> bool:
        return not size or (self.out / "rows.jsonl").read_bytes().endswith(b"\n")

    def directory(self, name: str) -> Path:
        """Return the directory of a calibrated run."""
        return self.out / "calibrations" / re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")


def feasible(size: str) -> dict[str, tuple[str, ...]]:
    """Return all degrees, virtual stages, optimizers, micro-batches and recompute options that the
    recipe supports on two ranks.

    Keys are descriptive names; values include the options of the model.
    """
    feasible_options: dict[str, tuple[str, ...]] = {}
    degrees = {"DP2": (), "DP2 ZeRO1": ("--use-distributed-optimizer",)}
    degrees |= {"TP2": (_TP, "2"), "PP2": (_PP, "2")}
    virtual = ("--num-layers-per-virtual-pipeline-stage", str(SIZES[size].virtual_layers))
    degrees["PP2 VP2"] = (*degrees["PP2"], *virtual)
    for (name, words), micro, recompute in product(
        degrees.items(), (1, 2, 4, 8, 16), ("", "selective", "full")
    ):
        recompute_options = ("--recompute-granularity", recompute) if recompute else ()
        options = (
            *SIZES[size].options,
            *words,
            "--micro-batch-size",
            str(micro),
            *recompute_options,
        )
        if is_accepted(options):
            feasible_options[f"{name} mbs{micro} {recompute}".strip()] = options
    return feasible_options


def is_accepted(options: Sequence[str]) -> bool:
    """Return True if the recipe's own parser accepts the options on two ranks."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            fit_to_world(parse_args([*options]), NUM_RANKS)
    except SystemExit:
        return False
    return True


def swept(rows: RunResults, size: str, repetition: int) -> None:
    """Run the missing layouts of a size for one repetition, in an order of its own."""
    layouts = feasible(size)
    names = [*layouts]
    random.Random(f"{_SEED} {size} {repetition}").shuffle(names)
    prefix = f"sweep/{size}/{repetition}/"
    done = rows.out / f"swept-{size}-{repetition}.jsonl"
    for _ in range(_TRIES + 1):
        _collect(rows, prefix, layouts, done)
        remaining = [name for name in names if prefix + name not in rows.values]
        if not remaining:
            return
        cases = rows.out / "cases.json"
        cases.write_text(json.dumps([layouts[name] for name in remaining]), encoding="utf-8")
        words = [*torchrun_words(), str(SWEEP), str(cases), str(done), str(SWEPT_STEPS)]
        output_of(words, limit_s=_SWEEP_LIMIT_S)
        names = names[::-1]  # put a layout that broke the launch last
    _collect(rows, prefix, layouts, done)


def _collect(
    rows: RunResults, prefix: str, layouts: Mapping[str, tuple[str, ...]], done: Path
) -> None:
    """Store the results of a sweep, even an interrupted one."""
    names = {options: name for name, options in layouts.items()}
    for line in done.read_text(encoding="utf-8").splitlines() if done.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            name = names[tuple(row["options"])]
            if prefix + name not in rows.values:
                rows.keep(prefix + name, row["step_s"])


def calibrated(
    rows: RunResults, name: str, words: Sequence[str], cwd: Path | None = None
) -> Path | None:
    """Return the directory of a calibrated run, making it if missing; None if it fails."""
    directory = rows.directory(name)
    if f"calibration/{name}" in rows.values:
        return directory
    shutil.rmtree(directory, ignore_errors=True)
    forerun_options = [
        "--calibrate",
        f"--calibrate-dir={directory.absolute()}",
        "--calibrate-wandb=off",
    ]
    command = [*torchrun_words(), *words, *forerun_options, f"--calibrate-steps={WINDOW}"]
    done = output_of(command, limit_s=_LIMIT_S, cwd=cwd)
    if done is None:
        return None
    rows.keep(f"calibration/{name}", _step_s(done))
    return directory


def followed(rows: RunResults, case: Case, clone: Path | None) -> None:
    """Calibrate a case, make the plan, run the first command that it prints, store both.

    ``clone`` is Megatron-LM's, the working directory of its cases.
    """
    key = f"followed/{case.name}"
    if key in rows.values:
        return
    script = "pretrain_gpt.py" if case.is_megatron else str(RECIPE)
    cwd = clone if case.is_megatron else None
    words = [script, *case.words, "--train-iters", str(ITERS)]
    directory = calibrated(rows, case.name, words, cwd)
    if directory is None:
        return
    plan_json = _verb("plan", str(directory), "--json")
    if plan_json is None:
        return
    first = json.loads(plan_json)["candidates"][0]
    file = rows.out / "command.sh"
    file.unlink(missing_ok=True)
    _verb("plan", str(directory), "--show", "1", "--write", str(file))
    value = {name: first[name] for name in ("label", "step_time_s", "low_s", "high_s")}
    value |= {"command": None, "actual_s": None}
    if file.exists():
        done = output_of(["sh", str(file.absolute())], limit_s=_LIMIT_S, cwd=cwd)
        value["command"] = file.read_text(encoding="utf-8")
        value["actual_s"] = None if done is None else _step_s(done)
    rows.keep(key, value)


def _verb(*words: str) -> str | None:
    program = str(Path(sys.executable).parent / "forerun")
    done = subprocess.run([program, *words], capture_output=True, text=True)
    if done.returncode:
        print(f"forerun {shlex.join(words)}: {done.stderr[-400:]}", file=sys.stderr)
    return None if done.returncode else done.stdout


def _step_s(text: str) -> float | None:
    times_s = step_times_s(text)[SKIPPED:]
    return statistics.median(times_s) if times_s else None


def sweep_times(rows: RunResults, size: str) -> Mapping[str, Mapping[int, float]]:
    """Return seconds of a step by layout and repetition, for layouts with every repetition."""
    times_by_layout: dict[str, dict[int, float]] = {}
    for key, value in rows.values.items():
        kind, of_size, number, name = (*key.split("/"), "", "", "")[:4]
        if kind == "sweep" and of_size == size:
            times_by_layout.setdefault(name, {})[int(number)] = value
    most = max(map(len, times_by_layout.values()), default=0)
    return {name: times for name, times in times_by_layout.items() if len(times) == most}
