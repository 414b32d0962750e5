"""Parts of ``gpu/recipe_runs.py``: each measures one thing and compares it with its bar."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from scipy.stats import bootstrap

from forerun.benchmarks.runs.gpu_runs import Run, Runner
from forerun.calib.answers import overhead
from forerun.calib.fit import Calibration, calibrate
from forerun.calib.layers import stage_operators
from forerun.calib.records import CollectiveRecord, OperatorRecord, TraceRecord
from forerun.calib.workload import Operator, OperatorKind, Phase, RunConfig

BASE = "base"
SHORT_S = 20e-6
"""Seconds; operators below this are mostly launch time: shown, not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number, its bar (None: shown only), and whether it is met."""

    name: str
    value: float
    bar: float | None = None
    note: str = ""

    @property
    def is_met(self) -> bool:
        """True if there is no bar or the value does not pass it."""
        return self.bar is None or self.value <= self.bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Results of one part."""

    title: str
    figures: tuple[Figure, ...]
    rows: tuple[tuple[str, ...], ...] = ()
    """A table; its first row is the head."""
    notes: tuple[str, ...] = field(default=())


def overhead_part(runner: Runner) -> Part:
    """Compare hooked with bare steps of a long window, and later steps with the bare ones."""
    long = runner.run("overhead", window_steps=runner.size.overhead_steps)
    steps = long.table.steps
    clean = steps[steps["is_clean"]].sort_values("step")
    measured = overhead(clean["time_s"], clean["is_hooked"])
    bare = clean.loc[~clean["is_hooked"], "time_s"].to_numpy()
    ratio = bootstrap(
        (long.after_s, bare),
        lambda after, inside, axis=-1: statistics.median(after) / statistics.median(inside) - 1,
        vectorized=False,
        method="percentile",
        n_resamples=1000,
        confidence_level=0.9,
        rng=1,
    ).confidence_interval
    off = runner.run("overhead, off", window_steps=0)
    off_s = statistics.median(off.steps_s[5:])
    return Part(
        title="Overhead",
        figures=(
            Figure(
                name="in the window",
                value=measured.overhead_frac,
                bar=0.03,
                note=f"90 %: {measured.low_frac:+.2%} to {measured.high_frac:+.2%}, "
                f"{measured.num_hooked} hooked and {measured.num_bare} bare steps",
            ),
            Figure(
                name="after the window",
                value=long.step_s / statistics.median(bare) - 1,
                bar=0.001,
                note=f"90 %: {ratio.low:+.2%} to {ratio.high:+.2%}, {len(long.after_s)} steps "
                "against the bare ones of the window",
            ),
            Figure(
                name="bare steps against a run without --calibrate",
                value=statistics.median(bare) / off_s - 1,
                note="two processes: their clocks and memory differ as well",
            ),
        ),
    )


def kineto_part(runner: Runner) -> Part:
    """Compare each operator by events with the sum of its kernels."""
    traced = runner.run(BASE, trace="on")
    records = [
        record for rank_records in traced.records.records.values() for record in rank_records
    ]
    events = _by_operator(r for r in records if isinstance(r, OperatorRecord))
    kernels = _by_operator(r for r in records if isinstance(r, TraceRecord))
    if not kernels:
        names = [r.name for r in records if getattr(r, "name", "").startswith("trace")]
        raise ValueError(f"nothing was traced: {', '.join(names) or 'no reason given'}")
    rows, errors = [("operator", "events", "kernels", "difference")], []
    pairs = {key: (events[key], kernels[key]) for key in sorted(events.keys() & kernels.keys())}
    for key, (by_event, by_kernel) in pairs.items():
        if by_event >= SHORT_S:
            errors.append(abs(by_event / by_kernel - 1))
        difference = f"{by_event / by_kernel - 1:+.1%}"
        rows.append((key, f"{by_event * 1e6:.1f} us", f"{by_kernel * 1e6:.1f} us", difference))
    calls = calls_in_step(traced.table.config())
    rest = {key: times for key, times in pairs.items() if OperatorKind.OPTIMIZER.value not in key}
    fracs = calibrate(traced.table, device=traced.table.config().device).weight_fracs
    shares = ", ".join(f"{kind.value} {share:.2f}" for kind, share in fracs.items())
    return Part(
        title="Events against Kineto, by operator",
        figures=(
            Figure(
                name="largest difference", value=max(errors, default=0.0), bar=0.03,
                note=f"of {len(errors)} operators of {SHORT_S * 1e6:.0f} us or more",
            ),
            Figure(name="operators of a step", value=abs(weighted_frac(pairs, calls)), bar=0.03),
            Figure(
                name="operators of a step but the optimizer", value=abs(weighted_frac(rest, calls))
            ),
        ),
        rows=tuple(rows),
        notes=(f"weight gradient's share of the backward phase: {shares}",),
    )  # fmt: skip


