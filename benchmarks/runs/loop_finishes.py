"""Every kind of training loop, calibrated once on CPU ranks: reported end against actual end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.megatron_matrix import MODEL
from forerun.calib.samples import read_table
from forerun.calib.units import format_count, format_frac
from forerun.launch.store import read_forecasts

HOME = Path(__file__).parents[2]
LOOP = HOME / "benchmarks" / "runs" / "loop_run.py"
RECIPE = HOME / "recipes" / "pretrain_gpt.py"
STEPS = 250
COLUMNS = ("loop", "ranks", "what it says", "first error", "last error", "tokens/s", "groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRun:
    """One launch."""

    name: str
    kind: str
    """Kind of ``loop_run.py``; empty for Megatron's loops."""
    num_ranks: int = 2
    script: Path = LOOP
    options: tuple[str, ...] = ()
    needs_steps: bool = False
    """True if the number of steps is given by flag."""


def loop_runs(megatron: Path | None) -> list[LoopRun]:
    """Return all loops; ``megatron`` is a checkout of Megatron-LM."""
    iters = ("--train-iters", str(STEPS))
    runs = [
        LoopRun(name="recipes/pretrain_gpt.py", kind="", script=RECIPE, options=iters),
        LoopRun(name="plain DDP, the flag", kind="ddp", needs_steps=True),
        LoopRun(name="plain DDP, no flag", kind="ddp"),
        LoopRun(name="plain DDP, data without a length", kind="stream"),
        LoopRun(name="FSDP2, the flag", kind="fsdp2", needs_steps=True),
        LoopRun(name="HSDP 2x2, the flag", kind="hsdp", num_ranks=4, needs_steps=True),
        LoopRun(name="Trainer of transformers", kind="hugging_face"),
        LoopRun(name="Lightning", kind="lightning"),
        LoopRun(name="forerun.attach without config", kind="attach"),
    ]
    if megatron is not None:
        model = [*MODEL, *iters, "--calibrate-device=cpu"]
        script = megatron / "pretrain_gpt.py"
        megatron_run = LoopRun(
            name="Megatron-LM, unmodified", kind="", script=script, options=(*model,)
        )
        runs.insert(0, megatron_run)
    return runs


def launch(run: LoopRun, directory: Path) -> None:
    """Train to the end, into an empty folder; output goes to ``log.txt``."""
    directory.mkdir(parents=True)
    out = directory / "out"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(run.num_ranks), str(run.script)),
    ]
    if run.kind:
        command += [run.kind, str(STEPS), str(out)]
    command += run.options
    if run.kind != "attach":
        command += ["--calibrate", f"--calibrate-dir={out}"]
    if run.needs_steps:
        command.append(f"--calibrate-total-steps={STEPS}")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "FORERUN"))}
    env |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with (directory / "log.txt").open("w") as log:
        subprocess.run(command, env=env, cwd=run.script.parent, stdout=log, stderr=log, check=True)


def row_of(run: LoopRun, directory: Path) -> Sequence[str]:
    """Return a line of the table."""
    out, log = directory / "out", (directory / "log.txt").read_text()
    forecast = json.loads((out / "forecast.json").read_text())
    table = read_table(out / "samples.parquet")
    group_table = table.collectives[["role", "num_ranks"]].drop_duplicates().sort_values("role")
    pairs = zip(group_table["role"], group_table["num_ranks"], strict=True)
    groups = ", ".join(f"{role} of {count}" for role, count in pairs)
    rate = forecast.get("tokens_per_s")
    return (
        run.name,
        str(run.num_ranks),
        *_finish(forecast, out, table.run_id, float(table.runs["started_unix_s"].min()), log),
        "" if rate is None else format_count(rate),
        groups or "none",
    )


def _finish(
    forecast: dict[str, Any], out: Path, run_id: str, began_unix_s: float, log: str
) -> Sequence[str]:
    """Return what was reported, and the errors of the first and of the last forecast."""
    if not forecast.get("reason_no_finish"):
        track = read_forecasts(out).track(run_id)
        if track is None or not track.errors:
            return "no forecast before its end", "", ""
        first, last = track.errors[0], track.errors[-1]
        return (
            "finish of the run",
            f"{format_frac(first.of_total_frac, signed=True)} after {first.iteration}",
            f"{format_frac(last.of_total_frac, signed=True)} after {last.iteration}",
        )
    if "pass" not in forecast:
        return f"no finish: {forecast['reason_no_finish']}", "", ""
    (ended,) = re.findall(r"^ENDED (.+)$", log, re.MULTILINE)
    late_s = forecast["pass"]["finish_p50_unix_s"] - float(ended)
    error = format_frac(late_s / (float(ended) - began_unix_s), signed=True)
    return "end of this pass over the data", "", f"{error} after {forecast['steps_done']}"


def finish_table(out: Path, megatron: Path | None, *, only_table: bool) -> str:
    """Run what is missing; return the table of all stored runs."""
    rows = []
    for run in loop_runs(megatron):
        directory = out / f"{run.kind or run.script.parent.name}-{'steps' * run.needs_steps}"
        if not only_table and not directory.exists():
            launch(run, directory)
        if directory.exists():
            rows.append(row_of(run, directory))
    return markdown_table(COLUMNS, rows)
