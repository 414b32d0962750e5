"""Launches of PyTorch's own stack: what they say, and what they cost beside Megatron."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.calib.arguments._torch_stacks import on_stack
from forerun.calib.arguments.megatron_args import apply_options
from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.arguments.torchtitan_options import titan_options
from forerun.calib.errors import ConfigError
from forerun.calib.memory.devices import known_device
from forerun.calib.regressors.robust import Z_90
from forerun.calib.workload.config import RunConfig
from forerun.calib.workload.parallelism import Engine, Sharding
from forerun.launch.cli import ExitCode, main
from forerun.launch.known.machine_fits import device_machine

LLAMA = {
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"vocab_size": 128256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"},
}
PIPED = (
    *("--module", "llama3", "--config", "llama3_8b", "--training.local_batch_size=32"),
    *("--training.seq_len", "8192", "--parallelism.pipeline_parallel_degree", "4"),
    *("--parallelism.tensor_parallel_degree", "2", "--activation_checkpoint.mode", "full"),
    *("--metrics.log_freq", "10", "--compile.enable"),
)


def config_of(words: list[str], ranks: int = 16) -> RunConfig:
    line = (
        f"torchrun --nproc-per-node {ranks} pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
        "--num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 --vocab-size 128256 "
        "--max-position-embeddings 8192 --swiglu --normalization RMSNorm --position-embedding-type "
        "rope --disable-bias-linear --bf16"
    )
    return apply_options(config_from_command(line.split()).config, words)


def test_a_pipeline_of_torchtitan_cuts_its_batch_into_micro_batches() -> None:
    """One sample each by default (``pipeline_parallel_microbatch_size``), 32 in a step; embedding
    and head count as a layer each: 34 over 4 stages are 9, 9, 8 and 8."""
    config = config_of([*titan_options(PIPED, 16, 32)])
    par = config.parallelism
    assert (par.pp, par.tp, par.dp, par.sharded) == (4, 2, 2, Sharding.WEIGHTS)
    assert (config.batch.micro_batch_size, config.num_microbatches) == (1, 32)
    assert config.batch.global_batch_size == 64 and par.chunk_layers == (8, 9, 8, 7)
    assert (par.engine, config.framework) == (Engine.TORCH, "torchtitan")
    assert config.is_compiled and not par.regathers_weights and par.keeps_grads_whole
    whole = [*PIPED, "--parallelism.pipeline_parallel_microbatch_size", "8"]
    assert config_of([*titan_options(whole, 16, 32)]).num_microbatches == 4
    flat = [word.replace("degree", "no") if "pipeline" in word else word for word in PIPED]
    assert config_of([*titan_options(flat, 16, 32)]).batch.micro_batch_size == 32


def test_an_interleaved_schedule_has_two_chunks_a_stage() -> None:
    words = [*PIPED, "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"]
    par = config_of([*titan_options(words, 16, 32)]).parallelism
    assert par.vp == 2 and sum(par.chunk_layers or (4,) * 8) == 32
    with pytest.raises(ConfigError, match="'DualPipeV' is not modelled"):
        titan_options([*words[:-1], f"{words[-1].partition('=')[0]}=DualPipeV"], 16, 32)


def test_what_decides_time_and_is_not_read_is_refused() -> None:
    words = [*PIPED, "--quantize.linear.mx.recipe_name", "mxfp8_cublas"]
    with pytest.raises(ConfigError, match="quantize"):
        config_of([*titan_options(words, 16, 32)])


def test_a_stack_is_said_by_its_name() -> None:
    plain = config_of(["--use-torch-fsdp2", "--use-distributed-optimizer"])
    assert on_stack(plain, "") == on_stack(plain, "megatron-lm") == plain
    named = config_of(["--use-torch-fsdp2", "--framework", "transformers"])
    assert named.framework == "transformers" and not named.fuses_norms
    assert apply_options(named, ["--tp", "2"]).parallelism.engine is Engine.TORCH
    with pytest.raises(ConfigError, match="give torchtitan, transformers"):
        config_of(["--framework", "other"])


def test_an_eager_stack_is_slower_and_less_certain() -> None:
    """Eager Llama 3.1 8B takes 1.16 times the compiled step (torchtitan's table of December 2024);
    models of transformers also run norms as chains: a fused one takes a step on B200 from 0.60 to
    0.48 s (transformers PR 48692)."""
    device = known_device("B200").driver_name
    base = replace(config_of(["--use-torch-fsdp2"], ranks=8), device=device)
    stacks = {
        "megatron": base,
        "eager": on_stack(base, "torchtitan"),
        "compiled": replace(on_stack(base, "torchtitan"), is_compiled=True),
        "chain": on_stack(base, "transformers"),
    }
    steps = device_machine(base).steps
    estimates = {name: steps.estimates([config])[0] for name, config in stacks.items()}
    assert estimates["chain"].time_s > 1.05 * estimates["eager"].time_s
    assert estimates["compiled"].sigma_log < estimates["eager"].sigma_log
    assert math.log(1.16) < Z_90 * estimates["eager"].sigma_log


def test_a_launch_of_torchtitan_is_answered_with_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(LLAMA), encoding="utf-8")
    launch = ["torchrun", "--nproc-per-node", "8", "--nnodes", "2", "-m", "torchtitan.train"]
    command = ["predict", "--device", "H100", "--json", "--config", str(model), "--"]
    assert main([*command, *launch, *PIPED]) == ExitCode.ANSWER
    answer: Any = json.loads(capsys.readouterr().out)
    assert answer["label"].startswith("TP2 PP4 DP2 FSDP 8-9-8-7 mbs1 full")
    assert main([*command, "torchrun", "--nproc-per-node", "8", "own.py"]) == ExitCode.USAGE
    assert "exclude each other" in capsys.readouterr().err
