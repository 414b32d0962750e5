"""Questions about a model before any run: a layout that nobody requested never refuses them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from forerun.calib.memory.devices import known_device
from forerun.launch.cli import ExitCode, main

LLAMA_70B: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 8192, "num_attention_heads": 64, "head_dim": 128},
    **{"num_key_value_heads": 8, "intermediate_size": 28672, "num_hidden_layers": 80},
    **{"vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"},
}
Out = pytest.CaptureFixture[str]
SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 24))]


def drawn(seed: int) -> tuple[dict[str, Any], int, int, int]:
    """Return the keys of a model's file, and numbers of GPUs, samples and tokens."""
    draw = random.Random(seed)
    heads = draw.choice([8, 12, 24])
    keys: dict[str, Any] = {
        **{"model_type": "llama", "hidden_size": 128 * heads, "num_attention_heads": heads},
        **{"num_key_value_heads": draw.choice([4, heads]), "head_dim": 128},
        **{"intermediate_size": 256 * heads, "num_hidden_layers": draw.choice([4, 10, 14])},
        **{"vocab_size": 32000, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"},
    }
    if draw.random() < 0.4:
        keys |= {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2}
        keys |= {"moe_intermediate_size": 512}
    return (
        keys,
        draw.choice([1, 6, 8, 16, 64]),
        draw.choice([1, 3, 8, 30, 96]),
        draw.choice([2048, 16384]),
    )


def can_split(keys: dict[str, Any], num_gpus: int, samples: int, seq: int) -> bool:
    """Return True if TP, CP and even stages divide what they split, and replicas the batch."""
    heads, groups = keys["num_attention_heads"], keys["num_key_value_heads"]
    sizes = [n for n in range(1, num_gpus + 1) if num_gpus % n == 0]
    return any(
        num_gpus % (tp * cp * pp) == 0
        and (heads % tp, keys["intermediate_size"] % tp, seq % (2 * cp * tp)) == (0, 0, 0)
        and (groups % tp == 0 or tp % groups == 0)
        and 32768 % tp == 0
        and keys["num_hidden_layers"] % pp == 0
        and samples % (num_gpus // (tp * cp * pp)) == 0
        for tp in sizes
        for cp in sizes
        if cp <= 16
        for pp in sizes
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_question_with_an_answer_is_answered(seed: int, tmp_path: Path, capsys: Out) -> None:
    keys, num_gpus, samples, seq = drawn(seed)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(keys))
    words = ["--device", "H200", "--config", str(file), "--gpus", str(num_gpus)]
    words += ["--gbs", str(samples), "--seq", str(seq)]
    expected = ExitCode.ANSWER if can_split(keys, num_gpus, samples, seq) else None
    for verb in ("plan", "predict"):
        code = main([verb, "--json", *words])
        captured = capsys.readouterr()
        assert expected in (code, None), captured.err
        if code != ExitCode.ANSWER:
            assert "micro_batch_size" not in captured.err, (
                "data parallelism alone was not asked for"
            )
            continue
        result = json.loads(captured.out)
        layout = result if verb == "predict" else result["candidates"][0]
        assert layout["num_ranks"] == num_gpus and samples % layout["dp"] == 0
        if verb == "plan":
            assert result["own"] is None and result["global_batch_size"] == samples
            labels = [row["label"] for row in result["candidates"]]
            assert result["best"] is None or result["best"] in labels


def test_every_offered_row_is_in_the_table(tmp_path: Path, capsys: Out) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_70B | {"num_hidden_layers": 32}))
    words = ["plan", "--device", "H100", "--config", str(file), "--gpus", "16", "--top", "1"]
    assert main([*words, "--gbs", "64", "--seq", "8192"]) == ExitCode.ANSWER
    out = capsys.readouterr().out
    named = {*re.findall(r"\brow (\d+)", out)}
    assert named and named <= {*re.findall(r"^(\d+) ", out, re.MULTILINE)}


def test_a_launch_line_is_row_0_on_the_requested_gpus(capsys: Out) -> None:
    line = (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 --num-layers 8 --hidden-size 1024 "
        "--num-attention-heads 8 --seq-length 2048 --max-position-embeddings 2048 --vocab-size "
        "32000 --micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size 2"
    )
    words = ["--json", "--device", "H100", "--gpus", "32", "--", *line.split()]
    steps = []
    for verb in ("plan", "predict"):
        assert main([verb, *words]) == ExitCode.ANSWER
        result = json.loads(capsys.readouterr().out)
        row = result["own"] if verb == "plan" else result
        assert row["num_ranks"] == 32 and row["tp"] == 2
        steps.append(row["step_time_s"])
    assert steps[0] == pytest.approx(steps[1])


def test_plan_offers_what_fits_with_states_on_the_host(tmp_path: Path, capsys: Out) -> None:
    """Llama 3.1 70B on one node: 141 GB of weights and as much of gradients, over 8 x 80 GB."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_70B))
    words = ["--device", "H100", "--config", str(file), "--gpus", "8", "--gbs", "64"]
    words += ["--seq", "4096"]
    layout = ["--tp", "8", "--sp", "on", "--recompute", "full", "--optimizer-cpu-offload"]
    assert main(["predict", "--json", *words, *layout]) == ExitCode.ANSWER
    assert json.loads(capsys.readouterr().out)["verdict"] == "fits"
    assert main(["plan", *words, "--top", "1"]) == ExitCode.ANSWER
    first = " ".join(capsys.readouterr().out.partition("Layouts")[0].split())
    assert first.startswith("fastest on 8 x") and first.endswith("of each host")


@pytest.mark.parametrize(
    ("names", "driver"),
    [
        ("A100-40|A100-40GB|A100 40GB|NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),
        ("A100|A100-80GB|A100-SXM|a100 80gb", "NVIDIA A100-SXM4-80GB"),
        ("H100|H100-SXM|H100-SXM5|H100 80GB", "NVIDIA H100 80GB HBM3"),
        ("H100NVL|H100 NVL|H100-NVL", "NVIDIA H100 NVL"),
        ("RTX4090|RTX 4090|4090|GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
    ],
)
def test_spellings_of_a_device_are_one_device(names: str, driver: str) -> None:
    assert {known_device(name).driver_name for name in names.split("|")} == {driver}
