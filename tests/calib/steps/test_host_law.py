"""Launch times of classes and runs, the queue between host and device, and what is said of it."""

from __future__ import annotations

import math
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_shape import of_width

import forerun
from forerun.calib.answers.measured_steps import fit_run, known_elsewhere
from forerun.calib.answers.run_measurements import Measurements
from forerun.calib.layers.blocks import BlockKind, block
from forerun.calib.regressors.estimate import Estimate
from forerun.calib.samples._operator_rows import operator_rows
from forerun.calib.samples.store import read_table
from forerun.calib.samples.table import SampleTable
from forerun.calib.steps._scales import FLOOR, FLOOR_RATIO
from forerun.calib.steps.base_times import Conditions
from forerun.calib.steps.known_steps import KnownStep
from forerun.calib.steps.launches import LaunchTimes, layer_launches
from forerun.calib.steps.live import IN_SITU, LiveTimes, live_times
from forerun.calib.steps.model import FittedSteps
from forerun.calib.timeline.terms import Term
from forerun.calib.workload.config import Batch, Parallelism, Precision, RunConfig
from forerun.calib.workload.operators import OperatorKind, Phase

GPU = "NVIDIA H200"
RUNNING = RunConfig(
    model=of_width(2048, num_layers=24, seq_length=2048, vocab_size=32000),
    parallelism=Parallelism(),
    batch=Batch(micro_batch_size=1, global_batch_size=16),
    precision=Precision.BF16,
    device=GPU,
)
PASSES = (Phase.FORWARD, Phase.BACKWARD)
LAYER = block(RUNNING, BlockKind.LAYER)
COUNTS = {
    (operator.kind, phase): count
    for phase, operators in zip(PASSES, (LAYER.forward, LAYER.backward), strict=True)
    for operator, count in operators
}
"""Number of operators of a layer by class."""
MEASURED = Path(forerun.__path__[0]) / "benchmarks" / "gpu" / "measured"


def layer_s(times_s: dict[tuple[OperatorKind, Phase], float], phase: Phase) -> float:
    operators = LAYER.forward if phase is Phase.FORWARD else LAYER.backward
    return sum(count * times_s[operator.kind, phase] for operator, count in operators)


def launches(
    times_s: dict[tuple[OperatorKind, Phase], float], rate: float = 1.0, left_out: int = 0
) -> LaunchTimes:
    """Return launch times of a run on a host of this rate, without the first classes."""
    return {
        name: Estimate(median=rate * time_s, unshared_sigma_log=0.02)
        for name, time_s in [*times_s.items()][left_out:]
    }


CLASSES = st.fixed_dictionaries({name: st.floats(5e-5, 1e-3) for name in COUNTS})


