"""Planted: a host that pays for each call on a sharded tensor, and for each unit of FSDP."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.fit._sharded_host import split_measured
from forerun.calib.fit.calibration import Calibration, calibrate
from forerun.calib.regressors.estimate import Estimate
from forerun.calib.samples.columns import normalise
from forerun.calib.samples.table import SampleTable
from forerun.calib.workload.config import Batch, ModelShape, Parallelism, RunConfig, Sharding
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

GPT = ModelShape(
    num_layers=3,
    hidden_size=512,
    ffn_hidden_size=2048,
    num_attention_heads=8,
    num_query_groups=8,
    kv_channels=64,
    seq_length=128,
    vocab_size=4096,
)
CALLS, CALL_S = 240, 60e-6
HOST_S, UNIT_S = 0.4e-3, 0.9e-3
NUM_UNITS = 4
PARAMETERS = 1_000_000
SHARDED = Parallelism(
    dp=4, is_optimizer_distributed=True, sharding=Sharding.WEIGHTS, overlaps_grad_reduce=True
)
PLAIN = Parallelism(dp=4)


def run(par: Parallelism) -> RunConfig:
    batch = Batch(micro_batch_size=1, global_batch_size=4)
    return RunConfig(model=GPT, parallelism=par, batch=batch, sharded_update_calls=CALLS)


def plain(parameters: int) -> Operator:
    kind, shape = OperatorKind.OPTIMIZER, (parameters,)
    return Operator(kind=kind, phase=Phase.STEP, shape=shape, element_nbytes=4)


def over_shards(parameters: int) -> Operator:
    kind, shape = OperatorKind.SHARDED_OPTIMIZER, (parameters, CALLS)
    return Operator(kind=kind, phase=Phase.STEP, shape=shape, element_nbytes=4)


def host(kind: OperatorKind, phase: Phase = Phase.FORWARD) -> Operator:
    return Operator(kind=kind, phase=phase, shape=(), element_nbytes=0)


@pytest.fixture
def calibrated(make_table, planted, truth):
    """A run in one layout on the planted machine, whose optimizer takes the law's time."""

    def fit(par: Parallelism) -> Calibration:
        rows = {o: t for o, t in planted(128, 512).items() if o.kind is not OperatorKind.OPTIMIZER}
        update_s = float(truth([plain(PARAMETERS)])[0])
        if par is SHARDED:
            rows[over_shards(PARAMETERS)] = update_s + CALLS * CALL_S
        else:
            rows[plain(PARAMETERS)] = update_s
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            rest_s = HOST_S + (NUM_UNITS * UNIT_S if par is SHARDED else 0.0)
            rows[host(OperatorKind.HOST_MICROBATCH, phase)] = rest_s
        return calibrate(described(make_table(rows), run(par)), device="cpu")

    return fit


def described(table: SampleTable, config: RunConfig) -> SampleTable:
    runs = pd.DataFrame({"run_id": ["run"], "config": [json.dumps(config.to_json())]})
    return replace(table, runs=normalise("runs", runs))


def test_a_plain_optimizer_does_not_inherit_calls_on_shards(calibrated, truth) -> None:
    result = calibrated(SHARDED)
    for parameters in (PARAMETERS // 2, 4 * PARAMETERS):
        (time_s,) = result.operators([plain(parameters)]).time_s
        # The law of launches and bytes with the machine's rates, which one width tells to a third.
        assert time_s == pytest.approx(truth([plain(parameters)])[0], rel=0.5)


def test_the_same_calls_on_larger_shards_take_the_same_time(calibrated, truth) -> None:
    result = calibrated(SHARDED)
    both_s = result.operators([over_shards(PARAMETERS), over_shards(2 * PARAMETERS)]).time_s
    more_s = float(np.diff(truth([plain(PARAMETERS), plain(2 * PARAMETERS)]))[0])
    assert both_s[0] == pytest.approx(CALLS * CALL_S + truth([plain(PARAMETERS)])[0], rel=0.01)
    assert 0.4 * more_s < both_s[1] - both_s[0] < 2.5 * more_s


def test_shards_that_nobody_measured_add_their_calls_widely(calibrated) -> None:
    result = calibrated(PLAIN)
    plainly, sharded = (
        result.operators([plain(PARAMETERS)]),
        result.operators([over_shards(PARAMETERS)]),
    )
    assert sharded.time_s[0] > plainly.time_s[0]
    assert sharded.sigma_log[0] > 2 * plainly.sigma_log[0]


def test_units_leave_the_host_of_a_pass_and_add_up_with_it(calibrated) -> None:
    result = calibrated(SHARDED)
    rest, unit = result.operators(
        [host(OperatorKind.HOST_MICROBATCH), host(OperatorKind.SHARD_UNIT)]
    ).time_s
    assert rest + NUM_UNITS * unit == pytest.approx(HOST_S + NUM_UNITS * UNIT_S, rel=1e-6)
    assert unit == pytest.approx(UNIT_S, rel=0.15)
    plainly = calibrated(PLAIN).operators([host(OperatorKind.HOST_MICROBATCH)]).time_s
    assert plainly[0] == pytest.approx(HOST_S, rel=0.01)


GUESSES = st.builds(Estimate, median=st.floats(1e-6, 1.0), unshared_sigma_log=st.floats(0.05, 1.5))


@given(total_s=st.floats(1e-6, 2.0), one=GUESSES, other=GUESSES)
def test_parts_add_up_and_none_is_negative(total_s: float, one: Estimate, other: Estimate) -> None:
    first, second = split_measured(total_s, one, other)
    assert first.median > 0 and second.median > 0
    assert first.median + second.median == pytest.approx(total_s)
