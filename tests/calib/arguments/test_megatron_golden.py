"""Megatron's arguments as given, against what Megatron-LM itself made of them (golden)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.calib.arguments.megatron_command import config_from_command, config_from_mapping
from forerun.calib.arguments.megatron_namespace import from_namespace
from forerun.calib.errors import ConfigError
from forerun.calib.workload.config import (
    ContextComm,
    Fp8Recipe,
    Normalization,
    PositionEmbedding,
    Precision,
    Recompute,
    RunConfig,
)
from forerun.calib.workload.model_shape import AttentionWindow

FILE = Path(__file__).parents[2] / "golden" / "megatron_args" / "core_v0.16.1.json"
ROWS: dict[str, Any] = {row["name"]: row for row in json.loads(FILE.read_text())}


def described(name: str) -> RunConfig:
    row = ROWS[name]
    description = config_from_command(row["argv"].split(), num_ranks=row["num_ranks"])
    assert description.unknown == ()
    return description.config


@pytest.mark.parametrize("name", ROWS)
def test_arguments_as_given_mean_what_megatron_makes_of_them(name: str) -> None:
    validated = ROWS[name]["validated"]
    config = described(name)
    each = config.parallelism.ranks_per_node
    assert from_namespace(SimpleNamespace(**validated, ranks_per_node=each)) == config
    assert config_from_mapping(validated).config == config
    assert list(config.chunk_layers) == ROWS[name]["chunk_layers"]


@pytest.mark.parametrize("name", ROWS)
def test_every_size_is_megatrons(name: str) -> None:
    validated, config = ROWS[name]["validated"], described(name)
    model, par = config.model, config.parallelism
    result = {
        "ffn_hidden_size": model.ffn_hidden_size,
        "kv_channels": model.kv_channels,
        "padded_vocab_size": model.vocab_size,
        "data_parallel_size": par.dp,
        "expert_tensor_parallel_size": par.expert_tp,
        "global_batch_size": config.batch.global_batch_size,
        "train_iters": config.cadence.train_iters,
    }
    assert result == {key: validated[key] for key in result}
    assert (par.vp, par.is_sequence_parallel) == (
        validated.get("virtual_pipeline_model_parallel_size", 1),
        validated.get("sequence_parallel", False),
    )
    if par.vp > 1:
        assert par.overlaps_p2p == validated.get("overlap_p2p_comm", False)
    if model.experts:
        assert model.experts.ffn_hidden_size == validated["moe_ffn_hidden_size"]


def test_what_is_modelled_is_not_listed() -> None:
    listed = {name: described(name).unmodelled for name in ROWS}
    assert {name: names for name, names in listed.items() if names} == {
        "layout_prediction_apart": ("pipeline_model_parallel_layout",),
        "samples": ("log_params_norm", "optimizer"),
    }


def test_settings_outside_the_model_are_listed() -> None:
    changes: dict[str, Any] = {
        "cp_comm_type": ["p2p", "a2a"],
        "linear_attention_freq": 2,
        "cpu_offloading_num_layers": 1,
        "tp_comm_overlap_ag": False,
        "fp8": "hybrid",
        "num_experts": 8,
        "sequence_parallel": True,
        "recompute_modules": ["mlp"],
    }
    config = from_namespace(SimpleNamespace(**ROWS["defaults"]["validated"] | changes))
    assert set(config.unmodelled) == {
        "cp_comm_type",
        "cpu_offloading_num_layers",
        "tp_comm_overlap_ag",
        "linear_attention_freq",
    }


def test_a_missing_size_is_named() -> None:
    args = SimpleNamespace(**ROWS["defaults"]["validated"])
    del args.hidden_size
    with pytest.raises(ConfigError, match=r"hidden_size is missing .* give --hidden-size"):
        from_namespace(args)


def test_settings_reach_their_fields() -> None:
    plain, llama = described("defaults"), described("tp_pp_swiglu")
    assert (plain.precision, plain.model.num_query_groups) == (Precision.FP32, 16)
    assert llama.precision is Precision.BF16
    assert llama.model.normalization is Normalization.RMS_NORM
    assert llama.model.position_embedding is PositionEmbedding.ROPE
    assert llama.model.num_query_groups == ROWS["tp_pp_swiglu"]["validated"]["num_query_groups"]
    assert not llama.model.is_tied and not llama.model.has_bias and llama.model.is_gated
    assert described("fp8").fp8 is Fp8Recipe.BLOCKWISE and described("fp8").keeps_fp8_params
    assert described("fp8").reduces_grads_in_bf16
    assert described("fp4").fp8 is Fp8Recipe.NVFP4 and described("fp4").uses_cuda_graphs
    assert described("recompute_alias").recompute is Recompute.SELECTIVE
    assert described("recompute_modules").recompute_modules == ("layernorm", "mlp", "core_attn")
    assert described("recompute_modules").is_loss_fused
    assert described("recompute_block").recompute_num_layers == 3
    assert described("layers_per_virtual_stage").parallelism.microbatch_group_size == 8
    assert described("context_parallel").parallelism.context_comm is ContextComm.ALL_TO_ALL
    assert described("context_parallel").parallelism.is_pipeline_before_data
    cadence, validated = (
        described("fp16_ramp_up_in_samples").cadence,
        ROWS["fp16_ramp_up_in_samples"]["validated"],
    )
    assert cadence.rampup_batch_size == (64, 32, 40000)
    assert cadence.eval_interval == validated["eval_interval"]
    assert cadence.save_interval == validated["save_interval"]
    assert described("samples").model.window == AttentionWindow(width=129)
    latent = described("latent_attention_experts_by_list").model
    assert latent.latent_attention and latent.latent_attention.q_lora_rank == 384
    assert latent.experts and latent.experts.layer_pattern == (False,) + (True,) * 15
    numbered = described("experts_by_number").model.experts
    assert numbered and numbered.layer_pattern == (True, False) * 8