def calls_in_step(config: RunConfig, stage: int = 0) -> Counter[str]:
    """Return how often a rank calls each operator in a step, by its name in the tables."""
    work = stage_operators(config, stage)
    calls: Counter[str] = Counter()
    for operator, number in (*work.forward, *work.backward, *work.recompute):
        calls[_operator_name(operator)] += number * config.num_microbatches
    for operator, number in work.step:
        calls[_operator_name(operator)] += number
    return calls


def weighted_frac(pairs: Mapping[str, tuple[float, float]], calls: Mapping[str, int]) -> float:
    """Return the difference of a step's first times from its second ones, over the second."""
    first, second = (
        sum(times[place] * calls.get(name, 0) for name, times in pairs.items()) for place in (0, 1)
    )
    return first / second - 1


def layouts_part(runner: Runner) -> Part:
    """Predict step time and memory of other shapes from one, then run them."""
    size = runner.size
    shapes: dict[str, tuple[str, ...]] = {
        "micro-batch halved": ("--micro-batch-size", str(max(1, size.micro_batch // 2))),
        "micro-batch doubled": ("--micro-batch-size", str(2 * size.micro_batch)),
        "half the layers": ("--num-layers", str(size.layers // 2)),
        "half the sequence": ("--seq-length", str(size.seq_length // 2)),
        "full recompute": ("--recompute-granularity", "full"),
    }
    base = runner.run(BASE, trace="on")
    rows = [("shape", "predicted", "90 %", "measured", "error", "memory", "measured", "error")]
    errors, memories, failed = [], [], []
    for name, options in shapes.items():
        try:
            run = runner.run(name, options, window_steps=4)
        except Exception as err:  # one shape may not fit; the others are still measured
            failed.append(f"{name}: {err}")
            continue
        prediction = predict(base, options)
        error = prediction["step_time_s"] / run.step_s - 1
        # The peak is the allocator's: it excludes the context and the buffers of libraries.
        predicted_nbytes = (
            prediction["memory"]["total_nbytes"] - prediction["memory"]["overhead_nbytes"]
        )
        peak_nbytes = max(run.table.memory_peak_nbytes().values())
        off = predicted_nbytes / peak_nbytes - 1
        errors.append(abs(error))
        memories.append(abs(off))
        rows.append(
            (
                name,
                f"{prediction['step_time_s']:.4f} s",
                f"{prediction['low_s']:.4f} to {prediction['high_s']:.4f}",
                f"{run.step_s:.4f} s",
                f"{error:+.1%}",
                f"{predicted_nbytes / 2**30:.2f} GiB",
                f"{peak_nbytes / 2**30:.2f} GiB",
                f"{off:+.1%}",
            )
        )
    return Part(
        title="Other shapes from one calibration",
        figures=(
            Figure(name="mean error of the step", value=statistics.mean(errors), bar=0.05),
            Figure(name="largest error of the peak memory", value=max(memories), bar=0.05),
        ),
        rows=tuple(rows),
        notes=tuple(failed),
    )


def fake_part(runner: Runner) -> Part:
    """Measure one rank's work under TP and PP, in a single process with a fake process group."""
    base = runner.run(BASE, trace="on")
    known = calibrate(base.table, device=base.table.config().device)
    places = {
        "TP 2": (("--tensor-model-parallel-size", "2"), 1),
        "PP 2, first stage": (("--pipeline-model-parallel-size", "2"), 0),
        "PP 2, last stage": (("--pipeline-model-parallel-size", "2"), 1),
    }
    rows, errors = [("rank", "predicted work", "measured", "error")], []
    for name, (options, rank) in places.items():
        run = runner.fake(name, options, rank, 2)
        table = run.table
        config = table.config()
        stage = int(table.runs["stage"].iloc[0])
        predicted_s = work_s(known, config, stage)
        measured_s = work_s(calibrate(table, device=config.device), config, stage)
        errors.append(abs(predicted_s / measured_s - 1))
        error = f"{predicted_s / measured_s - 1:+.1%}"
        rows.append((name, f"{predicted_s:.4f} s", f"{measured_s:.4f} s", error))
    return Part(
        title="Tensor and pipeline shapes, one rank each, nothing transferred",
        figures=(Figure(name="mean error of the work", value=statistics.mean(errors), bar=0.05),),
        rows=tuple(rows),
    )


def nccl_part(runner: Runner) -> Part:
    """Run two real ranks on one device: losses with and without hooks, counts of collectives."""
    layouts: dict[str, tuple[str, ...]] = {
        "TP 2": ("--tensor-model-parallel-size", "2"),
        "PP 2": ("--pipeline-model-parallel-size", "2"),
        "DP 2": ("--use-distributed-optimizer", "--overlap-grad-reduce"),
    }
    environ = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    if not runner.is_cpu:
        _check_nccl()
    rows, num_wrong = [("layout", "losses", "collectives per hooked step and rank")], 0
    for name, options in layouts.items():
        hooked = runner.run(
            f"{name}, two ranks", options, num_ranks=2, window_steps=4, environ=environ
        )
        plain = runner.run(
            f"{name}, plain", options, num_ranks=2, window_steps=4, environ=environ, is_bare=True
        )
        num_common = min(len(hooked.loss_bits), len(plain.loss_bits))
        is_equal = num_common > 0 and hooked.loss_bits[:num_common] == plain.loss_bits[:num_common]
        counts = {
            rank: _counts(rank_records) for rank, rank_records in hooked.records.records.items()
        }
        is_steady = len(counts) == 2 and all(len(set(c)) == 1 and c[0] for c in counts.values())
        num_wrong += (not is_equal) + (not is_steady)
        rows.append((name, "equal" if is_equal else "DIFFERENT", str(counts)))
    return Part(
        title="Two ranks on one device",
        figures=(Figure(name="layouts with other losses or counts", value=num_wrong, bar=0.0),),
        rows=tuple(rows),
    )


def predict(base: Run, options: Sequence[str]) -> dict:
    """Return the JSON of ``forerun predict``."""
    command = [sys.executable, "-m", "forerun.launch.cli", "predict", str(base.directory), "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"forerun predict {' '.join(options)}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def work_s(calibration: Calibration, config: RunConfig, stage: int) -> float:
    """Return seconds of all operators of one rank in a step, without transfers."""
    work = stage_operators(config, stage)
    per_pass = (*work.forward, *work.backward, *work.recompute)
    counts = [(o, n * config.num_microbatches) for o, n in per_pass] + list(work.step)
    times_s = calibration.operators([operator for operator, _ in counts]).time_s
    return float(sum(t * n for t, (_, n) in zip(times_s, counts, strict=True)))


def _by_operator(records: Iterable[OperatorRecord | TraceRecord]) -> dict[str, float]:
    """Return median seconds by operator, with both gradients of a linear added."""
    gradients = (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)
    runs: dict[tuple, int] = defaultdict(int)
    for n, r in enumerate(records):
        is_part = r.phase in gradients
        name = _operator_name(r, Phase.BACKWARD if is_part else r.phase)
        # Both gradients follow each other, layer by layer; all others are separate runs.
        place = (r.step, r.microbatch, r.layer) if is_part else n
        runs[name, place] += r.duration_ns
    times: dict[str, list[int]] = defaultdict(list)
    for (name, _), duration_ns in runs.items():
        times[name].append(duration_ns)
    return {
        name: statistics.median(operator_times_ns) / 1e9
        for name, operator_times_ns in times.items()
    }


def _operator_name(
    operator: Operator | OperatorRecord | TraceRecord, phase: Phase | None = None
) -> str:
    shape = "x".join(map(str, operator.shape))
    return f"{operator.kind.value} {(phase or operator.phase).value} {shape}"


def _counts(records: Iterable[object]) -> list[int]:
    steps = Counter(r.step for r in records if isinstance(r, CollectiveRecord))
    return list(steps.values())


def _check_nccl() -> None:
    import torch

    version = torch.cuda.nccl.version()
    if version < (2, 30):
        nccl_version = ".".join(map(str, version))
        raise ValueError(
            f"NCCL {nccl_version} cannot share a GPU between ranks; "
            "install nvidia-nccl-cu13 2.30 or later"
        )
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
