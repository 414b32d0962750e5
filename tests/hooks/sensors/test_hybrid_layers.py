"""Sites of hybrid models in real layers of megatron.core, as a layout of the pattern has them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forerun.calib.layers.blocks import chunk_blocks
from forerun.calib.workload.config import Batch, ModelShape, Parallelism, RunConfig
from forerun.calib.workload.model_shape import OpaqueLayer, PositionEmbedding

pytest.importorskip("megatron.core")

PROBE = Path(__file__).parent / "hybrid_probe.py"
NUMEL = 4 * 16 * 16


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROBE)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    value: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
    return value


def layout() -> RunConfig:
    """The probe's layers: 8 tokens of 3 samples, 16 wide."""
    model = ModelShape(
        num_layers=3,
        hidden_size=16,
        ffn_hidden_size=32,
        num_attention_heads=2,
        num_query_groups=2,
        kv_channels=8,
        seq_length=8,
        vocab_size=64,
        has_bias=False,
        position_embedding=PositionEmbedding.NONE,
        layer_kinds="*-M",
        opaque_layers=(OpaqueLayer(symbol="M", split_numel=0, whole_numel=NUMEL),),
    )
    batch = Batch(micro_batch_size=3, global_batch_size=3)
    return RunConfig(model=model, parallelism=Parallelism(), batch=batch, fuses_norms=False)


def test_sites_are_the_operators_of_the_layout(answer: dict[str, Any]) -> None:
    expected: Counter[str] = Counter()
    for block, repeats in chunk_blocks(layout(), 0)[1:-1]:
        for operator, count in block.forward:
            expected[operator.kind.value] += repeats * count
    assert answer["kinds"] == expected


def test_mixers_and_single_sums_have_the_layouts_shapes(answer: dict[str, Any]) -> None:
    """One residual sum counts as both of half of the tokens; a mixer is one operator."""
    expected = [
        ["residual", 0, [12, 16]],
        ["residual", 1, [12, 16]],
        ["residual", 2, [12, 16]],
        ["mamba", 2, [24, NUMEL]],
    ]
    assert sorted(map(str, answer["shapes"])) == sorted(map(str, expected))
    shapes = {
        (operator.kind.value, operator.shape)
        for block, _ in chunk_blocks(layout(), 0)
        for operator, _ in block.forward
    }
    assert shapes >= {(kind, tuple(shape)) for kind, _, shape in expected}
    assert answer["symbols"] == ["M"]
