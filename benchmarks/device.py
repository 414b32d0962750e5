"""Forerun's records of a stand-in GPU against that GPU's own timeline: unmodified programs on CPU.

    python benchmarks/device.py CLONE [--cases ep2 fsdp2 ...] [--work DIR] [--out FILE]

``CLONE`` is a Megatron-LM with built ``helpers_cpp``.  Each case trains twice over
``tests/support/device_timeline.py``, with Forerun and without.  The timeline is the truth: which
kernel ran when on which stream inside which module, when each transfer ended, and how long a stream
stood idle.  None of its figures come from Forerun.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.runs.device_truths import Transferred, Work, transfers_of, work_of
from forerun.calib.errors import ForerunError
from forerun.calib.records import CollectiveRecord, OperatorRecord, StepFlag, StepRecord
from forerun.calib.samples import read_run
from forerun.calib.workload import Phase

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
LOOPS = Path(__file__).parent / "runs" / "device_loops.py"
WINDOW, ITERS, TIMEOUT_S = 8, 14, 240
OPERATOR_FRAC, OPERATOR_NS = 0.03, 2_000
EXPOSED_FRAC, EXPOSED_NS = 0.05, 20_000
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
_OVERLAP = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--ddp-bucket-size 50000"
)
MEGATRON: dict[str, tuple[int, str]] = {
    "ep2": (
        2,
        "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
        "--expert-model-parallel-size 2 --disable-bias-linear",
    ),
    "tp2-pp2-dp2": (
        8,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
        + _OVERLAP,
    ),
    "tp2-dp4-instances2": (
        8,
        "--tensor-model-parallel-size 2 --num-distributed-optimizer-instances 2 " + _OVERLAP,
    ),
}
"""Ranks and arguments."""
LOOP_CASES = {"llama": 1, "fsdp2": 4, "hsdp": 4, "ring-cp2": 2}
CASES = (*MEGATRON, *LOOP_CASES)
CHECKS = ("runs", "losses", "operators", "layers", "no zeros", "transfers", "exposed")


@dataclass(slots=True, kw_only=True)
class Cell:
    """One case: per check ``ok`` or the failure, and the counts."""

    case: str
    results: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)
    time_s: float = 0.0


class Failed(Exception):
    """A training process failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Output paths of one training run."""

    folder: Path
    num_ranks: int

    @property
    def truths(self) -> dict[int, dict[str, Any]]:
        """Work charged to the timeline of each rank."""
        files = sorted((self.folder / "truth").glob("rank-*.json"))
        if len(files) != self.num_ranks:
            raise Failed(f"{self.folder.name}: {len(files)} of {self.num_ranks} ranks wrote truth")
        read = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        return {value["rank"]: value for value in read}


def train(clone: Path, case: str, folder: Path, *, has_forerun: bool) -> Run:
    """Run a case once over the timeline."""
    is_loop = case in LOOP_CASES
    num_ranks, arguments = (LOOP_CASES[case], case) if is_loop else MEGATRON[case]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(num_ranks), *((str(LOOPS),) if is_loop else ("pretrain_gpt.py", *MODEL)),
        *arguments.split(),
    ]  # fmt: skip
    if has_forerun:
        command += [
            "--calibrate", "--calibrate-device=cpu", "--calibrate-wandb=off",
            "--calibrate-trace=off", f"--calibrate-steps={WINDOW}",
            f"--calibrate-dir={folder / 'records'}",
        ]  # fmt: skip
    (folder / "truth").mkdir(parents=True)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "FORERUN"))}
    clean |= {
        "PYTHONPATH": str(SUPPORT / "device_site"),
        "FORERUN_TEST_TIMELINE": str(folder / "truth"),
        "FORERUN_DEVICE": "cpu",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    home = folder if is_loop else clone
    try:
        done = subprocess.run(
            command, cwd=home, env=clean, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as err:
        raise Failed(f"{folder.name}: no end after {TIMEOUT_S} s") from err
    log = done.stdout + done.stderr
    (folder / "log.txt").write_text(log, encoding="utf-8")
    if done.returncode:
        error_match = re.search(
            r"^(?:\[rank\d+\]: *)?(\w*(?:Error|Exception).*)$", log, re.MULTILINE
        )
        raise Failed(
            f"{folder.name}: exit {done.returncode}: {error_match[1] if error_match else 'unknown'}"
        )
    return Run(folder=folder, num_ranks=num_ranks)


def is_near(recorded_ns: float, truth_ns: float) -> bool:
    """Return True if within the bounds for one operator or transfer."""
    return abs(recorded_ns - truth_ns) <= OPERATOR_FRAC * truth_ns + OPERATOR_NS


class Comparison:
    """Records of one run against its truth, summed over ranks and hooked steps."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.by_kind: dict[str, Counter[str]] = defaultdict(Counter)
        self.misses: list[str] = []
        self.exposed: list[tuple[float, float]] = []
        """Pairs by rank: a timed transfer stands for those of the whole window."""
        self.events: list[int] = []

    def add(self, rank: int, records: Iterable[Any], truth: dict[str, Any]) -> None:
        """Add all hooked steps of a rank."""
        rows = list(records)
        steps = {step["step"]: step for step in _rows(truth, "steps")}
        work, transfers = work_of(truth), transfers_of(truth)
        hooked = [r for r in rows if isinstance(r, StepRecord) and r.is_hooked]
        recorded_ns = truth_ns = 0.0
        for record in hooked:
            step = record.step
            if step not in steps or StepFlag.TRACED in record.flags:
                continue
            self.counts["steps"] += 1
            self.events.append(steps[step]["timed_records"])
            place = f"rank {rank}, step {step}"
            mine = [r for r in rows if getattr(r, "step", None) == step]
            operators = [r for r in mine if isinstance(r, OperatorRecord)]
            self._operators(place, operators, work[step])
            self._layers(place, operators, work[step])
            called = [r for r in mine if isinstance(r, CollectiveRecord)]
            self._transfers(place, called, transfers[step])
            recorded_ns += sum(record.exposed_ns * record.stands_for for record in called)
            truth_ns += exposed_ns(truth, step)
        self._exposed(f"rank {rank}", recorded_ns, truth_ns)

    def _operators(self, place: str, records: list[OperatorRecord], work: list[Work]) -> None:
        truth = _by_key((w.key, w) for w in work)
        recorded = _by_key((_key(r), r) for r in records if r.phase is not Phase.STEP)
        for key, mine in recorded.items():
            theirs = truth.get(key, [])
            name = f"{key[0]} {key[2]}"
            if not theirs:  # no kernel of it was charged
                theirs = [Work(key=key, begin_s=0.0) for _ in mine]
            if len(mine) != len(theirs):
                self._miss("operators", name, f"{place}: {key}: {len(mine)} records of "
                           f"{len(theirs)} calls")  # fmt: skip
                continue
            mine.sort(key=lambda r: r.start_ns)
            theirs.sort(key=lambda w: w.begin_s)
            for record, call in zip(mine, theirs, strict=True):
                self._operator(f"{place}: {key}", name, record.duration_ns, call.self_ns)

    def _layers(self, place: str, records: list[OperatorRecord], work: list[Work]) -> None:
        """Compare sums of a layer and pass: if equal, operators differ by their borders alone."""
        recorded, truth = Counter[Any](), Counter[Any]()
        for record in records:
            if record.phase is not Phase.STEP:
                recorded[_key(record)[1:]] += record.duration_ns
        for one in work:
            truth[one.key[1:]] += one.self_ns
        for key, recorded_ns in recorded.items():
            self.counts["layers"] += 1
            if not is_near(recorded_ns, truth[key]):
                text = f"{place}: layer {key}: {recorded_ns} ns, truth {truth[key]:.0f}"
                self._miss("layers", f"layer {key[1]}", text)

    def _operator(self, place: str, name: str, recorded_ns: int, truth_ns: float) -> None:
        self.counts["operators"] += 1
        self.by_kind[name]["all"] += 1
        if recorded_ns == 0 and truth_ns > OPERATOR_NS:
            self._miss("zeros", name, f"{place}: 0 ns, truth {truth_ns:.0f}")
        if not is_near(recorded_ns, truth_ns):
            self._miss("operators", name, f"{place}: {recorded_ns} ns, truth {truth_ns:.0f}")

    def _miss(self, check: str, name: str, text: str) -> None:
        self.counts[f"{check} missed"] += 1
        self.by_kind[name][check] += 1
        self.misses.append(f"{check}: {text}")

    def _transfers(
        self, place: str, records: list[CollectiveRecord], transfers: list[Transferred]
    ) -> None:
        truth = {t.key: t for t in transfers}
        for record in records:
            key = (record.collective.value, record.group, record.peer, record.sequence)
            name = f"{record.collective.value} {record.role.value}"
            self.counts["transfers"] += 1
            self.by_kind[name]["all"] += 1
            if key not in truth:
                self._miss("transfers", name, f"{place}: {key} was not called")
            elif record.is_bound:
                self.counts["transfers of unknown end"] += 1
                self.by_kind[name]["unknown end"] += 1
            elif not is_near(record.duration_ns, truth[key].duration_ns):
                self._miss("transfers", name, f"{place}: {key}: {record.duration_ns} ns, "
                           f"truth {truth[key].duration_ns:.0f}")  # fmt: skip

    def _exposed(self, place: str, recorded_ns: float, truth_ns: float) -> None:
        self.exposed.append((recorded_ns, truth_ns))
        if abs(recorded_ns - truth_ns) > EXPOSED_FRAC * truth_ns + EXPOSED_NS:
            self._miss("exposed", "window", f"{place}: {recorded_ns:.0f} ns, truth {truth_ns:.0f}")


