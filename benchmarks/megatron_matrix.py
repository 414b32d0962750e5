"""Unmodified Megatron-LM, version by layout, with and without ``--calibrate``, on CPU over gloo.

    python benchmarks/megatron_matrix.py CLONES [--versions core_v0.16.1 ...] [--layouts tp2-sp ...]
        [--python core_v0.19.0=/path/to/python ...] [--out FILE]

``CLONES`` has one folder per version (an exported tag is enough; build ``helpers_cpp`` in it).  A
cell trains three times: bare, calibrated with a stop after iteration 20, and resumed from the
checkpoint.  ``megatron_probe.py`` observes from inside; none of its figures come from Forerun.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forerun.benchmarks.markdown_text import markdown_head, markdown_row
from forerun.calib.errors import ForerunError
from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.record_kinds import CollectiveRecord, StepRecord
from forerun.calib.samples.store import read_run

PROBE = Path(__file__).parent / "runs" / "megatron_probe.py"
ITERS, STOP_AT, WINDOW, WARMUP = 20, 16, 8, 3
TIMEOUT_S = 300
ELSEWHERE = {"class methods", "gc callbacks"}
"""The only probed state that may ever change: nothing on the model or its settings."""
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 "
    f"--train-iters {ITERS} --lr 1e-3 --lr-decay-style constant --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 4200 --transformer-impl local "
    "--distributed-backend gloo --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--use-cpu-initialization --log-interval 1 --eval-iters 1 --eval-interval 1000 "
    "--ckpt-format torch --num-workers 0"
).split()
_MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 2 --disable-bias-linear"
)
LAYOUTS: dict[str, tuple[int, str]] = {
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2-vp2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "dp2-zero": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        "--ddp-bucket-size 50000 --bf16",
    ),
    "ep2": (2, _MOE),
    "recompute": (
        2,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
}
CHECKS = ("runs", "losses", "collectives", "hooks gone", "stop", "resume")
_KINDS = (
    ("all_reduce", ("allreduce",), 0),
    ("reduce_scatter", ("reduce_scatter",), None),
    ("all_gather", ("allgather", "all_gather"), None),
    ("all_to_all", ("alltoall", "all_to_all"), None),
    ("broadcast", ("broadcast",), 0),
    ("send", ("send",), 0),
    ("recv", ("recv",), 0),
)
"""Collective, parts of a method's name, and index of the payload argument (None: the larger)."""
Ranks = dict[int, dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class Cell:
    """One version with one layout: per check ``ok`` or the reason of its failure."""

    version: str
    layout: str
    results: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    time_s: float = 0.0

    @property
    def is_green(self) -> bool:
        """True if every check holds."""
        return all(self.results.get(check) == "ok" for check in CHECKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Path and interpreter of a version, and the folder a cell may write to."""

    clone: Path
    python: str
    work: Path


class Failed(Exception):
    """A training process failed."""


def _first_error(log: str) -> str:
    """Return the first error that a process printed, and where it was raised."""
    match = re.search(r"^(?:\[rank\d+\]: *)?(\w*(?:Error|Exception).*)$", log, re.MULTILINE)
    if match is None:
        return "no message"
    frames = re.findall(r'File "([^"]+)", line (\d+), in', log[: match.start()])
    where = f" at {frames[-1][0]}:{frames[-1][1]}" if frames else ""
    return match[1][:160] + where


def train(site: Site, name: str, layout: str, *options: str, **environ: str) -> tuple[Ranks, str]:
    """Run ``pretrain_gpt.py``; return the probe's output by rank, and the log."""
    seen = site.work / name
    seen.mkdir(parents=True)
    num_ranks, arguments = LAYOUTS[layout]
    command = [
        site.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(num_ranks), "pretrain_gpt.py", *MODEL, *arguments.split(), *options,
    ]  # fmt: skip
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "FORERUN"))}
    clean |= {
        "PYTHONPATH": os.pathsep.join([str(site.work / "site"), os.environ.get("PYTHONPATH", "")]),
        "MATRIX_PROBE_OUT": str(seen),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(site.python).parent}{os.pathsep}{os.environ['PATH']}",
        **environ,
    }
    try:
        done = subprocess.run(
            command, cwd=site.clone, env=clean, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as err:
        raise Failed(f"{name}: no end after {TIMEOUT_S} s") from err
    log = done.stdout + done.stderr
    (seen / "log.txt").write_text(log, encoding="utf-8")
    if done.returncode:
        raise Failed(f"{name}: exit {done.returncode}: {_first_error(log)}")
    files = [json.loads(path.read_text(encoding="utf-8")) for path in seen.glob("rank-*.json")]
    if len(files) != num_ranks:
        raise Failed(f"{name}: the probe saw {len(files)} of {num_ranks} ranks")
    return {file["rank"]: file for file in files}, log


def same_numbers(left: Ranks, right: Ranks, steps: Iterable[int]) -> str:
    """Check that losses and gradient norms of these steps are bit-identical on all ranks."""
    count = 0
    for rank, file in left.items():
        for step in steps:
            a = file["steps"].get(str(step), {})
            b = right[rank]["steps"].get(str(step), {})
            for name in ("losses", "grad_norm"):
                if name not in a or a[name] != b.get(name):
                    return f"rank {rank}, iteration {step}: {name} {a.get(name)} != {b.get(name)}"
            count += bool(a["losses"])
    return "ok" if count else "no losses were logged"


def counted(calls: dict[str, int]) -> Counter[tuple[Any, ...]]:
    """Return the probe's counts as (collective, group, ranks, bytes), with groups of one rank."""
    out: Counter[tuple[Any, ...]] = Counter()
    for text, count in calls.items():
        method, group, ranks, sizes, *_ = text.split(" | ")
        first, second = (*map(int, sizes.split(",")), 0)[:2]
        members = tuple(map(int, ranks.split(",")))
        for kind, words, payload in _KINDS:
            if any(word in method for word in words):
                nbytes = max(first, second) if payload is None else (first, second)[payload]
                out[kind, group, members, nbytes] += count
                break
        else:
            out["other", group, members, -1] += count
    return out


def recorded(run: RunRecords, rank: int, step: int) -> Counter[tuple[Any, ...]]:
    """Return Forerun's records of one hooked step in the form of ``counted``."""
    rows = [
        row for row in run.records[rank] if isinstance(row, CollectiveRecord) and row.step == step
    ]
    return Counter(
        (
            row.collective.value,
            row.group.rpartition("#")[0],
            row.ranks,
            -1 if row.collective.value == "other" else row.nbytes,
        )
        for row in rows
    )


def same_collectives(cell: Cell, bare: Ranks, run: RunRecords) -> str:
    """Check that every hooked step has the calls that the probe counted in the bare run."""
    num_calls = num_steps = 0
    for rank, records in run.records.items():
        hooked = [r.step for r in records if isinstance(r, StepRecord) and r.is_hooked]
        for step in hooked:
            truth = counted(bare[rank]["steps"][str(step)]["calls"])
            observed = recorded(run, rank, step)
            if observed != truth:
                more, less = dict(observed - truth), dict(truth - observed)
                return f"rank {rank}, iteration {step}: recorded too many {more}, too few {less}"
            num_calls += sum(truth.values())
            num_steps += 1
    cell.figures |= {"ranks_recorded": len(run.records), "hooked_steps": num_steps}
    cell.figures["calls_per_hooked_step"] = num_calls / max(1, num_steps)
    return "ok" if num_calls and not run.problems else f"nothing to compare; {run.problems}"


def hooks_gone(cell: Cell, bare: Ranks, calibrated: Ranks) -> str:
    """Check that after the window all is as in the bare run, and that hooks were seen within it."""
    most = 0
    for rank, file in calibrated.items():
        for step in range(STOP_AT):
            mine = _state(file, step)
            theirs = _state(bare[rank], step)
            strange = {part: mine[part] for part in theirs if mine[part] != theirs[part]}
            if hung := strange.keys() - ELSEWHERE:
                return f"rank {rank}, iteration {step}: on what is the user's: {sorted(hung)}"
            if step >= WARMUP + WINDOW and strange:
                return f"rank {rank}, iteration {step}: left behind {strange}"
            most = max(most, sum(map(len, strange.values())))
    cell.figures["places_hooked"] = most
    cell.figures["seams"] = next(iter(calibrated.values()))["seams"]
    if bare[0]["seams"]:
        return f"without the flag these are replaced: {bare[0]['seams']}"
    return "ok" if most >= 4 else f"only {most} places were ever seen hooked: the check is blind"


def _state(file: dict[str, Any], step: int) -> dict[str, Any]:
    return file["states"][file["steps"][str(step)]["state"]]


def stopped(calibrated: Ranks, log: str, checkpoint: Path) -> str:
    """Check that all ranks ended after the same iteration, with a checkpoint of it."""
    last = {rank: max(map(int, file["steps"])) + 1 for rank, file in calibrated.items()}
    if set(last.values()) != {STOP_AT}:
        return f"ranks ended after iterations {last}, not {STOP_AT}"
    tracker = checkpoint / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return "no checkpoint was saved"
    saved = tracker.read_text(encoding="utf-8").strip()
    if saved != str(STOP_AT):
        return f"checkpoint of iteration {saved}, not {STOP_AT}"
    return "ok" if f"exiting program at iteration {STOP_AT}" in log else "Megatron did not say so"


def run_cell(version: str, layout: str, site: Site) -> Cell:
    """Run the three trainings and compare."""
    cell = Cell(version=version, layout=layout)
    begin_s = time.monotonic()
    (site.work / "site").mkdir(parents=True)
    shutil.copy(PROBE, site.work / "site" / "sitecustomize.py")
    try:
        _check(cell, site)
        cell.results["runs"] = "ok"
    except (Failed, ForerunError) as err:
        cell.results["runs"] = str(err)
    cell.time_s = time.monotonic() - begin_s
    return cell


def _check(cell: Cell, site: Site) -> None:
    layout, results = cell.layout, cell.results
    records, checkpoint = site.work / "records", site.work / "checkpoint"
    forerun_options = ("--calibrate", "--calibrate-device=cpu", "--calibrate-wandb=off")
    forerun_options = (*forerun_options, f"--calibrate-steps={WINDOW}")
    bare, _ = train(site, "bare", layout, FORERUN_DEVICE="cpu", MATRIX_COUNT="1")
    calibrated, log = train(
        site, "calibrated", layout, *forerun_options, f"--calibrate-dir={records}",
        "--save", str(checkpoint), "--save-interval", "1000", MATRIX_STOP_AT=str(STOP_AT),
    )  # fmt: skip
    results["losses"] = same_numbers(calibrated, bare, range(STOP_AT))
    run = read_run(records)
    results["collectives"] = same_collectives(cell, bare, run)
    results["hooks gone"] = hooks_gone(cell, bare, calibrated)
    results["stop"] = stopped(calibrated, log, checkpoint)
    cell.figures["faults"] = len(re.findall(r"\[forerun\] hook(?: fault|s removed)", log))
    cell.figures["hooks"] = (re.findall(r"hooks: (\d+/\d+) fired", log) or [""])[0]
    cell.figures["missing"] = sorted(
        set(re.findall(r"\[forerun\] no patch at (\S+), which is missing", log))
    )
    results["resume"] = _resume(site, layout, bare, checkpoint, forerun_options)


def _resume(
    site: Site, layout: str, bare: Ranks, checkpoint: Path, forerun_options: tuple[str, ...]
) -> str:
    """Check that training resumes from the checkpoint as the uninterrupted run went on."""
    load = ("--load", str(checkpoint))
    directory = f"--calibrate-dir={site.work / 'resumed-records'}"
    try:
        resumed, _ = train(site, "resumed", layout, *forerun_options, directory, *load)
    except Failed as err:
        try:
            train(site, "resumed-bare", layout, *load, FORERUN_DEVICE="cpu")
        except Failed as same:
            return f"Megatron does not load it without --calibrate either: {same}"
        return str(err)
    return same_numbers(resumed, bare, range(STOP_AT, ITERS))


def table(cells: list[Cell]) -> str:
    """Return the matrix as Markdown, and a line for every failed check."""
    layouts = list(dict.fromkeys(cell.layout for cell in cells))
    by_place = {(cell.version, cell.layout): cell for cell in cells}
    lines = [markdown_head(["version", *layouts])]
    for version in dict.fromkeys(cell.version for cell in cells):
        row = [by_place.get((version, layout)) for layout in layouts]
        lines.append(markdown_row([version, *map(_mark, row)]))
    for cell in cells:
        for check, reason in cell.results.items():
            if reason != "ok":
                lines.append(f"\n{cell.version} {cell.layout}, {check}: {reason}")
    return "\n".join(lines)


def _mark(cell: Cell | None) -> str:
    if cell is None:
        return ""
    good = sum(cell.results.get(check) == "ok" for check in CHECKS)
    return "green" if cell.is_green else f"{good} of {len(CHECKS)}"


def main() -> None:
    """Run the cells, print results as they come, store all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clones", type=Path)
    parser.add_argument("--versions", nargs="+")
    parser.add_argument("--layouts", nargs="+", choices=sorted(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--python", nargs="+", default=[], metavar="VERSION=PATH")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, help="keep logs, records and checkpoints here")
    args = parser.parse_args()
    clone_names = sorted(path.parent.name for path in args.clones.glob("*/pretrain_gpt.py"))
    python_of = dict(pair.split("=", 1) for pair in args.python)
    cells = []
    for version in args.versions or clone_names:
        for layout in args.layouts:
            with tempfile.TemporaryDirectory() as scratch:
                work = (args.work or Path(scratch)).resolve() / version / layout
                python = python_of.get(version, sys.executable)
                site = Site(clone=args.clones / version, python=python, work=work)
                cells.append(run_cell(version, layout, site))
            cell = cells[-1]
            shown = {key: value for key, value in cell.figures.items() if key != "seams"}
            print(version, layout, _mark(cell), f"{cell.time_s:.0f} s", shown, flush=True)
            if args.out is not None:
                values = [asdict(cell) for cell in cells]
                args.out.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    print(table(cells))
    sys.exit(0 if all(cell.is_green for cell in cells) else 1)


if __name__ == "__main__":
    main()
