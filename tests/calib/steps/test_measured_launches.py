"""Host time of each operator in a busy run, from records to a shape that is launch-bound.

Planted: a host that takes the same for any shape, and kernels that hide all of it in the run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_shape import of_width

from forerun.calib.fit.calibration import calibrate
from forerun.calib.layers.blocks import BlockKind, block
from forerun.calib.layers.stage_work import stage_operators
from forerun.calib.records.record_kinds import (
    SCHEMA,
    Header,
    OperatorRecord,
    Record,
    RunRecord,
    StepRecord,
    to_dict,
)
from forerun.calib.samples.columns import normalise
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import SampleTable, build_table
from forerun.calib.steps._scales import FLOOR, FLOOR_RATIO, scales
from forerun.calib.steps.live import live_times
from forerun.calib.steps.model import fit_steps
from forerun.calib.workload.config import Batch, Parallelism, Precision, RunConfig
from forerun.calib.workload.model_shape import AttentionWindow
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

GPU = "NVIDIA H100 80GB HBM3"
HOOKED_STEPS = 6
FLOP_PER_S, BYTES_PER_S = 0.6 * 989e12, 0.7 * 3.35e12
HOST_NS = {Phase.FORWARD: 230_000, Phase.BACKWARD: 180_000}
"""Host time of each operator."""
RUNNING = RunConfig(
    model=of_width(2048, num_layers=8, seq_length=2048, vocab_size=32000),
    parallelism=Parallelism(),
    batch=Batch(micro_batch_size=8, global_batch_size=32),
    precision=Precision.BF16,
    device=GPU,
)
TINY = replace(
    RUNNING,
    model=replace(RUNNING.model, seq_length=128, max_position_embeddings=128),
    batch=Batch(micro_batch_size=1, global_batch_size=4),
)


def layer_s(phase: Phase) -> float:
    """The planted truth of one pass of a layer."""
    layer = block(RUNNING, BlockKind.LAYER)
    counts = layer.forward if phase is Phase.FORWARD else layer.backward
    return sum(count for _, count in counts) * HOST_NS[phase] / 1e9


def device_s(operator: Operator) -> float:
    """Return seconds of the device alone, at rates that large shapes reach of the data sheet."""
    shape, twice = operator.shape, 2 if operator.phase is Phase.BACKWARD else 1
    if operator.kind is OperatorKind.CORE_ATTENTION:
        batch, heads, _, seq, dim = shape
        return twice * 4 * batch * heads * seq**2 * dim / FLOP_PER_S * 2 + 3e-6
    if operator.kind.is_linear:
        return twice * 2 * math.prod(shape) / FLOP_PER_S + 3e-6
    return twice * 6 * math.prod(shape[:2]) / BYTES_PER_S + 3e-6


def records(*, has_host: bool = True, unknown: Iterable[OperatorKind] = ()) -> Iterator[Record]:
    """Hooked steps of one micro-batch, in which the host takes 4 % more or less by turns."""
    work = stage_operators(RUNNING, 0)
    for step in range(HOOKED_STEPS):
        start = step * 10**9
        yield StepRecord(
            step=step, window=0, start_ns=start, duration_ns=9 * 10**8, gap_ns=0, is_hooked=True
        )
        host_frac = has_host * (0.96, 1.04)[step % 2]
        for operator, count in (*work.forward, *work.backward, *work.step):
            if not operator.shape:
                continue
            host_ns = host_frac * HOST_NS.get(operator.phase, 0) * (operator.kind not in unknown)
            yield from [_record(operator, step, round(host_ns))] * count


def _record(operator: Operator, step: int, host_ns: int) -> OperatorRecord:
    return OperatorRecord(
        step=step, window=0, microbatch=0, kind=operator.kind, phase=operator.phase,
        shape=operator.shape, element_nbytes=operator.element_nbytes, layer=0,
        start_ns=step * 10**9, duration_ns=round(1e9 * device_s(operator)), host_ns=host_ns,
    )  # fmt: skip


def table_of(folder: Path, entries: Iterable[Record]) -> SampleTable:
    """As a run writes them and a command reads them."""
    header = Header(
        schema=SCHEMA, run_id="a", rank=0, world_size=1, created_by="test", device="cuda",
        started_unix_s=1.0,
    )  # fmt: skip
    home = folder / "records" / "a"
    home.mkdir(parents=True)
    lines = [
        json.dumps(to_dict(r)) for r in (header, RunRecord(config=RUNNING.to_json()), *entries)
    ]
    (home / "rank-00000.jsonl").write_text("\n".join(lines) + "\n")
    return build_table(read_run(folder))


def centers(table: SampleTable) -> dict[str, tuple[float, float]]:
    conditions = live_times(calibrate(table, device=GPU), RUNNING).conditions
    return {s.name: (s.log_center, s.log_sigma) for s in scales(conditions)}


def test_other_windows_than_the_runs_own_change_attention_by_its_scores(tmp_path: Path) -> None:
    """A run's attention was timed under its own windows: all or none, here half of the layers."""
    table = table_of(tmp_path, records(has_host=False))

    def under(window: AttentionWindow | None, seq_length: int = 2048) -> RunConfig:
        model = replace(
            RUNNING.model,
            window=window,
            seq_length=seq_length,
            max_position_embeddings=seq_length,
        )
        return replace(RUNNING, model=model)

    layers = (True, False) * 4
    full, narrow = under(None), under(AttentionWindow(width=128))
    half = under(AttentionWindow(width=128, layers=layers))
    calibration = calibrate(table, device=GPU)

    def times_s(running: RunConfig, *configs: RunConfig) -> list[float]:
        steps = fit_steps(live_times(calibration, running))
        return [one.time_s for one in steps.estimates(configs)]

    full_s, half_s, narrow_s = times_s(full, full, half, narrow)
    assert full_s > half_s > narrow_s
    assert full_s - half_s == pytest.approx(half_s - narrow_s, rel=0.02)
    # The same samples are those of the running layout, whichever its windows are.
    for running in (half, narrow):
        assert times_s(running, running)[0] == pytest.approx(full_s, rel=1e-6)
    assert times_s(half, full)[0] > full_s
    # Under a window attention grows with the length of a sample, without one with its square.
    long_full_s = times_s(full, under(None, 4096))[0]
    assert times_s(narrow, under(narrow.model.window, 4096))[0] < long_full_s