def _key(record: OperatorRecord) -> tuple[str, int, str, int]:
    return (record.kind.value, record.layer, record.phase.value, record.microbatch)


def _by_key(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    grouped: dict[Any, list[Any]] = defaultdict(list)
    for key, value in pairs:
        grouped[key].append(value)
    return grouped


def _rows(truth: dict[str, Any], table: str) -> Iterator[dict[str, Any]]:
    columns = truth[table]
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))


def exposed_ns(truth: dict[str, Any], step: int) -> float:
    """Return how long the step's stream stood idle for transfers."""
    stream = next(row["stream"] for row in _rows(truth, "steps") if row["step"] == step)
    return 1e9 * sum(
        end_s - begin_s
        for row in _rows(truth, "stalls")
        if row["step"] == step and row["stream"] == stream
        for begin_s, end_s, cause in row["parts"]
        if cause >= 0
    )


def run_case(clone: Path, case: str, work: Path) -> Cell:
    """Run a case twice and compare."""
    cell = Cell(case=case)
    begin_s = time.monotonic()
    try:
        bare = train(clone, case, work / "bare", has_forerun=False)
        calibrated = train(clone, case, work / "calibrated", has_forerun=True)
        cell.results["runs"] = "ok"
        _check(cell, bare, calibrated)
    except (Failed, ForerunError) as err:
        cell.results["runs"] = str(err)
    cell.time_s = time.monotonic() - begin_s
    return cell


