"""Everything that only a GPU can show, with one command; a part that fails is named, others go on.

    python benchmarks/runs/gpu_report.py --out DIR [--cpu] [--only PART ...]

Overhead of the hooks, events against Kineto, other shapes and their memory predicted from one, TP
and PP shapes in a fake process group, and real NCCL with two ranks on one device.  ``--cpu`` runs
the same at a toy size on a CPU: its figures mean nothing, but every step of the way is the same.
Exit codes: 0 all bars met, 1 some missed or failed, 3 no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.runs.gpu_parts import (
    BASE,
    Part,
    fake_part,
    kineto_part,
    layouts_part,
    nccl_part,
    overhead_part,
)
from forerun.benchmarks.runs.gpu_runs import CPU, GPU, ROOT, Runner

NO_GPU = 3
PARTS: dict[str, Callable[[Runner], Part]] = {
    "kineto": kineto_part,
    "overhead": overhead_part,
    "shapes": layouts_part,
    "fake": fake_part,
    "nccl": nccl_part,
}


def main() -> int:
    """Run the parts, write report and samples; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true", help="the same at a toy size on a CPU")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--steps", type=int, help="alternated steps for the overhead")
    parser.add_argument("--samples", type=Path, help="default: recipes/measured, or OUT on a CPU")
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        print("no GPU here; --cpu runs the same at a toy size", file=sys.stderr)
        return NO_GPU
    size = CPU if args.cpu else GPU
    if args.steps:
        size = replace(size, overhead_steps=args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(out=args.out, size=size, is_cpu=args.cpu)
    found = {name: attempt(name, PARTS[name], runner) for name in args.only}
    machine = describe_machine(is_cpu=args.cpu)
    write_report(args.out, machine, found)
    home = args.samples or (args.out if args.cpu else ROOT / "recipes") / "measured"
    keep_samples(home, machine, runner)
    is_met = all(isinstance(p, Part) and all(f.is_met for f in p.figures) for p in found.values())
    return 0 if is_met else 1


def attempt(name: str, part: Callable[[Runner], Part], runner: Runner) -> Part | str:
    """What the part found, or why it did not."""
    try:
        return part(runner)
    except Exception as err:  # whatever is wrong with one part, the others are worth having
        traceback.print_exc()
        return f"{name} failed: {type(err).__name__}: {err}"


def describe_machine(*, is_cpu: bool) -> dict[str, str]:
    """Date, hardware and versions that the figures belong to."""
    told = {
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        "device": "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    if not is_cpu:
        told["device"] = torch.cuda.get_device_name()
        told["num_devices"] = str(torch.cuda.device_count())
        told["cuda"] = str(torch.version.cuda)
        told["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        told["driver"] = _driver()
    return told


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.splitlines()[0].strip()


def write_report(out: Path, machine: dict[str, str], found: dict[str, Part | str]) -> None:
    """``report.md`` and ``report.json``."""
    lines = ["# GPU report", "", *(f"- {name}: {value}" for name, value in machine.items())]
    for part in found.values():
        lines += ["", f"**{part}**"] if isinstance(part, str) else _section(part)
    text = "\n".join(lines) + "\n"
    (out / "report.md").write_text(text, encoding="utf-8")
    values = {n: p if isinstance(p, str) else asdict(p) for n, p in found.items()}
    told = {"schema": 1, "machine": machine, "parts": values}
    (out / "report.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    print(text)


def _section(part: Part) -> list[str]:
    lines = ["", f"## {part.title}", ""]
    for figure in part.figures:
        bar = "" if figure.bar is None else f" (bar {figure.bar:.1%})"
        verdict = "" if figure.bar is None else (": met" if figure.is_met else ": MISSED")
        note = f"; {figure.note}" if figure.note else ""
        lines.append(f"- {figure.name}: {figure.value:+.2%}{bar}{verdict}{note}")
    if part.rows:
        heads, *rows = part.rows
        lines += ["", markdown_table(list(heads), [list(row) for row in rows])]
    return [*lines, *(f"\n{note}" for note in part.notes)]


def keep_samples(home: Path, machine: dict[str, str], runner: Runner) -> None:
    """The sample table of each run, with the machine that it was measured on."""
    name = re.sub(r"[^a-z0-9]+", "_", f"{machine['device']} {machine['date']}".lower())
    folder = home / name
    for run_name, run in runner.known.items():
        table = run.directory / "samples.parquet"
        if run_name != BASE and not table.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        if table.exists():
            shutil.copyfile(table, folder / f"{run.directory.name}.parquet")
    if folder.exists():
        text = json.dumps({"schema": 1, **machine}, indent=2) + "\n"
        (folder / "machine.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
