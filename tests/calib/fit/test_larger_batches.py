"""Estimates of larger micro-batch sizes from a run of one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.fit.batches import Timed, batch_of
from forerun.calib.fit.laws import Ceilings, columns
from forerun.calib.fit.machine import fit_machine
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

_TOKENS, _WIDTH, _HEADS, _SEQ = 256, 128, 4, 128
_SHAPES = {
    OperatorKind.LINEAR_QKV: (_TOKENS, _WIDTH, 3 * _WIDTH),
    OperatorKind.LINEAR_PROJ: (_TOKENS, _WIDTH, _WIDTH),
    OperatorKind.LINEAR_FC1: (_TOKENS, _WIDTH, 4 * _WIDTH),
    OperatorKind.LINEAR_FC2: (_TOKENS, 4 * _WIDTH, _WIDTH),
    OperatorKind.LOGITS: (_TOKENS, _WIDTH, 256),
    OperatorKind.NORM: (_TOKENS, _WIDTH),
    OperatorKind.RESIDUAL: (_TOKENS, _WIDTH),
    OperatorKind.ACTIVATION: (_TOKENS, 4 * _WIDTH, 4 * _WIDTH),
    OperatorKind.LOSS: (_TOKENS, 256),
    OperatorKind.EMBEDDING: (_TOKENS, _WIDTH, 256),
    OperatorKind.CORE_ATTENTION: (_TOKENS // _SEQ, _HEADS, _HEADS, _SEQ, _WIDTH // _HEADS),
}
_CUT = OperatorKind.POSITION
"""Without rotary positions: views of the product, and next to no bytes."""


def _operator(kind: OperatorKind, phase: Phase, shape: tuple[int, ...]) -> Operator:
    return Operator(kind=kind, phase=phase, shape=shape, element_nbytes=4)


def _planted_s(operator: Operator, machine: Ceilings) -> float:
    launches, flop, nbytes = columns(batch_of([operator]), 0).totals()[0]
    moved = 0.0 if operator.kind is _CUT else nbytes / machine.bytes_per_s
    return float(launches * machine.launch_s + flop / machine.flop_per_s + moved)


@settings(max_examples=8, deadline=None)
@given(
    launch_s=st.floats(8e-6, 24e-6),
    bytes_per_s=st.floats(6e9, 24e9),
    flop_per_s=st.floats(40e9, 160e9),
    seed=st.integers(0, 999),
)
def test_what_only_cuts_a_tensor_leaves_the_rates_of_the_machine_alone(
    launch_s: float, bytes_per_s: float, flop_per_s: float, seed: int
) -> None:
    machine = Ceilings(flop_per_s=flop_per_s, bytes_per_s=bytes_per_s, launch_s=launch_s)
    noise = np.random.default_rng(seed)
    groups, grown = {}, {}
    for kind, shape in {**_SHAPES, _CUT: (_TOKENS, 3 * _WIDTH)}.items():
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            one = _operator(kind, phase, shape)
            time_s = _planted_s(one, machine) * np.exp(0.03 * noise.standard_normal())
            name = f"{kind.value}/{phase.value}"
            groups[name] = Timed(
                batch=batch_of([one]), time_s=np.array([time_s]), weight=np.ones(1)
            )
            if kind is not _CUT and not kind.is_linear:
                grown[name] = (one, replace(one, shape=(4 * shape[0], *shape[1:])))
    fitted = fit_machine(groups, device="cpu")
    errors_log = []
    for name, pair in grown.items():
        batch = batch_of(list(pair))
        planted_s = [_planted_s(one, machine) for one in pair]
        errors_log += (np.diff(fitted.predict(name, batch).log_time) - np.diff(np.log(planted_s)),)
    assert abs(np.mean(errors_log)) < 0.3
