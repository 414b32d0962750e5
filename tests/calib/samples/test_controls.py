"""Probes on an accelerator are as wide as what the run's own shapes leave open."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.fit.calibration import calibrate
from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.record_kinds import CollectiveRecord, OperatorRecord, Record
from forerun.calib.samples._operator_rows import Controls, controls_of
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.calib.workload.collectives import Collective, CollectiveCall, GroupRole
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

KEYS = ["kind"]
KINDS_LOG, SHAPES_LOG = 0.15, 0.05
REPEAT_LOG = 0.02


def planted(
    num_kinds: int, num_shapes: int, *, seed: int = 0
) -> tuple[pd.DataFrame, dict[str, float]]:
    """Pairs of kinds whose kernels differ from the probe's, and of shapes that differ beside."""
    rng = np.random.default_rng(seed)
    places = {f"k{i}": float(rng.normal(0.0, KINDS_LOG)) for i in range(num_kinds)}
    rows = [
        {
            "kind": kind,
            "control_s": 1e-3,
            "live_s": 1e-3 * math.exp(place + rng.normal(0.0, SHAPES_LOG)),
        }
        for kind, place in places.items()
        for _ in range(num_shapes)
    ]
    return pd.DataFrame(rows), places


def widths(controls: Controls, kinds: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Log time of a probe of 1 s of each kind in the run, and the standard error of that."""
    rows = pd.DataFrame({"kind": kinds, "time_s": 1.0, "spread_log": 0.0, "num_steps": 5})
    out = controls.corrected(rows, KEYS, rows["time_s"], rows["time_s"])
    errors = 1.2533 * out["spread_log"] / np.sqrt(out["num_steps"])
    return np.log(out["time_s"].to_numpy()), errors.to_numpy()


def test_planted_deviations_come_back() -> None:
    controls = controls_of(planted(400, 3)[0], KEYS)
    assert controls.of_shapes_log == pytest.approx(SHAPES_LOG, rel=0.1)
    assert controls.of_keys_log == pytest.approx(math.hypot(KINDS_LOG, SHAPES_LOG), rel=0.1)


@pytest.mark.parametrize(("num_kinds", "num_shapes"), [(200, 2), (200, 4), (24, 2)])
def test_other_shapes_lie_within_the_width(num_kinds: int, num_shapes: int) -> None:
    """Standardised errors have unit deviation, for kinds with controls and for kinds without."""
    errors, others = [], []
    for seed in range(12):
        pairs, places = planted(num_kinds, num_shapes, seed=seed)
        rng = np.random.default_rng(1000 + seed)
        controls = controls_of(pairs, KEYS)
        center, width = widths(controls, list(places))
        truth = np.array(list(places.values())) + rng.normal(0.0, SHAPES_LOG, num_kinds)
        errors.append((truth - center) / width)
        fresh = rng.normal(0.0, KINDS_LOG, 50) + rng.normal(0.0, SHAPES_LOG, 50)
        center, width = widths(controls, [f"new{i}" for i in range(50)])
        others.append((fresh - center) / width)
    assert np.std(np.concatenate(errors)) == pytest.approx(1.0, abs=0.15)
    assert 0.75 < np.std(np.concatenate(others)) < 1.15


def test_without_a_second_shape_shapes_may_differ_as_much_as_kinds() -> None:
    controls = controls_of(planted(20, 1)[0], KEYS)
    assert controls.of_shapes_log == controls.of_keys_log > KINDS_LOG / 2


@given(ratio=st.floats(0.01, 100.0))
def test_a_control_that_met_something_else_corrects_nothing_and_tells_nothing(
    ratio: float,
) -> None:
    pairs, _ = planted(5, 2)
    odd = pd.DataFrame([{"kind": "odd", "control_s": 1.0, "live_s": ratio}])
    center, width = widths(controls_of(pd.concat([pairs, odd]), KEYS), ["odd"])
    if 0.25 <= ratio <= 4.0:
        assert center[0] == pytest.approx(math.log(ratio))
    else:
        bare = widths(controls_of(pairs, KEYS), ["odd"])
        assert (center[0], width[0]) == (bare[0][0], bare[1][0]) == (0.0, width[0])


CONTROL_SHAPE, WIDE = (256, 256, 512), (1024, 256, 512)
LIVE_NS, CONTROL_NS, WIDE_NS = 300_000, 240_000, 1_000_000
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def run(write_run) -> RunRecords:
    return read_run(write_run())


def operator(kind: OperatorKind, shape: tuple[int, ...], duration_ns: int) -> OperatorRecord:
    return OperatorRecord(
        step=9,
        window=0,
        microbatch=0,
        kind=kind,
        phase=Phase.FORWARD,
        shape=shape,
        element_nbytes=4,
        layer=0,
        start_ns=0,
        duration_ns=duration_ns,
        is_probe=True,
    )


def reduced(nbytes: int, sequence: int) -> CollectiveRecord:
    return CollectiveRecord(
        step=9,
        window=0,
        collective=Collective.ALL_REDUCE,
        role=GroupRole.DP,
        group="group",
        ranks=(0, 1),
        nbytes=nbytes,
        sequence=sequence,
        peer=-1,
        is_async=False,
        is_bound=False,
        issue_ns=0,
        duration_ns=200_000,
        exposed_ns=200_000,
        is_probe=True,
    )


def with_probes(run: RunRecords, device: str, *more: Record) -> RunRecords:
    """Five equal repeats: their own spread is none."""
    probes: list[Record] = [
        replace(operator(kind, shape, duration_ns), microbatch=repeat)
        for kind, shape, duration_ns in (
            (OperatorKind.LINEAR_FC1, CONTROL_SHAPE, CONTROL_NS),
            (OperatorKind.LINEAR_FC1, WIDE, WIDE_NS),
            (OperatorKind.NORM, (64, 64), 50_000),
        )
        for repeat in range(5)
    ]
    records = {rank: (*rank_records, *probes, *more) for rank, rank_records in run.records.items()}
    headers = {rank: replace(header, device=device) for rank, header in run.headers.items()}
    return replace(run, records=records, headers=headers)


def sigma_log(run: RunRecords, kind: OperatorKind, shape: tuple[int, ...]) -> float:
    wanted = Operator(kind=kind, phase=Phase.FORWARD, shape=shape, element_nbytes=4)
    table = build_table(run)
    return float(
        calibrate(table, device=table.newest("runs")["device"].iloc[0])
        .operators([wanted])
        .sigma_log[0]
    )


@pytest.mark.slow
def test_the_width_is_that_of_the_estimate(run: RunRecords) -> None:
    """One control, of 1.25: with the prior of log(4) / 3 that is the deviation of kinds."""
    on_device = with_probes(run, H100)
    kinds_log = math.sqrt((math.log(1.25) ** 2 + (math.log(4.0) / 3.0) ** 2) / 2.0)
    expected = math.hypot(REPEAT_LOG, kinds_log * math.sqrt(2.0))
    value = sigma_log(on_device, OperatorKind.LINEAR_FC1, WIDE)
    assert value == pytest.approx(expected, rel=1e-3)
    bare = sigma_log(on_device, OperatorKind.NORM, (64, 64))
    assert bare == pytest.approx(math.hypot(REPEAT_LOG, kinds_log), rel=1e-3)


@pytest.mark.slow
def test_on_a_cpu_the_kernels_are_the_same(run: RunRecords) -> None:
    value = sigma_log(with_probes(run, "cpu"), OperatorKind.LINEAR_FC1, WIDE)
    assert value == pytest.approx(REPEAT_LOG, rel=1e-3)


def test_a_machine_that_was_probed_without_a_run_is_as_sure_as_its_repeats(
    run: RunRecords,
) -> None:
    alone = with_probes(run, H100)
    probes = {
        rank: tuple(r for r in rank_records if getattr(r, "is_probe", False))
        for rank, rank_records in alone.records.items()
    }
    value = sigma_log(replace(alone, records=probes), OperatorKind.LINEAR_FC1, WIDE)
    assert value == pytest.approx(REPEAT_LOG, rel=1e-3)


@pytest.mark.slow
def test_transfers_without_a_control_are_as_wide_as_the_prior(run: RunRecords) -> None:
    more = [reduced(1 << 12, sequence) for sequence in range(5)]
    table = build_table(with_probes(run, H100, *more))
    call = CollectiveCall(
        collective=Collective.ALL_REDUCE, role=GroupRole.DP, num_ranks=2, nbytes=1 << 12
    )
    (result,) = calibrate(table, device=H100).collectives([call]).sigma_log
    assert result == pytest.approx(math.hypot(REPEAT_LOG, math.log(4.0) / 3.0), rel=1e-3)
