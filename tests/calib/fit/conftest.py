"""Sample tables with planted laws."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import pytest

from forerun.calib.fit.batches import batch_of
from forerun.calib.fit.laws import Ceilings
from forerun.calib.fit.machine import FittedLaw
from forerun.calib.samples.columns import FRAMES, normalise, shape_text
from forerun.calib.samples.table import SampleTable
from forerun.calib.workload.collectives import CollectiveCall
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

TRUE = Ceilings(flop_per_s=8e10, bytes_per_s=9e9, launch_s=1.5e-5)
LINEARS = (
    OperatorKind.LINEAR_QKV,
    OperatorKind.LINEAR_PROJ,
    OperatorKind.LINEAR_FC1,
    OperatorKind.LINEAR_FC2,
    OperatorKind.LOGITS,
)
EFFICIENCY = {
    OperatorKind.LINEAR_QKV: 0.92,
    OperatorKind.LINEAR_PROJ: 0.86,
    OperatorKind.LINEAR_FC1: 0.95,
    OperatorKind.LINEAR_FC2: 0.9,
    OperatorKind.LOGITS: 0.97,
    OperatorKind.NORM: 0.8,
    OperatorKind.RESIDUAL: 1.2,
    OperatorKind.ACTIVATION: 0.5,
    OperatorKind.CORE_ATTENTION: 0.7,
    OperatorKind.EMBEDDING: 1.5,
    OperatorKind.LOSS: 0.6,
    OperatorKind.POSITION: 2.0,
    OperatorKind.OPTIMIZER: 0.75,
}
MakeTable = Callable[..., SampleTable]


def gpt_operators(hidden: int, *, tp: int = 1, tokens: int = 256) -> list[Operator]:
    """One layer, head and optimizer of a GPT of this width, forward and backward."""
    heads, vocab = max(1, hidden // 64 // tp), 4096 // tp
    qkv, ffn = 3 * hidden // tp, 4 * hidden // tp
    kind = OperatorKind
    shapes = {
        kind.EMBEDDING: (tokens, hidden, vocab),
        kind.NORM: (tokens, hidden),
        kind.LINEAR_QKV: (tokens, hidden, qkv),
        kind.POSITION: (tokens, qkv),
        kind.CORE_ATTENTION: (2, heads, heads, tokens // 2, 64),
        kind.LINEAR_PROJ: (tokens, hidden // tp, hidden),
        kind.RESIDUAL: (tokens, hidden),
        kind.LINEAR_FC1: (tokens, hidden, ffn),
        kind.ACTIVATION: (tokens, ffn, ffn),
        kind.LINEAR_FC2: (tokens, ffn, hidden),
        kind.LOGITS: (tokens, hidden, vocab),
        kind.LOSS: (tokens, vocab),
    }
    operators = [
        Operator(kind=k, phase=phase, shape=shape, element_nbytes=4)
        for k, shape in shapes.items()
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    ]
    step = Operator(
        kind=kind.OPTIMIZER, phase=Phase.STEP, shape=(12 * hidden * hidden // tp,), element_nbytes=4
    )
    return [*operators, step]


def true_time_s(operator: Operator) -> float:
    """The planted law: true ceilings and one efficiency per kind."""
    log_time = FittedLaw(ceilings=TRUE, num_units=0).log_time(batch_of([operator]))
    return float(np.exp(log_time[0])) / EFFICIENCY[operator.kind]


@pytest.fixture(scope="session")
def make_table() -> MakeTable:
    empty = {name: normalise(name, pd.DataFrame(columns=list(FRAMES[name]))) for name in FRAMES}

    def make(
        operators: Mapping[Operator, float] | None = None,
        collectives: Mapping[CollectiveCall, float] | None = None,
        *,
        window: int = 0,
        num_steps: int = 10,
        spread_log: float = 0.01,
        is_bound: bool = False,
        stages: Sequence[int] = (0,),
    ) -> SampleTable:
        common = {
            "window": window,
            "count": 4 * num_steps,
            "num_steps": num_steps,
            "num_seen": 2,
            "spread_log": spread_log,
            "is_bound": is_bound,
        }
        rows: list[dict[str, object]] = [
            {
                **common,
                "row": "operator",
                "kind": o.kind.value,
                "phase": o.phase.value,
                "shape": shape_text(o.shape),
                "element_nbytes": o.element_nbytes,
                "time_s": time_s,
                "stage": stage,
            }
            for (o, time_s), stage in itertools.product((operators or {}).items(), stages)
        ]
        rows += [
            {
                **common,
                "row": "collective",
                "kind": c.collective.value,
                "role": c.role.value,
                "num_ranks": c.num_ranks,
                "span": c.num_ranks,
                "nbytes": c.nbytes,
                "time_s": time_s,
            }
            for c, time_s in (collectives or {}).items()
        ]
        frames = {name: frame.copy() for name, frame in empty.items()}
        filled = pd.DataFrame(rows).fillna(
            {c: "" if k == "str" else 0 for c, k in FRAMES["samples"].items()}
        )
        frames["samples"] = normalise("samples", filled.assign(run_id="r"))
        frames["runs"] = normalise("runs", pd.DataFrame({"run_id": ["r"], "rank": [0]}))
        return SampleTable(**frames)

    return make


@pytest.fixture(scope="session")
def planted() -> Callable[..., dict[Operator, float]]:
    def plant(
        *widths: int, seed: int = 0, noise: float = 0.02, **kwargs: int
    ) -> dict[Operator, float]:
        rng = np.random.default_rng(seed)
        result: dict[Operator, float] = {}
        for width in widths:
            for operator in gpt_operators(width, **kwargs):
                result[operator] = true_time_s(operator) * float(np.exp(noise * rng.normal()))
        return result

    return plant


@pytest.fixture(scope="session")
def truth() -> Callable[[Sequence[Operator]], np.ndarray]:
    return lambda operators: np.array([true_time_s(o) for o in operators])


@pytest.fixture(scope="session")
def gpt() -> Callable[..., list[Operator]]:
    return gpt_operators