def _check(cell: Cell, bare: Run, calibrated: Run) -> None:
    truths, plain = calibrated.truths, bare.truths
    cell.results["losses"] = _same_losses(truths, plain)
    run = read_run(calibrated.folder / "records")
    seen = Comparison()
    for rank, records in run.records.items():
        seen.add(rank, records, truths[rank])
    counts = seen.counts
    for check, name in (
        ("operators", "operators"),
        ("layers", "layers"), ("no zeros", "zeros"), ("transfers", "transfers"),
        ("exposed", "exposed"),
    ):  # fmt: skip
        missed = counts[f"{name} missed"]
        of = len(seen.exposed) if name == "exposed" else counts[name]
        of = of or counts["operators"]
        cell.results[check] = f"{missed} of {of} missed" if missed or not of else "ok"
    cell.misses = seen.misses
    cell.figures = {
        "hooked_steps": counts["steps"],
        "operators": counts["operators"],
        "transfers": counts["transfers"],
        "transfers_of_unknown_end": counts["transfers of unknown end"],
        "events_per_hooked_step": sorted(set(seen.events))[-1:] and max(seen.events),
        "events_per_hooked_step_median": median(seen.events) if seen.events else 0,
        "exposed_found_ms": sum(recorded_ns for recorded_ns, _ in seen.exposed) / 1e6,
        "exposed_truth_ms": sum(truth for _, truth in seen.exposed) / 1e6,
        "missed_by_kind": {
            name: dict(count) for name, count in sorted(seen.by_kind.items()) if len(count) > 1
        },
    }


def _same_losses(left: dict[int, dict[str, Any]], right: dict[int, dict[str, Any]]) -> str:
    count = 0
    for rank, truth in left.items():
        for step, loss in truth["notes"].items():
            other = right[rank]["notes"].get(step)
            if loss != other:
                return f"rank {rank}, step {step}: {loss} with Forerun, {other} without"
            count += 1
    return "ok" if count else "no losses were told"


def table(cells: list[Cell]) -> str:
    """Return a table of the checks by case."""
    head = ["case", *CHECKS, "hooked steps", "events a step", "exposed, of truth", "s"]
    rows = []
    for cell in cells:
        figures = cell.figures
        truth_ms = figures.get("exposed_truth_ms", 0.0)
        share = f"{figures['exposed_found_ms'] / truth_ms:.3f}" if truth_ms else "-"
        rows.append([
            cell.case, *(cell.results.get(check, "-") for check in CHECKS),
            figures.get("hooked_steps", 0), figures.get("events_per_hooked_step", 0), share,
            f"{cell.time_s:.0f}",
        ])  # fmt: skip
    return markdown_table(head, rows)


def main() -> None:
    """Run the cases, print results as they come, store all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, help="keep logs, records and truth here")
    parser.add_argument("--misses", type=int, default=4, help="how many to print of a case")
    args = parser.parse_args()
    cells = []
    for case in args.cases:
        with tempfile.TemporaryDirectory() as scratch:
            work = (args.work or Path(scratch)).resolve() / case
            cells.append(run_case(args.clone.resolve(), case, work))
        cell = cells[-1]
        print(case, cell.results, cell.figures, *cell.misses[: args.misses], sep="\n  ")
        if args.out is not None:
            values = [asdict(cell) for cell in cells]
            args.out.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    print(table(cells))
    is_green = all(cell.results.get(check) == "ok" for cell in cells for check in CHECKS)
    sys.exit(0 if is_green else 1)


if __name__ == "__main__":
    main()
