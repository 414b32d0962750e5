"""Parameters, buckets, groups and collectives against real megatron.core, one rank at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forerun.calib.workload.collectives import GroupRole
from forerun.calib.workload.config import (
    Normalization,
    PositionEmbedding,
    Precision,
    Recompute,
    RunConfig,
)
from forerun.calib.workload.parameters import buckets, parameter_tensors, parameters
from forerun.calib.workload.ranks import group, position
from forerun.calib.workload.stage_work import step_collectives

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]

PROBE = Path(__file__).parent / "megatron_probe.py"
ROLES = {
    "TENSOR_MODEL_PARALLEL_GROUP": GroupRole.TP,
    "PIPELINE_MODEL_PARALLEL_GROUP": GroupRole.PP,
    "DATA_PARALLEL_GROUP_WITH_CP": GroupRole.DP,
    "DATA_PARALLEL_GROUP": GroupRole.DP,
    "EMBEDDING_GROUP": GroupRole.EMBEDDING,
}
CONTROL_NBYTES = 64
"""Norms and flags are at most this long, and are left out by design."""

DIST = {"is_optimizer_distributed": True}
OVERLAP = {**DIST, "overlaps_grad_reduce": True, "overlaps_param_gather": True}
LLAMA = {
    "normalization": Normalization.RMS_NORM,
    "position_embedding": PositionEmbedding.ROPE,
    "is_gated": True,
    "has_bias": False,
    "is_tied": False,
    "num_query_groups": 2,
}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "data parallel": ({"dp": 2}, 1),
    "first of tp2 pp2 dp2, distributed": ({"tp": 2, "pp": 2, "dp": 2, "par": DIST}, 0),
    "last of tp2 pp2 dp2, overlapped": ({"tp": 2, "pp": 2, "dp": 2, "par": OVERLAP}, 7),
    "full recompute of one layer": (
        {"tp": 2, "pp": 2, "recompute": Recompute.FULL, "recompute_num_layers": 1},
        0,
    ),
    "llama, first of pp4": ({"tp": 2, "pp": 4, "model": LLAMA}, 0),
    "llama, middle of pp4": ({"tp": 2, "pp": 4, "model": LLAMA}, 5),
    "llama, sequence parallel": (
        {
            "tp": 2,
            "dp": 2,
            "model": LLAMA,
            "par": {"is_sequence_parallel": True},
            "recompute": Recompute.FULL,
        },
        0,
    ),
    "learned positions, sequence parallel": (
        {"tp": 2, "pp": 2, "par": {"is_sequence_parallel": True}},
        0,
    ),
    "wide kv, bf16, selective": (
        {
            "tp": 4,
            "dp": 2,
            "precision": Precision.BF16,
            "recompute": Recompute.SELECTIVE,
            "model": {"kv_channels": 32},
            "par": DIST,
        },
        3,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Probed:
    config: RunConfig
    rank: int
    stage: int
    found: dict[str, Any]


@pytest.fixture(scope="module")
def probed() -> dict[str, Probed]:
    return {}


@pytest.fixture(params=CASES)
def case(
    request: pytest.FixtureRequest, layout: Callable[..., RunConfig], probed: dict[str, Probed]
) -> Probed:
    if request.param not in probed:
        settings, rank = CASES[request.param]
        config = layout(**settings)
        stage = position(config.parallelism, rank).stage
        probed[request.param] = Probed(
            config=config, rank=rank, stage=stage, found=run_probe(config, rank)
        )
    return probed[request.param]


def run_probe(config: RunConfig, rank: int) -> dict[str, Any]:
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


def test_parameters_buckets_groups_and_collectives_are_those_of_megatron(case: Probed) -> None:
    config, stage = case.config, case.stage
    assert [t.numel for t in parameter_tensors(config, stage)] == case.found["parameters"]
    assert parameters(config, stage) == sum(case.found["parameters"])
    assert [bucket.numel for bucket in buckets(config, stage)] == case.found["buckets"]
    for role in (GroupRole.TP, GroupRole.DP, GroupRole.PP, GroupRole.MODEL):
        assert list(group(config.parallelism, role, case.rank)) == case.found["groups"][role.value]
    assert predicted(config, stage) == issued(case.found["calls"])


def predicted(config: RunConfig, stage: int) -> dict[tuple[Any, ...], int]:
    return {
        (call.collective.value, call.role, call.num_ranks, call.nbytes): count
        for call, count in step_collectives(config, stage=stage)
    }


def issued(calls: list[list[Any]]) -> dict[tuple[Any, ...], int]:
    return {
        (kind, ROLES[name], num_ranks, nbytes): count
        for kind, name, num_ranks, nbytes, count in calls
        if num_ranks > 1 and name in ROLES and nbytes > CONTROL_NBYTES
    }