@given(CLASSES, st.lists(st.floats(0.5, 2.0), min_size=1, max_size=4), st.floats(0.5, 2.0))
def test_classes_belong_to_the_program_and_a_rate_to_the_host(
    times_s: dict[tuple[OperatorKind, Phase], float], rates: list[float], rate: float
) -> None:
    """A busy run shows a few classes: those tell its rate, and others' runs all other classes."""
    others = [launches(times_s, other) for other in rates]
    busy = launches(times_s, rate, left_out=len(times_s) // 2)
    for known in (busy, launches(times_s, rate)):
        result = layer_launches(RUNNING, known, others)
        for phase in PASSES:
            truth = rate * layer_s(times_s, phase)
            assert abs(math.log(result[phase].median / truth)) < 2 * result[phase].sigma_log
    # A run that showed nothing has the rate of the others.
    unknown = layer_launches(RUNNING, {}, others)
    mean = math.exp(sum(map(math.log, rates)) / len(rates))
    for phase in PASSES:
        assert unknown[phase].median == pytest.approx(mean * layer_s(times_s, phase), rel=1e-6)
        assert unknown[phase].sigma_log > 0.03


def test_hosts_that_differ_leave_the_next_one_open() -> None:
    times_s = dict.fromkeys(COUNTS, 2e-4)
    alike, apart = (
        layer_launches(RUNNING, {}, [launches(times_s, rate) for rate in rates])
        for rates in ((1.0, 1.01, 0.99, 1.0), (0.5, 2.0, 0.6, 1.7))
    )
    assert apart[Phase.FORWARD].sigma_log > 1.5 * alike[Phase.FORWARD].sigma_log
    assert layer_launches(RUNNING, {}, []) == {}


def queue_s(host_s: Sequence[float], device_s: Sequence[float]) -> float:
    """Seconds of passes in order on a device whose work a host launches ahead of it."""
    issued = done = 0.0
    for host, device in zip(host_s, device_s, strict=True):
        # A pass is many launches, each of which can only begin after it was issued.
        for _ in range(50):
            issued += host / 50
            done = max(done, issued) + device / 50
    return done


@pytest.mark.parametrize("ratio", [0.4, 0.8, 1.0, 1.6])
@pytest.mark.parametrize("device_s", [1e-3, 2e-3, 2.9e-3, 6e-3])
def test_a_host_runs_ahead_from_one_pass_into_the_next(
    planted: Callable[..., Any], device_s: float, ratio: float
) -> None:
    """The backward of a layer takes the device twice its forward; the truth is a queue."""
    floor_s, layers, num = 2e-3, RUNNING.model.num_layers, RUNNING.num_microbatches
    estimator = planted()
    one = {Phase.FORWARD: device_s, Phase.BACKWARD: 2 * device_s}
    estimator.operator_s = lambda operator: (
        one.get(operator.phase, 1e-9) if operator.kind is OperatorKind.CORE_ATTENTION else 1e-9
    )
    conditions = Conditions(
        is_attention_fused=True,
        bytes_per_s=1e12,
        is_in_situ=True,
        log_centers={**IN_SITU, FLOOR: math.log(floor_s), FLOOR_RATIO: math.log(ratio)},
    )
    steps = FittedSteps(base=LiveTimes(estimator=estimator, conditions=conditions))
    passes = [device_s, 2 * device_s] * num
    host = [floor_s, ratio * floor_s] * num
    truth = queue_s([layers * h for h in host], [layers * d for d in passes])
    (step_s,) = steps.median_times([RUNNING])
    assert step_s == pytest.approx(truth, rel=0.1)
    waits = steps.estimate(RUNNING).host_wait_frac
    assert waits == pytest.approx(1 - sum(passes) * layers / truth, abs=0.1)


def test_the_doubt_of_the_host_belongs_to_the_launches(planted: Callable[..., Any]) -> None:
    """A busy device hides its host: what the host may add is no unexplained rest of the step."""
    estimator = planted()
    estimator.operator_s = lambda operator: (
        3e-3 if operator.kind is OperatorKind.CORE_ATTENTION else 1e-9
    )
    conditions = Conditions(
        is_attention_fused=True,
        bytes_per_s=1e12,
        is_in_situ=True,
        log_centers={**IN_SITU, FLOOR: math.log(2e-3)},
        log_sigmas={FLOOR: 0.8},
    )
    steps = FittedSteps(base=LiveTimes(estimator=estimator, conditions=conditions))
    (one,) = steps.by_term([RUNNING])
    (name,) = (name for name in one.estimate.error_log if name.endswith(f" {FLOOR}"))
    whole_s = one.estimate.error_log[name] * one.estimate.time_s
    assert whole_s > 0.2 * one.estimate.time_s
    launches_s, rest_s = (one.error_s[term][name] for term in (Term.LAUNCHES, Term.UNEXPLAINED))
    assert launches_s > 0.8 * whole_s and abs(rest_s) < 0.25 * whole_s


def archived(name: str, folder: Path) -> SampleTable:
    with tarfile.open(MEASURED / "h200-2026-11-28.tar.gz") as packed:
        packed.extractall(folder, filter="data")
    return read_table(next(folder.rglob(f"{name}/samples.parquet")))


@pytest.mark.slow
def test_a_slow_host_turns_the_order_of_micro_batches_under_a_pipeline(tmp_path: Path) -> None:
    """A 1.3B that kept one H200 busy, on eight: the bubble pays for a micro-batch of 1, launching
    it does not.  The host's times are those of a launch-bound model on the same machine."""
    busy, waiting = (
        Measurements(table=archived(name, tmp_path)) for name in ("megatron-lm-a", "megatron-lm-b")
    )
    config = busy.config

    def split(micro: int, **degrees: int) -> RunConfig:
        layout = replace(
            config.parallelism,
            ranks_per_node=8,
            is_sequence_parallel=degrees.get("tp", 1) > 1,
            **degrees,
        )
        return replace(
            config, parallelism=layout, batch=replace(config.batch, micro_batch_size=micro)
        )

    tp8, one, two = split(4, tp=8), split(1, pp=4, dp=2), split(2, pp=4, dp=2)

    def estimates(*known: KnownStep) -> list[Any]:
        base = live_times(busy.calibration, config, known)
        return fit_run(busy, base, (), config).steps.estimates([tp8, one, two])

    blind, seen = estimates(), estimates(known_elsewhere(waiting, config))
    assert blind[1].time_s < blind[2].time_s
    assert seen[1].time_s > 1.2 * seen[2].time_s
    assert seen[0].time_s > 2 * blind[0].time_s
    # Blind, the intervals are as wide as the host is unknown, and say why; this one is slower than
    # nineteen of twenty.
    assert all(b.low_s < s.time_s < 1.02 * b.high_s for b, s in zip(blind, seen, strict=True))
    assert blind[0].host_wait_high_frac > 0.4 and blind[1].host_wait_high_frac > 0.2
    assert seen[0].host_wait_frac > 0.4 and seen[1].host_wait_frac > 0.2 > seen[2].host_wait_frac


def test_the_first_layer_of_a_pass_and_one_slow_step_count_for_little() -> None:
    """A host takes twice as long for a pass's first layer; one step of six waits for all else."""
    columns = {
        "window": 0, "stage": 0, "rank": 0, "kind": "norm", "phase": "forward", "stands_for": 1.0,
    }  # fmt: skip
    rows = [
        {
            **columns, "shape": "512x64", "element_nbytes": 2, "step": step, "microbatch": 0,
            "layer": layer, "start_ns": 1000 * step + layer, "time_s": 1e-4,
            "host_s": 2e-4 if layer == 3 else 1e-4, "host_bound_s": 1e-4 * (step == 0),
        }
        for step in range(6)
        for layer in (3, 4, 5)
    ]  # fmt: skip
    (row,) = operator_rows(pd.DataFrame(rows)).itertuples()
    assert row.host_s == pytest.approx(1e-4)
    assert row.host_bound_frac == 0.0
    # If nothing else is known, the first layers are all that there is.
    (alone,) = operator_rows(pd.DataFrame([one for one in rows if one["layer"] == 3])).itertuples()
    assert alone.host_s == pytest.approx(2e-4)
