"""Compares a rank that we generate with the same rank of a real megatron.core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from forerun.calib.workload.buckets import buckets
from forerun.calib.workload.collectives import GroupRole
from forerun.calib.workload.config import Normalization, PositionEmbedding, RunConfig
from forerun.calib.workload.parameters import parameter_tensors
from forerun.calib.workload.ranks import group, position
from forerun.calib.workload.stage_work import stage_operators, step_collectives

PROBE = Path(__file__).parent / "expert_probe.py"
CONTROL_NBYTES = 64
"""Norms and flags are at most this long, and are left out by design."""
NOT_GENERATED = {"other", "model", "world"}
LLAMA = {
    "normalization": Normalization.RMS_NORM,
    "position_embedding": PositionEmbedding.ROPE,
    "is_gated": True,
    "has_bias": False,
    "is_tied": False,
}


@pytest.fixture
def llama(layout: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """Makes a config of a small model with the parts that models with experts have."""

    def make(*, model: dict[str, Any] | None = None, dp: int = 1, **settings: Any) -> RunConfig:
        settings = {"samples": 4 * dp, **settings}
        return layout(model={**LLAMA, "num_layers": 2, **(model or {})}, dp=dp, **settings)

    return make


@pytest.fixture
def assert_as_megatron() -> Callable[..., None]:
    """Asserts that a rank holds, runs and sends what it does in Megatron.

    ``unseen`` are kinds that run outside of what the hooks see in this layout: they are generated,
    and must not have been recorded.
    """

    def check(config: RunConfig, rank: int, unseen: Iterable[tuple[Any, ...]] = ()) -> None:
        found = _probed(config, rank)
        stage = position(config.parallelism, rank).stage
        assert [t.numel for t in parameter_tensors(config, stage)] == found["parameters"]
        generated = [[bucket.numel, bucket.is_expert] for bucket in buckets(config, stage)]
        assert generated == found["buckets"]
        for role, ranks in found["groups"].items():
            assert list(group(config.parallelism, GroupRole(role), rank)) == ranks
        operators = _operators(config, stage)
        hidden = {key for key in operators if key[:3] in set(unseen)}
        assert len(hidden) == len(set(unseen))
        recorded = {(*key[:2], tuple(key[2]), *key[3:]): n for *key, n in found["operators"]}
        assert {key: n for key, n in operators.items() if key not in hidden} == recorded
        assert _calls(config, stage) == {
            tuple(call): count
            for *call, count in found["calls"]
            if call[1] not in NOT_GENERATED and call[2] > 1 and call[3] > CONTROL_NBYTES
        }

    return check


def _probed(config: RunConfig, rank: int) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROBE), json.dumps(config.to_json()), str(rank)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))


def _operators(config: RunConfig, stage: int) -> dict[tuple[Any, ...], int]:
    """Kind, phase, shape and element size of each, and how often a step runs it."""
    work = stage_operators(config, stage)
    return {
        (o.kind.value, o.phase.value, o.shape, o.element_nbytes): n * config.num_microbatches
        for o, n in (*work.forward, *work.backward, *work.recompute)
        if o.shape  # the host's remainders have none
    }


def _calls(config: RunConfig, stage: int) -> dict[tuple[Any, ...], int]:
    calls: dict[tuple[Any, ...], int] = {}
    for call, count in step_collectives(config, stage=stage):
        key = call.collective.value, call.role.value, call.num_ranks, call.nbytes
        calls[key] = calls.get(key, 0) + count
    return calls
