"""The recipe on Megatron's own classes: losses, probes with little free memory, and overhead."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from forerun.benchmarks.gpu.bench import Bench, NotHere
from forerun.benchmarks.runs.gpu_parts import (
    Part,
    fake_part,
    kineto_part,
    layouts_part,
    nccl_part,
    overhead_part,
)
from forerun.benchmarks.runs.gpu_runs import CPU, GPU, Run, Runner, Size
from forerun.calib.records import CoverageRecord, OperatorRecord, WindowRecord
from forerun.calib.workload import Phase
from forerun.hooks.process import is_installed

_CONTEXT_NBYTES = 2 << 30
"""Bytes of CUDA's context and its libraries' buffers, which no allocator counts."""
_SPARE_FRAC = 0.1
"""Fraction of the allocator's peak lost to fragmentation: cached blocks that do not fit."""
_FULL_FRAC = 0.95
_GIVE_UP_S = 3.0
_BALLAST = """
import sys, torch
free, total = torch.cuda.mem_get_info()
wanted = max(0, int({full} * total) - {needed} - (total - free))
held = torch.empty(wanted, dtype=torch.uint8, device="cuda")
print(wanted, *torch.cuda.mem_get_info(), flush=True)
sys.stdin.read()
"""


def recipe(bench: Bench) -> None:
    """Check losses with and without hooks bit by bit, faults, and that backward hooks fire."""
    runner = _runner(bench, _short(bench))
    hooked = runner.run("hooked", window_steps=20)
    _put_hooked(bench, hooked)
    plain = runner.run("plain", window_steps=20, is_bare=True)
    _put_losses(bench, hooked, plain)
    bench.put(
        hooked_run_step_s=statistics.median(hooked.after_s),
        plain_run_step_s=statistics.median(plain.after_s),
    )
    bench.keep_samples("recipe", hooked.directory)


def _runner(bench: Bench, size: Size, name: str = "runs") -> Runner:
    if not is_installed("megatron.core"):
        raise NotHere("needs megatron.core: carry its wheel for this Python and give --wheels")
    limited = replace(size, timeout_s=max(5.0, bench.remaining_s - 2 * _GIVE_UP_S))
    return Runner(out=bench.work / name, size=limited, is_cpu=bench.is_cpu)


def _short(bench: Bench) -> Size:
    return replace(CPU if bench.is_cpu else GPU, window_steps=20, steps_after=15)


def _put_hooked(bench: Bench, run: Run) -> None:
    records: list[Any] = [r for rank_records in run.records.records.values() for r in rank_records]
    operators = [r for r in records if isinstance(r, OperatorRecord)]
    coverage = {r.name: (r.fired, r.installed) for r in records if isinstance(r, CoverageRecord)}
    windows = [r for r in records if isinstance(r, WindowRecord)]
    bench.put(
        num_operators=len(operators),
        num_backward=sum(r.phase is Phase.BACKWARD for r in operators),
        num_zero_durations=sum(r.duration_ns == 0 for r in operators),
        num_silent=sum(installed > 0 and not fired for fired, installed in coverage.values()),
        num_windows=len(windows),
        num_faults=sum(r.num_faults for r in windows),
        num_dropped=sum(r.num_dropped for r in windows),
        coverage=coverage,
    )


def _put_losses(bench: Bench, run: Run, other: Run) -> None:
    common = min(len(run.loss_bits), len(other.loss_bits))
    pairs = zip(run.loss_bits[:common], other.loss_bits[:common], strict=True)
    bench.put(num_losses=common, num_other_losses=sum(a != b for a, b in pairs))


def probes(bench: Bench) -> None:
    """Run probes with 95 % of the memory in use: no failure, equal losses, equal steps."""
    dropout = ("--hidden-dropout", "0.1")  # reveals any change of the random state
    size = replace(_short(bench), window_steps=8, steps_after=20)
    runner = _runner(bench, size)
    plain = runner.run("without probes", dropout)
    needed = _needed_nbytes(plain)
    bench.put(needed_nbytes=needed)
    probed = (*dropout, "--calibrate-probe-seconds=5")
    runner.size = replace(size, timeout_s=max(5.0, bench.remaining_s - 2 * _GIVE_UP_S))
    with _ballast(bench, needed):
        probed_run = runner.run("with probes", probed)
    _put_losses(bench, probed_run, plain)
    records: list[Any] = [r for ranks in probed_run.records.records.values() for r in ranks]
    windows = [r for r in records if isinstance(r, WindowRecord)]
    bench.put(
        num_probed=sum(getattr(r, "is_probe", False) for r in records),
        num_faults=sum(r.num_faults for r in windows),
        left_out=sorted(
            {r.name for r in records if isinstance(r, CoverageRecord) and _is_unprobed(r)}
        ),
        plain_step_s=plain.step_s,
        probed_step_s=probed_run.step_s,
        last_frac=_last_s(probed_run) / _last_s(plain) - 1,
    )