@pytest.mark.slow
def test_the_host_of_a_busy_run_tells_what_a_launch_bound_shape_takes(tmp_path: Path) -> None:
    blind, seen = (
        fit_steps(live_times(calibrate(table, device=GPU), RUNNING)).estimates([RUNNING, TINY])
        for table in (
            table_of(tmp_path / "blind", records(has_host=False)),
            table_of(tmp_path / "seen", records()),
        )
    )
    # The head takes its host about as long as a layer.
    layers = RUNNING.model.num_layers + 1
    truth_s = 4 * layers * (layer_s(Phase.FORWARD) + layer_s(Phase.BACKWARD))
    assert blind[1].time_s < 0.6 * truth_s
    assert seen[1].time_s == pytest.approx(truth_s, rel=0.1)
    assert seen[1].low_s < truth_s < seen[1].high_s
    assert seen[1].high_s / seen[1].low_s < 0.7 * blind[1].high_s / blind[1].low_s
    # Its own step is the device's.
    assert seen[0].time_s == pytest.approx(blind[0].time_s, rel=0.01)


def test_the_floor_is_the_measured_launch_of_a_layer(tmp_path: Path) -> None:
    table = table_of(tmp_path, records())
    forward = table.operators[table.operators["phase"] == "forward"]
    assert forward["host_s"].to_numpy() == pytest.approx(HOST_NS[Phase.FORWARD] / 1e9, rel=0.001)
    assert forward["host_spread_log"].to_numpy() == pytest.approx(1.4826 * 0.04, rel=0.05)
    result = centers(table)
    passes_s = layer_s(Phase.FORWARD), layer_s(Phase.BACKWARD)
    assert result[FLOOR][0] == pytest.approx(math.log(passes_s[0]), abs=0.005)
    assert result[FLOOR_RATIO][0] == pytest.approx(math.log(passes_s[1] / passes_s[0]), abs=0.005)
    # The scatter of its steps; that between launches is every layout's own.
    assert 0.04 < result[FLOOR][1] < 0.12


def test_operators_without_a_time_widen_it(tmp_path: Path) -> None:
    whole = centers(table_of(tmp_path / "whole", records()))
    unknown = (OperatorKind.LINEAR_FC1, OperatorKind.LINEAR_FC2)
    part = centers(table_of(tmp_path / "part", records(unknown=unknown)))
    # Others stand for them.
    assert part[FLOOR][0] == pytest.approx(whole[FLOOR][0], abs=0.005)
    assert part[FLOOR][1] > 1.15 * whole[FLOOR][1]


def test_without_times_of_the_host_it_is_unknown(tmp_path: Path) -> None:
    """As in files of older versions: no such field in a line, no such column in a table."""
    table = table_of(tmp_path, records(has_host=False))
    assert not any("host_ns" in to_dict(r) for r in records(has_host=False))
    older = table.samples.drop(columns=["host_s", "host_spread_log"])
    without_host = replace(table, samples=normalise("samples", older))
    assert without_host.equals(table) and without_host.sha256 == table.sha256
    result = centers(table)
    # The device hid a host of which nothing is known; its autograd is in C++.
    assert result[FLOOR][1] == 0.8 and result[FLOOR_RATIO] == (math.log(0.8), 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"uses_cuda_graphs": True}, {"device": "cpu"}])
def test_graphs_and_processors_have_none_of_it(tmp_path: Path, changes: dict[str, object]) -> None:
    """Launches that a graph replays have no marks; on a CPU an operator is the host's work."""
    config = replace(RUNNING, **changes)  # type: ignore[arg-type]
    one, other = (
        live_times(calibrate(table, device=config.device), config).conditions
        for table in (
            table_of(tmp_path / "one", records()),
            table_of(tmp_path / "other", records(has_host=False)),
        )
    )
    assert one.log_centers == other.log_centers and one.log_sigmas == other.log_sigmas
