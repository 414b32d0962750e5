"""Records of hooks beside CUDA graphs, compared with the calls of a replay of real layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("megatron.core")

PROBE = Path(__file__).parent / "graph_probe.py"
LOCAL, ENGINE = "local", "transformer_engine"
PARTIAL = {"experts": 4, "is_partly": True, "moe_shared_expert_intermediate_size": 16}
SPARSE = {"experts": 4, "moe_shared_expert_intermediate_size": 16}
OVERLAPPED = {**SPARSE, "moe_shared_expert_overlap": True}
BARE = {"has_attention": False}
CASES: list[tuple[str, list[str], dict[str, Any]]] = [
    ("none", [], {}),
    ("none", [], SPARSE),
    (LOCAL, [], {}),
    (LOCAL, ["attn"], {}),
    (LOCAL, ["attn"], BARE),
    (LOCAL, ["moe_router"], PARTIAL),
    (LOCAL, ["attn", "moe_preprocess"], PARTIAL),
    (LOCAL, ["attn"], PARTIAL),
    (LOCAL, ["moe_router"], SPARSE),
    (ENGINE, [], {}),
    (ENGINE, ["attn"], {}),
    (ENGINE, ["mlp"], {}),
    (ENGINE, ["attn", "mlp"], {}),
    (ENGINE, ["attn", "mlp"], BARE),
    (ENGINE, ["attn"], BARE),
    (ENGINE, ["attn"], SPARSE),
    (ENGINE, ["moe_router"], SPARSE),
    (ENGINE, ["moe_router", "moe_preprocess"], SPARSE),
    (ENGINE, ["attn", "moe_router", "moe_preprocess"], SPARSE),
    (ENGINE, ["attn", "moe_router"], OVERLAPPED),
    (ENGINE, ["mamba"], {}),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    lines = [
        json.dumps({"implementation": implementation, "scope": scope, **more})
        for implementation, scope, more in CASES
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROBE)],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        cwd=tmp_path_factory.mktemp("graphs"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result_lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return [json.loads(line.removeprefix("RESULT")) for line in result_lines]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: json.dumps(CASES[n]))
def test_what_a_replay_calls_is_recorded_and_nothing_else(
    answers: list[dict[str, Any]], number: int
) -> None:
    result, reasons = answers[number], answers[number]["places"]
    recorded = {path for path, why in reasons.items() if why is None}
    around = {path for path, why in reasons.items() if why == "partly captured"}
    assert set(result["called"]) - around == recorded
    assert around <= {""} and result["num_sites"] == len(recorded)
    # Upstream calls only the products of shared experts that overlap.
    assert (reasons.get("mlp.shared_experts") == "overlapped") == (CASES[number][2] is OVERLAPPED)
    assert bool(result["names"]) == (len(recorded) < len(reasons))


def test_an_engine_s_graph_of_attention_leaves_the_mlp(answers: list[dict[str, Any]]) -> None:
    result = answers[CASES.index((ENGINE, ["attn"], {}))]
    assert set(result["called"]) == {
        "pre_mlp_layernorm",
        "mlp",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    }
    assert result["places"][""] == "partly captured"
    assert result["names"] == [
        "inside a CUDA graph (transformer_engine): attn of 1 layer, "
        "whose residual is not seen either"
    ]


def test_a_residual_that_runs_around_graphs_is_not_recorded(answers: list[dict[str, Any]]) -> None:
    result = answers[CASES.index((LOCAL, ["moe_router"], PARTIAL))]
    assert "" in result["called"] and result["places"][""] == "partly captured"
    hidden = {path for path, why in result["places"].items() if why == "captured"}
    assert hidden == {
        "pre_mlp_layernorm",
        "mlp.router",
        "mlp.shared_experts",
        "mlp.shared_experts.linear_fc1",
        "mlp.shared_experts.linear_fc2",
        "dispatcher.dispatch_preprocess",
        "dispatcher.combine_postprocess",
    }