def _is_unprobed(record: CoverageRecord) -> bool:
    return record.name.startswith(("not probed", "probes ended"))


def _last_s(run: Run) -> float:
    """Return the time of the last steps, after any probe."""
    return statistics.median(run.steps_s[-5:])


def _needed_nbytes(run: Run) -> int:
    records = (r for rank_records in run.records.records.values() for r in rank_records)
    peak = max(r.memory_peak_nbytes for r in records if isinstance(r, WindowRecord))
    return round(peak * (1 + _SPARE_FRAC)) + _CONTEXT_NBYTES


@contextmanager
def _ballast(bench: Bench, needed_nbytes: int) -> Iterator[None]:
    """Let another process take the memory that a run does not need, up to 95 % of the total."""
    if bench.is_cpu:
        bench.put(ballast="none: needs a GPU")
        yield
        return
    code = _BALLAST.format(full=_FULL_FRAC, needed=needed_nbytes)
    pipe = subprocess.PIPE
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
    try:
        reply = holder.stdout.readline().split() if holder.stdout else []
        if len(reply) != 3:
            raise ValueError("the process that takes memory has failed")
        ballast_nbytes, free, total = map(int, reply)
        bench.put(ballast_nbytes=ballast_nbytes, free_nbytes=free, memory_nbytes=total)
        yield
    finally:
        holder.kill()
        holder.wait()


def overhead(bench: Bench) -> None:
    """Compare hooked with bare steps, both launch-bound and compute-bound."""
    base = CPU if bench.is_cpu else GPU
    sizes = {
        "launch_bound": _sized(base, hidden=1024, layers=12, seq=512, micro=1),
        "compute_bound": _sized(base, hidden=4096, layers=3, seq=2048, micro=2),
    }
    for name, size in sizes.items():
        runner = _runner(bench, CPU if bench.is_cpu else size, name)
        _put_part(bench, name, overhead_part, runner)
        bench.put(**{f"{name}_waiting_frac": _waiting_frac(runner.known["overhead"])})
        bench.keep_samples(name, runner.known["overhead"].directory)


def shapes(bench: Bench) -> None:
    """Compare events with kernels, then predict other shapes and ranks from one run, and measure.

    Each part is started only if its known duration fits the remaining time.
    """
    base = CPU if bench.is_cpu else GPU
    runner = _runner(bench, base)
    more: dict[str, tuple[float, Callable[[Runner], Part]]] = {
        "kineto": (50.0, kineto_part),
        "layouts": (150.0, layouts_part),
        "fake": (90.0, fake_part),
        "two_ranks": (90.0, nccl_part),
    }
    for name, (needed_s, part) in more.items():
        if bench.remaining_s < needed_s:
            bench.put(**{name: f"not begun: {bench.remaining_s:.0f} s were left of {needed_s:.0f}"})
            continue
        runner.size = replace(base, timeout_s=max(5.0, bench.remaining_s - 2 * _GIVE_UP_S))
        try:
            _put_part(bench, name, part, runner)
        except Exception as err:  # any failure of one must not prevent the others
            bench.put(**{name: f"failed: {type(err).__name__}: {err}"[-500:]})
        for known, run in runner.known.items():
            bench.keep_samples(known, run.directory)


def _waiting_frac(run: Run) -> float:
    """Return the share of the operators' time in which the device waited for the host."""
    records = (r for rank_records in run.records.records.values() for r in rank_records)
    operators = [r for r in records if isinstance(r, OperatorRecord)]
    whole_ns = sum(r.duration_ns for r in operators)
    return sum(r.host_bound_ns for r in operators) / whole_ns if whole_ns else 0.0


def _sized(base: Size, *, hidden: int, layers: int, seq: int, micro: int) -> Size:
    words = list(base.model)
    words[words.index("--hidden-size") + 1] = str(hidden)
    words[words.index("--num-attention-heads") + 1] = str(max(1, hidden // 128))
    return replace(
        base, model=tuple(words), layers=layers, seq_length=seq, micro_batch=micro,
        overhead_steps=40, steps_after=15,
    )  # fmt: skip


def _put_part(bench: Bench, name: str, part: Callable[[Runner], Part], runner: Runner) -> None:
    result = asdict(part(runner))
    bench.put(**{f"{name}: {figure['name']}": figure["value"] for figure in result["figures"]})
    bench.put(**{name: result})
