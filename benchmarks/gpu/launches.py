"""Unmodified Megatron-LM launched by torchrun: the models, calibrated runs, and two ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.benchmarks.gpu.bench import Bench, NotHere, free_port
from forerun.benchmarks.gpu.kernels import kineto_part
from forerun.benchmarks.gpu.layouts import LOCAL, PAIRS
from forerun.benchmarks.gpu.megatron_runs import losses, script
from forerun.benchmarks.runs.launches import step_times_s
from forerun.calib.errors import ForerunError
from forerun.calib.records.record_kinds import (
    CollectiveRecord,
    CoverageRecord,
    OperatorRecord,
    StepRecord,
    WindowRecord,
)
from forerun.calib.samples.store import read_run

_TAIL = 1500
_AFTER_S, _END_S = 10.0, 4.0
"""Seconds to keep and read a run's records, and to end one."""
_COMMON = shlex.split(
    "--no-gradient-accumulation-fusion --tokenizer-type NullTokenizer --mock-data --split 98,1,1 "
    "--lr 1e-4 --min-lr 1e-5 --log-interval 1 --eval-iters 0 --eval-interval 1000 --num-workers 0 "
    "--disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
_ON_CPU = shlex.split(
    "--distributed-backend gloo --use-cpu-initialization --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion"
)


def has_engine(bench: Bench) -> bool:
    """Return True if Transformer Engine was seen to work on this machine."""
    is_there = "GPU_REPORT_ENGINE" in os.environ
    return is_there and bool(bench.figures_of("preflight").get("has_engine"))


def words_of(bench: Bench, *, hidden: int = 4096, seq: int = 4096, layers: int = 4) -> list[str]:
    """Return the arguments of a model with the proportions of Llama 3 8B, in bf16; on a CPU of a
    64th of its width."""
    shrink = 64 if bench.is_cpu else 1
    heads = hidden // 128
    words = [*_COMMON, "--num-layers", str(layers), "--hidden-size", str(hidden // shrink)]
    words += ["--num-attention-heads", str(heads), "--group-query-attention"]
    words += ["--num-query-groups", str(min(8, heads)), "--seq-length", str(seq // shrink)]
    words += ["--max-position-embeddings", str(seq // shrink)]
    words += ["--ffn-hidden-size", str(hidden * 7 // 2 // shrink)]
    words += ["--vocab-size", str(32_000 // (16 if bench.is_cpu else 1))]
    words += ["--micro-batch-size", "2", "--global-batch-size", "8"]
    words += _ON_CPU if bench.is_cpu else ["--bf16"]
    return [*words, *(() if has_engine(bench) else LOCAL)]


def calibrated(bench: Bench, name: str, words: Sequence[str], *, num_steps: int) -> None:
    """Train with ``--calibrate``, alone as a user gives it; keep records, answer and log."""
    folder = bench.work / name
    try:
        commands = _launched(bench, name, words, num_steps)
        log = finished(bench, name, commands, bench.remaining_s - _AFTER_S)
    finally:
        _keep(bench, name)
    bench.put(
        steps_s=step_times_s(log),
        losses=losses(log)[:2],
        lines=[line for line in log.splitlines() if "[forerun]" in line],
        **_of_records(folder),
    )
    try:
        bench.put(kernels=kineto_part(read_run(folder)))
    except ValueError as err:
        bench.put(kernels=str(err)[:300])


def _keep(bench: Bench, name: str) -> None:
    """Store the whole directory of a run next to the figures."""
    if (bench.work / name).exists():
        with tarfile.open(bench.out.with_name(f"{name}-run.tar.gz"), "w:gz") as packed:
            packed.add(bench.work / name, arcname=name)


def _launched(
    bench: Bench, name: str, words: Sequence[str], num_steps: int, *, num_ranks: int = 1,
    is_bare: bool = False,
) -> list[list[str]]:  # fmt: skip
    """Return a command for each rank: ranks of one GPU are nodes of one rank to torchrun."""
    flags = [] if is_bare else ["--calibrate", f"--calibrate-dir={bench.work / name}"]
    if not is_bare:
        flags += ["--calibrate-wandb=off", *(["--calibrate-device=cpu"] if bench.is_cpu else [])]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    launcher += ["--nnodes", str(num_ranks), "--master-addr", "localhost", "--master-port"]
    program = [script(), *words, "--train-iters", str(num_steps), *flags]
    port = free_port()
    return [
        [*launcher, port, "--node-rank", str(rank), "--local-addr", "localhost", *program]
        for rank in range(num_ranks)
    ]


def finished(
    bench: Bench, name: str, commands: Sequence[Sequence[str]], limit_s: float,
    **environ: str,
) -> str:  # fmt: skip
    """Return the output of all ranks, ended at the limit; raises ``ValueError`` if one fails."""
    settings = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **environ}
    if bench.is_cpu:
        settings |= {"FORERUN_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    begun_s = time.monotonic()
    place = bench.out.with_name(f"{name}-run.log")
    with place.open("wb") as file:
        ranks = [
            subprocess.Popen(one, stdout=file, stderr=subprocess.STDOUT, env=settings)
            for one in commands
        ]
        try:
            codes = [one.wait(max(1.0, begun_s + limit_s - time.monotonic())) for one in ranks]
        except subprocess.TimeoutExpired as err:
            raise ValueError(f"{name}: still running after {limit_s:.0f} s") from err
        finally:
            for one in ranks:  # torchrun ends its workers, which have sessions of their own
                one.terminate()
            with suppress(subprocess.TimeoutExpired):
                ranks[0].wait(_END_S)
            for one in ranks:
                one.kill()
    log = place.read_text(encoding="utf-8", errors="replace")
    if any(codes):
        raise ValueError(f"{name}: ended with {codes}: {_first_error(log)}")
    return log


def _first_error(log: str) -> str:
    match = re.search(r"^(?:\[rank\d+\]: *)?(\w*(?:Error|Exception).*)$", log, re.MULTILINE)
    return match[1][:300] if match else log[-_TAIL:]


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _of_records(folder: Path) -> dict[str, Any]:
    """Return what the records of a run contain, all ranks together."""
    by_rank = read_run(folder).records
    records: list[Any] = [one for of_rank in by_rank.values() for one in of_rank]
    operators = [r for r in records if isinstance(r, OperatorRecord)]
    moved = [r for r in records if isinstance(r, CollectiveRecord)]
    steps = [r for r in records if isinstance(r, StepRecord)]
    coverage = [r for r in records if isinstance(r, CoverageRecord)]
    hooked = [r.duration_ns for r in steps if r.is_hooked][1:]
    ends = max((r.step for r in steps if r.is_hooked), default=0)
    answered = [row["iteration"] for row in _lines(folder / "forecasts.jsonl")]
    bare = [r.duration_ns for r in steps if not r.is_hooked]
    counts = {rank: [*_counts(of_rank)] for rank, of_rank in by_rank.items()}
    return {
        "num_ranks": len(by_rank),
        "num_operators": len(operators),
        "num_collectives": len(moved),
        "num_zero_durations": sum(r.duration_ns == 0 for r in (*operators, *moved)),
        "num_exposed_too_long": sum(r.exposed_ns > r.duration_ns for r in moved),
        "num_silent": sum(r.installed > 0 and not r.fired for r in coverage),
        "num_faults": sum(r.num_faults for r in records if isinstance(r, WindowRecord)),
        "num_unsteady_ranks": sum(len(set(of_rank)) > 1 for of_rank in counts.values()),
        "collectives_by_rank": {rank: of_rank[:1] for rank, of_rank in counts.items()},
        "first_answer_after": min(answered) - ends if answered else None,
        "hooked_frac": statistics.median(hooked) / statistics.median(bare) - 1 if bare else None,
    }


def _counts(records: Sequence[Any]) -> Sequence[int]:
    return [*Counter(r.step for r in records if isinstance(r, CollectiveRecord)).values()]


def two_ranks(bench: Bench) -> None:
    """Train on two ranks of one GPU, with hooks and without at once: losses and records."""
    environ = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    if not bench.is_cpu:
        library = os.environ.get("GPU_REPORT_NCCL")
        if library is None:
            raise NotHere("needs NCCL 2.30: carry nccl2.xz")
        environ["LD_PRELOAD"] = library
    words = words_of(bench, hidden=1024, seq=1024)
    rows: dict[str, dict[str, Any]] = {}
    for number, (name, options) in enumerate(PAIRS.items()):
        limit_s = (bench.remaining_s - _AFTER_S) / (len(PAIRS) - number) - _END_S
        # Megatron-LM refuses FSDP with one.
        environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if "--use-megatron-fsdp" in options else "1"

        def trained(
            kind: str, name: str = name, options: Sequence[str] = options, limit_s: float = limit_s
        ) -> dict[str, Any]:
            return _pair(bench, name, kind, [*words, *options], limit_s, environ)

        with ThreadPoolExecutor(2) as pool:
            hooked, bare = pool.map(trained, ("hooked", "bare"))
        rows[name] = row = hooked | bare
        losses_of = [row.get(f"{kind}_losses") for kind in ("hooked", "bare")]
        row["is_equal"] = bool(losses_of[0]) and losses_of[0] == losses_of[1]
        bench.put(pairs=rows)
    bench.put(
        num_other_losses=sum(not row["is_equal"] for row in rows.values()),
        **{
            key: sum(row.get(key, 1) for row in rows.values())
            for key in (
                "num_zero_durations",
                "num_exposed_too_long",
                "num_faults",
                "num_unsteady_ranks",
            )
        },
        num_answered=sum((row.get("first_answer_after") is not None) for row in rows.values()),
    )


def _pair(
    bench: Bench, name: str, kind: str, words: Sequence[str], limit_s: float,
    environ: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    run = f"{name}-{kind}".replace(" ", "").lower()
    is_bare = kind == "bare"
    row: dict[str, Any] = {}
    begun_s = time.monotonic()
    try:
        commands = _launched(bench, run, words, 27, num_ranks=2, is_bare=is_bare)
        finished(bench, run, commands, limit_s, **environ)
    except Exception as err:  # its log and its records are read all the same
        row[f"{kind}_problem"] = str(err)[:400]
    log = bench.out.with_name(f"{run}-run.log").read_text(encoding="utf-8", errors="replace")
    row[f"{kind}_losses"] = losses(log)
    if times_s := step_times_s(log)[3:]:
        row[f"{kind}_step_s"] = statistics.median(times_s)
    if not is_bare:
        _keep(bench, run)
        with suppress(ForerunError, OSError, statistics.StatisticsError):
            row |= _of_records(bench.work / run)
    return row | {f"{kind}_wall_s": round(time.monotonic() - begun_s, 1)}
