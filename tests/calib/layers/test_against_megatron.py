"""A rank's work against the real megatron.core: operators, collectives, parameters, groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from stage_tensors import parameter_tensors, parameters

from forerun.calib.layers.buckets import buckets
from forerun.calib.layers.stage_work import stage_operators, step_collectives
from forerun.calib.workload.collectives import GroupRole
from forerun.calib.workload.config import (
    Normalization,
    PositionEmbedding,
    Precision,
    Recompute,
    RunConfig,
)
from forerun.calib.workload.operators import OperatorKind
from forerun.calib.workload.ranks import group, position
from forerun.hooks.sensors.process_groups import role_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]

PROBE = Path(__file__).parent / "megatron_probe.py"
CONTROL_NBYTES = 64
"""Norms and flags are at most this long, and are left out by design."""
HOST = (OperatorKind.HOST_MICROBATCH, OperatorKind.HOST_STEP)

DIST = {"is_optimizer_distributed": True}
OVERLAP = {**DIST, "overlaps_grad_reduce": True, "overlaps_param_gather": True}
SEQUENCE = {"is_sequence_parallel": True}
LLAMA = {
    "normalization": Normalization.RMS_NORM,
    "position_embedding": PositionEmbedding.ROPE,
    "is_gated": True,
    "has_bias": False,
    "is_tied": False,
    "num_query_groups": 2,
}
QWEN = {**LLAMA, "has_qkv_bias": True, "has_qk_norm": True}
WIDE = {"num_attention_heads": 8, "num_query_groups": 8, "num_layers": 32}

Case = tuple[dict[str, Any], int]
CASES: dict[str, Case] = {
    "data parallel": ({"dp": 2}, 1),
    "first of tp2 pp2 dp2, distributed": ({"tp": 2, "pp": 2, "dp": 2, "par": DIST}, 0),
    "last of tp2 pp2 dp2, overlapped": ({"tp": 2, "pp": 2, "dp": 2, "par": OVERLAP}, 7),
    "small buckets, overlapped": ({"dp": 4, "par": {**OVERLAP, "bucket_numel": 50_000}}, 2),
    "small padded buckets": (
        {"dp": 4, "pp": 2, "par": {**OVERLAP, "bucket_numel": 50_000, "pads_buckets": True}},
        2,
    ),
    "small buckets without a distributed optimizer": (
        {"dp": 2, "par": {"overlaps_grad_reduce": True, "bucket_numel": 20_000}},
        1,
    ),
    "bf16 gradients": (
        {"dp": 2, "precision": Precision.BF16, "reduces_grads_in_bf16": True, "par": DIST},
        1,
    ),
    "fp16": (
        {"tp": 2, "dp": 2, "precision": Precision.FP16, "reduces_grads_in_bf16": True, "par": DIST},
        1,
    ),
    "two optimizer instances": ({"dp": 8, "par": {**DIST, "num_optimizer_instances": 2}}, 5),
    "two optimizer instances, overlapped": (
        {"tp": 2, "dp": 4, "par": {**OVERLAP, "num_optimizer_instances": 2}},
        6,
    ),
    "pipeline before data": (
        {"tp": 2, "pp": 2, "dp": 2, "par": {**DIST, "is_pipeline_before_data": True}},
        6,
    ),
    "full recompute of one layer": (
        {"tp": 2, "pp": 2, "recompute": Recompute.FULL, "recompute_num_layers": 1},
        0,
    ),
    "full recompute, activations distributed": (
        {"tp": 2, "recompute": Recompute.FULL, "distributes_saved_activations": True},
        1,
    ),
    "mlp and norms recomputed": (
        {
            "tp": 2,
            "model": LLAMA,
            "par": SEQUENCE,
            "recompute": Recompute.SELECTIVE,
            "recompute_modules": ("mlp", "layernorm"),
        },
        0,
    ),
    # With biases Megatron's own recompute of an MLP does not end: it returns one of its weights.
    "attention and mlp recomputed": (
        {
            "tp": 2,
            "pp": 2,
            "model": LLAMA,
            "recompute": Recompute.SELECTIVE,
            "recompute_modules": ("core_attn", "mlp"),
        },
        3,
    ),
    "llama, first of pp4": ({"tp": 2, "pp": 4, "model": LLAMA}, 0),
    "llama, middle of pp4": ({"tp": 2, "pp": 4, "model": LLAMA}, 5),
    "llama, sequence parallel": (
        {"tp": 2, "dp": 2, "model": LLAMA, "par": SEQUENCE, "recompute": Recompute.FULL},
        0,
    ),
    "llama, ranks share a query group": ({"tp": 4, "dp": 2, "model": LLAMA, "par": SEQUENCE}, 3),
    "qwen, norms of heads": ({"tp": 2, "dp": 2, "model": QWEN, "par": DIST}, 2),
    "qwen, sequence parallel": ({"tp": 2, "pp": 2, "model": QWEN, "par": SEQUENCE}, 3),
    "gated attention": (
        {"tp": 2, "dp": 2, "model": {**QWEN, "has_attention_gate": True}, "par": DIST},
        1,
    ),
    "learned positions, sequence parallel": ({"tp": 2, "pp": 2, "par": SEQUENCE}, 0),
    "fused loss": ({"tp": 4, "pp": 2, "is_loss_fused": True}, 5),
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
    "interleaved, first": ({"pp": 2, "par": {"vp": 2}}, 0),
    "interleaved, last, overlapped": (
        {"tp": 2, "pp": 2, "dp": 2, "par": {**OVERLAP, "vp": 2, "bucket_numel": 20_000}},
        7,
    ),
    "interleaved, recomputed by layers": (
        {
            "pp": 2,
            "model": {"num_layers": 8},
            "par": {"vp": 2},
            "recompute": Recompute.FULL,
            "recompute_num_layers": 1,
        },
        1,
    ),
    "uneven, first": ({"pp": 2, "par": {"chunk_layers": (1, 3)}}, 0),
    "uneven, interleaved, last": (
        {"pp": 2, "dp": 2, "model": LLAMA, "par": {**DIST, "vp": 2, "chunk_layers": (0, 2, 1, 1)}},
        3,
    ),
    "an empty last chunk": ({"pp": 4, "par": {"chunk_layers": (0, 2, 2, 0)}}, 3),
    "64 ranks, first": ({"tp": 8, "pp": 4, "dp": 2, "model": WIDE, "par": {**OVERLAP, "vp": 2}}, 0),
    "64 ranks, middle": (
        {"tp": 8, "pp": 4, "dp": 2, "model": WIDE, "par": {**OVERLAP, "vp": 2}},
        29,
    ),
    "64 ranks, last": (
        {"tp": 8, "pp": 4, "dp": 2, "model": WIDE, "par": {**OVERLAP, "vp": 2}},
        63,
    ),
    "1024 ranks, first": (
        {"tp": 8, "pp": 16, "dp": 8, "model": WIDE, "par": {**OVERLAP, **SEQUENCE}, "samples": 32},
        0,
    ),
    "1024 ranks, middle": (
        {"tp": 8, "pp": 16, "dp": 8, "model": WIDE, "par": {**OVERLAP, **SEQUENCE}, "samples": 32},
        517,
    ),
    "1024 ranks, last": (
        {"tp": 8, "pp": 16, "dp": 8, "model": WIDE, "par": {**OVERLAP, **SEQUENCE}, "samples": 32},
        1023,
    ),
}


@pytest.fixture(scope="module")
def probed() -> dict[str, Any]:
    return {}


@pytest.fixture(params=CASES)
def case(
    request: pytest.FixtureRequest, layout: Callable[..., RunConfig], probed: dict[str, Any]
) -> tuple[RunConfig, int, dict[str, Any]]:
    if not probed:
        probed["asked"] = True
        cases = {name: (layout(**settings), rank) for name, (settings, rank) in CASES.items()}
        results = run_probe(list(cases.values()))
        probed |= {name: (*cases[name], results[i]) for i, name in enumerate(cases)}
    assert request.param in probed, "the probe did not end; its first failure says why"
    return probed[request.param]


def run_probe(cases: list[tuple[RunConfig, int]]) -> list[dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROBE)],
        input=json.dumps([(config.to_json(), rank) for config, rank in cases]),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert len(lines) == len(cases), (cases[len(lines)], done.stderr[-3000:])
    return [json.loads(line.removeprefix("RESULT")) for line in lines]


Probed = tuple[RunConfig, int, dict[str, Any]]


def test_parameters_and_buckets_are_those_of_megatron(case: Probed) -> None:
    config, rank, result = case
    stage = position(config.parallelism, rank).stage
    chunks = config.chunks_of(stage)
    assert [[t.numel for t in parameter_tensors(config, c)] for c in chunks] == result["parameters"]
    assert parameters(config, stage) == sum(map(sum, result["parameters"]))
    assert [[bucket.numel for bucket in buckets(config, c)] for c in chunks] == result["buckets"]


def test_groups_are_those_of_megatron(case: Probed) -> None:
    config, rank, result = case
    for name, ranks in result["groups"].items():
        assert list(group(config.parallelism, GroupRole(name), rank)) == ranks, name


def test_collectives_are_those_of_megatron(case: Probed) -> None:
    config, rank, result = case
    stage = position(config.parallelism, rank).stage
    generated = {
        (call.collective.value, call.role, call.num_ranks, call.nbytes): count
        for call, count in step_collectives(config, stage=stage)
    }
    issued = Counter[tuple[Any, ...]]()
    for kind, name, num_ranks, nbytes, count in result["calls"]:
        role = role_of(name)
        if kind in ("send", "recv") and role is GroupRole.WORLD:
            # Between two stages, Megatron sends one way over the group of all ranks.
            role, num_ranks = GroupRole.PP, config.parallelism.pp
        if num_ranks > 1 and nbytes > CONTROL_NBYTES:
            issued[kind, role, num_ranks, nbytes] += count
    assert generated == issued


def test_operators_are_those_that_the_hooks_record(case: Probed) -> None:
    config, rank, result = case
    work = stage_operators(config, position(config.parallelism, rank).stage)
    generated = {
        (operator.kind.value, operator.phase.value, operator.shape, operator.element_nbytes): count
        * config.num_microbatches
        for operator, count in (*work.forward, *work.backward, *work.recompute)
        if operator.kind not in HOST
    }
    recorded = {
        (kind, phase, tuple(shape), nbytes): count
        for kind, phase, shape, nbytes, count in result["operators"]
    }
    assert generated == recorded
